"""Separable convolutions over R^3 x S^2 with a few directions over every point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_counts, check_positive, check_tensor
from lieattn._core.contexts import as_without_autocast, without_autocast
from lieattn._core.numerics import ExactConstants, keep_variance
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    LiftedGraph,
    Nearest,
    Neighborhood,
    PixelSquare,
    PrincipalFrames,
    Radius,
    point_clouds,
)
from lieattn.groups import FiniteGroup, pyritohedral, tetrahedral
from lieattn.models._base.inputs import PointInputs, VectorInputs, features, in_precision_of_weights, vectors
from lieattn.models._base.network import GroupField, OutputKind, PointOutputs
from lieattn.models.frames._network import FrameHead, FrameNetwork, FrameOptions, in_frames
from lieattn.nn import FrameMessages, LiftingConvolution, Pooling, RotationHead, ZonalLinear
from lieattn.nn.relative import EdgeNetwork
from lieattn.reps import Pseudovector

_APART = 0.003  # fraction of the cutoff below which neighbors fade, so that points at the same place count nothing


@dataclass(frozen=True)
class DirectionOptions(FrameOptions):
    """Options of :class:`DirectionConvNet`: those of all networks on frames, with other defaults.

    Attributes
    ----------
    mlp_ratio, dropout, cutoff, basis, hidden, window, angles, random_poses, edge_channels
        See :class:`FrameOptions`. Other poses than principal axes are not replaced by random ones.
    axis
        An axis ``[3]``. Its images under H are the directions over every point. By default it is the rotation axis with
        the largest stabilizer in H, which gives four directions for T, six for O, and twelve for I. Vectors are most
        precise if the directions are spread evenly in space.
    gain
        Positive factor of the initial kernels of the blocks. 1 suits molecules with about ten neighbors and up to four
        blocks. The field grows from block to block: on compact molecules of 18 atoms, initial outputs are about 20 for
        four blocks within 3 Å, but several hundred for six blocks or within 5 Å (in QM9 a tenth of that), and training
        reduces them slowly. With 0.1 they are near 1 or below. Use 0.01 for sampled clouds with tens of neighbors or
        points much closer together than the cutoff, for which they would be up to 10^6 and more.
    norm
        With ``"layer"``, the feed-forward network of a block sees the convolution alone, after a layer normalization
        over its channels. Trainings on forces as gradients of energies are faster with it in their first half; at the
        end it was more accurate for ethanol, and less for aspirin.
    """

    window: int = 2
    angles: int = 8
    random_poses: bool = True
    axis: Sequence[float] | None = None
    gain: float = 1.0
    norm: Literal["none", "layer"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(gain=self.gain)


class DirectionConvNet(FrameNetwork):
    r"""A convolutional network on positions and directions: R^3 x S^2, with a few directions over every point.

    The directions :math:`n_a` over every point are the images of one axis under H; K is the stabilizer of the axis. A
    block is

    .. math::
        f \leftarrow f + \sum_j k(r_{ij}, \langle e_{ij}, n_a \rangle) \odot f(x_j, a), \qquad
        f \leftarrow f + B \, \mathrm{gelu}(A f)

    with :class:`lieattn.nn.ZonalLinear` maps A, B. The kernels depend on the distance and the features of a neighbor
    and on the cosine between its displacement and the direction. These are invariants of a pair in R^3 x S^2, so the
    kernels are invariant to rotations about a direction by construction (a separable convolution, as in PONITA, Bekkers
    et al. 2024). A kernel is a linear map of the units of an :class:`lieattn.nn.relative.EdgeNetwork`, which all blocks
    share, of its Bessel functions, and of the products of these and the cosine. The fiber is H/K: it has a third of the
    elements of T, a fourth of those of O, or a fifth of those of I.

    By default there is no normalization. With more than four layers or about ten neighbors,
    ``DirectionOptions(gain=...)`` keeps the field from growing. With ``DirectionOptions(norm="layer")`` a block is
    :math:`f \leftarrow f + B \, \mathrm{gelu}(A \, \mathrm{LN}(\sum_j k \odot f(x_j) + c))` as in PONITA. The weight of
    a neighbor vanishes as its distance approaches 0 (within 0.003 of the cutoff), so points at the same place do not
    interact. Nor does a point interact with itself, so :meth:`geometry` leaves out such edges if it can.

    **Equivariance.** As for :class:`FramewiseTransformer`: exact for R^3 ⋊ H, and for all rigid motions if the pose is
    given by principal axes. Without a pose, the network has to learn the rotations that are not in H.

    If a reflection maps the directions to themselves, and no input field is axial, the network is equivariant to it
    too, and invariant outputs do not tell left from right. This is so for T, O and I with their default axes, and not
    for ``PrincipalFrames()``.

    Parameters
    ----------
    frames
        H, a finite group in three dimensions; or ``FiniteFrames(H, pose)``. ``PrincipalFrames()`` is short for
        ``FiniteFrames(T, PrincipalFrames())``, with four directions. ``PrincipalFrames(improper=True)`` is short for
        Th in place of T, with six directions; the network is then exactly equivariant to reflections too.
    in_channels, out_channels, pool
        See :class:`FramewiseTransformer`.
    channels, layers
        Channels per direction; number of blocks.
    neighborhood
        Neighborhood of the convolutions. In periodic clouds it includes the periodic images.
    vector_inputs
        Names of attributes of the data that hold vectors ``[points, 3]``, such as ``("vel",)``. The network sees their
        components along the directions. A mapping names any fields as in :class:`lieattn.models.VectorEmbedding`, of
        which the network sees the components that K keeps.
    kind
        ``"invariant"`` for numbers; ``"vector"`` for vectors, means over the directions of n_a w(x, a) with numbers w.
        They are in the span of the directions: along the axis if H is C_n about this axis.
    options
        Further options.

    Raises
    ------
    ValueError
        If H does not act on three coordinates, or if it has no rotation with an axis and the options give no axis. In
        :class:`lieattn.models.FieldModel`, if the head is a :class:`lieattn.nn.RotationHead` and mirrors map all
        directions to themselves, or the directions are on one line: the poses would not be determined.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from lieattn.geometry import PrincipalFrames, Radius
    >>> from lieattn.models import DirectionConvNet
    >>> network = DirectionConvNet(PrincipalFrames(), 2, 1, neighborhood=Radius(3.0))
    >>> network(Data(x=torch.randn(9, 2), pos=torch.randn(9, 3))).shape
    torch.Size([1, 1])
    >>> len(network.directions), network.symmetry.name
    (4, 'SE(3)')
    """

    places: Tensor
    edges: _ZonalEdges
    lifting: LiftingConvolution

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames | PrincipalFrames,
        in_channels: PointInputs,
        out_channels: int,
        *,
        neighborhood: Neighborhood,
        channels: int = 32,
        layers: int = 4,
        vector_inputs: VectorInputs = (),
        kind: OutputKind = "invariant",
        pool: Pooling = "mean",
        options: DirectionOptions | None = None,
    ) -> None:
        check_arguments(DirectionConvNet.__init__, locals())
        options = options or DirectionOptions()
        check_counts(out_channels=out_channels, channels=channels, layers=layers)
        chosen = in_frames(frames, lambda improper: pyritohedral() if improper else tetrahedral())
        if chosen.group.dim != 3:
            raise ValueError(f"frames: expected those of a group that acts on 3 coordinates, got {chosen.group!r}")
        axis = _axis(chosen.group, options.axis)
        orbit = places, directions = _orbit(chosen.group, axis)
        sizes: dict[str, Any] = {"channels": channels, "vector_inputs": vector_inputs, "along": 1}
        super().__init__(chosen, in_channels, neighborhood, options, partial(_ZonalEdges, directions), **sizes)
        self.tied = {**self.tied, "axis": ", ".join(f"{number:.6f}" for number in axis.tolist())}
        self.axis, preserving = axis, chosen.group.elements[places == places[chosen.group.identity_index]]
        for name, rep in self.field_inputs.items():
            if rep.matrix(preserving).mean(dim=0).trace() < 0.5:
                reason = f"no component of {rep.name} is the same for all elements that keep a direction"
                raise ValueError(f"vector_inputs[{name!r}]: {reason}; use a FramewiseTransformer")
        self.register_buffer("places", places, persistent=False)
        keep_variance(self.lifting.output, math.sqrt(0.5))
        self.blocks = nn.ModuleList(_Block(directions, channels, self.edges.units, options) for _ in range(layers))
        self.head = _Head(channels, out_channels, axis, orbit, PointOutputs(kind, pool))
        self.has_kinks = pool == "max"

    @property
    def directions(self) -> Float[Tensor, "directions 3"]:
        """Directions ``[directions, 3]`` float64 in the frame of a cloud."""
        return self.edges.directions

    def check_head(self, head: nn.Module) -> None:
        """Refuse rotations that the field, which is constant on the cosets of K, does not determine."""
        if not any(isinstance(part, RotationHead) for part in head.modules()):
            return
        places, turns = self.places.cpu(), Pseudovector().matrix(self.group.elements)
        # The pseudovectors that K preserves, and their images under H, have to span at least a plane.
        preserved = turns[places == places[self.group.identity_index]].mean(dim=0)
        if torch.linalg.matrix_rank((turns @ preserved).movedim(0, 1).flatten(1), rtol=1e-6) < 2:
            raise ValueError(
                f"head: a field over the directions of {self.group.name} does not determine rotations; use another "
                "group such as tetrahedral(), another DirectionOptions(axis=...), or a FramewiseTransformer"
            )

    @in_precision_of_weights
    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the clouds.

        Raises
        ------
        ValueError
            If positions do not have three coordinates, or clouds are periodic and the pose is given by principal axes.
        """
        clouds = point_clouds(data)
        if clouds.pos.shape[1] != 3:
            raise ValueError(f"data.pos: expected [points, 3], got {tuple(clouds.pos.shape)}")
        graph = self._lifted(clouds, data, _without_loops(self.neighborhood))
        # The edge network has its own window.
        return graph.with_relative(replace(graph.relative, cutoff=None))

    @in_precision_of_weights
    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        """Field after the last block, constant on the cosets of K; see :meth:`Network.field`."""
        graph = self.geometry(data) if geometry is None else geometry
        invariants, directed = features(data, self.inputs, graph), vectors(data, self.vector_inputs, graph)
        x = self.embed_features(invariants)[:, None].expand(-1, self.edges.fiber, -1)
        around, seen = self._on_edges(data, graph, invariants, directed)
        x = x if around is None else x + around
        if self.embed_vectors is not None:
            with without_autocast(graph.device):
                along = [self.edges.along(graph, directed), *map(self._on_directions, self._other_fields(data, graph))]
            x = x + self.embed_vectors(torch.cat(along, dim=-1))
        # One edge network for all blocks; each block has its own linear map from the units to its kernels.
        terms = self.edges(seen, invariants)
        x = x + self.lifting(terms.psi, graph)
        seen = seen.carrying(terms=terms)
        for block in self.blocks:
            x = self._through(block, x, seen)
        return GroupField(self.on_frames(x), graph)

    def _on_directions(self, x: Tensor) -> Tensor:
        """Return the means ``[points, directions, *]`` of a field over H over the elements with the same direction."""
        total = x.new_zeros(len(x), self.edges.fiber, x.shape[2]).index_add(1, self.places, x)
        return total * (self.edges.fiber / x.shape[1])

    def on_frames(self, x: Float[Tensor, "points directions channels"]) -> Float[Tensor, "points fiber channels"]:
        """Convert a field over directions, ``[points, directions, channels]``, to one over H.

        The result is ``[points, fiber, channels]``.
        """
        check_tensor("x", x, "a floating tensor [points, directions, channels]")
        if x.ndim != 3 or x.shape[1] != self.edges.fiber:
            raise ValueError(f"x: expected [points, {self.edges.fiber}, channels], got {tuple(x.shape)}")
        return x.index_select(1, self.places)


