"""Separable convolutions over positions and directions, R^3 x S^2 with a few directions over every point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lieattn._autocast import without_autocast
from lieattn._checks import check_arguments, check_counts, check_tensor
from lieattn._exact import ExactConstants
from lieattn.geometry import (
    FiniteFrames,
    LiftedGraph,
    Neighborhood,
    PrincipalFrames,
    lift,
    natural_space,
    point_clouds,
)
from lieattn.groups import FiniteGroup, pyritohedral, tetrahedral
from lieattn.models._inputs import PointInputs, features, read_inputs, vectors
from lieattn.models._jumps import jumps_of_frames, jumps_of_neighbors
from lieattn.models._network import (
    GroupField,
    Network,
    OutputKind,
    PointOutputs,
    Symmetry,
    cutoff_of,
)
from lieattn.models._poses import posed, refuse_lattices
from lieattn.nn import FrameMessages, LiftingConvolution, Pooling, ZonalLinear
from lieattn.nn.relative import AngleFeatures, EdgeNetwork, keep_variance
from lieattn.ops import RelativeTerms

_APART = 0.003  # share of the cutoff below which neighbors fade: at one place they count as little as loops


@dataclass(frozen=True)
class DirectionOptions:
    """Options of :class:`DirectionConvNet`.

    Attributes
    ----------
    axis
        Direction whose images under H are those over every point; if absent the axis of a rotation that most elements
        leave alone: four directions for T, six for O, twelve for I.
    mlp_ratio, dropout
        Hidden channels of each block over its channels; dropout behind both of its branches.
    cutoff, basis, hidden, window
        Of the :class:`lieattn.nn.relative.EdgeNetwork` that all blocks share.
    angles
        Functions of the :class:`lieattn.nn.relative.AngleFeatures`, 0 for none.
    random_poses
        Whether each cloud gets a random pose while the network trains, where the pose is principal axes. Else it learns
        by heart how the clouds it has seen lie in their axes. In evaluation the pose is principal axes either way.
    """

    axis: Sequence[float] | None = None
    mlp_ratio: int = 4
    dropout: float = 0.0
    cutoff: float | None = None
    basis: int = 8
    hidden: int = 16
    window: int = 2
    angles: int = 8
    random_poses: bool = True

    def __post_init__(self) -> None:
        check_arguments(DirectionOptions, vars(self))
        check_counts(mlp_ratio=self.mlp_ratio)
        check_counts(0, angles=self.angles)


class DirectionConvNet(Network):
    r"""A convolutional network on positions and directions: R^3 x S^2, with a few directions over every point.

    Over every point stand the directions :math:`n_a`, images of one axis under H, which K leaves alone. A block is

    .. math::
        f \leftarrow f + \sum_j k(r_{ij}, \langle e_{ij}, n_a \rangle) \odot f(x_j, a), \qquad
        f \leftarrow f + B \, \mathrm{gelu}(A f)

    with :class:`lieattn.nn.ZonalLinear` maps A, B, and kernels that see of a neighbor its distance, its features and
    the cosine with the direction: the invariants of a pair in R^3 x S^2, so that rotations about a direction make no
    difference by construction (a separable convolution, as in PONITA, Bekkers et al. 2024). Kernels are linear maps of
    an :class:`lieattn.nn.relative.EdgeNetwork` that all blocks share, of its Bessel functions, and of these times the
    cosine. The fiber is H/K, with a third of the elements of T, a fourth of those of O, a fifth of those of I.

    Nothing is normalized: how far a bond is from its length at rest is a small part of what a point sees of its
    neighbors, and forces are made of it. Neighbors fade within 0.003 of the cutoff, so points at one place do not see
    each other.

    **Equivariance.** That of :class:`FramewiseTransformer`: exact for R^3 ⋊ H; with principal axes as pose for all
    rigid motions. Without a pose other rotations have to be learned.

    Parameters
    ----------
    frames
        H, a group of rotations of space; or ``FiniteFrames(H, pose)``. ``PrincipalFrames()`` alone is short for those
        with H = T, four directions.
    in_channels, out_channels
        Channels of the invariant features ``data.x``, or what makes these features, see
        :class:`lieattn.models.CloudInputs`; numbers, or vectors, for each cloud or point.
    channels, layers
        Channels of each direction; blocks.
    neighborhood
        Whom kernels reach, images among them where clouds repeat.
    vector_inputs
        Attributes of the data with vectors ``[points, 3]``, such as ``("vel",)``, which enter by their components along
        the directions.
    kind
        ``"invariant"`` numbers, or ``"vector"`` outputs: the mean over the directions of n_a w(x, a) with numbers w.
    pool
        ``"mean"``, ``"sum"`` or ``"max"`` over the points of each cloud, or ``"none"`` for outputs at the points.
    options
        What is changed less often.

    Raises
    ------
    ValueError
        If H does not act on space, or has no rotation and the options no axis.

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

    def __init__(
        self,
        frames: FiniteGroup | FiniteFrames | PrincipalFrames,
        in_channels: PointInputs,
        out_channels: int,
        *,
        neighborhood: Neighborhood,
        channels: int = 32,
        layers: int = 4,
        vector_inputs: Sequence[str] = (),
        kind: OutputKind = "invariant",
        pool: Pooling = "mean",
        options: DirectionOptions | None = None,
    ) -> None:
        check_arguments(DirectionConvNet.__init__, locals())
        super().__init__()
        options = options or DirectionOptions()
        check_counts(out_channels=out_channels, channels=channels, layers=layers)
        self.inputs, self.in_channels, self.cloud_inputs = read_inputs(in_channels)
        if isinstance(frames, PrincipalFrames):
            frames = FiniteFrames(pyritohedral() if frames.improper else tetrahedral(), frames)
        self.frames = FiniteFrames(frames) if isinstance(frames, FiniteGroup) else frames
        self.group = group = self.frames.group
        if group.dim != 3:
            raise ValueError(f"frames: expected those of a group that acts on 3 coordinates, got {group!r}")
        self.space, self.neighborhood = natural_space(self.frames, 3), neighborhood
        self.axis = _axis(group, options.axis)
        orbit = places, directions = _orbit(group, self.axis)
        self.register_buffer("places", places, persistent=False)
        self.random_poses = options.random_poses and isinstance(self.frames.pose, PrincipalFrames)
        self.vector_inputs = tuple(vector_inputs)
        self.embed_features = nn.Linear(self.in_channels, channels)
        self.embed_vectors = nn.Linear(len(self.vector_inputs), channels, bias=False) if self.vector_inputs else None
        sizes: dict[str, Any] = {"cutoff": cutoff_of(neighborhood, options.cutoff), "basis": options.basis}
        sizes["window"] = options.window
        self.angles = AngleFeatures(3, self.in_channels, options.angles, **sizes) if options.angles else None
        self.embed_angles = None if self.angles is None else nn.Linear(self.angles.of_points, channels)
        sizes |= {"in_vectors": len(self.vector_inputs), "hidden": options.hidden}
        sizes["in_edges"] = 0 if self.angles is None else self.angles.of_edges
        self.edges = _ZonalEdges(directions, self.in_channels, **sizes)
        self.lifting = LiftingConvolution(self.edges.units, channels)
        keep_variance(self.lifting.output, math.sqrt(0.5))
        self.blocks = nn.ModuleList(_Block(directions, channels, self.edges.units, options) for _ in range(layers))
        self.head = _Head(channels, out_channels, self.axis, orbit, PointOutputs(kind, pool))
        self.has_kinks = pool == "max"

    @property
    def symmetry(self) -> Symmetry:
        """R^3 ⋊ H, or what the pose makes of it."""
        return Symmetry.of_frames(self.space, self.frames)

    @property
    def jumps(self) -> tuple[str, ...]:
        """Those of a pose, and neighborhoods that end before the window."""
        return (*jumps_of_neighbors(self.neighborhood, self.edges.cutoff), *jumps_of_frames(self.frames))

    @property
    def directions(self) -> Tensor:
        """The directions ``[directions, 3]`` float64 in the frame of a cloud."""
        return self.edges.directions

    def tied_to(self) -> dict[str, str]:
        """What the weights are tied to, and where and how neighbors fade."""
        axis = ", ".join(f"{number:.6f}" for number in self.axis.tolist())
        return {**super().tied_to(), "axis": axis, "cutoff": f"{self.edges.cutoff:g}", "window": f"{self.edges.window}"}

    def geometry(self, data: Any) -> LiftedGraph:
        """Lift the clouds; ValueError if they are not in space, or clouds repeat and the pose is principal axes."""
        clouds = point_clouds(data)
        if clouds.pos.shape[1] != 3:
            raise ValueError(f"data.pos: expected [points, 3], got {tuple(clouds.pos.shape)}")
        refuse_lattices(clouds, self.frames)
        frames, generator = posed(self.frames, self.random_poses, self.training)
        given: dict[str, Any] = {"generator": generator}
        if self.vector_inputs:
            given["vectors"] = vectors(data, self.vector_inputs, clouds)
        with without_autocast(clouds.device):
            graph = lift(clouds, frames, self.neighborhood, self.space, **given)
        # The network of edges has a window of its own.
        return graph.with_relative(replace(graph.relative, cutoff=None))

    def field(self, data: Any, geometry: LiftedGraph | None = None) -> GroupField:
        """Field behind the last block, alike at all elements of H with one direction; see :meth:`Network.field`."""
        graph = self.geometry(data) if geometry is None else geometry
        invariants, directed = features(data, self.inputs, graph), vectors(data, self.vector_inputs, graph)
        x = self.embed_features(invariants)[:, None].expand(-1, self.edges.fiber, -1)
        pairs = None
        with without_autocast(graph.device):
            if self.angles is not None:
                around, pairs = self.angles(graph, invariants)
            along = self.edges.along(graph, directed)
        if self.angles is not None and self.embed_angles is not None:
            x = x + self.embed_angles(around)[:, None]
        if self.embed_vectors is not None:
            x = x + self.embed_vectors(along)
        # One network of what all directions see of an edge, of which every block makes kernels of its own.
        terms = self.edges(graph, invariants, directed, pairs)
        x = x + self.lifting(terms, graph)
        for block in self.blocks:
            x = self._through(block, x, graph, terms)
        return GroupField(self.on_frames(x), graph)

    def on_frames(self, x: Tensor) -> Tensor:
        """A field over directions, ``[points, directions, channels]``, as one over H, ``[points, fiber, channels]``."""
        check_tensor("x", x, "a floating tensor [points, directions, channels]")
        if x.ndim != 3 or x.shape[1] != self.edges.fiber:
            raise ValueError(f"x: expected [points, {self.edges.fiber}, channels], got {tuple(x.shape)}")
        return x.index_select(1, self.places)


