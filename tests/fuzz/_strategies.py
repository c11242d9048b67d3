"""Clouds of unusual kinds that occur in practice: empty, of one point, coincident, huge, tiny, not contiguous."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float64)
KINDS = ("normal", "coincident", "zero padded", "on a line", "in a plane", "grid", "huge", "tiny", "far away", "mixed")


@st.composite
def points(draw: st.DrawFn, dim: int, most: int = 12, kinds: tuple[str, ...] = KINDS) -> tuple[Tensor, Tensor]:
    """Draw positions ``[points, dim]`` and an ascending batch index ``[points]``, which may skip numbers."""
    sizes = draw(st.lists(st.integers(0, most), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pos = torch.cat([_cloud(draw(st.sampled_from(kinds)), size, dim, generator) for size in sizes]).to(dtype)
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    if draw(st.booleans()):  # strides of a tensor that is not contiguous
        pos = pos.T.contiguous().T
    return pos, batch


def _cloud(kind: str, size: int, dim: int, generator: torch.Generator) -> Tensor:
    pos = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    if kind == "coincident":
        pos = pos[:1].expand(size, dim)
    elif kind == "zero padded":
        pos = torch.where(torch.arange(size)[:, None] < size // 2, pos, 0)
    elif kind == "on a line":
        pos = pos[:, :1] * torch.randn(1, dim, generator=generator, dtype=torch.float64)
    elif kind == "in a plane":
        pos = torch.cat([pos[:, :-1], torch.zeros(size, 1)], dim=1)
    elif kind == "grid":
        pos = pos.round()
    elif kind == "huge":
        pos = pos * 1e6
    elif kind == "tiny":
        pos = pos * 1e-6
    elif kind == "far away":
        pos = pos + 1e4
    elif kind == "mixed":
        pos = pos * 10.0 ** torch.randint(-3, 4, (size, 1), generator=generator)
    return pos
