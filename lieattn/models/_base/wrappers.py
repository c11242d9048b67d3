"""Networks around other networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, kind
from lieattn.models._base.inputs import attribute, check_data, copied, in_precision_of_weights
from lieattn.models._base.network import GroupField, Network, Wrapper, guarantee_of
from lieattn.models._base.symmetry import Symmetry, jumps_of, kinks_of


class FieldModel(Network):
    r"""A network for vectors and tensors, at points or of clouds, computed from the field of another network.

    .. math::  y = \sum_k c_k v_k + u \operatorname{head}(\operatorname{field}(\mathrm{data}))

    where :math:`v_k` are known vectors of the data, for example positions extrapolated along straight lines.

    **Equivariance.** That of the network and the head; the added attributes must transform as the outputs do.

    Parameters
    ----------
    network, head
        Any network with a field, whose weights are shared, and a head such as :class:`lieattn.nn.VectorHead`, which
        replaces its own. :class:`lieattn.nn.Heads` is for several outputs.
    start
        Names of the attributes :math:`v_k`, and their factors :math:`c_k`. That of ``pos`` is 1 (or ValueError).
    units
        Names of attributes and the numbers by which they are divided before the network sees them; a ``cell`` is
        divided like ``pos``. The :math:`v_k` themselves are not divided.
    unit
        Factor u > 0, chosen so that the outputs of the head are of the order of 1. ValueError is raised if ``start`` or
        ``unit`` is given with a head for rotations, or with several outputs (:class:`lieattn.nn.Heads`).

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.groups import tetrahedral
    >>> from lieattn.models import FieldModel, FramewiseTransformer
    >>> from lieattn.nn import VectorHead
    >>> network = FramewiseTransformer(tetrahedral(), 1, 1, channels=4, layers=1, vector_inputs=("vel",))
    >>> model = FieldModel(network, VectorHead(4), start={"pos": 1.0, "vel": 0.5})
    >>> model(Data(x=torch.ones(5, 1), pos=torch.randn(5, 3), vel=torch.randn(5, 3))).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        network: Network,
        head: nn.Module,
        *,
        start: Mapping[str, float] | None = None,
        units: Mapping[str, float] | None = None,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(network, Network):
            raise TypeError(f"network: expected a lieattn.models.Network, got {type(network).__name__}")
        check_arguments(FieldModel.__init__, locals())
        self.start, self.units, self.unit = dict(start or {}), dict(units or {}), unit
        given = (("start", self.start), ("units", self.units))
        self.tied = {name: repr({key: float(of[key]) for key in sorted(of)}) for name, of in given}
        self.tied["unit"] = repr(float(unit))
        for argument, numbers in (("units", self.units), ("unit", {"unit": unit})):
            for name, number in numbers.items():
                if not 0 < number < math.inf:
                    raise ValueError(f"{argument}: expected positive numbers, got {number} for {name}")
        kind = getattr(head, "kind", None)
        if (self.start or unit != 1) and (kind == "rotation" or isinstance(kind, Mapping)):
            outputs = "rotations" if kind == "rotation" else "several outputs"
            raise ValueError(f"start, unit: expected none for {outputs}, got start={self.start}, unit={unit}")
        _check_start(self.start, kind, network.symmetry)
        network.check_head(head)  # that of the network would not be trained, so checkpoints should not include it
        self.network, self.head = network.with_head(nn.Identity()), head
        named = (*network.vector_inputs, *(() if kind == "invariant" else self.start))
        self.vector_inputs = tuple(name for name in dict.fromkeys(named) if name != "pos")
        self.field_inputs, self.cloud_inputs = dict(network.field_inputs), network.cloud_inputs
        self.sees_order = network.sees_order
        self.has_kinks = network.has_kinks or bool(getattr(head, "has_kinks", False))

    @property
    def symmetry(self) -> Symmetry:
        return self.network.symmetry

    @property
    def jumps(self) -> tuple[str, ...]:
        return self.network.jumps

    @property
    def kind(self) -> Any:
        """Kind of the head, or ``"position"`` if the outputs are the positions plus a correction."""
        return "position" if self.start.get("pos") == 1 else super().kind

    @in_precision_of_weights
    def geometry(self, data: Any) -> Any:
        """Return the geometry of the network, in its units; AttributeError if it has no such method."""
        return cast(Any, self.network).geometry(self._in_units(data))

    @in_precision_of_weights
    def field(self, data: Any, geometry: Any = None) -> GroupField:
        return self.network.field(self._in_units(data), geometry)

    def _in_units(self, data: Any) -> Any:
        """Return data whose attributes are divided by their units."""
        lattice = {"cell": self.units["pos"]} if "pos" in self.units and getattr(data, "cell", None) is not None else {}
        units = lattice | self.units
        return copied(data, **{name: attribute(data, name) / units[name] for name in units}) if units else data

    @in_precision_of_weights
    def forward(self, data: Any, geometry: Any = None) -> Any:
        """Return vectors ``[points, dim]``, or other outputs of the head, by name for :class:`lieattn.nn.Heads`.

        The data must also have the attributes of ``start``, in the shape of the outputs, and tangent at points of a
        sphere (otherwise ValueError). They are not changed.
        """
        output = super().forward(data, geometry)
        if not isinstance(output, Mapping):  # several outputs have neither unit nor start
            output = self.unit * output
        for name, factor in self.start.items():
            known = attribute(data, name)
            if (shape := tuple(known.shape)) != tuple(output.shape):
                raise ValueError(f"data.{name}: expected {tuple(output.shape)} like the output, got {shape}")
            if self.kind == "vector" and self.network.space is not None:
                several = known if known.ndim == 3 else known[:, None]
                self.network.space.check_tangent(f"data.{name}", data.pos, several)
            output = output + factor * known
        return output


