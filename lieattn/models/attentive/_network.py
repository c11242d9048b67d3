"""What the networks of attentive group convolution share: layers with a kind of attention, and a field on images."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn

from lieattn._checks import check_choice
from lieattn.geometry import Raster
from lieattn.groups import FiniteGroup
from lieattn.models._images import ImageNetwork, plus_vectors
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
    group, in_channels, out_channels, attention, vector_inputs
        See :class:`lieattn.models.AttentiveCNN`.
    stem_channels
        Channels of the responses of the first layer.
    """

    limits = ("poolings refuse images whose sides they do not divide",)
    own_readout: ClassVar[tuple[str, ...]] = ()
    lifting: nn.Module
    blocks: nn.ModuleList

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
        check_choice("attention", attention, AttentionKind)
        self.attention: AttentionKind = attention
        self.reads_itself = True

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

    def last_field(self, images: Tensor, vectors: Tensor | None) -> tuple[Tensor, Raster]:
        """Field behind the last block, in raster order, and its raster."""
        x = self.fields(images, vectors)[-1]
        return from_grid(x), Raster(len(x), *x.shape[-2:])

    def features(self, images: Tensor) -> list[Tensor]:
        """Fields behind every block, then the logits."""
        fields = self.fields(images)
        return [*fields, self.logits(fields[-1])]

    def fields(self, images: Tensor, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields ``[images, channels, order, rows, columns]`` behind the first layer and every block.

        ``vectors`` ``[images, stem_channels, order, rows, columns]`` are added to the responses of the first layer.
        """
        fields = [plus_vectors(self.lifting(images), vectors)]
        for block in self.blocks:
            fields.append(block(fields[-1]))
        return fields

    @abc.abstractmethod
    def logits(self, field: Tensor) -> Tensor:
        """Logits ``[images, out_channels]`` of the last field."""

    def attention_maps(self, data: Any) -> dict[str, AttentionMaps]:
        """Maps of every attentive layer, by its name and in the order of the layers.

        They are the residual attention α⁻, which is subtracted: responses are multiplied by 1 - α⁻. The network is
        observed as it is; call ``eval()`` first to leave dropout out.
        """
        found: dict[str, AttentionMaps] = {}

        def observe(name: str, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = layer.attend(inputs[0], return_maps=True)[1]

        with ExitStack() as hooks:
            for name, module in self.named_modules():
                if isinstance(module, _ATTENTIVE):
                    hooks.enter_context(module.register_forward_hook(partial(observe, name)))
            self(data)
        return found


def convolution(
    group: FiniteGroup,
    in_channels: int,
    out_channels: int,
    size: int,
    *,
    attention: AttentionKind,
    lifting: bool = False,
    pad: int = 0,
    init_scale: float = 1.0,
    **spatial: Any,
) -> nn.Module:
    """Lifting or group convolution with a kind of attention: ``layer(x) -> x`` on grids.

    With ``"input"`` and ``"pose"`` it is a gate and a convolution, named ``gate`` and ``convolution``. Sizes of the
    attention, ``hidden``, ``spatial_size`` and ``spatial_dilation``, are ignored where a kind has none.
    """
    sizes: Any = (group, in_channels, out_channels, size)
    options: Any = {"pad": pad, "init_scale": init_scale}
    if attention in ("full", "channel", "spatial"):
        attentive: Any = GridAttentiveLifting if lifting else GridAttentiveConvolution
        made: nn.Module = attentive(*sizes, attention=attention, **spatial, **options)
        return made
    plain: Any = (GridLiftingConvolution if lifting else GridGroupConvolution)(*sizes, **options)
    if attention == "none":
        return plain
    layers = nn.Sequential()
    gate: Any = GridPoseAttention if attention == "pose" else partial(GridInputAttention, **spatial)
    layers.add_module("gate", gate(group, in_channels, lifting=lifting, init_scale=init_scale))
    layers.add_module("convolution", plain)
    return layers


def batch_norm(channels: int) -> FieldBatchNorm:
    """Batch normalization of fields on grids, with the authors' ε."""
    return FieldBatchNorm(channels, eps=2e-5, axis=1)


def width_for(group: FiniteGroup, planar: int) -> int:
    """Channels per frame with about as many parameters as so many planar channels: planar / sqrt(|H|)."""
    return max(1, round(planar / group.order**0.5))
