"""Figures of the papers for ``lieattn picture``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from lieattn import viz
from lieattn._core.checks import check_counts, check_index
from lieattn.geometry import PixelSquare, Radius, pixel_positions
from lieattn.groups import cyclic
from lieattn.models import AffineSelfConvNet, AttentiveAllCNN, GSANet, GSAOptions, published_attentive_cnn
from lieattn.nn import act_on_grid
from lieattn.testing import relative_error
from lieattn.train import load_data, load_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZES: dict[str, Any] = {"steps": 60, "sides": range(16, 34), "channels": 8}  # of training, images and networks
_GLYPH = (".......", ".#####.", ".#.....", ".###...", ".#.....", ".#.....", ".......")  # a letter without symmetry


def gsa_fields(*, order: int = 4, side: int = 15) -> dict[str, Figure]:
    """Fields of a GSA-Net when its input is rotated (GSA-Nets, Figure 1).

    The network is untrained. For groups with other rotations than quarter turns, its neighborhoods are discs in place
    of pixel squares.

    Parameters
    ----------
    order
        Number of rotations of the group; the input is rotated by the same angles.
    side
        Side of the input in pixels.
    """
    check_counts(order=order, side=side)
    torch.manual_seed(0)
    near = PixelSquare(5) if 4 % order == 0 else Radius(2.5)
    paper = GSAOptions(pattern="query_sum")
    network = GSANet(cyclic(order), neighborhood=near, channels=8, blocks=(1,), heads=2, options=paper)
    seen = viz.Microscope(network, _glyph(side), turns=order)
    names = ("lifting", "self-attention")
    return {f"gsa-fields_{name}": seen.picture("field", channel=0, layer=k) for k, name in enumerate(names)}


def attention_maps(weights: Path, *, image: int = 0) -> dict[str, Figure]:
    """Attention maps of a released network, input rotated (attentive group convolution, Figures 7, 8 and 11).

    One picture shows α⁻, the attention that the layers subtract, as in the figures of the paper. The other one shows
    1 - α⁻, which the layers let pass. For networks of `lieattn fit` use `lieattn picture CHECKPOINT`.

    Parameters
    ----------
    weights
        Released weights of a network with attention to its input, as an .npz file for
        `lieattn.models.published_attentive_cnn`. It must also contain images `x` as inputs of the network.
    image
        Index of the image that is drawn.
    """
    network = published_attentive_cnn(weights)
    with np.load(weights, allow_pickle=False) as archive:
        if "x" not in archive:
            raise ValueError(f"weights: expected images as an array 'x' beside the weights, got none in {weights}")
        check_index("image", image, len(archive["x"]))
        shown = torch.from_numpy(archive["x"][image]).to(torch.float32)
    kinds = {"subtracted": False, "passed": True}
    return {
        f"attention-maps_{kind}": viz.attention_under_group(network, shown, passed=passed)
        for kind, passed in kinds.items()
    }


def stride_parity() -> dict[str, Figure]:
    """Equivariance of p4 All-CNN for images of even and odd sides (attentive group convolution, Figures 9 and 10).

    On even sides, strides of 2 sample pixels off center, so that a rotated image is sampled at other places. Maxima
    in place of strides are exact on the sides that they divide. The weights are random.
    """
    group, curves = cyclic(4), {}
    names: dict[str, Literal["strided", "pooled"]] = {"strides of 2": "strided", "maxima of 2 x 2": "pooled"}
    for name, downsampling in names.items():
        generator = torch.manual_seed(0)
        network = AttentiveAllCNN(group, channels=_SIZES["channels"], downsampling=downsampling).double().eval()
        sides = [side for side in _SIZES["sides"] if downsampling == "strided" or side % 4 == 0]
        errors = []
        with torch.no_grad():
            for side in sides:
                image = torch.randn(1, 3, side, side, generator=generator, dtype=torch.float64)
                logits = network(image).expand(group.order, -1)
                moved = network(torch.cat([act_on_grid(group, h, image) for h in range(group.order)]))
                errors.append(relative_error(moved, logits, floor=1e-30))
        curves[name] = (sides, errors)
    return {"stride-parity": viz.error_curves(curves, "side of the images (pixels)", "relative change under the group")}


def asc_filters(*, checkpoint: str | None = None, block: int = 0, image: int = 0) -> dict[str, Figure]:
    """Learned affine maps, and the effective filters of attention (Affine Self Convolution).

    The paper has no such figure. Drawn are the tables of one block, and the resulting filters at three pixels of an
    image that is moved by the group. Without a checkpoint, a small p4 network is trained for a few seconds to
    distinguish four letters.

    Parameters
    ----------
    checkpoint
        Checkpoint of `lieattn fit` with `lieattn.models.AffineSelfConvNet`; the image is from its test set.
    block
        Index of the block, from 0.
    image
        Index of the image in the test set, or among the letters.
    """
    check_counts(0, image=image)
    if checkpoint is None:
        network = _reader_of_letters()
        shown = _letters(torch.Generator().manual_seed(1), image + 1)[0][image]
    else:
        found = load_network(checkpoint)
        if not isinstance(found, AffineSelfConvNet):
            raise TypeError(f"checkpoint: expected one of an AffineSelfConvNet, got {type(found).__name__}")
        network, images = found, cast(Any, load_data(checkpoint))
        check_index("image", image, len(images))
        shown = network.images(Batch.from_data_list([images[image]]))[0]
    return {
        "asc-filters_maps": viz.affine_maps(network, block=block, channels=4),
        "asc-filters_attention": viz.effective_filters(network, shown, block=block),
    }


def gsa_steerability(*, size: int = 7, order: int = 16) -> dict[str, Figure]:
    """Weights of a convolution and of attention, rotated (GSA-Nets, Figure 2).

    Positional scores rotate without interpolation. Their error is compared with the error of interpolated weights.

    Parameters
    ----------
    size
        Side of the neighborhood in pixels, odd.
    order
        Number of angles in a full turn, a multiple of 4.
    """
    return {"gsa-steerability": viz.steerability(size=size, order=order)}


_LETTERS = (
    "#####|#....|###..|#....|#....",
    "#####|..#..|..#..|..#..|..#..",
    "#....|#....|#....|#....|#####",
    "#...#|#...#|#...#|#...#|#####",
)
_SIDE = 12  # pixels


def _letters(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Noisy images ``[count, 1, side, side]`` of letters at random places in four orientations, and their labels."""
    letters = torch.tensor([[[float(pixel == "#") for pixel in row] for row in text.split("|")] for text in _LETTERS])
    letters = letters.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    images = 0.1 * torch.randn(count, 1, _SIDE, _SIDE, generator=generator)
    labels, turns = (torch.randint(4, (count,), generator=generator) for _ in range(2))
    size = letters.shape[-1]
    corners = torch.randint(_SIDE - size + 1, (count, 2), generator=generator)
    for canvas, label, turn, (row, column) in zip(images[:, 0], labels, turns, corners, strict=True):
        canvas[row : row + size, column : column + size] += torch.rot90(letters[label], int(turn))
    return images, labels


def _reader_of_letters() -> AffineSelfConvNet:
    """A p4 network that is trained for some steps to recognize letters."""
    generator = torch.manual_seed(0)
    network = AffineSelfConvNet(cyclic(4), 1, 4, blocks=1, channels=4, heads=2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(_SIZES["steps"]):
        images, labels = _letters(generator, 16)
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def _glyph(side: int) -> Data:
    """A gray image of a letter F."""
    letter = torch.tensor([[float(pixel == "#") for pixel in row] for row in _GLYPH])
    image = torch.nn.functional.interpolate(letter[None, None], (side, side), mode="bilinear", antialias=True)
    return Data(x=image.reshape(-1, 1), pos=pixel_positions(side, side), grid=torch.tensor([[side, side]]))


FIGURES: Mapping[str, Callable[..., dict[str, Figure]]] = {
    "gsa-fields": gsa_fields,
    "attention-maps": attention_maps,
    "stride-parity": stride_parity,
    "asc-filters": asc_filters,
    "gsa-steerability": gsa_steerability,
}
"""Functions by the names of the figures. They return figures by the names of their files.

The first line of a docstring is shown in the help, and the keyword arguments are the options.
"""