class _ZonalEdges(ExactConstants, EdgeNetwork):
    """An edge network that sees the components of vectors along the directions over a point.

    The output consists of its units and of its Bessel functions, alone and multiplied by the cosine. The latter let
    networks learn smooth functions of the distance faster, such as forces.
    """

    directions: Tensor  # [directions, 3] float64

    def __init__(self, directions: Tensor, in_channels: int, **options: Any) -> None:
        super().__init__(3, in_channels, **options)
        self.fiber, self.units = len(directions), self.hidden.out_features + 2 * self.basis
        self.register_constant("directions", directions)
        self.arrows = nn.Linear(1 + 2 * self.in_vectors, self.hidden.out_features, bias=False)
        keep_variance(self.arrows, math.sqrt(1.5))  # the mean of the square of a cosine is a third

    def along(self, graph: LiftedGraph, vectors: Tensor, points: Tensor | None = None) -> Tensor:
        """Components ``[n, directions, count]`` of the vectors ``[n, count, 3]`` at all points, or at ``points``."""
        pose = graph.relative.pose
        if pose is not None:
            vectors = torch.einsum("pji,pkj->pki", pose if points is None else pose[points], vectors)
        return (vectors @ self.directions.to(vectors).T).mT

    def _components(self, graph: LiftedGraph, vectors: Tensor, points: Tensor) -> Tensor:
        return self.along(graph, vectors, points)

    def _units(self, seen: Tensor, invariants: Tensor, weight: Tensor, square: Tensor, radial: Tensor) -> Tensor:
        # Without this factor, the field of coincident points would be 10^6 times as large as elsewhere.
        weight = weight * square / (square + _APART**2)
        own, radial = super()._units(seen, invariants, weight, square, radial), (radial * weight[:, None])[:, None]
        return torch.cat([own, radial.expand(-1, self.fiber, -1), radial * seen[..., :1]], dim=-1)


