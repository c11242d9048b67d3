"""What the networks of attentive group convolution share: layers with a kind of attention, images, promises."""

from __future__ import annotations

import abc
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup, check_group
from lieattn.nn import (
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridLiftingConvolution,
    GridPoseAttention,
    grid_images,
)
from lieattn.ops import AttentionMaps

# "none": plain group convolution; "full" (α), "channel" (α_CH) and "spatial" (α_SP) attend to the responses; "input"
# (α_F) attends to the input of every convolution, "pose" (α_RH) to its poses.
AttentionKind = Literal["none", "full", "channel", "spatial", "input", "pose"]

_ATTENTIVE = (GridAttentiveConvolution, GridAttentiveLifting, GridInputAttention, GridPoseAttention)


class AttentiveNetwork(nn.Module, abc.ABC):
    """A network on grids whose logits do not change when the image moves.

    Attributes
    ----------
    group
        H.
    in_channels, classes
        Channels of the images, number of logits.
    attention
        Kind of attention of every convolution.
    """

    def __init__(self, group: FiniteGroup, in_channels: int, classes: int, attention: AttentionKind) -> None:
        super().__init__()
        check_group("group", group)
        check_count("in_channels", in_channels)
        check_count("classes", classes)
        if attention not in get_args(AttentionKind):
            raise ValueError(f"attention: expected one of {get_args(AttentionKind)}, got {attention!r}")
        self.group, self.in_channels, self.classes = group, in_channels, classes
        self.attention: AttentionKind = attention

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        return (
            f"logits are invariant to {self.group.name} acting on images about their center, exactly up to rounding; "
            f"poolings refuse images whose sides they do not divide, and translations by pixels hold up to the border"
        )

    def forward(self, data: Any) -> Tensor:
        """Logits ``[images, classes]``.

        Parameters
        ----------
        data
            Images ``[images, in_channels, rows, columns]``; or a torch_geometric ``Data`` or ``Batch`` of their pixels,
            see :func:`lieattn.nn.grid_images`.
        """
        return self.features(self.images(data))[-1]

    def images(self, data: Any) -> Tensor:
        """Images of the data, checked."""
        images = grid_images(data)
        if images.shape[1] != self.in_channels or not images.is_floating_point():
            raise ValueError(
                f"data: expected floating images with {self.in_channels} channels, got {images.dtype} "
                f"{tuple(images.shape)}"
            )
        return images

    @abc.abstractmethod
    def features(self, images: Tensor) -> list[Tensor]:
        """Fields behind every block, then the logits."""

    def attention_maps(self, data: Any) -> dict[str, AttentionMaps]:
        """Maps of every attentive layer, by its name and in the order of the layers.

        They are the residual attention α⁻, which is subtracted: responses are multiplied by 1 - α⁻. The network is
        observed as it is; call ``eval()`` first to leave dropout out.
        """
        found: dict[str, AttentionMaps] = {}

        def observer(name: str) -> Any:
            def observe(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                found[name] = layer.attend(inputs[0], return_maps=True)[1]

            return observe

        handles = [
            module.register_forward_hook(observer(name))
            for name, module in self.named_modules()
            if isinstance(module, _ATTENTIVE)
        ]
        try:
            self(data)
        finally:
            for handle in handles:
                handle.remove()
        return found


def convolution(
    group: FiniteGroup,
    in_channels: int,
    out_channels: int,
    size: int,
    *,
    attention: AttentionKind,
    hidden: int,
    lifting: bool = False,
    pad: int = 0,
    spatial_size: int = 7,
    spatial_dilation: int = 1,
    spread: float = 1.0,
) -> nn.Module:
    """Lifting or group convolution with a kind of attention: ``layer(x) -> x`` on grids.

    With ``"input"`` and ``"pose"`` it is a gate and a convolution, named ``gate`` and ``convolution``.
    """
    sizes: tuple[FiniteGroup, int, int, int] = (group, in_channels, out_channels, size)
    if attention in ("full", "channel", "spatial"):
        attentive = GridAttentiveLifting if lifting else GridAttentiveConvolution
        return attentive(
            *sizes,
            attention=attention,
            hidden=hidden,
            spatial_size=spatial_size,
            spatial_dilation=spatial_dilation,
            pad=pad,
            spread=spread,
        )
    plain = (GridLiftingConvolution if lifting else GridGroupConvolution)(*sizes, pad=pad, spread=spread)
    if attention == "none":
        return plain
    layers = nn.Sequential()
    if attention == "input":
        gate: nn.Module = GridInputAttention(
            group,
            in_channels,
            hidden=hidden,
            spatial_size=spatial_size,
            spatial_dilation=spatial_dilation,
            lifting=lifting,
            spread=spread,
        )
    else:
        gate = GridPoseAttention(group, in_channels, lifting=lifting, spread=spread)
    layers.add_module("gate", gate)
    layers.add_module("convolution", plain)
    return layers


def width_for(group: FiniteGroup, planar: int) -> int:
    """Channels per pose with about as many parameters as so many planar channels: planar / sqrt(|H|)."""
    return max(1, round(planar / group.order**0.5))