class _ZonalEdges(ExactConstants, EdgeNetwork):
    """An edge network that sees of vectors their components along the directions over a point.

    Beside its units it gives its Bessel functions, alone and times the cosine: networks learn what is smooth in the
    distance, such as forces, faster from these.
    """

    directions: Tensor  # [directions, 3] float64

    def __init__(self, directions: Tensor, in_channels: int, **options: Any) -> None:
        super().__init__(3, in_channels, **options)
        self.fiber, self.units = len(directions), self.hidden.out_features + 2 * self.basis
        self.register_constant("directions", directions)
        self.arrows = nn.Linear(1 + 2 * self.in_vectors, self.hidden.out_features, bias=False)
        keep_variance(self.arrows, math.sqrt(1.5))  # the square of a cosine is a third in the mean

    def along(self, graph: LiftedGraph, vectors: Tensor, points: Tensor | None = None) -> Tensor:
        """Components ``[n, directions, count]`` of vectors ``[n, count, 3]`` over the points i, or ``points[i]``."""
        pose = graph.relative.pose
        if pose is not None:
            vectors = torch.einsum("pji,pkj->pki", pose if points is None else pose[points], vectors)
        return (vectors @ self.directions.to(vectors).T).mT

    def _components(self, graph: LiftedGraph, vectors: Tensor, points: Tensor) -> Tensor:
        return self.along(graph, vectors, points)

    def _units(self, seen: Tensor, invariants: Tensor, weight: Tensor, length: Tensor, radial: Tensor) -> Tensor:
        # Nothing bounds the field: where all points coincide it would be 10^6 times what it is elsewhere.
        weight = weight * length.square() / (length.square() + _APART**2)
        own, radial = super()._units(seen, invariants, weight, length, radial), (radial * weight[:, None])[:, None]
        return torch.cat([own, radial.expand(-1, self.fiber, -1), radial * seen[..., :1]], dim=-1)


