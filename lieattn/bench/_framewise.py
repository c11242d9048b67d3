"""A training step of the framewise transformer beside torch's own TransformerEncoder of the same width."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from lieattn.bench._measure import Cases, Problem, mean_square, timed
from lieattn.geometry import AllPairs, lift
from lieattn.groups import FiniteGroup, cyclic, dihedral, icosahedral, octahedral, tetrahedral
from lieattn.nn import FramewiseBlock
from lieattn.nn.relative import RotaryPhases

CLOUDS, POINTS, WIDTH, LAYERS, MLP_RATIO = 16, 32, 384, 4, 4
SMALL = {"CLOUDS": 2, "POINTS": 4, "LAYERS": 1}
GROUPS = {"C4": cyclic(4), "D4": dihedral(4), "T": tetrahedral(), "O": octahedral(), "I": icosahedral()}


def framewise(group: FiniteGroup, device: str = "cpu") -> Problem:
    """Four blocks on 16 clouds of 32 points, |H| heads; the width is 384, or 360 for the 60 frames of I."""
    channels = _channels(group)
    torch.manual_seed(0)
    phases = RotaryPhases(group.dim, 1, channels).to(device)
    blocks = nn.ModuleList(FramewiseBlock(group, channels, mlp_ratio=MLP_RATIO) for _ in range(LAYERS)).to(device)
    batch = torch.arange(CLOUDS, device=device).repeat_interleave(POINTS)
    graph = lift(torch.randn(len(batch), group.dim).to(device), group, AllPairs(), batch=batch)
    x = torch.randn(len(batch), group.order, channels).to(device)

    def output() -> Tensor:
        blocks.zero_grad()
        y, rotary = x, graph.carrying(terms=phases.terms(graph, values=True))
        for block in blocks:
            y = block(y, rotary)
        return y

    return mean_square(output)


def ordinary(group: FiniteGroup, device: str = "cpu") -> Problem:
    """``torch.nn.TransformerEncoder`` with the same width and numbers of heads, layers, hidden units and tokens."""
    width = group.order * _channels(group)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, group.order, MLP_RATIO * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device)
    x = torch.randn(CLOUDS, POINTS, width).to(device)

    def output() -> Tensor:
        encoder.zero_grad()
        return cast(Tensor, encoder(x))

    return mean_square(output)


def cases(device: str = "cpu") -> Cases:
    """Return one case for each group, with the ways ``torch`` and ``framewise``."""
    return {
        name: {"torch": partial(ordinary, group, device), "framewise": partial(framewise, group, device)}
        for name, group in GROUPS.items()
    }


def _channels(group: FiniteGroup) -> int:
    """The even number of channels per frame with which the total is closest to the width."""
    return 2 * round(WIDTH / (2 * group.order))


BENCHMARK = timed(cases, repeats=9, threads=1)
