"""Figures of the papers, each drawn by a function with options of its own: one table for ``lieattn picture``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch_geometric.data import Data

from lieattn import viz
from lieattn.geometry import PixelSquare, Radius, pixel_positions
from lieattn.groups import cyclic
from lieattn.models import GSANet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GLYPH = (".......", ".#####.", ".#.....", ".###...", ".#.....", ".#.....", ".......")  # has no symmetry


def gsa_fields(*, order: int = 4, side: int = 15, channel: int = 0, seed: int = 0) -> dict[str, Figure]:
    """Fields of a GSA-Net when its input turns (GSA-Nets, Figure 1).

    The network is untrained. Beyond quarter turns its neighborhoods are discs in place of pixel squares.

    Parameters
    ----------
    order
        Number of rotations of the group, by which the input is turned too.
    side
        Pixels of a side of the input.
    channel
        Which channel of the fields is drawn.
    seed
        Of the weights.
    """
    group = cyclic(order)
    torch.manual_seed(seed)
    near = PixelSquare(5) if 4 % order == 0 else Radius(2.5)
    network = GSANet(group, neighborhood=near, channels=8, blocks=(1,), heads=2)
    angles = [2 * math.pi * step / order for step in range(order)]
    cloud = _glyph(side)
    return {
        "gsa-fields_lifting": viz.feature_fields(network, cloud, angles, channel=channel, layer=0),
        "gsa-fields_self-attention": viz.feature_fields(network, cloud, angles, channel=channel, layer=1),
    }


def _glyph(side: int) -> Data:
    """A letter F in gray on pixels."""
    letter = torch.tensor([[float(pixel == "#") for pixel in row] for row in _GLYPH])
    image = torch.nn.functional.interpolate(letter[None, None], (side, side), mode="bilinear", antialias=True)
    return Data(x=image.reshape(-1, 1), pos=pixel_positions(side, side), grid=torch.tensor([[side, side]]))


FIGURES: Mapping[str, Callable[..., dict[str, Figure]]] = {
    "gsa-fields": gsa_fields,
}
"""Name -> function, whose docstring begins with the line for the help, and whose keyword arguments are the options.

It returns figures by the names of their files.
"""
