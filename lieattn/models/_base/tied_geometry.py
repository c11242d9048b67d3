"""The geometry that the weights of a network depend on."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor, nn

from lieattn.geometry import PrincipalFrames, ScaleFrames
from lieattn.io import tied_to_group
from lieattn.models._base.inputs import CloudInputs, Species
from lieattn.models._base.jumps import decided
from lieattn.models._base.tied_options import tied_options, tied_outputs
from lieattn.spaces import HomogeneousSpace


def tied_geometry(module: nn.Module) -> dict[str, str]:
    """Return descriptions of the group, geometry, inputs, options and outputs that weights depend on."""
    frames, group = getattr(module, "frames", None), getattr(module, "group", None)
    found = tied_to_group(getattr(frames, "group", None) if group is None else group)
    if frames is not None:
        pose = getattr(frames, "pose", None)
        found["frames"] = type(frames).__name__ + (f" in the pose of {type(pose).__name__}" if pose else "")
        for name, chosen in (("pose", pose or frames), ("scales", frames)):
            if isinstance(chosen, PrincipalFrames if name == "pose" else ScaleFrames):
                found[name] = repr(chosen)
    space, neighborhood = getattr(module, "space", None), getattr(module, "neighborhood", None)
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