def _check_start(start: Mapping[str, float], kind: Any, symmetry: Symmetry) -> None:
    """Raise ValueError if positions in ``start`` would give outputs that move in no known way."""
    if "pos" in start and (kind == "invariant" or (symmetry.group and symmetry.translations and start["pos"] != 1)):
        got = f"got {start['pos']} for {kind} outputs, which would move in no known way"
        raise ValueError(f"start: expected the factor 1 for pos, and none for invariant outputs, {got}")


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


class Preprocessed(Wrapper):
    """A network together with the transform of its training data, so that it accepts untransformed data.

    **Equivariance.** That of the network, if the transform is invariant (it standardizes features, or computes them
    from nuclear charges) or equivariant (it subtracts the mean of the points).

    Parameters
    ----------
    network
        Called with the transformed data.
    transform
        Called with a ``Data`` or ``Batch``, and returns a new one: ``MoleculeFeatures`` or ``Standardize`` of
        ``lieattn_datasets``, a transform of ``torch_geometric.transforms``, or several in its ``Compose``. If its
        result has no ``pos``, the forward call raises TypeError.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.transforms import Constant
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import FramewiseTransformer
    >>> network = Preprocessed(FramewiseTransformer(cyclic(4), 1, 3, channels=4), Constant(cat=False))
    >>> network(Data(pos=torch.randn(7, 2))).shape
    torch.Size([1, 3])
    """

    def __init__(self, network: nn.Module, transform: Callable[[Any], Any]) -> None:
        check_arguments(Preprocessed.__init__, locals())
        super().__init__(network)
        self.network, self.transform = network, transform

    def geometry(self, data: Any) -> Any:
        """Return ``network.geometry(transform(data))``; AttributeError if the network has no such method."""
        network: Any = self.network
        return network.geometry(self._transformed(data))

    def forward(self, data: Any, geometry: Any = None, **options: Any) -> Any:
        """Return ``network(transform(data), geometry, **options)``, without the geometry if none is given."""
        given = () if geometry is None else (geometry,)
        return self.network(self._transformed(data), *given, **options)

    def _transformed(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            raise TypeError(f"data: expected a torch_geometric Data or Batch, got {kind(data)}")
        check_data(data)
        found = self.transform(data)
        if getattr(found, "pos", None) is None:
            raise TypeError(f"transform: expected data with pos from {self.transform!r}, got {kind(found)}")
        # Some transforms, such as Constant of PyTorch Geometric, put new attributes on the CPU.
        return copy.copy(found).to(found.pos.device) if hasattr(found, "to") else found

    def extra_repr(self) -> str:
        """Return the transform as text."""
        return f"transform={self.transform!r}"
