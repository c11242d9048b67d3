"""Models with options drawn at random: they keep what they state, or are refused with the name of an argument."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Data

from lieattn import models
from lieattn import nn as layers
from lieattn.certify import certify
from lieattn.geometry import AllPairs, FiniteFrames, Nearest, PrincipalFrames, Radius, SampledFrames
from lieattn.groups import SE, E, Sim, Translations, cyclic, cyclic_about, dihedral, full_tetrahedral, tetrahedral
from lieattn.models import irreps
from lieattn.reps import Pseudovector, SymmetricTensor, Vector
from lieattn.spaces import Euclidean
from lieattn.testing import randomize
from tests.fuzz._target import Finding, Target, Verdict, named

_CHANNELS = 8
_FRAMES = {
    2: (cyclic(1), cyclic(5), dihedral(3), dihedral(1)),
    3: (tetrahedral(), full_tetrahedral(), cyclic_about(4), PrincipalFrames(), FiniteFrames(tetrahedral())),
}
_LIE = {
    2: ((SE(2), PrincipalFrames()), (E(2), PrincipalFrames()), (Sim(2), PrincipalFrames()), (SE(2), cyclic(4))),
    3: ((SE(3), PrincipalFrames()), (E(3), PrincipalFrames()), (Sim(3), PrincipalFrames()), (SE(3), SampledFrames(2))),
}
_NEIGHBORHOODS = (AllPairs(), AllPairs(include_self=False), Radius(1.7), Radius(3.0, smooth=False), Nearest(3))
# Values of arguments whose annotation does not list them.
_VALUES: dict[str, tuple[Any, ...]] = {
    "heads": (1, 2),
    "hidden": (3,),
    "rank": (2,),
    "basis": (1, 4),
    "window": (2, 3),
    "angles": (0, 3),
    "mlp_ratio": (1, 2),
    "radial": (0, 3),
    "local": (0, 3),
    "length": (0.7, 2.0),
    "cutoff": (2.5,),
    "moments": (1, 3),
    "seeds": (0, 2),
    "downsampling": (0.5, 1.0),
    "feature_channels": (2,),
    "degree": (0, 1),
}
_OVERFLOW = "exp-mean"  # exponentials of the scores of random weights
_MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "framewise": (models.FramewiseTransformer, (2, 3)),
    "directions": (models.DirectionConvNet, (3,)),
    "gsa": (models.GSANet, (2, 3)),
    "lie": (models.LieTransformer, (2, 3)),
    "lie conv": (models.LieConvNet, (2, 3)),
    "finite SE(2)": (models.FiniteSE2Transformer, (2,)),
    "tensor field": (irreps.TensorFieldNetwork, (3,)),
    "SE(3) transformer": (irreps.SE3Transformer, (3,)),
    "distances": (irreps.DistanceTransformer, (3,)),
}
_HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "vectors": lambda width, dim: layers.VectorHead(width, dim),
    "dipoles": lambda width, dim: layers.DipoleHead(width, dim),
    "polarizabilities": lambda width, dim: layers.PolarizabilityHead(width, dim),
    "sums": lambda width, dim: layers.FieldHead(width, Vector(dim) + SymmetricTensor(dim), pool="mean"),
    "pseudovectors": lambda width, dim: layers.FieldHead(width, Pseudovector()),
    "rotations": lambda width, dim: layers.RotationHead(width),
}


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(_MODELS)))
    make, dims = _MODELS[name]
    dim = draw(st.sampled_from(dims))
    given = {"neighborhood": draw(st.sampled_from(_NEIGHBORHOODS)), "channels": 12 if name == "gsa" else _CHANNELS}
    if name in ("framewise", "directions", "gsa"):
        given["frames"] = draw(st.sampled_from(_FRAMES[dim]))
    elif name.startswith("lie"):
        group, given["frames"] = draw(st.sampled_from([*_LIE[dim], (Translations(dim), None)]))
        given["space"] = Euclidean(group)
    given |= {"blocks": (1,)} if name == "gsa" else {"layers": 1}
    if draw(st.booleans()) and name != "finite SE(2)":
        given["vector_inputs"] = ("vel",)
    options = _drawn(draw, make, given)
    around = draw(st.sampled_from(["nothing", "forces", "units", *_HEADS]))
    return {"model": name, "dim": dim, "around": around, "seed": draw(st.integers(0, 2**31)), "options": options}


def _drawn(draw: st.DrawFn, make: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments and some of the others; an object of options is its class with its own arguments."""
    found = dict(given)
    for name, choices, options in _choices(make):
        if name in found or not draw(st.booleans()):
            continue
        if options is not None:
            found[name] = (options, _drawn(draw, options, {}))
        elif choices:
            found[name] = draw(st.sampled_from(choices))
    return found


