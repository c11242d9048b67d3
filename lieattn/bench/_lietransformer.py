"""One SE(3) attention layer of LieTransformer beside the literal dense evaluation.

The cases ``18x1`` ... ``256x1`` are named by points times frames, and have whole clouds as neighborhoods. In the cases
``radius 256`` ... ``radius 4096``, time and memory grow with the number of points, not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn.bench._measure import Cases, Problem, mean_square, timed
from lieattn.geometry import AllPairs, GivenFrames, Neighborhood, Radius, lift
from lieattn.groups import SO
from lieattn.models.published import PublishedCoordinates
from lieattn.nn import LieSelfAttention
from lieattn.ops import backend

CHANNELS, HEADS = 128, 8
CLOUDS = {18: 16, 64: 4, 256: 1}
CASES = ((18, 1), (18, 4), (18, 8), (64, 1), (64, 4), (256, 1))
LOCAL = (256, 1024, 4096)
SMALL = {"CASES": ((5, 2),), "LOCAL": (30,)}
NEAR = 20  # neighbors of a point within the radius, on average
Way = Literal["plain", "fused", "log"]


def clouds_of(points: int, samples: int, device: str, local: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Positions ``[clouds, points, 3]``, rotations ``[clouds, points, samples, 3, 3]``, and a field on the elements.

    Points are normally distributed; with ``local`` there is one cloud of unit density.
    """
    generator = torch.Generator().manual_seed(0)
    clouds = 1 if local else CLOUDS.get(points, 1)
    draw, size = (torch.rand, points ** (1 / 3)) if local else (torch.randn, 1.0)
    pos = size * draw(clouds, points, 3, generator=generator)
    frames = SO(3).sample(clouds, points, samples, generator=generator)
    field = torch.randn(clouds, points, samples, CHANNELS, generator=generator)
    return pos.to(device), frames.to(device), field.to(device)


def layer_of(coordinates: int) -> LieSelfAttention:
    """The layer, with the same weights in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LieSelfAttention(CHANNELS, coordinates, heads=HEADS)


def build(points: int, samples: int, way: Way, device: str = "cpu", *, local: bool = False) -> Problem:
    """The library's layer: on the plain backend, on the default one, or there with the logarithms used by ``dense``.

    Neighborhoods are whole clouds or, with ``local``, balls that contain :data:`NEAR` points at unit density.
    """
    pos, frames, field = clouds_of(points, samples, device, local)
    neighborhood: Neighborhood = Radius((0.75 * NEAR / torch.pi) ** (1 / 3)) if local else AllPairs()
    batch = torch.arange(len(pos), device=device).repeat_interleave(points)
    given = GivenFrames(frames.flatten(0, 1))
    x = field.flatten(0, 1).requires_grad_()
    layer = layer_of(6 if way == "log" else 12).to(device)

    def problem() -> Iterator[Tensor]:
        with backend("plain" if way == "plain" else "auto"):
            graph = lift(pos.flatten(0, 1), given, neighborhood, batch=batch)
            if way == "log":
                graph = graph.with_relative(graph.relative.with_coordinates(PublishedCoordinates()(graph)))
            yield layer(x, graph).square().mean()

    return problem


def build_dense(points: int, samples: int, device: str = "cpu") -> Problem:
    """The literal evaluation with the weights of the library's layer."""
    pos, frames, field = clouds_of(points, samples, device)
    x = field.flatten(1, 2).requires_grad_()
    layer = layer_of(6).to(device)
    parameters = dict(layer.named_parameters())

    def output() -> Tensor:
        elements = torch.eye(4, device=device).repeat(*frames.shape[:3], 1, 1)
        elements[..., :3, :3] = frames
        elements[..., :3, 3] = pos[:, :, None]
        return dense_attention(x, elements.flatten(1, 2), parameters)

    return mean_square(output)


def dense_attention(x: Tensor, elements: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Attention of ``[clouds, N, channels]`` on elements ``[clouds, N, 4, 4]``, with every formula for all pairs."""

    def linear(name: str, signal: Tensor) -> Tensor:
        return F.linear(signal, parameters[f"{name}.weight"], parameters[f"{name}.bias"])

    def heads_of(signal: Tensor) -> Tensor:
        return signal.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    size = x.shape[1]
    inverse = torch.linalg.inv(elements)[:, None].repeat(1, size, 1, 1, 1)
    relative = inverse @ elements[:, :, None].repeat(1, 1, size, 1, 1)
    pair = rigid_log(relative)
    location = pair.flatten(0, 2).repeat(HEADS, 1, 1)
    for number in range(3):
        weight = parameters[f"score.location.weights.{number}"]
        bias = parameters[f"score.location.biases.{number}"]
        location = F.silu(location @ weight + bias[:, None])
    location = location[..., 0].unflatten(1, pair.shape[:3]).transpose(0, 1)
    query, key = heads_of(linear("score.content.query", x)), heads_of(linear("score.content.key", x))
    score = query @ key.mT / query.shape[-1] ** 0.5 + location
    out = score.softmax(dim=-1) @ heads_of(linear("value", x))
    return linear("output", out.transpose(1, 2).flatten(2))


def rigid_log(g: Tensor) -> Tensor:
    """Logarithm ``[*, 6]`` of rigid motions ``[*, 4, 4]`` away from half turns: w, then u with t = V u.

    It is written as by the authors, with a series for small angles.
    """
    rotation, translation = g[..., :3, :3], g[..., :3, 3]
    trace = rotation.diagonal(dim1=-2, dim2=-1).sum(-1)
    angle = torch.acos(((trace - 1) / 2).clamp(-1 + 1e-7, 1 - 1e-7))
    skew = (rotation - rotation.mT) / 2 * (angle / torch.sin(angle))[..., None, None]
    half = angle / 2
    closed = (1 - half * torch.cos(half) / torch.sin(half)) / angle.square()
    factor = torch.where(angle < 0.07, (1 + angle.square() / 60) / 12, closed)
    identity = torch.eye(3, dtype=g.dtype, device=g.device).expand_as(rotation)
    inverse = identity - skew / 2 + factor[..., None, None] * (skew @ skew)
    w = torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], dim=-1)
    return torch.cat([w, (inverse @ translation[..., None])[..., 0]], dim=-1)


def cases(device: str = "cpu") -> Cases:
    """Return whole clouds, and the local neighborhoods of large clouds."""
    whole: Cases = {
        f"{points}x{samples}": {
            "dense": partial(build_dense, points, samples, device),
            **{way: partial(build, points, samples, way, device) for way in get_args(Way)},
        }
        for points, samples in CASES
    }
    local: Cases = {
        f"radius {points}": {"fused": partial(build, points, 1, "fused", device, local=True)} for points in LOCAL
    }
    return {**whole, **local}


BENCHMARK = timed(cases, repeats=3)
