"""Properties that the weights of a network depend on, besides their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lieattn.geometry import Given, PrincipalFrames, ScaleFrames
from lieattn.io import tied_to_group
from lieattn.models._base.inputs import CloudInputs, Species
from lieattn.models._base.symmetry import decided
from lieattn.nn import GroupAttention, Heads, LieBlock
from lieattn.nn.relative import RelativePositionTable
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
        edges = isinstance(neighborhood, Given) and isinstance(neighborhood.edge_index, Tensor)
        # Edges are no properties of the weights.
        found["neighborhood"] = type(neighborhood).__name__ if edges else tied_repr(decided(neighborhood))
    if module.inputs is not None:
        found |= {"vector_inputs": repr(module.vector_inputs), "cloud_inputs": repr(module.cloud_inputs)}
        if module.field_inputs:
            found["field_inputs"] = repr({name: rep.name for name, rep in module.field_inputs.items()})
        inputs = module.inputs.points if isinstance(module.inputs, CloudInputs) else module.inputs
        if isinstance(inputs, Species):
            found["species"] = repr(tuple(inputs.species))
        found["inputs"] = "data.x" if isinstance(inputs, int) else type(inputs).__name__
    return found | _of_layers(module) | _of_outputs(module)


def tied_repr(value: object) -> str:
    """Return the text of an object; only its class if the text is an address in memory, which weights do not have."""
    return type(value).__name__ if repr(value) == object.__repr__(value) else repr(value)


def tied_lengths(neighborhood: Any, **lengths: float | None) -> dict[str, str]:
    """Return descriptions of lengths by name; those that are absent are that of the neighborhood, or a length of 1."""
    found = {}
    for name, length in lengths.items():
        last = 1.0 if name == "length" else None
        given = (value for value in (length, neighborhood.length, last) if value is not None)
        if (value := next(given, None)) is not None:
            found[name] = repr(float(value))
    return found


def _of_layers(module: nn.Module) -> dict[str, str]:
    """Return the options of the layers of a network, which are not those of other networks within it."""
    found: dict[str, list[str]] = {}
    for layer in _layers(module):
        for name, option in _options(layer).items():
            if option is not None and option not in found.setdefault(name, []):
                found[name].append(option)
    return {name: ", ".join(options) for name, options in found.items() if options}


def _options(layer: Any) -> dict[str, str | None]:
    own, block = vars(layer), isinstance(layer, LieBlock)
    activation, heads = own.get("activation"), own.get("heads")
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", None)
    # Other functions may have no name that is the same in every process.
    known = name is activation or (name and getattr(functional, name, None) is activation)
    eps = getattr(layer.norm_attention, "eps", None) if block else None
    return {
        "activation": name if known else None,
        "normalize": layer.normalize if isinstance(layer, GroupAttention) else None,
        "norm": ("post" if layer.post else "pre") if block else None,
        "eps": None if eps is None else f"{eps:g}",
        "heads": str(heads) if isinstance(heads, Integral) else None,
        "border": own["positions"].border if isinstance(own.get("positions"), RelativePositionTable) else None,
    }


def _of_outputs(module: Any) -> dict[str, str]:
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