class _Block(nn.Module):
    """A convolution within each direction and channel, then a feed-forward network over directions and channels."""

    def __init__(self, directions: Tensor, channels: int, units: int, options: DirectionOptions) -> None:
        super().__init__()
        self.messages = FrameMessages(units, channels)
        keep_variance(self.messages.kernel, math.sqrt(2) * options.gain)
        self.linear1 = ZonalLinear(directions, channels, options.mlp_ratio * channels)
        self.linear2 = ZonalLinear(directions, options.mlp_ratio * channels, channels)
        self.dropout = nn.Dropout(options.dropout)
        normed = options.norm == "layer"
        self.bias = nn.Parameter(torch.zeros(channels)) if normed else None
        self.norm = nn.LayerNorm(channels) if normed else None

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:
        """Map a field ``[points, directions, channels]`` to a field of the same shape."""
        seen = self.messages(x, graph)
        if self.norm is None:
            x = seen = x + self.dropout(seen)
        else:
            seen = self.norm(seen + self.bias)
        return x + self.dropout(self.linear2(F.gelu(self.linear1(seen))))


class _Head(ExactConstants, FrameHead):
    """A network with one hidden layer, and the mean over the directions of its output, or of its output times n_a."""

    axis: Tensor
    first: Tensor

    def __init__(
        self, channels: int, out_channels: int, axis: Tensor, orbit: tuple[Tensor, Tensor], outputs: PointOutputs
    ) -> None:
        places, directions = orbit
        hidden = ZonalLinear(directions, channels, 2 * channels)
        super().__init__(hidden, nn.Linear(2 * channels, out_channels), out_channels, outputs)
        self.register_constant("axis", axis)
        first = [places.tolist().index(number) for number in range(len(directions))]
        self.register_buffer("first", torch.tensor(first), persistent=False)  # one element per direction

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:  # type: ignore[override]
        """Map a field ``[points, fiber, channels]`` to ``[clouds | points, out_channels]``, or ``[..., 3]`` vectors."""
        hidden, act, last = self
        x = x.index_select(1, self.first)
        if self.kind == "invariant":
            return self.outputs(as_without_autocast(last, act(hidden(x)).mean(dim=1), last), graph)
        # The part that all directions share cancels in the sum, which needs more than half precision.
        with without_autocast(graph.device):
            frames = graph.frames.index_select(-3, self.first)
            directions = (frames @ self.axis.to(graph.pos)).expand(len(x), -1, -1)
            values = last(act(hidden(x.to(graph.pos))))
            return self.outputs(torch.einsum("pac,paj->pcj", values, directions) / len(self.first), graph)


