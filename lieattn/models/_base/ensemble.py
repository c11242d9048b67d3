"""Ensembles of networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, kind
from lieattn.models._base.jumps import jumps_of, kinks_of
from lieattn.models._base.network import Wrapper, guarantee_of
from lieattn.models._base.symmetry import Symmetry


class Spread(NamedTuple):
    """Means and standard deviations over an ensemble, each with the structure of the outputs of one network."""

    mean: Any
    std: Any


class Ensemble(Wrapper):
    r"""An ensemble of networks trained from different seeds: the mean of their outputs, and their spread.

    .. math::
        \bar f = \frac{1}{n} \sum_k f_k, \qquad s = \sqrt{\frac{1}{n - 1} \sum_k (f_k - \bar f)^2}

    s is the square root of the unbiased variance, entry by entry. If the networks disagree, at most one of them is
    right; but s is not calibrated, since they can agree and all be wrong. For networks of the class
    :class:`EnergyForces`, the mean force is minus the gradient of the mean energy.

    **Equivariance.** The mean transforms as the outputs of the networks. Standard deviations of invariant numbers are
    invariant; those of components of vectors and tensors depend on the coordinate axes.

    Parameters
    ----------
    networks
        At least two different networks with the same guarantee (otherwise ValueError): ``task.model`` of trained tasks,
        or results of :func:`lieattn.load`. They are not copied. ``lieattn.save`` writes all of them to one file.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import Ensemble, FramewiseTransformer
    >>> ensemble = Ensemble([FramewiseTransformer(cyclic(4), 1, 3, channels=4) for _ in range(4)]).eval()
    >>> mean, std = ensemble.spread(Data(pos=torch.randn(7, 2)))
    >>> mean.shape, std.shape
    (torch.Size([1, 3]), torch.Size([1, 3]))
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        check_arguments(Ensemble.__init__, locals())
        if len(networks) < 2:
            raise ValueError(f"networks: expected at least two, got {len(networks)}")
        if len(set(networks)) < len(networks):
            raise ValueError("networks: expected different networks, got one of them more than once")
        super().__init__(networks[0])
        # A sentence of the user may be the same for different groups.
        promised = {f"{guarantee_of(network)} ({Symmetry.stated_by(network).name})" for network in networks}
        if len(promised) > 1:
            raise ValueError(f"networks: expected the same guarantee for all, got {' and '.join(sorted(promised))}")
        self.networks = nn.ModuleList(networks)
        for names in ("vector_inputs", "cloud_inputs"):
            setattr(self, names, tuple(dict.fromkeys(name for one in networks for name in getattr(one, names, ()))))
        self.field_inputs = {name: rep for one in networks for name, rep in getattr(one, "field_inputs", {}).items()}
        self.sees_order = any(getattr(network, "sees_order", False) for network in networks)
        self.has_kinks = any(map(kinks_of, networks))

    @property
    def jumps(self) -> tuple[str, ...] | None:
        found = [jumps_of(network) for network in self.networks]
        return None if None in found else tuple(dict.fromkeys(jump for jumps in found for jump in jumps or ()))

    def geometry(self, data: Any) -> list[Any]:
        """Return ``network.geometry(data)`` of each network; AttributeError if one has no such method."""
        networks: Any = self.networks
        return [network.geometry(data) for network in networks]

    def forward(self, data: Any, geometry: Any = None, **options: Any) -> Any:
        """Return the means of the outputs of the networks; arguments and exceptions as in :meth:`spread`."""
        return _of_each(lambda values: values.mean(dim=0), self.outputs(data, geometry, **options))

    def spread(self, data: Any, geometry: Any = None, **options: Any) -> Spread:
        """Return means and standard deviations of the outputs of the networks; arguments as in :meth:`outputs`.

        TypeError is raised if the outputs are neither tensors nor tensors by name, and ValueError if their names or
        shapes differ.
        """
        found = self.outputs(data, geometry, **options)
        return Spread(_of_each(lambda values: values.mean(dim=0), found), _of_each(_deviation, found))

    def outputs(self, data: Any, geometry: Any = None, **options: Any) -> list[Any]:
        """Return the outputs of each network.

        Parameters
        ----------
        data
            Input of the networks.
        geometry
            Result of :meth:`geometry`, or the geometry of one network if it is the same for all; computed by each
            network if absent. ValueError is raised for a list of another length.
        options
            Further keyword arguments of the networks.
        """
        if geometry is None:
            return [network(data, **options) for network in self.networks]
        own = geometry if isinstance(geometry, list) else [geometry] * len(self.networks)
        if len(own) != len(self.networks):
            raise ValueError(f"geometry: expected one for each of {len(self.networks)} networks, got {len(own)}")
        return [network(data, geometry=one, **options) for network, one in zip(self.networks, own, strict=True)]


def _deviation(values: Tensor) -> Tensor:
    """Unbiased standard deviation over the first axis, without torch's warning if there are no entries."""
    return values.std(dim=0) if values.numel() else values[0]


def _of_each(reduce: Callable[[Tensor], Tensor], outputs: Sequence[Any]) -> Any:
    """Stack the outputs of the networks and reduce over the first axis, for each name if outputs have names."""
    first = outputs[0]
    if len(forms := list(dict.fromkeys(map(_form, outputs)))) > 1:
        raise ValueError(f"networks: expected the same outputs of all, got {' and '.join(forms)}")
    if isinstance(first, Tensor):
        for other in outputs[1:]:
            if other.shape != first.shape:
                found = f"{list(first.shape)} and {list(other.shape)}"
                raise ValueError(f"networks: expected outputs of one shape, got {found}")
        return reduce(torch.stack(list(outputs)))
    if hasattr(first, "_asdict"):
        return type(first)(*(_of_each(reduce, values) for values in zip(*outputs, strict=True)))
    if isinstance(first, Mapping):
        return {name: _of_each(reduce, [found[name] for found in outputs]) for name in first}
    raise TypeError(f"networks: expected tensors or mappings of tensors as outputs, got {kind(first)}")


def _form(outputs: Any) -> str:
    """Return what the outputs of all networks must have in common: their names, or else their class."""
    if isinstance(outputs, Mapping):
        return str(sorted(outputs))
    return "a tensor" if isinstance(outputs, Tensor) else kind(outputs)