@cache
def _choices(make: Callable[..., Any]) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Return the optional arguments of a class, with values to choose from, or the class of an object of options."""
    hints = get_type_hints(make if dataclasses.is_dataclass(make) else make.__init__)
    found = []
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.default is parameter.empty:
            continue
        parts = get_args(hints[name]) or (hints[name],)
        parts = (hints[name],) if get_origin(hints[name]) is Literal else parts
        listed = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        listed += [False, True] if bool in parts else []
        options = next((part for part in parts if dataclasses.is_dataclass(part) and "Options" in str(part)), None)
        options = options or next((part for part in parts if part in (models.Lifting, models.Readout)), None)
        values = tuple(value for value in listed if value != _OVERFLOW) or _VALUES.get(name, ())
        found.append((name, values, options))
    return found


def _check(case: dict[str, Any]) -> Finding | Verdict:
    make, _ = _MODELS[case["model"]]
    seen = {} if case["model"] == "finite SE(2)" else {"in_channels": 2}
    try:
        network = _around(case["around"], make(out_channels=1, **seen, **_built(case["options"])), case)
    except (ValueError, TypeError) as error:
        return Verdict.NAMED if named(error, *_names(case)) else Finding(Verdict.UNNAMED, f"{error}: {case}")
    generator = torch.Generator().manual_seed(case["seed"])
    network = randomize(network, spread=0.3).double().eval()
    clouds = [_cloud(size, case["dim"], generator) for size in (5, 7)]
    try:
        found = certify(network, clouds, elements=1, rotations=1, continuity=False, dtypes=[torch.float64])
    except ValueError as error:
        return Verdict.NAMED if named(error, *_names(case)) else Finding(Verdict.UNNAMED, f"{error}: {case}")
    if found.verdict == "failed":
        failed = "; ".join(line for line in str(found).splitlines() if line.endswith("FAILED"))
        return Finding(Verdict.SILENT, f"{failed}: {case}")
    return Verdict.CORRECT


def _names(case: dict[str, Any]) -> set[str]:
    """Return how messages begin: with the name of an argument of the model, of its options, or of what is around it."""
    names = {"model", "head", "shift", "frames", "kind", "pool", "neighborhood", "cutoff"}
    classes = [_MODELS[case["model"]][0]]
    while classes:
        optional = _choices(classes.pop())
        names |= {name for name, _, _ in optional}
        classes += [options for _, _, options in optional if options is not None]
    return {f"{name}{end}" for name in names for end in (":", "[", ", ")}


def _built(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace classes of options and their arguments by objects."""
    nested = {name: value for name, value in arguments.items() if isinstance(value, tuple) and len(value) == 2}
    return arguments | {name: make(**_built(own)) for name, (make, own) in nested.items() if isinstance(make, type)}


def _around(name: str, network: nn.Module, case: dict[str, Any]) -> nn.Module:
    if name == "forces":
        return models.EnergyForces(network, jumps="allow")
    if name == "units":
        return models.Rescaled(network, {"y": 2.0}, {"y": 1.0})
    if name in _HEADS and hasattr(network, "field"):
        return models.FieldModel(network, _HEADS[name](case["options"]["channels"], case["dim"]))
    return network


def _cloud(size: int, dim: int, generator: torch.Generator) -> Data:
    x, pos, vel = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (2, dim, dim))
    return Data(x=x, pos=pos, vel=vel)


TARGETS = {"options": Target("options of models", _cases(), _check, long=1000, quick=4)}
