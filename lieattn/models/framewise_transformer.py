"""Framewise transformer: attention within every frame, frames mixed by group-tied linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lieattn.geometry import PointClouds, padding, point_clouds
from lieattn.groups import FiniteGroup, check_group
from lieattn.models._lifted_field import LiftedField
from lieattn.models._point_inputs import Kind, Readout, centered, check_options, features, read_out, vectors
from lieattn.nn import FiberNorm, FramewiseBlock, RotaryPhases


class FramewiseTransformer(nn.Module):
    """A transformer over whole clouds that is equivariant to R^d ⋊ H and cheaper than an ordinary one of its width.

    Points carry fields ``[points, fiber, channels]``, so the width is |H| · channels. Every frame attends alone,
    with rotary encodings whose frequencies turn with it, and all linear maps are tied over the fiber; they are
    evaluated in the Fourier basis of H, which makes them cheaper than dense ones. In 2D for C_n and D_n, in 3D for
    the groups of the platonic solids, and for any other finite group of matrices.

    **Equivariance.** When positions are moved by R^d ⋊ H and vector inputs turn along, invariant outputs do not change,
    vector outputs turn, and :meth:`field` is translated by H.

    Parameters
    ----------
    group
        H.
    in_channels
        Channels of the invariant features ``data.x`` ``[points, in_channels]``.
    outputs
        Numbers, or vectors, for each cloud or point.
    channels
        Channels per frame, even.
    layers
        Number of blocks.
    heads
        Heads of each frame.
    vector_inputs
        Names of attributes of the data with vectors ``[points, dim]``, such as ``("vel",)``; each enters by its
        components in the frames.
    scale
        Length, in the unit of the positions, over which rotary phases change by about one radian at the start.
    readout
        Whether outputs are summed or averaged over the points of a cloud, or given for each point.
    kind
        ``"invariant"`` numbers, or ``"vector"`` outputs: the mean over the frames of h_a w(x, a), for a vector w in
        the frame.
    widening, dropout
        See :class:`lieattn.nn.FramewiseBlock`.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        outputs: int,
        *,
        channels: int = 32,
        layers: int = 4,
        heads: int = 1,
        vector_inputs: Sequence[str] = (),
        scale: float = 1.0,
        readout: Readout = "mean",
        kind: Kind = "invariant",
        widening: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_group("group", group)
        check_options(readout, kind, scale, in_channels=in_channels, outputs=outputs, layers=layers)
        self.group, self.scale, self.readout, self.kind = group, scale, readout, kind
        self.in_channels, self.channels, self.outputs = in_channels, channels, outputs
        self.vector_inputs = tuple(vector_inputs)
        self.embed_features = nn.Linear(in_channels, channels)
        self.embed_vectors = nn.Linear(group.dim * (1 + len(self.vector_inputs)), channels, bias=False)
        self.phases = RotaryPhases(group.dim, heads, channels // heads)
        self.blocks = nn.ModuleList(
            FramewiseBlock(group, channels, heads=heads, widening=widening, dropout=dropout) for _ in range(layers)
        )
        self.norm = FiberNorm(channels)
        width = outputs if kind == "invariant" else outputs * group.dim
        self.head = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, width))

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        return (
            f"outputs are equivariant to R^{self.group.dim} x| {self.group.name} acting on positions and vectors, "
            f"exactly up to rounding"
        )

    def forward(self, data: Any) -> Tensor:
        """Outputs ``[clouds, outputs]``, or vectors ``[clouds, outputs, dim]`` (one: ``[clouds, dim]``), or per point.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with ``x`` ``[points, in_channels]``, ``pos`` ``[points, dim]`` and
            the vector inputs.

        Raises
        ------
        TypeError, ValueError
            If an attribute is missing or its shape does not fit.
        """
        clouds = point_clouds(data)
        field = self.field(data, clouds)
        if self.kind == "invariant":
            out = self.head(field.mean(dim=1))
        else:
            components = self.head(field).unflatten(-1, (self.outputs, self.group.dim))
            out = torch.einsum("aij,paoj->poi", self.group.elements.to(field), components) / self.group.order
        return read_out(out, clouds, self.readout, self.kind)

    def field(self, data: Any, clouds: PointClouds | None = None) -> Tensor:
        """Field ``[points, fiber, channels]`` behind the last block; ``clouds`` are those of ``data``, if at hand."""
        clouds = point_clouds(data) if clouds is None else clouds
        if clouds.cell is not None:
            raise ValueError("data.cell: attention over whole clouds knows no images; use a model with a Radius")
        if clouds.pos.shape[1] != self.group.dim:
            raise ValueError(
                f"data.pos: {self.group.name} acts on {self.group.dim} coordinates, got {tuple(clouds.pos.shape)}"
            )
        arrows = [centered(clouds) / self.scale, *vectors(data, self.vector_inputs, clouds).unbind(dim=1)]
        seen = [self._in_frames(arrow) for arrow in arrows]
        x = self.embed_features(features(data, self.in_channels, clouds))[:, None]
        x = x + self.embed_vectors(torch.cat(seen, dim=-1))
        layout = padding(clouds.batch, clouds.num_clouds)
        phases = self.phases(seen[0])
        for block in self.blocks:
            x = block(x, phases, layout)
        return self.norm(x)

    def lifted_field(self, data: Any) -> LiftedField:
        """Field behind the last block, the clouds, and the frames over their points."""
        clouds = point_clouds(data)
        return LiftedField(self.field(data, clouds), clouds, self.group.elements.to(clouds.pos))

    def _in_frames(self, vectors: Tensor) -> Tensor:
        """h_a⁻¹ v for each frame: ``[points, dim]`` to ``[points, fiber, dim]``."""
        inverse = self.group.elements[self.group.inverse].to(vectors)
        return torch.einsum("aij,pj->pai", inverse, vectors)
