"""LieTransformer: equivariant self-attention for Lie groups (Hutchinson et al., ICML 2021, arXiv 2012.10885)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn._checks import kind as kind_of
from lieattn.geometry import AllPairs, FiniteFrames, LiftedElements, Nearest, Neighborhood, SampledFrames
from lieattn.groups import SE, Group, Translations, cyclic
from lieattn.models._lie_coordinates import Coordinates
from lieattn.models._lie_features import sorted_distances, species_features
from lieattn.models._lie_graph import Frames, Lifting
from lieattn.models._lie_guarantee import guarantee, sees_order, symmetry
from lieattn.models._lie_local import LocalLifting, lifted
from lieattn.models._lie_readout import CloudReadout, Pooling, Readout, VectorReadout
from lieattn.models._lifted_field import LiftedField, VectorEmbedding
from lieattn.models._point_inputs import Kind, length_of, vectors
from lieattn.nn import (
    BlockNorm,
    FeaturePart,
    Kernel,
    LieBlock,
    LieSelfAttention,
    LocationPart,
    RelativeGraph,
)
from lieattn.ops import Activation, Normalization
from lieattn.spaces import Euclidean, HomogeneousSpace

Inputs = Literal["x", "species", "distances"]


class LieTransformer(nn.Module):
    r"""Self-attention on points lifted to a Lie group, and invariant outputs for every cloud.

    Points x_i of X = G/H are lifted to group elements g_ia; a linear map embeds the features, the same over the whole
    fiber; blocks of :class:`lieattn.nn.LieSelfAttention` and an MLP follow; the field is pooled.

    **Equivariance.** Outputs do not change when all elements move by one element of G. :attr:`guarantee` says in words
    for which motions of the *points* that is so with the frames chosen: exactly for a finite group of frames and for
    frames made of the data, on average for sampled ones.

    Parameters
    ----------
    in_channels
        Features of a point; None for ``inputs="species"``, which knows.
    outputs
        Numbers, or vectors, for every cloud.
    space
        X = G/H, for example ``Euclidean(SE(3))``.
    frames
        What stands over each point: ``FiniteFrames``, ``SampledFrames``, ``PrincipalFrames`` or ``GivenFrames``; None
        where the stabilizer H is trivial.
    neighborhood
        Which points attend to which.
    channels, layers, heads
        Of the attention blocks.
    kernel, normalize, hidden, features, location, feature_channels, dropout
        See :class:`lieattn.nn.LieSelfAttention`.
    activation
        Of all networks and MLPs.
    norm
        See :class:`lieattn.nn.LieBlock`.
    readout, pool, head_norm
        See :class:`CloudReadout`: ``"pool_first"`` is the authors' ``model_1``, ``"point_first"`` their ``lieconv``.
    kind
        ``"invariant"`` numbers, or ``"vector"`` outputs, whose read-out is :class:`VectorReadout`: for orthogonal
        frames, with ``pool`` ``"mean"``, ``"sum"`` or, at points, ``"none"``.
    coordinates
        Of relative elements: ``"smooth"``, or one of the authors' for weights trained with them, see
        :func:`lieattn.models.published_pairs`.
    scale
        Length that translations are divided by; the neighborhood's own if absent, or 1.
    squash
        Whether the coordinates are bounded by a tanh of their length.
    keep
        Share of the neighbors that a training step keeps, drawn anew each time (the authors' ``fill``). In eval mode
        all neighbors are used.
    inputs
        ``"x"``: features ``data.x``; ``"species"``: one-hot ``data.z`` times powers of the charge; ``"distances"``:
        sorted distances of a point to the others of its cloud, as many as in_channels.
    species
        Nuclear charges that ``"species"`` knows.
    vector_inputs
        Names of attributes of the data with vectors ``[points, dim]``, such as ``("vel",)``, for orthogonal frames;
        each enters by its components in the frames.
    eps
        Of the normalizations of the blocks.
    radial
        Number of Bessel functions of the distance that scores see beside the coordinates; for rigid motions.
    lifting
        Hidden units of the :class:`lieattn.nn.EdgeNetwork` of a :class:`lieattn.nn.LiftingConvolution`, which adds to
        the embedded features what each frame sees of the neighbors of its point; 0 for none. For rigid motions.
    cutoff
        Distance at which both vanish; the neighborhood's own length if absent.
    """

    def __init__(
        self,
        in_channels: int | None,
        outputs: int = 1,
        *,
        space: HomogeneousSpace,
        frames: Frames | None = None,
        neighborhood: Neighborhood,
        channels: int = 512,
        layers: int = 6,
        heads: int = 8,
        kernel: Kernel = "sum",
        normalize: Normalization = "softmax",
        hidden: int = 16,
        features: FeaturePart = "mixed",
        location: LocationPart = "coordinates",
        feature_channels: int | None = None,
        dropout: float = 0.0,
        activation: Activation = "silu",
        norm: BlockNorm = "layer_pre",
        readout: Readout = "pool_first",
        pool: Pooling = "mean",
        head_norm: bool = False,
        coordinates: Coordinates = "smooth",
        scale: float | None = None,
        squash: bool = False,
        keep: float = 1.0,
        inputs: Inputs = "x",
        species: Sequence[int] = (1, 6, 7, 8, 9),
        vector_inputs: Sequence[str] = (),
        eps: float = 1e-5,
        kind: Kind = "invariant",
        radial: int = 0,
        lifting: int = 0,
        cutoff: float | None = None,
    ) -> None:
        super().__init__()
        if inputs not in get_args(Inputs):
            raise ValueError(f"inputs: expected one of {get_args(Inputs)}, got {inputs!r}")
        if inputs == "species" and in_channels is None:
            in_channels = 3 * len(species)
        if in_channels is None:
            raise ValueError(f"in_channels: expected the number of features, since inputs are {inputs!r}, got None")
        check_count("in_channels", in_channels)
        check_count("outputs", outputs)
        check_count("layers", layers)
        self.inputs, self.in_channels, self.species = inputs, in_channels, tuple(species)
        self.lifting = Lifting(space, frames, neighborhood, coordinates, scale, squash, keep, radial, cutoff)
        self.embed = nn.Linear(in_channels, channels)
        self.vector_inputs = tuple(vector_inputs)
        self.embed_vectors = VectorEmbedding(vector_inputs, space.group.dim, channels)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            attention = LieSelfAttention(
                channels,
                self.lifting.num_coordinates,
                heads=heads,
                kernel=kernel,
                normalize=normalize,
                hidden=hidden,
                activation=activation,
                features=features,
                location=location,
                feature_channels=feature_channels,
                dropout=dropout,
            )
            self.blocks.append(LieBlock(attention, channels, norm=norm, activation=activation, eps=eps))
        self.head: CloudReadout | VectorReadout
        if kind == "invariant":
            self.head = CloudReadout(
                channels, outputs, readout=readout, pool=pool, activation=activation, norm=head_norm
            )
        elif kind == "vector":
            self.head = VectorReadout(channels, outputs, space.group.dim, pool=pool, activation=activation)
        else:
            raise ValueError(f"kind: expected 'invariant' or 'vector', got {kind!r}")
        self.kind = kind
        self.local = None
        if lifting:
            cutoff = length_of("cutoff", neighborhood, cutoff)
            self.local = LocalLifting(space, in_channels, len(self.vector_inputs), channels, lifting, cutoff)

    @classmethod
    def qm9(cls, outputs: int = 1, **options: Any) -> LieTransformer:
        """Network for QM9 with the authors' defaults: 10.0 M parameters with their coordinates of SE(3)."""
        preset = {
            "space": Euclidean(SE(3)),
            "frames": SampledFrames(1),
            "neighborhood": AllPairs(),
            "inputs": "species",
        }
        return cls(None, outputs, **{**preset, **options})

    @classmethod
    def qm9_published(cls, outputs: int = 1, **options: Any) -> LieTransformer:
        """Network for QM9 of the authors' published run: 101.8 M parameters with their quaternions.

        Theirs takes 25 of the nearest 50 *elements*, at random; this one about as many points with all of their frames.
        """
        preset = {
            "space": Euclidean(SE(3)),
            "frames": SampledFrames(4),
            "neighborhood": Nearest(12),
            "keep": 0.5,
            "inputs": "species",
            "channels": 1504,
            "layers": 11,
            "kernel": "combined",
            "normalize": "mean",
            "hidden": 6,
            "feature_channels": 8,
            "readout": "point_first",
            "coordinates": "quaternion",
            "squash": True,
        }
        return cls(None, outputs, **{**preset, **options})

    @classmethod
    def constellation(cls, repetitions: int = 2, *, samples: int = 4, **options: Any) -> LieTransformer:
        """Network that counts four patterns among points of the plane, ``[clouds, 4 * (repetitions + 1)]`` logits."""
        preset = {
            "space": Euclidean(SE(2)),
            "frames": SampledFrames(samples),
            "neighborhood": AllPairs(),
            "inputs": "distances",
        }
        return cls(17 * repetitions - 1, 4 * (repetitions + 1), **{**preset, **options})

    @classmethod
    def springs(cls, **options: Any) -> LieTransformer:
        """Potential of particles on springs, invariant to translations: 841,641 parameters. Inputs are (mass, k)."""
        preset = {"space": Euclidean(Translations(2)), "neighborhood": AllPairs(), "channels": 160, "layers": 5}
        return cls(2, 1, **{**preset, "normalize": "mean", **options})

    @classmethod
    def springs_grid(cls, rotations: int = 2, **options: Any) -> LieTransformer:
        """Potential of particles on springs, invariant to R^2 ⋊ C_n: 139,353 parameters. Inputs are (mass, k)."""
        preset = {
            "space": Euclidean(SE(2)),
            "frames": FiniteFrames(cyclic(rotations)),
            "neighborhood": AllPairs(),
            "channels": 80,
            "layers": 3,
            "normalize": "mean",
            "coordinates": "grid",
        }
        return cls(2, 1, **{**preset, **options})

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        return guarantee(self.lifting.space, self.lifting.frames, self.lifting.coordinates, self.kind)

    @property
    def symmetry(self) -> Group | None:
        """Group that leaves the outputs alone exactly; a finite one together with translations, None for no group."""
        return symmetry(self.lifting.space, self.lifting.frames, self.lifting.coordinates)

    @property
    def sees_order(self) -> bool:
        """Whether the order of the points matters: it does where frames are drawn for each point."""
        return sees_order(self.lifting.frames)

    def graph(self, data: Any, *, generator: torch.Generator | None = None) -> LiftedElements:
        """Lifted clouds with the coordinates of all pairs.

        In training mode random frames and the share ``keep`` of the neighbors are new at every call, drawn from the
        generator or torch's default one; in eval mode the same data gives the same graph.
        """
        return self.lifting(data, training=self.training, generator=generator)

    def forward(self, data: Any, graph: RelativeGraph | None = None) -> Tensor:
        """Outputs ``[clouds, outputs]``, or vectors ``[clouds, outputs, dim]`` (one: ``[clouds, dim]``), or per point.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with ``pos`` ``[points, dim]`` and features ``x``
            ``[points, in_channels]`` or charges ``z`` ``[points]``.
        graph
            What :meth:`graph` gives for ``data``; built here if absent.
        """
        graph = self.graph(data) if graph is None else graph
        field = self.field(data, graph)
        if isinstance(self.head, VectorReadout):
            return cast(Tensor, self.head(field, lifted(graph)))
        return cast(Tensor, self.head(field, graph.batch, graph.num_clouds))

    def field(self, data: Any, graph: RelativeGraph) -> Tensor:
        """Field ``[points, fiber, channels]`` behind the last block."""
        x, seen = self.point_features(data, graph), self.embed_vectors(data, graph)
        if self.local is not None:
            around = self.local(x, vectors(data, self.vector_inputs, lifted(graph)), lifted(graph))
            seen = around if seen is None else seen + around
        return self.features(x, graph, seen)[-1]

    def lifted_field(self, data: Any) -> LiftedField:
        """Field behind the last block, the clouds, and the frames over their points."""
        graph = self.graph(data)
        return LiftedField(self.field(data, graph), graph, graph.frames)

    def features(self, x: Tensor, graph: RelativeGraph, vectors: Tensor | None = None) -> list[Tensor]:
        """Fields ``[points, fiber, channels]``: embedded, then of each block.

        Parameters
        ----------
        x
            Features ``[points, in_channels]``.
        graph
            The graph.
        vectors
            Added to the embedded features, ``[points, fiber, channels]``.
        """
        if x.ndim != 2 or x.shape[1] != self.in_channels or not x.is_floating_point():
            raise ValueError(
                f"x: expected floating features [points, {self.in_channels}], got {x.dtype} {tuple(x.shape)}"
            )
        fiber = graph.relative_coordinates.shape[1]
        embedded = self.embed(x)[:, None].expand(-1, fiber, -1)
        fields = [embedded if vectors is None else embedded + vectors]
        for block in self.blocks:
            fields.append(block(fields[-1], graph))
        return fields

    def point_features(self, data: Any, graph: RelativeGraph) -> Tensor:
        """What the embedding sees of each point, ``[points, in_channels]``."""
        weight = self.embed.weight
        if self.inputs == "distances":
            return sorted_distances(data.pos, graph.batch, self.in_channels).to(weight.dtype)
        source = "x" if self.inputs == "x" else "z"
        given = getattr(data, source, None)
        if not isinstance(given, Tensor):
            raise TypeError(f"data: expected a torch_geometric Data or Batch with {source}, got {kind_of(data)}")
        return given if source == "x" else species_features(given, self.species).to(weight)
