"""What layers of the papers cost beside a literal evaluation of their published formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn.bench._measure import Benchmark, Cases, Problem, Record, Sizes, compare, mean_square
from lieattn.geometry import AllPairs, GivenFrames, LiftedGraph, Nearest, Neighborhood, Radius, lift, pixel_positions
from lieattn.groups import SO, cyclic, tetrahedral
from lieattn.models import AttentiveCNN, Dropouts, GSANet
from lieattn.models.published import PublishedCoordinates
from lieattn.nn import (
    AttentiveGroupConvolution,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GroupConvolution,
    GroupSelfAttention,
    LieSelfAttention,
    LiftingSelfAttention,
)
from lieattn.nn.relative import NetworkKernel
from lieattn.ops import backend

AttentiveWay = Literal["literal", "fused", "plain"]


class LiteralLayer(nn.Module):
    """An attentive layer evaluated literally, response by response (Romero et al. 2020, Eqs. 14-20)."""

    def __init__(self, layer: GridAttentiveConvolution | GridAttentiveLifting) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Same as ``layer.forward``: ``[batch, in, (order,) rows, columns]`` to ``[batch, out, order, *, *]``."""
        layer = self.layer
        field = x[:, :, None] if x.ndim == 4 else x
        kernels = layer.kernels()
        out, order, channels, fiber, size, _ = kernels.shape
        depth_wise = kernels.permute(2, 3, 0, 1, 4, 5).reshape(-1, 1, size, size)
        t = F.conv2d(field.flatten(1, 2), depth_wise, padding=layer.pad, groups=channels * fiber)
        t = t.unflatten(1, (channels, fiber, out, order)).permute(0, 3, 4, 1, 2, 5, 6)
        attention: Tensor | float = 1.0
        matrices = layer.attention.channel_matrices()
        if matrices is not None:
            statistics = t.mean(dim=(-2, -1)), t.amax(dim=(-2, -1))
            levels = [_channel_level(matrices[0], matrices[1], statistic) for statistic in statistics]
            attention = torch.sigmoid(levels[0] + levels[1])[..., None, None]
        weighted = attention * t
        spatial = layer.attention.spatial_kernels()
        if spatial is not None:
            planes = torch.stack([weighted.mean(dim=3), weighted.amax(dim=3)], dim=4)
            side = spatial.shape[-1]
            level = F.conv2d(
                planes.flatten(1, 4),
                spatial.reshape(-1, 2, side, side),
                padding=layer.spatial_dilation * (side // 2),
                dilation=layer.spatial_dilation,
                groups=out * order * fiber,
            )
            attention = attention * torch.sigmoid(level.unflatten(1, (out, order, 1, fiber)))
        return layer.measure * ((1 - attention) * t).sum(dim=(3, 4))


def _channel_level(first: Tensor, second: Tensor, statistic: Tensor) -> Tensor:
    hidden = torch.relu(torch.einsum("ohfnc,bohcf->bohnf", first, statistic))
    return torch.einsum("ohfcn,bohnf->bohcf", second, hidden)


def literal_attentive(network: AttentiveCNN) -> AttentiveCNN:
    """Replace every attentive layer by its literal evaluation, in place."""
    layers: Any = network.layers
    for number, layer in enumerate(layers):
        layers[number] = LiteralLayer(layer)
    return network


def attentive_layer(
    size: tuple[int, int, int, int], way: AttentiveWay, images: int = 16, device: str = "cpu"
) -> Problem:
    """Full attention on p4 with 3 x 3 kernels and 7 x 7 spatial kernels; ``size`` is that of :data:`ATTENTIVE`."""
    channels, side, pad, hidden = size
    torch.manual_seed(0)
    layer: nn.Module
    if way == "plain":
        layer = GridGroupConvolution(cyclic(4), channels, channels, 3, pad=pad)
    else:
        attentive = GridAttentiveConvolution(cyclic(4), channels, channels, 3, hidden=hidden, pad=pad)
        layer = LiteralLayer(attentive) if way == "literal" else attentive
    layer = layer.to(device)
    x = torch.randn(images, channels, 4, side, side).to(device).requires_grad_()
    return mean_square(lambda: layer(x))


def attentive_network(way: AttentiveWay, number: int = 16, device: str = "cpu") -> Problem:
    """Forward pass and loss of the α-p4-CNN, or of the plain p4-CNN, on images of 28 x 28."""
    torch.manual_seed(0)
    network = AttentiveCNN(cyclic(4), attention="none" if way == "plain" else "full")
    network = (literal_attentive(network) if way == "literal" else network).to(device)
    images, labels = torch.randn(number, 1, 28, 28).to(device), (torch.arange(number) % 10).to(device)

    def problem() -> Iterator[Tensor]:
        yield F.cross_entropy(network(images), labels)

    return problem


def attentive_clouds(count: int, way: AttentiveWay, points: int = 64, device: str = "cpu") -> Problem:
    """Full attention with T on ragged clouds of irregular points, with 8 neighbors and 8 channels."""
    torch.manual_seed(0)
    numbers = points - torch.arange(count) % 8
    batch = torch.arange(count).repeat_interleave(numbers)
    group = tetrahedral()
    graph = lift(torch.randn(len(batch), 3), group, Nearest(8), batch=batch).to(device)
    kernel = NetworkKernel(group, 8, 8)
    layer = (GroupConvolution(kernel) if way == "plain" else AttentiveGroupConvolution(kernel)).to(device)
    x = torch.randn(len(batch), graph.fiber, 8).to(device).requires_grad_()

    def problem() -> Iterator[Tensor]:
        with backend("plain" if way == "literal" else "auto"):  # parts are recomputed in the backward pass
            yield layer(x, graph).square().mean()

    return problem


def _cases_of_attentive(sizes: Sizes, device: str) -> Cases:
    """The wide layer has no literal way, which would take tens of gigabytes."""
    narrow, wide, images = (sizes[name] for name in ("narrow", "wide", "images"))
    ways: tuple[Any, ...] = get_args(AttentiveWay)

    def on_clouds(count: int) -> dict[str, Any]:
        return {way: partial(attentive_clouds, count, way, sizes["points"], device) for way in ways}

    return {f"{count} clouds": on_clouds(count) for count in sizes["clouds"]} | {
        f"{narrow[0]}x{narrow[0]}p4": {way: partial(attentive_layer, narrow, way, images, device) for way in ways},
        "alpha-p4-CNN": {way: partial(attentive_network, way, images, device) for way in ways},
        f"{wide[0]}x{wide[0]}p4": {way: partial(attentive_layer, wide, way, images, device) for way in ways[1:]},
    }


def _run_attentive(sizes: Sizes, repeats: int | None, device: str) -> list[Record]:
    """All cases, the wide layer in one step."""
    *few, wide = _cases_of_attentive(sizes, device).items()
    found = compare(dict(few), repeats=repeats or 3, threads=1, device=device)
    return found + compare(dict([wide]), repeats=1, threads=1, device=device)


def _cost_of_attention(records: list[Record], sizes: Sizes) -> list[str]:
    steps = {(record.case, record.way): record.step_ms for record in records}
    return [
        f"{case}: with attention a step takes {steps[case, 'fused'] / steps[case, 'plain']:.1f} times as long"
        for case in dict.fromkeys(record.case for record in records)
    ]


# Narrow and wide: channels, side of the image, border, hidden width of the channel attention.
ATTENTIVE = Benchmark(
    "attentive group convolution: layers and a rotated MNIST network, compared with direct evaluation",
    {"images": 16, "narrow": (10, 26, 0, 5), "wide": (96, 32, 1, 6), "clouds": (2, 4, 8), "points": 64},
    {"images": 1, "narrow": (2, 6, 0, 1), "wide": (3, 6, 1, 1), "clouds": (2,), "points": 10},
    _cases_of_attentive,
    run=_run_attentive,
    remarks=_cost_of_attention,
)

Way = Literal["cubic", "plain", "fused", "joint", "each"]


class Cubic(nn.Module):
    """A layer of GSA-Nets evaluated literally (Eqs. 14 and 16, with the corrected table of frames), on whole images.

    Scores are [B, heads, h, g, H, W, m, P, P]; one softmax runs over frames and pixels of the neighborhood.
    """

    def __init__(self, layer: LiftingSelfAttention | GroupSelfAttention) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Same as ``layer.forward``: ``[points, (fiber,) channels]`` to ``[points, fiber, channels]``."""
        layer, grid = self.layer, cast(Tensor, graph.grid)
        images, (height, width) = graph.num_clouds, grid[0].tolist()
        field = x[:, None] if x.ndim == 2 else x
        sizes = (images, height, width, field.shape[1], layer.heads, layer.head_channels)
        query, key, value = (
            linear(field).view(sizes).permute(0, 4, 3, 1, 2, 5) for linear in (layer.query, layer.key, layer.value)
        )
        side = round(graph.relative.num_rows**0.5)
        keys, inside = _unfold(key, side)
        values, _ = _unfold(value, side)
        content = torch.einsum("beghwd,bemhwtd->beghwmt", query, keys)
        terms = layer.encoding(graph)
        order = window_order(graph, side)
        position = torch.einsum("beghwd,tod->beoghwt", query, terms.positional_key.squeeze(2)[order])
        score = content[:, :, None] + position[:, :, :, :, :, :, None]
        if terms.fiber_key is not None:
            frames = torch.einsum("beghwd,gmd->beghwm", query, terms.fiber_key.squeeze(2))
            score = score + frames[:, :, None, ..., None]
        score = score * layer.scale
        score = score.masked_fill(~inside[None, None, None, None, :, :, None, :], float("-inf"))
        weight = score.flatten(-2).softmax(-1).view_as(score)
        weight = nn.functional.dropout(weight, layer.dropout, layer.training)
        out = torch.einsum("beoghwmt,bemhwtd->bhwoed", weight, values)
        return layer.output(out.flatten(-2).flatten(0, 2))


def _unfold(signal: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Neighborhoods ``[B, heads, frames, H, W, side², d]``, and ``[H, W, side²]`` for pixels inside the image."""
    height, width = signal.shape[3:5]
    margin = side // 2
    padded = nn.functional.pad(signal, (0, 0, margin, margin, margin, margin))
    windows = padded.unfold(3, side, 1).unfold(4, side, 1)  # [..., H, W, d, side, side]
    inside = nn.functional.pad(torch.ones(height, width, dtype=torch.bool, device=signal.device), (margin,) * 4)
    return windows.flatten(-2).mT, inside.unfold(0, side, 1).unfold(1, side, 1).flatten(-2)


def window_order(graph: LiftedGraph, side: int) -> Tensor:
    """Row of the displacement table for each place of the window, in the order of the rows of the image."""
    identity = 0 if graph.group is None else graph.group.identity_index
    seen = graph.relative.positions[:, identity] * (side // 2)
    row, column = (-seen[:, 1] + side // 2).round().long(), (seen[:, 0] + side // 2).round().long()
    order = seen.new_empty(side * side, dtype=torch.int64)
    order[row * side + column] = torch.arange(len(seen), device=seen.device)
    return order


def literal(network: GSANet) -> GSANet:
    """Replace every attention layer by the cubic formula, in place."""
    modules: Any = network
    modules.lifting = Cubic(modules.lifting)
    for block in modules.blocks:
        block.attention = Cubic(block.attention)
    return network


def images_of(number: int, side: int) -> Batch:
    """Random images as point sets."""
    generator = torch.Generator().manual_seed(0)
    pos, grid = pixel_positions(side, side), torch.tensor([[side, side]])
    clouds = [Data(x=torch.randn(side * side, 1, generator=generator), pos=pos, grid=grid) for _ in range(number)]
    return Batch.from_data_list(clouds)


def gsa_net(order: int, way: Way, sizes: Sizes, device: str = "cpu") -> Problem:
    """Forward pass and loss of the R4 or R8 network with 5 x 5 neighborhoods, without dropout.

    The geometry is computed in advance, as by a data loader. In joint attention, the query frame is the output frame.
    For R8 at batch 8, each copy of the scores of the cubic formula takes 3 GB, so it evaluates one image at a time. For
    a fair comparison of memory, the way ``"each"`` is the fused kernel on one image at a time.
    """
    torch.manual_seed(0)
    network = GSANet.rot_mnist(cyclic(order), dropout=Dropouts()).to(device)
    if way == "cubic":
        network = literal(network)
    for block in network.blocks if way == "joint" else ():
        attention: Any = block.attention
        attention.pattern = "joint"
    batch = images_of(sizes["images"], sizes["side"]).to(device)
    parts = batch.to_data_list() if way in ("cubic", "each") and order > sizes["fits"] else [batch]
    geometries = [network.geometry(part) for part in parts]

    def problem() -> Iterator[Tensor]:
        for part, geometry in zip(parts, geometries, strict=True):
            with backend("plain" if way == "plain" else "auto"):
                logits = network(part, geometry)
            labels = torch.arange(len(logits), device=device)
            yield F.cross_entropy(logits, labels, reduction="sum") / sizes["images"]

    return problem


def _cases_of_gsa_nets(sizes: Sizes, device: str) -> Cases:
    ways: tuple[Way, ...] = get_args(Way)
    return {
        f"R{order}": {
            way: partial(gsa_net, order, way, sizes, device) for way in ways if way != "each" or order > sizes["fits"]
        }
        for order in sizes["orders"]
    }


# fits: order of the largest group for which the cubic formula evaluates the whole batch at once
GSA_NET = Benchmark(
    "a training step of the rotated MNIST networks, compared with the published cubic formula",
    {"images": 8, "side": 28, "orders": (4, 8), "fits": 4},
    {"images": 1, "side": 22, "orders": (1, 2), "fits": 1},
    _cases_of_gsa_nets,
    options={"repeats": 3, "threads": 1},
)

CHANNELS, HEADS = 128, 8
NEAR = 20  # neighbors of a point within the radius, on average
LieWay = Literal["plain", "fused", "log"]


def clouds_of(points: int, samples: int, device: str, local: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Positions ``[clouds, points, 3]``, rotations ``[clouds, points, samples, 3, 3]``, and a field on the elements.

    Points are normally distributed; with ``local`` there is one cloud of unit density.
    """
    generator = torch.Generator().manual_seed(0)
    clouds = 1 if local else {18: 16, 64: 4}.get(points, 1)
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


def lie_layer(points: int, samples: int, way: LieWay, device: str = "cpu", *, local: bool = False) -> Problem:
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


def lie_dense(points: int, samples: int, device: str = "cpu") -> Problem:
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


def _cases_of_lie_layers(sizes: Sizes, device: str) -> Cases:
    """Whole clouds, by points x frames, and local neighborhoods, whose cost grows with the number of points."""
    whole: Cases = {
        f"{points}x{samples}": {
            "dense": partial(lie_dense, points, samples, device),
            **{way: partial(lie_layer, points, samples, way, device) for way in get_args(LieWay)},
        }
        for points, samples in sizes["whole"]
    }
    local: Cases = {
        f"radius {points}": {"fused": partial(lie_layer, points, 1, "fused", device, local=True)}
        for points in sizes["local"]
    }
    return {**whole, **local}


LIETRANSFORMER = Benchmark(
    "an SE(3) attention layer of LieTransformer, compared with a direct dense evaluation",
    {"whole": ((18, 1), (18, 4), (18, 8), (64, 1), (64, 4), (256, 1)), "local": (256, 1024, 4096)},
    {"whole": ((5, 2),), "local": (30,)},
    _cases_of_lie_layers,
    options={"repeats": 3},
)
