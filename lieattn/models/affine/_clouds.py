"""Bottleneck residual networks with Affine Self Convolution on point clouds."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts
from lieattn.geometry import FiniteFrames, LiftedGraph, Neighborhood, lift, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import PointInputs, VectorEmbedding, VectorInputs, features, in_precision_of_weights
from lieattn.models._base.lifted import LiftedNetwork
from lieattn.models._base.network import GroupField
from lieattn.models.affine._network import (
    ATTENTION,
    EXPANSION,
    BottleneckBlock,
    Layer,
    draw_weights,
    heads_for,
    reduction_of,
)
from lieattn.nn import FieldBatchNorm, GroupConvolution, InvariantHead, Pooling
from lieattn.nn.relative import FourierFeatures, NetworkKernel


class AffineNet(LiftedNetwork):
    """Bottleneck residual network with Affine Self Convolution (Diaconu, Worrall 2019) on any point clouds.

    A lifting convolution with batch normalization and relu, bottleneck blocks with c inner and 4c outer channels, and
    a linear map after relu, pooled over frames and points. Where :class:`AffineSelfConvNet` has tables of offsets, psi
    and beta are networks of the displacement (:class:`lieattn.nn.relative.FourierFeatures`). Points are not pooled
    between the blocks.

    **Equivariance.** Outputs are invariant to translations and to H acting on the points, exactly up to rounding, if
    the neighborhoods rotate with the points. With ``FiniteFrames(H, PrincipalFrames())``, to all rotations.

    Parameters
    ----------
    frames
        A finite group H, or ``FiniteFrames(H, ...)``.
    in_channels, out_channels
        Number of input features, or an object that computes them (see :class:`lieattn.models.CloudInputs`); number of
        outputs.
    neighborhood
        Neighbors that the lifting and the blocks see.
    layer, squeeze_excite
        Layer of the blocks, and whether they end with a squeeze-and-excite, as for :class:`AffineSelfConvNet`. With
        ``"convolution"`` the kernels are networks of the displacement too.
    blocks, channels
        Number of blocks; inner channels c per frame.
    heads
        Attention heads; as for :class:`AffineSelfConvNet` if absent. With ``"convolution"`` they must be absent
        (otherwise ValueError).
    hidden
        Hidden units of the networks of the displacement.
    pool
        Pooling over the points, ``"mean"``, ``"sum"``, ``"max"`` or ``"none"``.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the lifted field.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import Radius
    >>> from lieattn.groups import octahedral
    >>> network = AffineNet(octahedral(), 1, 3, neighborhood=Radius(1.5), channels=4, blocks=1)
    >>> network(Data(x=torch.randn(9, 1), pos=torch.randn(9, 3))).shape
    torch.Size([1, 3])
    """

    has_kinks = True  # because of relu

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames,
        in_channels: PointInputs = 1,
        out_channels: int = 10,
        *,
        neighborhood: Neighborhood,
        layer: Layer = "affine",
        blocks: int = 3,
        channels: int = 8,
        heads: int | None = None,
        hidden: int = 32,
        squeeze_excite: bool = False,
        pool: Pooling = "mean",
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AffineNet.__init__, locals())
        super().__init__(frames, in_channels, neighborhood, None, vector_inputs)
        check_counts(out_channels=out_channels, blocks=blocks, channels=channels, hidden=hidden)
        self.group = group = frames if isinstance(frames, FiniteGroup) else frames.group
        heads = heads_for(layer, channels, group.dim, heads)
        self.lifting = self._convolution(self.in_channels, channels, hidden, lifting=True)
        self.lifting_norm = FieldBatchNorm(channels)
        self.vectors = VectorEmbedding(vector_inputs, group.dim, channels)
        self.blocks = nn.ModuleList()
        before, after = channels, EXPANSION * channels
        reduction = reduction_of(group) if squeeze_excite else None
        for number in range(blocks):
            if layer == "convolution":
                middle: nn.Module = self._convolution(channels, channels, hidden)
            else:
                middle = ATTENTION[layer](group, channels, channels, FourierFeatures(hidden), heads=heads)
            block = BottleneckBlock(group, before, channels, after, middle, projection=number == 0, reduction=reduction)
            self.blocks.append(block)
            before = after
        self.head = InvariantHead(after, out_channels, readout="point_first", pool=pool, activation="relu")
        draw_weights(self)

    def _convolution(self, inputs: int, outputs: int, hidden: int, *, lifting: bool = False) -> GroupConvolution:
        return GroupConvolution(
            NetworkKernel(self.group, inputs, outputs, hidden=hidden, lifting=lifting), reduction="mean"
        )

    @in_precision_of_weights
    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the clouds."""
        clouds = point_clouds(data)
        graph = lift(clouds, self.frames, self.neighborhood, self.space, vectors=self.seen_vectors(data, clouds))
        _ = graph.relative.row, graph.relative.positions  # evaluated by the workers of a loader
        return graph

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        graph = self.geometry(data) if geometry is None else geometry
        x = self._through(self.lifting, features(data, self.inputs, graph), graph)
        vectors: Tensor | None = self.vectors(data, graph)
        x = F.relu(self.lifting_norm(x if vectors is None else x + vectors))
        for block in self.blocks:
            x, _ = self._through(block, x, graph)
        return GroupField(x, graph)
