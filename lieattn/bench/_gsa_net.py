"""A training step of GSA-Nets beside a literal evaluation of the published formula."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn.bench._measure import Cases, Problem, timed
from lieattn.geometry import LiftedGraph, pixel_positions
from lieattn.groups import cyclic
from lieattn.models import Dropouts, GSANet
from lieattn.nn import GroupSelfAttention, LiftingSelfAttention
from lieattn.ops import backend

IMAGES, SIDE = 8, 28
ORDERS = (4, 8)
FITS = 4  # order of the largest group for which the cubic formula evaluates the whole batch at once
SMALL = {"IMAGES": 1, "SIDE": 22, "ORDERS": (1, 2), "FITS": 1}
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


def joint(network: GSANet) -> GSANet:
    """Turn every group layer into joint attention: the query frame is the output frame, no query sum."""
    for block in network.blocks:
        attention: Any = block.attention
        attention.pattern = "joint"
    return network


def images(device: str = "cpu") -> Batch:
    """Eight random images of 28 x 28 as point sets."""
    generator = torch.Generator().manual_seed(0)
    pos, grid = pixel_positions(SIDE, SIDE), torch.tensor([[SIDE, SIDE]])
    clouds = [Data(x=torch.randn(SIDE * SIDE, 1, generator=generator), pos=pos, grid=grid) for _ in range(IMAGES)]
    return Batch.from_data_list(clouds).to(device)


def build(order: int, way: Way, device: str = "cpu") -> Problem:
    """Forward pass and loss of the R4 or R8 network with 5 x 5 neighborhoods, without dropout.

    The geometry is computed in advance, as by a data loader. For R8 at batch 8, each copy of the scores of the cubic
    formula takes 3 GB, so it evaluates one image at a time. For a fair comparison of memory, the way ``"each"`` is the
    fused kernel on one image at a time.
    """
    torch.manual_seed(0)
    network = GSANet.rot_mnist(cyclic(order), dropout=Dropouts()).to(device)
    if way == "cubic":
        network = literal(network)
    elif way == "joint":
        network = joint(network)
    batch = images(device)
    parts = batch.to_data_list() if way in ("cubic", "each") and order > FITS else [batch]
    geometries = [network.geometry(part) for part in parts]

    def problem() -> Iterator[Tensor]:
        for part, geometry in zip(parts, geometries, strict=True):
            with backend("plain" if way == "plain" else "auto"):
                logits = network(part, geometry)
            labels = torch.arange(len(logits), device=device)
            yield nn.functional.cross_entropy(logits, labels, reduction="sum") / IMAGES

    return problem


def cases(device: str = "cpu") -> Cases:
    """Return R4 and R8: ``cubic``, ``plain``, ``fused``, ``joint``, and R8's ``each``."""
    ways: tuple[Way, ...] = get_args(Way)
    return {
        f"R{order}": {way: partial(build, order, way, device) for way in ways if way != "each" or order > FITS}
        for order in ORDERS
    }


BENCHMARK = timed(cases, repeats=3, threads=1)