class _Block(nn.Module):
    """A convolution within each direction and channel, then a network with one hidden layer over all of them."""

    def __init__(self, directions: Tensor, channels: int, units: int, options: DirectionOptions) -> None:
        super().__init__()
        self.messages = FrameMessages(units, channels)
        keep_variance(self.messages.kernel, math.sqrt(2))
        self.linear1 = ZonalLinear(directions, channels, options.mlp_ratio * channels)
        self.linear2 = ZonalLinear(directions, options.mlp_ratio * channels, channels)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, graph: LiftedGraph, terms: RelativeTerms) -> Tensor:
        """Field ``[points, directions, channels]`` to the same, with the terms of the edges."""
        x = x + self.dropout(self.messages(x, graph, terms))
        return x + self.dropout(self.linear2(F.gelu(self.linear1(x))))


class _Head(ExactConstants, nn.Sequential):
    """A network with one hidden layer at every direction, and the mean over them: of numbers, or numbers times n_a."""

    axis: Tensor
    first: Tensor

    def __init__(
        self,
        channels: int,
        out_channels: int,
        axis: Tensor,
        orbit: tuple[Tensor, Tensor],
        outputs: PointOutputs,
    ) -> None:
        places, directions = orbit
        super().__init__(
            ZonalLinear(directions, channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, out_channels)
        )
        self.outputs = outputs
        self.register_constant("axis", axis)
        first = [places.tolist().index(number) for number in range(len(directions))]
        self.register_buffer("first", torch.tensor(first), persistent=False)  # an element for each direction

    @property
    def kind(self) -> str:
        """How the outputs transform."""
        return self.outputs.kind

    def forward(self, x: Tensor, graph: LiftedGraph) -> Tensor:  # type: ignore[override]
        """Field ``[points, fiber, channels]`` to outputs ``[clouds | points, out_channels]``, vectors with 3."""
        hidden, act, last = self
        x = x.index_select(1, self.first)
        if self.kind == "invariant":
            return self.outputs(last(act(hidden(x)).mean(dim=1)), graph)
        # What all directions have in common cancels in their sum, for which half precision is too little.
        with without_autocast(graph.device):
            frames = graph.frames.index_select(-3, self.first)
            directions = (frames @ self.axis.to(graph.pos)).expand(len(x), -1, -1)
            values = last(act(hidden(x.to(graph.pos))))
            return self.outputs(torch.einsum("pac,paj->pcj", values, directions) / len(self.first), graph)


def _axis(group: FiniteGroup, axis: Sequence[float] | None) -> Tensor:
    """The axis ``[3]`` float64 of length 1 that was given, or that of a rotation that most elements leave alone."""
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
            # Of both ends of a line LAPACK gives one or the other, by the processor: weights must fit on all of them.
            candidate = fixed.Vh[2] * fixed.Vh[2][fixed.Vh[2].abs() > 1e-6][0].sign()
            count = int(((matrices @ candidate - candidate).norm(dim=-1) < 1e-6).sum())
            if count > most:
                found, most = candidate, count
    if found is None:
        raise ValueError(f"axis: must be given in DirectionOptions, since {group.name} has no rotation with an axis")
    return found


def _orbit(group: FiniteGroup, axis: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the direction that each element takes the axis to, and the directions ``[directions, 3]`` float64."""
    images = group.matrices(axis) @ axis
    places, directions = [], list[Tensor]()
    for image in images:
        near = [number for number, direction in enumerate(directions) if (direction - image).norm() < 1e-6]
        places.append(near[0] if near else len(directions))
        if not near:
            directions.append(image)
    return torch.tensor(places), torch.stack(directions)
