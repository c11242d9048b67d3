"""Deviation of each lift from invariance to rigid motions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from lieattn.bench._measure import Benchmark
from lieattn.geometry import FiniteFrames, Frames, GivenFrames, PrincipalFrames, Radius, SampledFrames
from lieattn.groups import SE, SO, octahedral, tetrahedral
from lieattn.models import LieTransformer, Lifting
from lieattn.spaces import Euclidean
from lieattn.testing import randomize

CLOUDS, POINTS, FEATURES, OUTPUTS, RADIUS = 4, 18, 5, 16, 3.0
SMALL = {"CLOUDS": 2, "POINTS": 6}
GROUPS = (tetrahedral(), octahedral())


@dataclass(frozen=True)
class LiftError:
    """Error of one lift: root mean square of y(g x) - y(x) relative to the standard deviation of y over the clouds.

    An error of 1 means that moving a cloud changes the output as much as taking another cloud.
    """

    case: str  # the lift
    way: str  # the motions by which the clouds were moved
    fiber: int  # frames over each point
    float64: float  # error in double precision
    float32: float
    repeats: int  # number of motions


def run(repeats: int | None = None, device: str = "cpu") -> list[LiftError]:
    """Return the records of all lifts, for ``repeats`` random motions of a random and deliberately rough network."""
    repeats = repeats or 6
    records = approximate(repeats, (4, 24), device) + _records(_exact_lifts(), repeats, device)
    for group in GROUPS:
        generator = torch.Generator().manual_seed(1)
        elements = group.elements[torch.randint(group.order, (repeats,), generator=generator)]
        own = SE(3).element(elements, torch.randn(repeats, 3, generator=generator, dtype=torch.float64))
        errors = _errors(FiniteFrames(group), own, device)
        records.append(LiftError(f"finite, {group.name}", "motions of its group", group.order, *errors, repeats))
    return records


def table(records: list[LiftError]) -> str:
    """Markdown, as in docs/exactness.md."""
    lines = ["| lift | frames | moved by | float64 | float32 |", "|---|---|---|---|---|"]
    lines += [f"| {r.case} | {r.fiber} | {r.way} | {r.float64:.1e} | {r.float32:.1e} |" for r in records]
    return "\n".join(lines)


def approximate(repeats: int, counts: Sequence[int], device: str = "cpu") -> list[LiftError]:
    """Return the records of lifts whose error depends on the number of frames: finite groups and sampled frames.

    ``counts`` are the numbers of sampled frames.
    """
    lifts: list[tuple[str, int, Frames]] = [
        (f"finite, {group.name}", group.order, FiniteFrames(group)) for group in GROUPS
    ]
    for count in counts:
        for per in ("point", "cloud"):
            for design in (False, True):
                name = f"sampled, per {per}, {'design' if design else 'independent'}"
                lifts.append((name, count, SampledFrames(count, per=per, design=design)))
    return _records(lifts, repeats, device)


def _exact_lifts() -> Iterator[tuple[str, int, Frames]]:
    """Names, frames over each point, and lifts that move with the points."""
    for of in ("cloud", "neighborhood"):
        yield f"principal axes, {of}", 4, PrincipalFrames(of=of)
    drawn = SO(3).sample(CLOUDS * POINTS, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    yield "given, moved along", 4, GivenFrames(drawn)


def _records(lifts: Iterable[tuple[str, int, Frames]], repeats: int, device: str) -> list[LiftError]:
    anywhere = SE(3).sample(repeats, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [
        LiftError(case, "random motions", fiber, *_errors(frames, anywhere, device), repeats)
        for case, fiber, frames in lifts
    ]


def _errors(frames: Frames, motions: Tensor, device: str) -> tuple[float, float]:
    """Errors in double and single precision."""
    generator = torch.Generator().manual_seed(0)
    pos = 1.5 * torch.randn(CLOUDS * POINTS, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(CLOUDS * POINTS, FEATURES, generator=generator, dtype=torch.float64)
    batch = torch.arange(CLOUDS).repeat_interleave(POINTS)
    errors = []
    for dtype in (torch.float64, torch.float32):
        model, outputs = _model().to(device, dtype), []
        for g in (SE(3).identity(motions), *motions):
            model.frames = frames
            if isinstance(frames, GivenFrames):
                model.frames = GivenFrames((SE(3).linear(g) @ frames.frames).to(device))
            moved, features = SE(3).act(g, pos).to(device, dtype), x.to(device, dtype)
            with torch.no_grad():
                outputs.append(model(SimpleNamespace(pos=moved, x=features, batch=batch.to(device))).double())
        still, others = outputs[0], torch.stack(outputs[1:])
        errors.append(float((others - still).square().mean().sqrt() / still.var(dim=0).mean().sqrt()))
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


BENCHMARK = Benchmark(run, table)
