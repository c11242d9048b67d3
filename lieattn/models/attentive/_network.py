"""What the networks of attentive group convolution share: layers with a kind of attention, and a field on images."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from torch import Tensor, nn

from lieattn._checks import check_choice
from lieattn.geometry import Raster
from lieattn.groups import FiniteGroup
from lieattn.models._images import ImageNetwork
from lieattn.models._network import GroupField
from lieattn.nn import (
    FieldBatchNorm,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridLiftingConvolution,
    GridPoseAttention,
    from_grid,
)
from lieattn.ops import AttentionMaps

# "none": plain group convolution; "full" (α), "channel" (α_CH) and "spatial" (α_SP) attend to the responses; "input"
# (α_F) attends to the input of every convolution, "pose" (α_RH) to its frames.
AttentionKind = Literal["none", "full", "channel", "spatial", "input", "pose"]

_ATTENTIVE = (GridAttentiveConvolution, GridAttentiveLifting, GridInputAttention, GridPoseAttention)


class AttentiveNetwork(ImageNetwork):
    """A network on grids whose logits do not change when the image moves.

    Its own layers read the field out. With another head, see :meth:`with_head`, that one does.

    Parameters
    ----------
    group
        H.
    in_channels, out_channels
        Channels of the images, number of logits.
    attention
        Kind of attention of every convolution.
    stem_channels, vector_inputs
        See :class:`lieattn.models.AttentiveCNN`.
    """

    own_readout: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        attention: AttentionKind,
        stem_channels: int,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__(group, in_channels, out_channels, stem_channels, vector_inputs)
        check_choice("attention", attention, get_args(AttentionKind))
        self.attention: AttentionKind = attention
        self.reads_itself = True

    def _limits(self) -> tuple[str, ...]:
        return ("poolings refuse images whose sides they do not divide",)

    @property
    def kind(self) -> Any:
        """How the outputs transform: invariant, or as another head says."""
        return "invariant" if self.reads_itself else super().kind

    def with_head(self, head: nn.Module) -> Self:
        """The same network with another head in place of its own last layers; all other weights are shared."""
        other = super().with_head(head)
        other.reads_itself = False
        for name in self.own_readout:
            other._modules.pop(name)
        return other

    def forward(self, data: Any, geometry: Any = None) -> Tensor:
        """Logits ``[images, out_channels]``, or what another head gives; arguments as in :meth:`field`."""
        if not self.reads_itself:
            return super().forward(data, geometry)
        return self.logits(self.fields(self.images(data), self.embedded_vectors(data))[-1])

    def field(self, data: Any, geometry: Any = None) -> GroupField:
        """Field behind the last block, in raster order, and the pixels of the raster that is left.

        Parameters
        ----------
        data
            Images ``[images, in_channels, rows, columns]``; or a torch_geometric ``Data`` or ``Batch`` of their pixels,
            see :func:`lieattn.nn.grid_images`.
        geometry
            None: images need none.
        """
        x = self.fields(self.images(data), self.embedded_vectors(data))[-1]
        raster = Raster(len(x), *x.shape[-2:])
        return GroupField(from_grid(x), raster.lift(self.group, 3, x.device))

    def features(self, images: Tensor) -> list[Tensor]:
        """Fields behind every block, then the logits."""
        fields = self.fields(images)
        return [*fields, self.logits(fields[-1])]

    @abc.abstractmethod
    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields ``[images, channels, order, rows, columns]`` behind every block.

        ``vectors`` ``[images, stem_channels, order, rows, columns]`` are added to the responses of the first layer.
        """

    @abc.abstractmethod
    def logits(self, field: Tensor) -> Tensor:
        """Logits ``[images, out_channels]`` of the last field."""

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
    init_scale: float = 1.0,
) -> nn.Module:
    """Lifting or group convolution with a kind of attention: ``layer(x) -> x`` on grids.

    With ``"input"`` and ``"pose"`` it is a gate and a convolution, named ``gate`` and ``convolution``.
    """
    sizes: tuple[FiniteGroup, int, int, int] = (group, in_channels, out_channels, size)
    spatial = {"hidden": hidden, "spatial_size": spatial_size, "spatial_dilation": spatial_dilation}
    if attention in ("full", "channel", "spatial"):
        attentive: Any = GridAttentiveLifting if lifting else GridAttentiveConvolution
        made: nn.Module = attentive(*sizes, attention=attention, **spatial, pad=pad, init_scale=init_scale)
        return made
    plain = (GridLiftingConvolution if lifting else GridGroupConvolution)(*sizes, pad=pad, init_scale=init_scale)
    if attention == "none":
        return plain
    gate: Any = GridPoseAttention if attention == "pose" else GridInputAttention
    layers = nn.Sequential()
    options: dict[str, Any] = {} if attention == "pose" else spatial
    layers.add_module("gate", gate(group, in_channels, lifting=lifting, init_scale=init_scale, **options))
    layers.add_module("convolution", plain)
    return layers


def batch_norm(channels: int) -> FieldBatchNorm:
    """Batch normalization of fields on grids, with the authors' ε."""
    return FieldBatchNorm(channels, eps=2e-5, axis=1)


def width_for(group: FiniteGroup, planar: int) -> int:
    """Channels per frame with about as many parameters as so many planar channels: planar / sqrt(|H|)."""
    return max(1, round(planar / group.order**0.5))
