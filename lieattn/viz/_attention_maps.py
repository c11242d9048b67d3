"""Pictures of the attention of attentive group convolutional networks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lieattn._core.checks import check_arguments
from lieattn.groups import FiniteGroup
from lieattn.models import AttentiveNetwork
from lieattn.nn import act_on_grid
from lieattn.testing import relative_error
from lieattn.viz._draw import blank_figure, in_words, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = 2.4  # inches
_ARROW = 1.6  # pixels that the longest arrow spans


def attention_picture(
    network: AttentiveNetwork, images: Tensor, *, planar: bool = True, passed: bool = False
) -> Tensor:
    """Return the product of the spatial attention of all layers, for each frame, at the size of the image.

    The map of every layer is resized to the image bilinearly with corner pixels aligned, as in the figures of
    attentive group convolution. The maps are the output of the sigmoid, the residual α⁻ that is *subtracted*: layers
    weaken the bright regions.

    Parameters
    ----------
    network
        Network with attention to the input of its layers (α_F) or to its frames (α_RH), whose maps are shared by all
        output channels. It is evaluated in eval mode.
    images
        Images ``[images, in_channels, rows, columns]``.
    planar
        Whether the map of the first layer, which has no frames, is a factor for all frames (rotated MNIST, PCam and p4m
        All-CNN in the paper) or is left out (p4 All-CNN).
    passed
        Whether the factors are 1 - α⁻, the share that passes, instead of α⁻.

    Returns
    -------
    Tensor
        Products ``[images, order, rows, columns]``. Their sum over the frames is the picture. ValueError is raised if
        the network has another kind of attention.
    """
    check_arguments(attention_picture, locals())
    if network.attention not in ("input", "pose"):
        raise ValueError(
            f"network: expected attention 'input' or 'pose', whose maps are shared by all output channels, got "
            f"{network.attention!r}"
        )
    if network.group.dim != 2:
        raise ValueError(f"network: expected a network for images, got the group {network.group.name} in space")
    network = copy.deepcopy(network).eval()
    with torch.no_grad():
        images = network.images(images)
        maps = network.attention_maps(images)
    product = images.new_ones(len(images), network.group.order, *images.shape[-2:])
    for found in (layer.spatial for layer in maps.values()):
        if found is None or (found.ndim == 4 and not planar):
            continue
        layer = found if found.ndim == 4 else found[:, 0]
        layer = F.interpolate(layer, images.shape[-2:], mode="bilinear", align_corners=True)
        product = product * (1 - layer if passed else layer)
    return product


def attention_under_group(
    network: AttentiveNetwork,
    image: Tensor,
    *,
    arrows: Literal["dominant", "all", "none"] = "dominant",
    passed: bool = False,
) -> Figure:
    """Draw the attention of a network for one image moved by every element of its group.

    Each column is an element, with the image above and its attention picture below (:func:`attention_picture`, summed
    over the frames). An arrow at every pixel shows the frame with the largest product of maps. It points to the image
    of "up" under the frame, and its length is the difference of the product to the mean over the frames; the longest
    arrow spans 1.6 pixels. For an equivariant network the columns are moved copies of the first. The title gives the
    measured largest difference after moving them back, relative to the largest entry.

    Parameters
    ----------
    network, passed
        See :func:`attention_picture`, also for errors.
    image
        One image ``[in_channels, rows, columns]`` with as many rows as columns; ValueError is raised otherwise.
    arrows
        ``"dominant"`` as above; ``"all"`` for the arrows of all frames as in the paper, whose lengths are the products;
        or ``"none"``.
    """
    require_matplotlib()
    check_arguments(attention_under_group, locals())
    if image.ndim != 3 or image.shape[-1] != image.shape[-2]:
        raise ValueError(f"image: expected one square image [channels, rows, columns], got {tuple(image.shape)}")
    group = network.group
    moved = torch.cat([act_on_grid(group, h, image[None]) for h in range(group.order)])
    pictures = attention_picture(network, moved, passed=passed)
    figure = blank_figure(_CELL * group.order, 2 * _CELL + 0.4)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(2, group.order, squeeze=False)
    top = float(pictures.sum(dim=1).max())
    lengths = pictures - pictures.mean(dim=1, keepdim=True) if arrows == "dominant" else pictures
    longest = max(float(lengths.max()), 1e-3 * float(pictures.max()))  # so that rounding is not magnified
    for h in range(group.order):
        shown = moved[h].mean(dim=0)
        axes[0][h].imshow(shown.cpu(), cmap="gray")
        axes[0][h].set_title(in_words(group.elements[h]), fontsize=9)
        drawn = axes[1][h].imshow(pictures[h].sum(dim=0).cpu(), cmap="viridis", vmin=0, vmax=top)
        if arrows != "none":
            _draw_poses(axes[1][h], group, lengths[h], longest, dominant=arrows == "dominant")
        for axis in axes[:, h]:
            axis.set_axis_off()
    figure.colorbar(drawn, ax=axes[1].tolist(), shrink=0.8, label="sum over the frames")
    what = r"product of $1 - \alpha^-$ (passes)" if passed else r"product of $\alpha^-$ (is subtracted)"
    apart = _difference(group, pictures)
    figure.suptitle(f"{what}; relative difference of columns that are moved back: {apart:.1e}", fontsize=10)
    return figure


def _draw_poses(axes: Axes, group: FiniteGroup, lengths: Tensor, longest: float, *, dominant: bool) -> None:
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in lengths.shape[-2:]), indexing="ij")
    style: dict[str, Any] = {"color": "white", "scale_units": "x", "scale": max(longest, 1e-30) / _ARROW}
    style |= {"width": 0.006 if dominant else 0.004, "pivot": "mid" if dominant else "tail"}
    lengths = lengths.cpu()
    most = lengths.argmax(dim=0)
    for pose, (right, upward) in enumerate(group.elements[:, :, 1].tolist()):
        shown = most == pose if dominant else torch.ones_like(most, dtype=torch.bool)
        length = lengths[pose][shown]
        axes.quiver(columns[shown], rows[shown], right * length, upward * length, **style)


def _difference(group: FiniteGroup, pictures: Tensor) -> float:
    """Return the largest difference of the pictures to the moved first one, relative to its largest entry."""
    first = pictures[group.identity_index][None, None]
    expected = torch.cat([act_on_grid(group, h, first)[0] for h in range(group.order)])
    return relative_error(pictures, expected, floor=1e-30)
