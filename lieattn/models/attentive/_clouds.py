"""Attentive group convolutional networks on point clouds."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_dropout
from lieattn.geometry import FiniteFrames, LiftedGraph, Neighborhood, lift, point_clouds
from lieattn.groups import FiniteGroup
from lieattn.models._base.inputs import PointInputs, VectorEmbedding, VectorInputs, features, in_precision_of_weights
from lieattn.models._base.jumps import decided, jumps_of_neighbors
from lieattn.models._base.lifted import LiftedNetwork
from lieattn.models._base.network import GroupField
from lieattn.models._base.symmetry import Symmetry, of_squares
from lieattn.models._base.tied import tied_repr
from lieattn.models.attentive._networks import AttentionKind, ShowsAttention
from lieattn.nn import AttentiveGroupConvolution, GroupConvolution, InvariantHead, PointBatchNorm, Pooling
from lieattn.nn.relative import NetworkKernel


class AttentiveNet(ShowsAttention, LiftedNetwork):
    """Attentive group convolutional network on any point clouds and any finite group (Romero et al. 2020).

    A lifting convolution and residual blocks, x + relu(norm(convolution(x))), whose kernels are networks of the
    relative element; then a linear map after relu, pooled over frames and points.

    **Equivariance.** Outputs are invariant to translations and to H acting on the points, exactly up to rounding, if
    the neighborhoods rotate with the points. With ``FiniteFrames(H, PrincipalFrames())``, to all rotations.

    Parameters
    ----------
    frames
        A finite group H, or ``FiniteFrames(H, ...)``.
    in_channels, out_channels
        Number of input features, or an object that computes them (see :class:`lieattn.models.CloudInputs`); number of
        outputs.
    neighborhood, local
        Neighbors that the spatial attention sees, and those that the kernels see; the same if ``local`` is absent.
    channels, layers
        Channels per frame, and number of convolutions, with the lifting.
    attention
        Attention of every convolution, as for :class:`AttentiveCNN`; ``"none"`` for group convolutions.
    hidden
        Hidden units of the kernels.
    dropout, pool
        Dropout probability after each block; pooling over the points, ``"mean"``, ``"sum"``, ``"max"`` or ``"none"``.
    vector_inputs
        Names of input fields, whose :class:`lieattn.models.VectorEmbedding` is added to the lifted field.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import Radius
    >>> from lieattn.groups import cyclic
    >>> network = AttentiveNet(cyclic(8), 1, 3, neighborhood=Radius(1.5), channels=4)
    >>> network(Data(x=torch.randn(9, 1), pos=torch.randn(9, 2))).shape
    torch.Size([1, 3])
    """

    has_kinks = True  # because of relu and maxima

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames,
        in_channels: PointInputs = 1,
        out_channels: int = 10,
        *,
        neighborhood: Neighborhood,
        local: Neighborhood | None = None,
        channels: int = 12,
        layers: int = 3,
        attention: AttentionKind = "full",
        hidden: int = 12,
        dropout: float = 0.0,
        pool: Pooling = "mean",
        vector_inputs: VectorInputs = (),
    ) -> None:
        check_arguments(AttentiveNet.__init__, locals())
        super().__init__(frames, in_channels, neighborhood, None, vector_inputs)
        check_counts(out_channels=out_channels, channels=channels, layers=layers, hidden=hidden)
        check_dropout("dropout", dropout)
        self.group = frames if isinstance(frames, FiniteGroup) else frames.group
        self.local, self.attention, self.dropout = local, attention, dropout
        self.lifting = self._convolution(self.in_channels, channels, hidden, lifting=True)
        self.blocks = nn.ModuleList(self._convolution(channels, channels, hidden) for _ in range(layers - 1))
        self.norms = nn.ModuleList(PointBatchNorm(channels) for _ in range(layers))
        self.vectors = VectorEmbedding(vector_inputs, self.group.dim, channels)
        self.head = InvariantHead(channels, out_channels, readout="point_first", pool=pool, activation="relu")

    def _convolution(
        self, inputs: int, outputs: int, hidden: int, *, lifting: bool = False
    ) -> GroupConvolution | AttentiveGroupConvolution:
        kernel = NetworkKernel(self.group, inputs, outputs, hidden=hidden, lifting=lifting)
        if self.attention == "none":
            return GroupConvolution(kernel, reduction="mean")
        wide = None
        if self.attention in ("full", "spatial", "input"):
            maps = 1 if self.attention == "input" else outputs
            wide = NetworkKernel(self.group, 2, maps, hidden=hidden, lifting=lifting)
        return AttentiveGroupConvolution(kernel, attention=self.attention, spatial=wide, reduction="mean")

    @property
    def symmetry(self) -> Symmetry:
        return of_squares(super().symmetry, self.local)

    @property
    def jumps(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().jumps, *jumps_of_neighbors(self.local))))

    def tied_to(self) -> dict[str, str]:
        return {**super().tied_to(), "local": tied_repr(decided(self.local or self.neighborhood))}

    @in_precision_of_weights
    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the clouds, with a local graph if the kernels see other neighbors than the attention."""
        clouds = point_clouds(data)
        seen = self.seen_vectors(data, clouds)
        graph = lift(clouds, self.frames, self.neighborhood, self.space, vectors=seen)
        if self.local is not None:
            graph = graph.carrying(
                local=lift(clouds, self.frames, self.local, self.space, length=graph.length, vectors=seen)
            )
        for part in (graph, graph.local):
            if part is not None:
                _ = part.relative.row, part.relative.positions  # evaluated by the workers of a loader
        return graph

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        graph = self.geometry(data) if geometry is None else geometry
        x = self._through(self.lifting, features(data, self.inputs, graph), graph)
        vectors = self.vectors(data, graph)
        x = self._after(self.norms[0](x if vectors is None else x + vectors))
        for block, norm in zip(self.blocks, list(self.norms)[1:], strict=True):
            x = x + self._after(norm(self._through(block, x, graph)))
        return GroupField(x, graph)

    def _after(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(x), self.dropout, self.training)
