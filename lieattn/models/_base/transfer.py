"""Training that starts from the weights of another network."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import nn

from lieattn._core.checks import check_arguments
from lieattn.io import Record, uncompiled
from lieattn.models._base.network import Network, Wrapper
from lieattn.models._base.tied import OF_OUTPUTS
from lieattn.models._base.wrappers import Ensemble, FieldModel
from lieattn.nn import Heads


def transfer_weights(network: nn.Module, source: nn.Module) -> tuple[str, ...]:
    """Copy the weights of a trained network into another network of the same class, and return the names of new ones.

    Weights of the readout are new, and keep their values, if they differ in shape or do not exist in the source, for
    example because the outputs are others. If all shapes agree but the outputs are of another kind, such as a vector in
    place of three numbers, the whole readout is new, and so is the head of a :class:`FieldModel` if the source has no
    such head. The readout is what :meth:`Network.with_head` replaces; for other classes, it is the part ``head``. All
    other weights are copied, including buffers, and converted to the dtype and device of the network. Modules around a
    network, such as :class:`Rescaled`, :class:`Preprocessed` and :class:`EnergyForces`, are neither compared nor
    copied. So the weights of a network for energies are a start for one that also learns forces, if its radius is
    smooth in both.

    **Equivariance.** That of the network, since a trained network of the same group has the same symmetry.

    Parameters
    ----------
    network
        Changed in place. It may be wrapped, or be part of a :class:`FieldModel`.
    source
        For example a result of :func:`lieattn.load`; it is not changed.

    Raises
    ------
    ValueError
        If the networks have different classes, or differ in other weights, or in the group, the geometry or the inputs
        that the weights are for, or if a network within modules was replaced after their construction. The network is
        then as it was.

    Examples
    --------
    >>> from lieattn.groups import cyclic
    >>> from lieattn.models import FramewiseTransformer
    >>> trained, network = (FramewiseTransformer(cyclic(4), 1, outputs, channels=4) for outputs in (1, 3))
    >>> transfer_weights(network, trained)
    ('head.2.weight', 'head.2.bias')
    """
    check_arguments(transfer_weights, locals())
    ours, theirs = _inner(network), _inner(source)
    whole = ours
    if type(ours) is not type(theirs):
        ours, theirs = (one.network if isinstance(one, FieldModel) else one for one in (ours, theirs))
    if type(ours) is not type(theirs):
        raise ValueError(
            f"source: expected the class of the network, {type(ours).__name__}, got {type(theirs).__name__}"
        )
    prefix = next((f"{name}." if name else "" for name, part in network.named_modules() if part is ours), None)
    if prefix is None:
        found = f"the {type(ours).__name__} within the {type(network).__name__} was replaced after its construction"
        raise ValueError(f"network: {found}; construct the {type(network).__name__} with the new one")
    before = ours.state_dict()
    given = theirs.state_dict()
    readout = _readout(ours) | _readout(theirs)
    shapes, wanted = ({name: state[name].shape for name in readout if name in state} for state in (given, before))
    differ = {name for name in readout if shapes.get(name) != wanted.get(name)}
    for start in _of_other_kinds(ours, theirs):
        part = {name: name.rpartition(".")[0] for name in readout if name.startswith(start)}
        last = {layer for name, layer in part.items() if name in differ}
        differ |= {name for name, layer in part.items() if not last or layer in last}
    copied = Record.of(given)
    weights = {name: value for name, value in copied.weights.items() if name not in differ}
    tied = {
        name: _without_outputs(entry)
        for name, entry in copied.modules.items()
        if not name or not any(weight.startswith(f"{name}.") for weight in differ)
    }
    record = Record(weights | {name: before[name] for name in before if name in differ}, tied)
    try:
        record.load_into(copy.deepcopy(ours), "the network")  # weights also decide choices that it has left open
    except ValueError as error:
        raise ValueError(f"source: {error}") from error
    record.load_into(ours, "the network", new=differ)
    new = tuple(prefix + name for name in before if name in differ)
    if whole is ours:
        return new
    # The head of a FieldModel is not part of the network whose weights were copied.
    outer = prefix.removesuffix("network.")
    return (*new, *(f"{outer}head.{name}" for name in cast(FieldModel, whole).head.state_dict()))


def _without_outputs(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a module without kind and pooling of its outputs, which may be others in a new task."""
    kept = {name: value for name, value in entry.get("geometry", {}).items() if name not in OF_OUTPUTS}
    return {**entry, "geometry": kept}


def _inner(network: nn.Module) -> nn.Module:
    """Return the network within modules such as :class:`Rescaled`, which adopt its symmetry."""
    network = uncompiled(network)
    if isinstance(network, Ensemble) or not isinstance(network, Wrapper):
        return network
    return _inner(network.wrapped) if isinstance(network.wrapped, nn.Module) else network


def _of_other_kinds(network: nn.Module, source: nn.Module) -> list[str]:
    """Return the starts of the names of weights in a readout whose outputs are of another kind than in the source."""
    ours, theirs = (getattr(one, "head", None) for one in (network, source))
    if isinstance(ours, Heads) and isinstance(theirs, Heads):
        both = [name for name in ours.heads if name in theirs.heads]
        return [f"head.heads.{name}." for name in both if _kind(ours.heads[name]) != _kind(theirs.heads[name])]
    return [""] if _kind(ours, network) != _kind(theirs, source) else []


def _kind(head: Any, network: nn.Module | None = None) -> Any:
    """Return the type of a field, or the kind of other outputs; vectors have several names."""
    return getattr(head, "rep", None) or getattr(head if network is None else network, "kind", None)


def _readout(network: nn.Module) -> set[str]:
    """Return the names of the weights that another head replaces."""
    names = set(network.state_dict())
    if isinstance(network, Network):
        return names - set(network.with_head(nn.Identity()).state_dict())
    return {name for name in names if name.startswith("head.")}
