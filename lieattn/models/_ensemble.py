"""Several networks as one: means of their outputs, and how far these differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lieattn._checks import check_arguments, kind
from lieattn.models._jumps import jumps_of
from lieattn.models._network import Wrapper


class Spread(NamedTuple):
    """Means and standard deviations over an ensemble, each like the outputs of one network."""

    mean: Any
    std: Any


class Ensemble(Wrapper):
    r"""Networks that were trained alike, from different seeds, as one: the mean of their outputs, and their spread.

    .. math::
        \bar f = \frac{1}{n} \sum_k f_k, \qquad s = \sqrt{\frac{1}{n - 1} \sum_k (f_k - \bar f)^2}

    s is the unbiased estimate, entry by entry: where the networks disagree, all but one of them at least are wrong. It
    is not calibrated: they may agree and all be wrong. Of :class:`EnergyForces` the mean force is minus the gradient of
    the mean energy.

    **Equivariance.** The mean has that of the networks; standard deviations of invariant numbers are invariant, those
    of components of vectors and tensors depend on the coordinate axes.

    Parameters
    ----------
    networks
        At least two, which promise the same: trained ones, or what :func:`lieattn.load` gives; task by task
        ``task.model``. They are kept, not copied. ``lieattn.save`` writes all of them to one file.

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
        if len(promised := {str(getattr(network, "guarantee", "no guarantee")) for network in networks}) > 1:
            raise ValueError(f"networks: expected the same guarantee for all, got {' and '.join(sorted(promised))}")
        self.networks = nn.ModuleList(networks)

    @property
    def kind(self) -> Any:
        """That of the networks."""
        return getattr(self.networks[0], "kind", "invariant")

    @property
    def jumps(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(jump for network in self.networks for jump in jumps_of(network)))

    def geometry(self, data: Any) -> list[Any]:
        """What each network makes of the data, ``network.geometry(data)``; AttributeError if one has no such method."""
        networks: Any = self.networks
        return [network.geometry(data) for network in networks]

    def forward(self, data: Any, geometry: Any = None, **options: Any) -> Any:
        """Means of the outputs of ``network(data, **options)``; arguments as in :meth:`outputs`."""
        return _of_each(lambda values: values.mean(dim=0), self.outputs(data, geometry, **options))

    def spread(self, data: Any, geometry: Any = None, **options: Any) -> Spread:
        """Means and unbiased standard deviations of the outputs of ``network(data, **options)``."""
        found = self.outputs(data, geometry, **options)
        return Spread(_of_each(lambda values: values.mean(dim=0), found), _of_each(lambda x: x.std(dim=0), found))

    def outputs(self, data: Any, geometry: Any = None, **options: Any) -> list[Any]:
        """Outputs of each network; TypeError if they are neither tensors nor tensors by name.

        Parameters
        ----------
        data
            What the networks take.
        geometry
            That of :meth:`geometry`, or what one network has made, for networks that all make the same of the data;
            made by each of them if absent. ValueError is raised for a list of another length.
        options
            Others that the networks take, by name.
        """
        if geometry is None:
            return [network(data, **options) for network in self.networks]
        own = geometry if isinstance(geometry, list) else [geometry] * len(self.networks)
        if len(own) != len(self.networks):
            raise ValueError(f"geometry: expected one for each of {len(self.networks)} networks, got {len(own)}")
        return [network(data, geometry=one, **options) for network, one in zip(self.networks, own, strict=True)]


def _of_each(reduce: Callable[[Tensor], Tensor], outputs: Sequence[Any]) -> Any:
    """Tensors ``[networks, *]`` reduced over the networks, each by its name where they have names."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return reduce(torch.stack(list(outputs)))
    if hasattr(first, "_asdict"):
        return type(first)(*(_of_each(reduce, values) for values in zip(*outputs, strict=True)))
    if isinstance(first, Mapping):
        return {name: _of_each(reduce, [found[name] for found in outputs]) for name in first}
    raise TypeError(f"networks: expected tensors or mappings of tensors as outputs, got {kind(first)}")
