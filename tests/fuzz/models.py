"""Calls of models: outputs are finite, equivariant, and the same alone, in a batch, far away, and in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn.geometry import AllPairs, FiniteFrames, PrincipalFrames, Radius
from lieattn.groups import SE, E, FiniteGroup, Sim, Translations, cyclic, dihedral, tetrahedral
from lieattn.models import (
    AttentionOptions,
    ConvolutionOptions,
    DirectionConvNet,
    EnergyForces,
    FieldModel,
    FiniteSE2Transformer,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
    Lifting,
)
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.models.published import PublishedCoordinates
from lieattn.nn import DipoleHead, VectorHead
from lieattn.spaces import Euclidean
from lieattn.testing import randomize
from tests.fuzz._strategies import points
from tests.fuzz._target import Finding, Target, Verdict, named

_RADIUS = 1.3712  # no distance in a grid is equal to it
# Clouds whose coordinates are of the order of the radius, so that errors are only rounding errors.
_ORDINARY = ("normal", "coincident", "zero padded", "on a line", "in a plane", "grid")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def _lie(group: Any, frames: Any = None, **options: Any) -> nn.Module:
    small = {"neighborhood": Radius(_RADIUS), "channels": 8, "layers": 1, "heads": 2, **options}
    return LieTransformer(1, 2, space=Euclidean(group), frames=frames, attention=AttentionOptions(hidden=4), **small)


def _gsa(frames: Any, **options: Any) -> nn.Module:
    return GSANet(frames, 1, 2, neighborhood=Radius(_RADIUS), channels=8, blocks=(1,), heads=2, **options)


def _framewise(frames: Any, outputs: int = 2, **options: Any) -> nn.Module:
    return FramewiseTransformer(frames, 1, outputs, channels=4, layers=1, **options)


def _steerable(model: Any, **options: Any) -> nn.Module:
    return model(1, 1, neighborhood=Radius(_RADIUS), channels=4, layers=1, vector_inputs=("vel",), **options)


_VEL: dict[str, Any] = {"vector_inputs": ("vel",)}
_LOGS = {"lifting": Lifting("log")}
# Dimension of the points, and the model.
MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "GSANet T": (3, lambda: _gsa(tetrahedral(), **_VEL)),
    "GSANet D3": (2, lambda: _gsa(dihedral(3))),
    "GSANet principal": (3, lambda: _gsa(PrincipalFrames(), **_VEL)),
    "framewise T": (3, lambda: _framewise(tetrahedral(), neighborhood=Radius(_RADIUS), **_VEL)),
    "framewise C4 vectors": (2, lambda: _framewise(cyclic(4), 1, kind="vector", pool="none", **_VEL)),
    "framewise principal vectors": (3, lambda: _framewise(PrincipalFrames(), 1, kind="vector", **_VEL)),
    "framewise posed": (3, lambda: _framewise(FiniteFrames(tetrahedral(), PrincipalFrames()), **_VEL)),
    "directions T": (3, lambda: _steerable(partial(DirectionConvNet, tetrahedral()))),
    "directions principal vectors": (
        3,
        lambda: _steerable(partial(DirectionConvNet, PrincipalFrames()), kind="vector"),
    ),
    "LieTransformer R3": (3, lambda: _lie(Translations(3))),
    "LieTransformer SE3": (3, lambda: _lie(SE(3), PrincipalFrames(), **_VEL)),
    "LieTransformer SE3, neighborhoods": (3, lambda: _lie(SE(3), PrincipalFrames("neighborhood"), **_VEL)),
    "LieTransformer E2": (2, lambda: _lie(E(2), PrincipalFrames(), **_VEL)),
    "LieTransformer Sim2": (2, lambda: _lie(Sim(2), PrincipalFrames(), neighborhood=AllPairs(), **_VEL)),
    "LieTransformer T": (3, lambda: _lie(SE(3), tetrahedral())),
    "LieTransformer C6 logarithms": (2, lambda: _lie(SE(2), cyclic(6), **_LOGS)),
    "LieTransformer C10 published": (2, lambda: _lie(SE(2), cyclic(10), lifting=Lifting(PublishedCoordinates("log")))),
    "LieTransformer vectors": (3, lambda: FieldModel(_lie(SE(3), PrincipalFrames(), **_VEL), VectorHead(8))),
    "LieConv": (
        3,
        lambda: LieConvNet(
            1,
            2,
            space=Euclidean(SE(3)),
            frames=PrincipalFrames(),
            neighborhood=Radius(_RADIUS),
            channels=8,
            layers=1,
            convolution=ConvolutionOptions(rank=2, hidden=4),
        ),
    ),
    "FiniteSE2": (2, lambda: FiniteSE2Transformer(3, channels=8, layers=1, heads=2, content="pairwise_distances")),
    "TensorFieldNetwork": (3, lambda: _steerable(TensorFieldNetwork, degree=1, kind="vector", pool="none")),
    "SE3Transformer": (3, lambda: _steerable(SE3Transformer, degree=1, heads=2)),
    "DistanceTransformer": (3, lambda: _steerable(DistanceTransformer, heads=2)),
    "dipoles": (3, lambda: FieldModel(_framewise(tetrahedral(), **_VEL), DipoleHead(4))),
    "forces": (3, lambda: EnergyForces(_steerable(TensorFieldNetwork, degree=1))),
}


@functools.cache
def _model(name: str, dtype: torch.dtype) -> nn.Module:
    return randomize(MODELS[name][1](), spread=0.4).to(dtype)


@st.composite
def _cases(draw: st.DrawFn):
    name = draw(st.sampled_from(sorted(MODELS)))
    ordinary = draw(st.booleans())
    pos, batch = draw(points(MODELS[name][0], most=6, **({"kinds": _ORDINARY} if ordinary else {})))
    return name, ordinary, pos, batch, draw(st.integers(0, 2**31)), draw(st.sampled_from([1.0] * 8 + [1e-30, 1e20]))


def _check(case: Any) -> Finding | Verdict:
    name, ordinary, pos, batch, seed, factor = case
    model, generator = _model(name, pos.dtype), torch.Generator().manual_seed(seed)
    batch = batch.unique(return_inverse=True)[1]  # outputs of clouds without points depend on the read-out
    inputs = {"x": torch.randn(len(pos), 1, generator=generator, dtype=torch.float64).to(pos) * factor}
    inputs["vel"] = torch.randn(pos.shape, generator=generator, dtype=torch.float64).to(pos)
    inputs["z"] = torch.randint(1, 9, (len(pos),), generator=generator)
    try:
        expected = _outputs(model, pos, batch, inputs)
    except ValueError as error:
        return Verdict.NAMED if named(error, "data", "pos", "points", "batch") else Verdict.UNNAMED
    if not all(bool(torch.isfinite(value).all()) for value in expected):
        return Finding(Verdict.SILENT, f"not finite: {case}")
    if len(pos) == 0 or factor != 1:
        return Verdict.CORRECT
    tolerance = _TOLERANCE[pos.dtype]
    clouds = int(batch.max()) + 1
    for cloud in range(clouds):
        own = batch == cloud
        alone = _outputs(model, pos[own], batch[own] - cloud, {key: value[own] for key, value in inputs.items()})
        for value, other in zip(expected, alone, strict=True):
            same = value[own] if len(value) == len(pos) else value[cloud : cloud + 1]
            if not _close(other, same, 10 * tolerance if not ordinary else tolerance):
                return Finding(Verdict.SILENT, f"not the same alone: {case}")
    if not ordinary:
        return Verdict.CORRECT
    # Principal axes depend on the order of equally far points. If there are as many clouds as points, outputs of points
    # cannot be distinguished from those of clouds.
    if not model.symmetry.moving_axes and clouds < len(pos):
        order = torch.randperm(len(pos), generator=generator)
        shuffled = _outputs(model, pos[order], batch[order], {key: value[order] for key, value in inputs.items()})
        for value, found in zip(expected, shuffled, strict=True):
            if not _close(found, value[order] if len(value) == len(pos) else value, tolerance):
                return Finding(Verdict.SILENT, f"depends on the order of points: {case}")
    if pos.dtype == torch.float32 and (model.symmetry.translations or model.symmetry.group.is_affine):
        far = pos.double() + 1e6 * torch.randn(pos.shape[1], generator=generator, dtype=torch.float64)
        for value, found in zip(expected, _outputs(model, far, batch, inputs), strict=True):
            if not _close(found, value, tolerance):
                return Finding(Verdict.SILENT, f"depends on the distance from the origin: {case}")
    moved, inputs["vel"], turn = _moved(model.symmetry, pos, inputs["vel"], generator)
    for value, found in zip(expected, _outputs(model, moved, batch, inputs), strict=True):
        directed = value.ndim > 1 and value.shape[-1] == pos.shape[1] and model.kind != "invariant"
        if not _close(found, value @ turn.T if directed else value, tolerance):
            worst = float((found - (value @ turn.T if directed else value)).abs().max())
            return Finding(Verdict.SILENT, f"not equivariant, {worst:.1e}: {case}")
    return Verdict.CORRECT


def _outputs(model: nn.Module, pos: Tensor, batch: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    found = model(Data(pos=pos.clone(), batch=batch, **inputs))
    return [value.detach() for value in ([found] if isinstance(found, Tensor) else found)]


def _moved(symmetry: Any, pos: Tensor, vel: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return points and velocities transformed by an element of the stated group, and its linear part."""
    group = symmetry.group
    if isinstance(group, FiniteGroup):
        turn = group.elements[int(torch.randint(group.order, (), generator=generator))]
    else:
        turn = group.linear(group.sample(generator=generator, dtype=torch.float64))
    shift = torch.randn(pos.shape[1], generator=generator, dtype=torch.float64)
    moved, turned = pos.double() @ turn.T + shift, vel.double() @ turn.T
    return moved.to(pos), turned.to(vel), turn.to(pos)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    return found.shape == expected.shape and bool(((found - expected).abs() <= tolerance * scale).all())


TARGETS = {"models": Target("model calls", _cases(), _check, long=3000, quick=8)}
