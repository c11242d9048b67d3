"""Attentive group convolution beside a literal evaluation of its formula."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn.bench._measure import Benchmark, Cases, Problem, Record, compare, mean_square
from lieattn.groups import cyclic
from lieattn.models import AttentiveCNN
from lieattn.nn import GridAttentiveConvolution, GridAttentiveLifting, GridGroupConvolution

IMAGES = 16
SMALL = {"IMAGES": 1, "NARROW": (2, 6, 0, 1), "WIDE": (3, 6, 1, 1)}
# Channels, side of the image, border, hidden width of the channel attention.
NARROW, WIDE = (10, 26, 0, 5), (96, 32, 1, 6)
Way = Literal["literal", "fused", "plain"]


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


def literal(network: AttentiveCNN) -> AttentiveCNN:
    """Replace every attentive layer by its literal evaluation, in place."""
    layers: Any = network.layers
    for number, layer in enumerate(layers):
        layers[number] = LiteralLayer(layer)
    return network


def build_layer(channels: int, side: int, pad: int, hidden: int, way: Way, device: str = "cpu") -> Problem:
    """Full attention with ``channels`` inputs and outputs on p4, 3 x 3 kernels, 7 x 7 spatial kernels, batch 16."""
    torch.manual_seed(0)
    layer: nn.Module
    if way == "plain":
        layer = GridGroupConvolution(cyclic(4), channels, channels, 3, pad=pad)
    else:
        attentive = GridAttentiveConvolution(cyclic(4), channels, channels, 3, hidden=hidden, pad=pad)
        layer = LiteralLayer(attentive) if way == "literal" else attentive
    layer = layer.to(device)
    x = torch.randn(IMAGES, channels, 4, side, side).to(device).requires_grad_()
    return mean_square(lambda: layer(x))


def build_network(way: Way, device: str = "cpu") -> Problem:
    """Forward pass and loss of the α-p4-CNN, or of the plain p4-CNN, on 16 images of 28 x 28."""
    torch.manual_seed(0)
    network = AttentiveCNN(cyclic(4), attention="none" if way == "plain" else "full")
    network = (literal(network) if way == "literal" else network).to(device)
    images, labels = torch.randn(IMAGES, 1, 28, 28).to(device), (torch.arange(IMAGES) % 10).to(device)

    def problem() -> Iterator[Tensor]:
        yield F.cross_entropy(network(images), labels)

    return problem


def run(repeats: int | None = None, device: str = "cpu") -> list[Record]:
    """Return the records of all cases; the wide layer has no literal way, which would take tens of gigabytes."""
    ways: tuple[Way, ...] = get_args(Way)
    cases: Cases = {
        "{0}x{0}p4".format(NARROW[0]): {way: partial(build_layer, *NARROW, way, device) for way in ways},
        "alpha-p4-CNN": {way: partial(build_network, way, device) for way in ways},
    }
    wide: Cases = {"{0}x{0}p4".format(WIDE[0]): {way: partial(build_layer, *WIDE, way, device) for way in ways[1:]}}
    few = compare(cases, repeats=repeats or 3, threads=1, device=device)
    return few + compare(wide, repeats=1, threads=1, device=device)


def remarks(records: list[Record]) -> list[str]:
    """Compare the costs of the network with full attention and of the plain network."""
    steps = {(record.case, record.way): record.step_ms for record in records}
    return [
        f"{case}: with attention a step takes {steps[case, 'fused'] / steps[case, 'plain']:.1f} times as long"
        for case in dict.fromkeys(record.case for record in records)
    ]


BENCHMARK = Benchmark(run, remarks=remarks)
