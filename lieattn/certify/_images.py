"""Images as point clouds in raster order, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data


def clouds_of_images(images: Tensor) -> list[Data]:
    """Pixels of floating images ``[images, channels, rows, columns]`` as points, row after row from the top.

    Raises
    ------
    ValueError
        For other tensors.
    """
    if images.ndim != 4 or images.numel() == 0 or not images.is_floating_point():
        raise ValueError(
            f"data: expected floating images [images, channels, rows, columns], got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    height, width = images.shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pos = torch.stack([columns - (width - 1) / 2, (height - 1) / 2 - rows], dim=-1).reshape(-1, 2)
    grid = torch.tensor([[height, width]])
    pixels = images.detach().cpu().flatten(2).mT
    return [Data(x=x, pos=pos, grid=grid) for x in pixels]


def images_of_clouds(clouds: Sequence[Data]) -> Tensor:
    """Images ``[images, channels, rows, columns]`` of points in raster order."""
    height, width = clouds[0].grid[0].tolist()
    return torch.stack([cloud.x.mT.unflatten(1, (height, width)) for cloud in clouds])
