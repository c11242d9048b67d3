"""Errors of equivariance: of each lift of LieTransformer, or of a truncated fiber of scales at its ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lieattn.bench._measure import Benchmark, Sizes
from lieattn.geometry import (
    FiniteFrames,
    Frames,
    GivenFrames,
    PrincipalFrames,
    Radius,
    SampledFrames,
    ScaleFrames,
    lift,
)
from lieattn.groups import SE, SO, cyclic, octahedral, tetrahedral
from lieattn.models import GSANet, LieTransformer, Lifting
from lieattn.nn import LieBlock, LieSelfAttention
from lieattn.spaces import Euclidean
from lieattn.testing import randomize

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


def errors_of_lifts(sizes: Sizes, repeats: int | None, device: str) -> list[LiftError]:
    """Return the records of all lifts, for ``repeats`` random motions of a random and deliberately rough network."""
    repeats = repeats or 6
    records = []
    for case, way, fiber, frames in lifts_of(sizes):
        generator = torch.Generator().manual_seed(1)
        if way == "random motions" or not isinstance(frames, FiniteFrames):
            motions = SE(3).sample(repeats, generator=generator, dtype=torch.float64)
        else:
            elements = frames.group.elements[torch.randint(fiber, (repeats,), generator=generator)]
            motions = SE(3).element(elements, torch.randn(repeats, 3, generator=generator, dtype=torch.float64))
        records.append(LiftError(case, way, fiber, *_errors(frames, motions, sizes, device), repeats))
    return records


def table_of_lifts(records: list[LiftError]) -> str:
    """Markdown, as in docs/exactness.md."""
    lines = ["| lift | frames | moved by | float64 | float32 |", "|---|---|---|---|---|"]
    lines += [f"| {r.case} | {r.fiber} | {r.way} | {r.float64:.1e} | {r.float32:.1e} |" for r in records]
    return "\n".join(lines)


def lifts_of(sizes: Sizes) -> Iterator[tuple[str, str, int, Frames]]:
    """Names, motions, frames over each point, and lifts: approximate ones, exact ones, and those of finite groups."""
    anywhere = "random motions"
    for group in GROUPS:
        yield f"finite, {group.name}", anywhere, group.order, FiniteFrames(group)
    for count in (4, 24):
        for per in ("point", "cloud"):
            for design in (False, True):
                name = f"sampled, per {per}, {'design' if design else 'independent'}"
                yield name, anywhere, count, SampledFrames(count, per=per, design=design)
    for of in ("cloud", "neighborhood"):
        yield f"principal axes, {of}", anywhere, 4, PrincipalFrames(of=of)
    number = sizes["clouds"] * sizes["points"]
    drawn = SO(3).sample(number, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    yield "given, moved along", anywhere, 4, GivenFrames(drawn)
    for group in GROUPS:
        yield f"finite, {group.name}", "motions of its group", group.order, FiniteFrames(group)


def _errors(frames: Frames, motions: Tensor, sizes: Sizes, device: str) -> tuple[float, float]:
    """Errors in double and single precision."""
    clouds, points = sizes["clouds"], sizes["points"]
    generator = torch.Generator().manual_seed(0)
    pos = 1.5 * torch.randn(clouds * points, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(clouds * points, 5, generator=generator, dtype=torch.float64)
    batch = torch.arange(clouds).repeat_interleave(points)
    errors = []
    for dtype in (torch.float64, torch.float32):
        model, outputs = _rough_network().to(device, dtype), []
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


def _rough_network() -> LieTransformer:
    model = LieTransformer(
        5,
        16,
        space=Euclidean(SE(3)),
        frames=PrincipalFrames(),
        neighborhood=Radius(3.0),
        channels=32,
        layers=2,
        heads=4,
        lifting=Lifting(local=0),
    )
    randomize(model)
    return model.double()


LIFTS = Benchmark(
    "equivariance error of LieTransformer with each lift (--repeats: number of motions)",
    {"clouds": 4, "points": 18},
    {"clouds": 2, "points": 6},
    run=errors_of_lifts,
    table=table_of_lifts,
)

SCALES = ScaleFrames(cyclic(4), base=2**0.5, levels=7, first=0.5)
CHANNELS, HEADS, RADIUS = 16, 4, 0.8
Field = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ScaleError:
    """Root mean square difference between the field of the dilated cloud on scale k + 1 and of the cloud on scale k.

    It is relative to the standard deviation of the second field over the points.
    """

    case: str  # the layers
    way: str  # the scale k
    error: float
    repeats: int  # number of clouds


def errors_at_ends(sizes: Sizes, repeats: int | None, device: str) -> list[ScaleError]:
    """Return the records of lifting layers with up to three more layers, for random clouds in the plane.

    They are layers of LieTransformer, and whole GSA-Nets.
    """
    repeats = repeats or 8
    count = repeats * sizes["points"]
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    x = torch.randn(count, CHANNELS, generator=generator, dtype=torch.float64)
    batch = torch.arange(repeats).repeat_interleave(sizes["points"])
    pos, x, batch = pos.to(device), x.to(device), batch.to(device)
    records = []
    for case, field in _cases(device):
        with torch.no_grad():
            small, large = (field(scale * pos, x, batch) for scale in (1.0, SCALES.base))
        for k in range(SCALES.levels - 1):
            error = (large[:, k + 1] - small[:, k]).square().mean().sqrt()
            spread = (small[:, k] - small[:, k].mean(0)).square().mean().sqrt()
            records.append(ScaleError(case, f"k={k}", float(error / spread), repeats))
    return records


def table_of_scales(records: list[ScaleError]) -> str:
    """Markdown, as in docs/exactness.md."""
    rows = {"layers": list(dict.fromkeys(record.way for record in records)), "---": ["---"] * (SCALES.levels - 1)}
    for record in records:
        rows.setdefault(record.case, []).append(f"{record.error:.1e}")
    return "\n".join(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())


def _cases(device: str) -> Iterator[tuple[str, Field]]:
    """Names, and fields ``[points, levels, fiber, channels]`` of positions, features and clouds."""
    coordinates = SCALES.group.dim + SCALES.group.dim**2 + 1
    for layers in range(4):
        modules = nn.ModuleList(
            LieBlock(LieSelfAttention(CHANNELS, coordinates, heads=HEADS), CHANNELS) for _ in range(layers + 1)
        )
        randomize(modules)
        yield f"lifting + {layers}", partial(_field_of_layers, modules.double().to(device))
    for layers in range(4):
        network = GSANet(
            SCALES, CHANNELS, neighborhood=Radius(RADIUS), channels=CHANNELS, blocks=(layers,), heads=HEADS
        )
        randomize(network)
        yield f"GSA-Net, blocks: {layers}", partial(_field_of_network, network.double().to(device))


def _field_of_layers(modules: nn.ModuleList, pos: Tensor, x: Tensor, batch: Tensor) -> Tensor:
    lifting, between = (lift(pos, replace(SCALES, reach=reach), Radius(RADIUS), batch=batch) for reach in (0, 1))
    field = lifting.spread(x)[:, None].expand(-1, SCALES.group.order, -1)
    for number, module in enumerate(modules):
        field = module(field, between if number else lifting)
    return between.by_level(field)


def _field_of_network(network: GSANet, pos: Tensor, x: Tensor, batch: Tensor) -> Tensor:
    field, graph = network.field(SimpleNamespace(pos=pos, x=x, batch=batch))
    return graph.by_level(field)


ENDS = Benchmark(
    "equivariance error of the scale fiber at its ends (--repeats: number of clouds)",
    {"points": 40},
    {"points": 8},
    run=errors_at_ends,
    table=table_of_scales,
)
