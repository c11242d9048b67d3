"""Framewise transformer: attention within every frame, frames mixed by group-tied linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lieattn.geometry import Neighborhood, PointClouds, find_neighbors, in_frames, padding, point_clouds
from lieattn.groups import FiniteGroup, Group, Translations, check_group
from lieattn.models._lifted_field import LiftedField
from lieattn.models._point_inputs import Kind, Readout, centered, check_options, features, length_of, read_out, vectors
from lieattn.models._poses import Poses, Posing, posed
from lieattn.nn import EdgeNetwork, FiberNorm, FramewiseBlock, LiftingConvolution, RotaryPhases


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
    neighborhood
        Neighbors that a :class:`lieattn.nn.LiftingConvolution` in front of the blocks, and
        :class:`lieattn.nn.FrameMessages` in each of them, see with distances and directions; None for none of both.
    cutoff
        Distance at which neighbors count nothing; the neighborhood's own length if absent.
    basis, hidden
        Of :class:`lieattn.nn.EdgeNetwork`, which all blocks share.
    positions
        Whether the embedding sees positions relative to the mean of the cloud, in the unit ``scale``. Where
        neighborhoods tell more, as in molecules, networks learn faster without.
    poses
        One frame for each cloud that the elements of H are multiplied with, see :class:`Posing`: with
        ``PrincipalFrames()`` the network is exactly equivariant to all rigid motions, for groups that contain the
        signs of the axes, such as T, O and I; with ``SampledFrames(1, per="cloud")`` on average. None: the frames are
        the elements of H.
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
        neighborhood: Neighborhood | None = None,
        cutoff: float | None = None,
        basis: int = 8,
        hidden: int = 16,
        positions: bool = True,
        poses: Poses | None = None,
    ) -> None:
        super().__init__()
        check_group("group", group)
        check_options(readout, kind, scale, in_channels=in_channels, outputs=outputs, layers=layers)
        self.group, self.scale, self.readout, self.kind = group, scale, readout, kind
        self.in_channels, self.channels, self.outputs = in_channels, channels, outputs
        self.vector_inputs = tuple(vector_inputs)
        self.embed_features = nn.Linear(in_channels, channels)
        width = group.dim * (positions + len(self.vector_inputs))
        self.embed_vectors = nn.Linear(width, channels, bias=False) if width else None
        self.positions = positions
        self.posing = None if poses is None else Posing(group, poses)
        self.neighborhood = neighborhood
        self.edges = self.lifting = None
        if neighborhood is not None:
            length, arrows = length_of("cutoff", neighborhood, cutoff), len(self.vector_inputs)
            self.edges = EdgeNetwork(
                group.dim, in_channels, cutoff=length, in_vectors=arrows, basis=basis, hidden=hidden
            )
            self.lifting = LiftingConvolution(hidden, channels)
        self.phases = RotaryPhases(group.dim, heads, channels // heads)
        messages = None if neighborhood is None else hidden
        self.blocks = nn.ModuleList(
            FramewiseBlock(group, channels, heads=heads, widening=widening, dropout=dropout, messages=messages)
            for _ in range(layers)
        )
        self.norm = FiberNorm(channels)
        width = outputs if kind == "invariant" else outputs * group.dim
        self.head = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, width))

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        acting = "acting on positions and vectors"
        if self.posing is None:
            return (
                f"outputs are equivariant to R^{self.group.dim} x| {self.group.name} {acting}, exactly up to rounding"
            )
        if self.posing.exact:
            return (
                f"outputs are equivariant to {self.posing.motions.name} {acting}, exactly up to rounding, for frames "
                f"are principal axes that move along"
            )
        return (
            f"outputs are equivariant to R^{self.group.dim} {acting}, exactly up to rounding; to "
            f"{self.posing.motions.name} on average over poses only"
        )

    @property
    def symmetry(self) -> Group:
        """Group that outputs are exactly equivariant to; a finite one together with translations."""
        if self.posing is None:
            return self.group
        return self.posing.motions if self.posing.exact else Translations(self.group.dim)

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
        field, clouds, frames = self.lifted_field(data)
        if self.kind == "invariant":
            out = self.head(field.mean(dim=1))
        else:
            components = self.head(field).unflatten(-1, (self.outputs, self.group.dim))
            out = torch.einsum("...aij,...aoj->...oi", frames, components) / self.group.order
        return read_out(out, clouds, self.readout, self.kind)

    def field(self, data: Any) -> Tensor:
        """Field ``[points, fiber, channels]`` behind the last block."""
        return self.lifted_field(data).field

    def lifted_field(self, data: Any) -> LiftedField:
        """Field behind the last block, the clouds, and the frames over their points."""
        clouds = point_clouds(data)
        self._check(clouds)
        x, arrows = features(data, self.in_channels, clouds), vectors(data, self.vector_inputs, clouds)
        frames = self.group.elements.to(clouds.pos)
        if self.posing is None:
            return LiftedField(self._field(x, arrows, clouds), clouds, frames)
        poses = self.posing(clouds, training=self.training)
        turned, arrows = posed(clouds, arrows, poses)
        return LiftedField(self._field(x, arrows, turned), clouds, poses[:, None] @ frames)

    def _field(self, x: Tensor, arrows: Tensor, clouds: PointClouds) -> Tensor:
        """Field of clouds in their poses, over the elements of H."""
        frames = self.group.elements.to(clouds.pos)
        position = self._in_frames(centered(clouds)[:, None] / self.scale)
        field = self.embed_features(x)[:, None].expand(-1, self.group.order, -1)
        if self.embed_vectors is not None:
            seen = [position, self._in_frames(arrows)] if self.positions else [self._in_frames(arrows)]
            field = field + self.embed_vectors(torch.cat(seen, dim=-1))
        edges = None
        if self.edges is not None and self.lifting is not None and self.neighborhood is not None:
            edges = self.edges(clouds.pos, find_neighbors(clouds, self.neighborhood), frames, x, arrows)
            field = field + self.lifting(edges)
        layout = padding(clouds.batch, clouds.num_clouds)
        phases = self.phases(position)
        for block in self.blocks:
            field = block(field, phases, layout, edges)
        normalized: Tensor = self.norm(field)
        return normalized

    def _check(self, clouds: PointClouds) -> None:
        if clouds.cell is not None:
            raise ValueError("data.cell: attention over whole clouds knows no images; use a model with a Radius")
        if clouds.pos.shape[1] != self.group.dim:
            raise ValueError(
                f"data.pos: {self.group.name} acts on {self.group.dim} coordinates, got {tuple(clouds.pos.shape)}"
            )

    def _in_frames(self, arrows: Tensor) -> Tensor:
        """h_a⁻¹ v for each frame: ``[points, names, dim]`` to ``[points, fiber, names * dim]``."""
        seen = in_frames(self.group, arrows.flatten(0, 1)).unflatten(0, arrows.shape[:2])
        return seen.transpose(1, 2).flatten(-2)
