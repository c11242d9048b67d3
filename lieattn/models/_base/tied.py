"""Properties that the weights of a network depend on, besides their shapes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lieattn.geometry import PrincipalFrames, ScaleFrames
from lieattn.io import tied_to_group
from lieattn.models._base.inputs import CloudInputs, Species
from lieattn.models._base.jumps import decided
from lieattn.nn import GroupAttention, Heads, LieBlock
from lieattn.reps import Representation
from lieattn.spaces import HomogeneousSpace

_OF_HEADS = ("activation", "neutral", "order")
OF_OUTPUTS = ("kind", "pool", *(f"head.{name}" for name in _OF_HEADS))  # names of properties that come with the head


def tied_geometry(module: Any) -> dict[str, str]:
    """Return descriptions of the group, geometry, inputs, options and outputs that weights depend on."""
    frames, group = module.frames, module.group
    found = tied_to_group(getattr(frames, "group", None) if group is None else group)
    if frames is not None:
        pose = getattr(frames, "pose", None)
        found["frames"] = type(frames).__name__ + (f" in the pose of {type(pose).__name__}" if pose else "")
        for name, chosen in (("pose", pose or frames), ("scales", frames)):
            if isinstance(chosen, PrincipalFrames if name == "pose" else ScaleFrames):
                found[name] = repr(chosen)
    space, neighborhood = module.space, module.neighborhood
    if isinstance(space, HomogeneousSpace):
        found["space"] = space.name
    if neighborhood is not None:
        # Neither edges nor addresses of objects in memory are properties of the weights.
        tensor = isinstance(getattr(neighborhood, "edge_index", None), Tensor)
        unnamed = tensor or repr(neighborhood) == object.__repr__(neighborhood)
        found["neighborhood"] = type(neighborhood).__name__ if unnamed else repr(decided(neighborhood))
    absent = getattr(neighborhood, "length", None)  # in place of a length or a cutoff that is None
    for owner in (getattr(module, "lifting", None), getattr(module, "options", None), module):
        for name, last in (("length", 1.0), ("cutoff", None)):
            given = [getattr(owner, name), absent, last] if hasattr(owner, name) else []
            if isinstance(value := next((length for length in given if length is not None), None), Real):
                found[name] = repr(float(value))
    found |= _inputs(module) if hasattr(module, "inputs") else {}
    return found | tied_options(module) | tied_outputs(module)


def _inputs(module: Any) -> dict[str, str]:
    names = {name: repr(tuple(getattr(module, name, ()))) for name in ("vector_inputs", "cloud_inputs")}
    inputs = module.inputs.points if isinstance(module.inputs, CloudInputs) else module.inputs
    if isinstance(inputs, Species):
        names["species"] = repr(tuple(inputs.species))
    return {**names, "inputs": "data.x" if isinstance(inputs, int) else type(inputs).__name__}


def tied_options(module: Any) -> dict[str, str]:
    """Return the options of a network and of its layers, which are not those of other networks within it."""
    layers = list(_layers(module))
    found = {name: [value for one in layers if (value := read(one)) is not None] for name, read in _OF_LAYERS.items()}
    texts = {name: ", ".join(dict.fromkeys(values)) for name, values in found.items() if values}
    of_network = ((name, read(module)) for name, read in _OF_NETWORKS.items())
    return texts | {name: text for name, text in of_network if text is not None}


def tied_outputs(module: Any) -> dict[str, str]:
    """Return the kind and the pooling of the outputs of a network, and the options of its head."""
    head = getattr(module, "head", None)
    pool = pool_of(module) if (of_head := pool_of(head)) is None else of_head
    # Modules around a network have neither, so that weights for energies fit a module with or without stresses.
    texts = {} if head is None and pool is None else {"kind": _text(module.kind), "pool": _text(pool)}
    texts |= {f"head.{name}": _text(_of_heads(head, name)) for name in _OF_HEADS}
    return {name: text for name, text in texts.items() if text}


def _layers(module: nn.Module, top: bool = True) -> Iterator[nn.Module]:
    """Yield a network and its parts, without its head and without networks within it, which state their own options."""
    for name, part in module.named_children():
        is_network = hasattr(type(part), "symmetry")
        if not is_network and not (top and name == "head"):
            yield part
            yield from _layers(part, top=False)


def _activation(layer: Any) -> str | None:
    found = getattr(layer, "activation", None)
    name = found if isinstance(found, str) else getattr(found, "__name__", None)
    # Other functions may have no name that is the same in every process.
    return name if name is found or (name and getattr(functional, name, None) is found) else None


def _eps(layer: Any) -> str | None:
    found = getattr(layer.norm_attention, "eps", None) if isinstance(layer, LieBlock) else None
    return None if found is None else f"{found:g}"


def _heads(layer: Any) -> str | None:
    found = getattr(layer, "heads", None)
    return str(found) if isinstance(found, Integral) else None


def _border(layer: Any) -> str | None:
    found = getattr(getattr(layer, "positions", None), "border", None)
    return found if isinstance(found, str) else None


def _downsampling(network: Any) -> str | None:
    share = getattr(network, "share", None)
    found = getattr(network, "downsampling", None) if share is None else f"{share:g} of the points per block"
    return found if isinstance(found, str) else None


def _coordinates(network: Any) -> str | None:
    found = getattr(getattr(network, "lifting", None), "coordinates", None)
    if found is None or isinstance(found, str):
        return found
    # Addresses of objects are not properties of the weights.
    return type(found).__name__ if repr(found) == object.__repr__(found) else repr(found)


def _positions(network: Any) -> str | None:
    found = getattr(getattr(network, "options", None), "positions", None)
    return found if isinstance(found, str) else None


def _scale(network: Any) -> str | None:
    found = getattr(network, "scale", ())  # None stands for the default, which depends on the layer
    return "1 / channels" if found is None else f"{found:g}" if isinstance(found, Real) else None


def _frame_table(network: Any) -> str | None:
    options: Any = getattr(network, "options", None)
    group = network.group
    if group is None or not hasattr(options, "frame_table"):
        return None
    table = None if options.equivariant(group) else options.frame_table.cpu().numpy().tobytes()
    return "g⁻¹ m" if table is None else f"the table {zlib.crc32(table):08x}"


def _field(owner: str, name: str) -> Callable[[Any], str | None]:
    """Return a function that reads an attribute of an attribute of a network, if there are both."""

    def read(network: Any) -> str | None:
        part = getattr(network, owner, None)
        return repr(getattr(part, name)) if hasattr(part, name) else None

    return read


_OF_LAYERS: dict[str, Callable[[Any], str | None]] = {
    "activation": _activation,
    "normalize": lambda layer: layer.normalize if isinstance(layer, GroupAttention) else None,
    "norm": lambda layer: ("post" if layer.post else "pre") if isinstance(layer, LieBlock) else None,
    "eps": _eps,
    "heads": _heads,
    "border": _border,
}
_OF_NETWORKS: dict[str, Callable[[Any], str | None]] = {
    "bound": _field("lifting", "bound"),
    "coordinates": _coordinates,
    "crops": _field("stages", "margins"),
    "downsampling": _downsampling,
    "frame_table": _frame_table,
    "pools": _field("stages", "pools"),
    "positions": _positions,
    "scale": _scale,
}


def _of_heads(head: Any, name: str) -> Any:
    """Return an option of a head, by name for several outputs; None for heads without this option."""
    if isinstance(head, Heads):
        return {output: _of_heads(one, name) for output, one in head.heads.items()}
    found = getattr(head, name, None)
    return repr(found) if isinstance(found, bool) else found if isinstance(found, str) else None


def pool_of(head: Any) -> Any:
    """Return how outputs are pooled over points, by name for several outputs, or None if there is no choice."""
    if isinstance(head, Heads):
        return {name: pool_of(one) for name, one in head.heads.items()}
    if hasattr(head, "cloud_pool"):
        return getattr(head.cloud_pool, "reduction", "none")
    return getattr(getattr(head, "outputs", None), "pool", None)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={text}" for name in sorted(value) if (text := _text(value[name])))
    # A kind of another type may have no text that is the same in every process.
    return value.name if isinstance(value, Representation) else value if isinstance(value, str) else ""
