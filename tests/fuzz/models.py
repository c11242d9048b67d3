"""Calls of models: outputs are finite, equivariant, and the same alone, in a batch, far away, and in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn.groups import FiniteGroup
from lieattn.testing import randomize
from tests.fuzz._strategies import points
from tests.fuzz._target import Finding, Target, Verdict, named
from tests.test_networks import NETWORKS

# Clouds whose coordinates are of the order of the radius, so that errors are only rounding errors.
_ORDINARY = ("normal", "coincident", "zero padded", "on a line", "in a plane", "grid")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


NAMES = (
    "gsa_points gsa_principal framewise framewise_point framewise_principal_vector framewise_posed_O directions "
    "framewise_separable directions_principal_vector lie_translations lie_principal lie_vectors lie_plane lie_finite "
    "lie_similar_vectors lie_logs lie_published_logs lie_vector lie_conv finite_se2 tfn_vector se3_transformer "
    "distances field_vector field_dipole forces"
).split()


def _width(name: str) -> tuple[int, int]:
    """Return the dimension of the points and the number of features of a network of the table."""
    cloud = NETWORKS[name][1]()[0]
    return cloud.pos.shape[1], cloud.x.shape[1]


# Dimension of the points, number of features, and the network.
MODELS: dict[str, tuple[int, int, Callable[[], nn.Module]]] = {
    name: (*_width(name), NETWORKS[name][0]) for name in NAMES
}


@functools.cache
def _model(name: str, dtype: torch.dtype) -> nn.Module:
    return randomize(MODELS[name][2](), spread=0.4).to(dtype)


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
    inputs = {"x": torch.randn(len(pos), MODELS[name][1], generator=generator, dtype=torch.float64).to(pos) * factor}
    inputs["vel"] = torch.randn(pos.shape, generator=generator, dtype=torch.float64).to(pos)
    inputs["z"] = torch.randint(6, 9, (len(pos),), generator=generator)
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
