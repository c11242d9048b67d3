"""LieConv: convolutions on Lie groups for point clouds (Finzi et al., ICML 2020, arXiv 2002.12880)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lieattn._checks import check_count, kind
from lieattn.geometry import AllPairs, Lift, LiftedElements, Nearest, Neighborhood, Radius, farthest_points
from lieattn.groups import SE, Group, Translations
from lieattn.models._lie_coordinates import Coordinates
from lieattn.models._lie_features import species_features
from lieattn.models._lie_graph import Lifting
from lieattn.models._lie_guarantee import guarantee, sees_order, symmetry
from lieattn.models._lie_readout import CloudReadout, Pooling
from lieattn.nn import LieBottleneck, PointBatchNorm
from lieattn.ops import Activation
from lieattn.spaces import Euclidean, HomogeneousSpace

Norm = Literal["batch", "layer", "none"]
_DISC = 15.0  # pixels; what the authors keep of a 28 x 28 image


@dataclass(frozen=True, eq=False)
class LieConvGeometry:
    """Geometry of a forward pass: what :meth:`LieResNet.geometry` makes of data.

    Attributes
    ----------
    graphs
        Graph of the convolution of each block.
    kept
        For each block the points ``[points kept]`` int64 that go on; None where all do.
    last
        The points behind the last block.
    """

    graphs: tuple[LiftedElements, ...]
    kept: tuple[Tensor | None, ...]
    last: LiftedElements


class LieResNet(nn.Module):
    """Residual network of group convolutions on lifted points, and invariant outputs for every cloud.

    A linear map embeds the features; :class:`lieattn.nn.LieBottleneck` blocks follow, behind each of which
    farthest-point subsampling may thin the points out while channels and neighborhoods grow; then normalization,
    activation, a linear map and pooling.

    **Equivariance.** As that of :class:`LieTransformer`: outputs do not change when all elements move by one element of
    G, and :attr:`guarantee` says for which motions of the points that is so. Subsampling starts at the outermost point
    and takes nearest and farthest points by their distances, which rotations leave alone.

    Parameters
    ----------
    in_channels
        Features ``data.x`` of a point; None if ``species`` are given.
    outputs
        Numbers for every cloud.
    space, frames, neighborhood, coordinates, scale, squash, keep
        See :class:`LieTransformer`; the neighborhood is that of the first block.
    channels, blocks
        Channels of the first block, number of blocks.
    downsampling
        Share of the points that is left behind all blocks; each keeps the same share.
    widening
        Exponent w of the widening: where a share s of the points is kept, channels grow by s^-w (½ in the paper's
        image network), and the radius of the neighborhoods by s^(-1 / dim).
    norm, activation, rank, hidden
        See :class:`lieattn.nn.LieBottleneck`.
    pool
        ``"mean"``, ``"max"`` or ``"sum"``; without downsampling also ``"none"``, for outputs of each point.
    species
        Nuclear charges; features are then made of ``data.z``, see :class:`LieTransformer`.
    """

    def __init__(
        self,
        in_channels: int | None,
        outputs: int = 1,
        *,
        space: HomogeneousSpace,
        frames: Lift | None = None,
        neighborhood: Neighborhood,
        channels: int = 384,
        blocks: int = 6,
        downsampling: float = 1.0,
        widening: float = 0.5,
        norm: Norm = "batch",
        activation: Activation = "silu",
        rank: int = 16,
        hidden: int = 32,
        pool: Pooling = "mean",
        coordinates: Coordinates = "smooth",
        scale: float | None = None,
        squash: bool = False,
        keep: float = 1.0,
        species: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if species is not None and in_channels is None:
            in_channels = 3 * len(species)
        if in_channels is None:
            raise ValueError("in_channels: expected the number of features, since no species are given, got None")
        for argument, count in (("in_channels", in_channels), ("channels", channels), ("blocks", blocks)):
            check_count(argument, count)
        if not 0 < downsampling <= 1:
            raise ValueError(f"downsampling: expected a share in (0, 1], got {downsampling}")
        if pool == "none" and downsampling < 1:
            raise ValueError(f"pool: 'none' needs all points, got downsampling {downsampling}; expected 1, or a pool")
        if not 0 <= widening <= 1:
            raise ValueError(f"widening: expected an exponent from 0 to 1, got {widening}")
        self.in_channels, self.species = in_channels, None if species is None else tuple(species)
        self.share = downsampling ** (1 / blocks)
        self.lifting = Lifting(space, frames, neighborhood, coordinates, scale, squash, keep)
        widths = [round(channels * self.share ** (-widening * number)) for number in range(blocks + 1)]
        self.embed = nn.Linear(in_channels, widths[0])
        self.blocks = nn.ModuleList(
            LieBottleneck(
                narrow, wide, self.lifting.num_coordinates, norm=norm, activation=activation, rank=rank, hidden=hidden
            )
            for narrow, wide in pairwise(widths)
        )
        norms: dict[str, Callable[[int], nn.Module]] = {
            "batch": PointBatchNorm,
            "layer": nn.LayerNorm,
            "none": nn.Identity,
        }
        self.norm = norms[norm](widths[-1])
        self.head = CloudReadout(widths[-1], outputs, readout="point_first", pool=pool, activation=activation)

    @classmethod
    def qm9(cls, outputs: int = 1, **options: Any) -> LieResNet:
        """Network for molecules with the widths of the paper, invariant to translations: 21.3 M parameters.

        With ``space=Euclidean(SE(3))`` and frames it is invariant to rotations too.
        """
        preset = {
            "space": Euclidean(Translations(3)),
            "neighborhood": AllPairs(),
            "channels": 1536,
            "species": (1, 6, 7, 8, 9),
        }
        return cls(None, outputs, **{**preset, **options})

    @classmethod
    def images(cls, in_channels: int = 1, outputs: int = 10, *, frames: Lift, **options: Any) -> LieResNet:
        """Network for images as points, see :func:`image_points`: a tenth of the pixels is left at the end."""
        preset = {
            "space": Euclidean(SE(2)),
            "frames": frames,
            "neighborhood": Radius(3.0),
            "channels": 128,
            "downsampling": 0.1,
        }
        return cls(in_channels, outputs, **{**preset, **options})

    @property
    def guarantee(self) -> str:
        """What is exact by construction, in words."""
        text = guarantee(self.lifting.space, self.lifting.frames, self.lifting.coordinates)
        if self.share < 1:
            text += "; where points are equally far, as on grids, subsampling depends on their order"
        return text

    @property
    def symmetry(self) -> Group | None:
        """Group that leaves the outputs alone exactly; a finite one together with translations, None for no group."""
        return symmetry(self.lifting.space, self.lifting.frames, self.lifting.coordinates)

    @property
    def sees_order(self) -> bool:
        """Whether the order of the points matters: it does where frames are drawn for each point."""
        return sees_order(self.lifting.frames)

    def geometry(self, data: Any, *, generator: torch.Generator | None = None) -> LieConvGeometry:
        """Graph of every block, the points lifted once; in training mode random parts are new at every call."""
        graph = self.lifting.elements(data, training=self.training, generator=generator)
        graphs, kept = [], []
        neighborhood = self.lifting.neighborhood
        for _ in self.blocks:
            graphs.append(self.lifting.coordinated(graph, training=self.training, generator=generator))
            chosen = None
            if self.share < 1:
                places = graph.pos.detach()[:, : graph.space.group.dim]
                chosen = farthest_points(places, fraction=self.share, batch=graph.batch).sort().values
                neighborhood = grown(neighborhood, self.share ** (-1 / graph.space.group.dim))
                graph = graph.subset(chosen, neighborhood)
            kept.append(chosen)
        return LieConvGeometry(tuple(graphs), tuple(kept), graph)

    def forward(self, data: Any, geometry: LieConvGeometry | None = None) -> Tensor:
        """Outputs ``[clouds, outputs]``.

        Parameters
        ----------
        data
            torch_geometric ``Data`` or ``Batch`` with ``pos`` ``[points, dim]`` and features ``x``
            ``[points, in_channels]`` or charges ``z`` ``[points]``.
        geometry
            What :meth:`geometry` gives for ``data``; built here if absent.
        """
        geometry = self.geometry(data) if geometry is None else geometry
        x = self.embed(self._point_features(data))[:, None].expand(-1, geometry.last.fiber, -1)
        for block, graph, kept in zip(self.blocks, geometry.graphs, geometry.kept, strict=True):
            x = block(x, graph, kept)
        outputs: Tensor = self.head(self.norm(x), geometry.last.batch, geometry.last.num_clouds)
        return outputs

    def _point_features(self, data: Any) -> Tensor:
        weight = self.embed.weight
        source = "x" if self.species is None else "z"
        given = getattr(data, source, None)
        if not isinstance(given, Tensor):
            raise TypeError(f"data: expected a torch_geometric Data or Batch with {source}, got {kind(data)}")
        if self.species is not None:
            return species_features(given, self.species).to(weight)
        if given.ndim != 2 or given.shape[1] != self.in_channels or not given.is_floating_point():
            raise ValueError(
                f"x: expected floating features [points, {self.in_channels}], got {given.dtype} {tuple(given.shape)}"
            )
        return given


def grown(neighborhood: Neighborhood, factor: float) -> Neighborhood:
    """The same neighborhood of points that are further apart by a factor."""
    if isinstance(neighborhood, Radius):
        return Radius(neighborhood.radius * factor, neighborhood.include_self)
    if isinstance(neighborhood, AllPairs | Nearest):
        return neighborhood
    raise ValueError(f"neighborhood: {neighborhood} cannot grow with subsampling; take a Radius, Nearest or AllPairs")


def image_points(images: Tensor, radius: float | None = _DISC) -> tuple[Tensor, Tensor, Tensor]:
    """Images as point clouds about their centers, cut to a disc so that no corner comes or goes in a rotation.

    Parameters
    ----------
    images
        ``[images, channels, height, width]``.
    radius
        Of the disc in pixels, 15 as the authors have it for 28 x 28; None keeps all pixels.

    Returns
    -------
    x, pos, batch
        Values ``[points, channels]``, places in pixels ``[points, 2]`` (to the right and up, the center at 0) and image
        ``[points]`` int64 of each pixel.
    """
    if images.ndim != 4:
        raise ValueError(f"images: expected [images, channels, height, width], got {tuple(images.shape)}")
    number, _, height, width = images.shape
    rows = torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2
    columns = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    up, right = torch.meshgrid(-rows, columns, indexing="ij")
    pos = torch.stack([right, up], dim=-1).flatten(0, 1)
    inside = torch.ones(len(pos), dtype=torch.bool, device=pos.device)
    if radius is not None:
        inside = pos.square().sum(dim=1) < radius**2
    x = images.flatten(2).transpose(1, 2)[:, inside]
    places = pos[inside].expand(number, -1, -1)
    batch = torch.arange(number, device=images.device).repeat_interleave(int(inside.sum()))
    return x.flatten(0, 1), places.flatten(0, 1), batch
