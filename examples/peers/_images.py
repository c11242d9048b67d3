"""Networks of plain torch for images of one size, which read the pixels as a raster."""

from __future__ import annotations

from typing import Self, cast

from torch import Tensor, nn, zeros
from torch_geometric.data import Data


class SmallCNN(nn.Module):
    """Three stages of two 3 x 3 convolutions with batch norm, and maxima over 2 x 2 pixels between them.

    Parameters
    ----------
    in_channels, out_channels
        Number of channels of ``data.x``, and of outputs of an image.
    width
        Number of channels of the first stage. It doubles from stage to stage.
    """

    kind = "invariant"

    def __init__(self, in_channels: int = 1, out_channels: int = 10, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage in range(3):
            layers += [nn.MaxPool2d(2)] if stage else []
            for before in (in_channels, width << stage):
                layers += [nn.Conv2d(before, width << stage, 3, padding=1, bias=False), nn.BatchNorm2d(width << stage)]
                layers += [nn.ReLU()]
            in_channels = width << stage
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(in_channels, out_channels)

    def forward(self, data: Data) -> Tensor:
        """Return logits ``[images, out_channels]``."""
        return cast(Tensor, self.head(self.layers(raster(data)).mean(dim=(2, 3))))


class PlainViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) with learned positions, and a mean over the patches at the end.

    Parameters
    ----------
    in_channels, out_channels
        As for :class:`SmallCNN`.
    width, layers, heads, patch
        Width of the tokens, a multiple of ``heads``; number of blocks; number of heads; side of the patches in pixels.
    side
        Number of rows and columns of the images, a multiple of ``patch``.
    """

    kind = "invariant"

    def __init__(
        self,
        in_channels: int = 1,
        out_channels: int = 10,
        width: int = 64,
        *,
        layers: int = 4,
        heads: int = 4,
        patch: int = 4,
        side: int = 28,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.positions = nn.Parameter(zeros((side // patch) ** 2, width))
        nn.init.normal_(self.positions, std=0.02)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, out_channels)

    def forward(self, data: Data) -> Tensor:
        """Return logits ``[images, out_channels]``."""
        tokens = self.embed(raster(data)).flatten(2).transpose(1, 2) + self.positions
        return cast(Tensor, self.head(self.blocks(tokens).mean(dim=1)))


class SteerableCNN(nn.Module):
    """The stages of :class:`SmallCNN` with regular fields of C_n in escnn (Weiler and Cesa 2019).

    Parameters
    ----------
    in_channels, out_channels
        As for :class:`SmallCNN`.
    width
        Number of regular fields of the first stage; those after it have 1.5 and 2 times as many.
    order
        n of C_n.
    """

    kind = "invariant"

    def __init__(self, in_channels: int = 1, out_channels: int = 10, width: int = 8, *, order: int = 8) -> None:
        super().__init__()
        from escnn import gspaces
        from escnn import nn as escnn

        plane = gspaces.rot2dOnR2(order)
        field = self.inputs = escnn.FieldType(plane, in_channels * [plane.trivial_repr])
        layers: list[nn.Module] = []
        for stage in range(3):
            layers += [escnn.PointwiseMaxPool2D(field, 2)] if stage else []
            for _ in range(2):
                wider = escnn.FieldType(plane, width * (2 + stage) // 2 * [plane.regular_repr])
                layers += [escnn.R2Conv(field, wider, 5, padding=2, bias=False), escnn.InnerBatchNorm(wider)]
                layers += [escnn.ReLU(wider)]
                field = wider
        self.layers = escnn.SequentialModule(*layers, escnn.GroupPooling(field))
        self.head = nn.Linear(len(field), out_channels)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers but convolutions, which would keep filters beside the weights in evaluation."""
        super().train(mode)
        for layer in self.layers:
            if hasattr(layer, "weights"):
                layer.train()
        return self

    def forward(self, data: Data) -> Tensor:
        """Return logits ``[images, out_channels]``."""
        return cast(Tensor, self.head(self.layers(self.inputs(raster(data))).tensor.mean(dim=(2, 3))))


def raster(data: Data) -> Tensor:
    """Return images of one size as ``[images, channels, height, width]``, whatever the positions of their pixels."""
    height, width = data.grid[0].tolist()
    return data.x.reshape(-1, height, width, data.x.shape[1]).permute(0, 3, 1, 2).contiguous()