def _without_loops(neighborhood: Neighborhood) -> Neighborhood:
    """Return the neighborhood without edges from points to themselves, if it can be made without them."""
    if isinstance(neighborhood, AllPairs | Nearest | PixelSquare) or (
        isinstance(neighborhood, Radius) and not neighborhood.smooth
    ):
        return replace(neighborhood, include_self=False)
    return neighborhood


def _axis(group: FiniteGroup, axis: Sequence[float] | None) -> Tensor:
    """Return the unit vector ``[3]`` float64 of the given axis, or the rotation axis with the largest stabilizer."""
    if axis is not None:
        given = torch.tensor([float(number) for number in axis], dtype=torch.float64)
        if given.shape != (3,) or not 0 < given.norm() < math.inf:
            raise ValueError(f"axis: expected three numbers, not all 0, got {axis}")
        return given / given.norm()
    matrices = group.matrices(torch.zeros(1, dtype=torch.float64))
    found, most = None, 1
    for matrix in matrices:
        fixed = torch.linalg.svd(matrix - torch.eye(3, dtype=torch.float64))
        if torch.linalg.det(matrix) > 0 and fixed.S[1] > 1e-6 > fixed.S[2]:
            # The sign that LAPACK returns depends on the processor, but weights must fit on all of them.
            candidate = fixed.Vh[2] * fixed.Vh[2][fixed.Vh[2].abs() > 1e-6][0].sign()
            count = int(((matrices @ candidate - candidate).norm(dim=-1) < 1e-6).sum())
            if count > most:
                found, most = candidate, count
    if found is None:
        raise ValueError(f"axis: must be given in DirectionOptions, since {group.name} has no rotation with an axis")
    return found


def _orbit(group: FiniteGroup, axis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the direction that each element maps the axis to, and the directions ``[n, 3]`` float64."""
    images = group.matrices(axis) @ axis
    places, directions = [], list[Tensor]()
    for image in images:
        near = [number for number, direction in enumerate(directions) if (direction - image).norm() < 1e-6]
        places.append(near[0] if near else len(directions))
        if not near:
            directions.append(image)
    return torch.tensor(places), torch.stack(directions)
