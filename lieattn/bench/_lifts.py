"""How far each lift is from invariance to rigid motions: a whole LieTransformer on clouds that are turned and shifted.

The model is random and deliberately far from smooth: two blocks of 32 channels with large weights, 16 outputs for a
cloud. The clouds are random too: 4 of 18 points, about as many as a molecule of QM9 has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from lieattn.geometry import FiniteFrames, Frames, GivenFrames, PrincipalFrames, Radius, SampledFrames
from lieattn.groups import SE, SO, FiniteGroup, octahedral, tetrahedral
from lieattn.models import LieTransformer, Lifting
from lieattn.spaces import Euclidean
from lieattn.testing import randomize

CLOUDS, POINTS, FEATURES, OUTPUTS, RADIUS = 4, 18, 5, 16, 3.0


@dataclass(frozen=True)
class LiftError:
    """Error of one lift.

    Attributes
    ----------
    case, way
        The lift, and the motions that the clouds were moved by.
    fiber
        Frames over each point.
    float64, float32
        Root mean square of y(g x) - y(x) over motions, clouds and outputs, relative to the standard deviation of y over
        the clouds: at 1 a cloud is as far from itself, moved, as from another one.
    repeats
        Number of motions.
    """

    case: str
    way: str
    fiber: int
    float64: float
    float32: float
    repeats: int


# From the frames ``[points, fiber, 3, 3]`` of the clouds as they stand and the rotation they are turned by.
_Frames = Callable[[Tensor], Frames]


def run(repeats: int = 6) -> list[LiftError]:
    """Records of all lifts, for as many random motions as there are repeats."""
    motions = SE(3).sample(repeats, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    records = []
    for case, fiber, frames in _lifts():
        records.append(LiftError(case, "random motions", fiber, *_errors(frames, motions), repeats))
    for group in (tetrahedral(), octahedral()):
        own = _motions_of(group, repeats)
        errors = _errors(lambda _, group=group: FiniteFrames(group), own)  # type: ignore[misc]
        records.append(LiftError(f"finite, {group.name}", "motions of its group", group.order, *errors, repeats))
    return records


def table(records: list[LiftError]) -> str:
    """Markdown, as in docs/exactness.md."""
    lines = ["| lift | frames | moved by | float64 | float32 |", "|---|---|---|---|---|"]
    lines += [f"| {r.case} | {r.fiber} | {r.way} | {r.float64:.1e} | {r.float32:.1e} |" for r in records]
    return "\n".join(lines)


def _lifts() -> Iterator[tuple[str, int, _Frames]]:
    for group in (tetrahedral(), octahedral()):
        yield f"finite, {group.name}", group.order, lambda _, group=group: FiniteFrames(group)  # type: ignore[misc]
    for count in (4, 24):
        for per in ("point", "cloud"):
            for design in (False, True):
                lift = SampledFrames(count, per=per, design=design)
                name = f"sampled, per {per}, {'design' if design else 'independent'}"
                yield name, count, lambda _, lift=lift: lift  # type: ignore[misc]
    for of in ("cloud", "neighborhood"):
        yield f"principal axes, {of}", 4, lambda _, of=of: PrincipalFrames(of=of)  # type: ignore[misc]
    drawn = SO(3).sample(CLOUDS * POINTS, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    yield "given, moved along", 4, lambda turn: GivenFrames(turn @ drawn)


def _motions_of(group: FiniteGroup, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    elements = group.elements[torch.randint(group.order, (number,), generator=generator)]
    return SE(3).element(elements, torch.randn(number, 3, generator=generator, dtype=torch.float64))


def _errors(frames: _Frames, motions: Tensor) -> tuple[float, float]:
    """Errors in double and single precision."""
    generator = torch.Generator().manual_seed(0)
    pos = 1.5 * torch.randn(CLOUDS * POINTS, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(CLOUDS * POINTS, FEATURES, generator=generator, dtype=torch.float64)
    batch = torch.arange(CLOUDS).repeat_interleave(POINTS)
    model = _model()
    errors = []
    for dtype in (torch.float64, torch.float32):
        model = copy.deepcopy(model).to(dtype)

        def evaluate(turn: Tensor, pos: Tensor, model: LieTransformer = model, dtype: torch.dtype = dtype) -> Tensor:
            model.frames = frames(turn)
            data = SimpleNamespace(pos=pos.to(dtype), x=x.to(dtype), batch=batch)
            with torch.no_grad():
                return model(data).double()

        expected = evaluate(torch.eye(3, dtype=torch.float64), pos)
        moved = [evaluate(SE(3).linear(g), SE(3).act(g, pos)) for g in motions]
        difference = torch.stack(moved) - expected
        spread = (expected - expected.mean(0)).square().sum(0) / (CLOUDS - 1)
        errors.append(float(difference.square().mean().sqrt() / spread.mean().sqrt()))
    return errors[0], errors[1]


def _model() -> LieTransformer:
    model = LieTransformer(
        FEATURES,
        OUTPUTS,
        space=Euclidean(SE(3)),
        frames=PrincipalFrames(),
        neighborhood=Radius(RADIUS),
        channels=32,
        layers=2,
        heads=4,
        lifting=Lifting(local=0),
    )
    randomize(model)
    return model.double()
