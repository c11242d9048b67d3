"""LieConv: convolutions on Lie groups for point clouds (Finzi et al., ICML 2020, arXiv 2002.12880)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.geometry import AllPairs, LiftedGraph, Neighborhood, Radius, farthest_points, pixel_positions, scaled
from lieattn.groups import SE, Translations
from lieattn.models._network import GroupField, Symmetry
from lieattn.models.lie._inputs import SortedDistances, Species
from lieattn.models.lie._network import AnyFrames, LieNetwork
from lieattn.models.lie._options import ConvolutionOptions, Lifting, Readout
from lieattn.nn import LieBottleneck, PointBatchNorm
from lieattn.spaces import Euclidean, HomogeneousSpace

_DISC = 15.0  # pixels; what the authors keep of a 28 x 28 image


@dataclass(frozen=True, eq=False)
class LieConvGeometry:
    """Geometry of a forward pass: what :meth:`LieConvNet.geometry` makes of data.

    Attributes
    ----------
    graphs
        Graph of the convolution of each block.
    kept
        For each block the points ``[points kept]`` int64 that go on; None where all do.
    last
        The points behind the last block.
    """

    graphs: tuple[LiftedGraph, ...]
    kept: tuple[Tensor | None, ...]
    last: LiftedGraph


class LieConvNet(LieNetwork):
    """Residual network of group convolutions on lifted points, and outputs for every cloud or point.

    A linear map embeds the features; :class:`lieattn.nn.LieBottleneck` blocks follow, behind each of which
    farthest-point subsampling may thin the points out while channels and neighborhoods grow; then normalization and a
    head.

    **Equivariance.** As that of :class:`LieTransformer`. Subsampling starts at the outermost point and takes nearest
    and farthest points by their distances, which rotations leave alone.

    Parameters
    ----------
    in_channels, out_channels, frames, neighborhood, space, vector_inputs, lifting, readout
        See :class:`LieTransformer`; the neighborhood is that of the first block.
    channels, layers
        Channels of the first block, number of blocks.
    convolution
        Of the blocks and of subsampling; with it outputs of points (``pool="none"``) are refused.
    """

    def __init__(
        self,
        in_channels: int | Species | SortedDistances,
        out_channels: int = 1,
        *,
        frames: AnyFrames | None = None,
        neighborhood: Neighborhood,
        space: HomogeneousSpace | None = None,
        channels: int = 384,
        layers: int = 6,
        vector_inputs: Sequence[str] = (),
        lifting: Lifting | None = None,
        convolution: ConvolutionOptions | None = None,
        readout: Readout | None = None,
    ) -> None:
        check_count("channels", channels)
        check_count("layers", layers)
        super().__init__(in_channels, channels, frames, neighborhood, space, vector_inputs, lifting)
        convolution, readout = convolution or ConvolutionOptions(), readout or Readout()
        share = convolution.downsampling
        if readout.pool == "none" and share < 1:
            raise ValueError(f"pool: 'none' needs all points, got downsampling {share}; expected 1, or a pool")
        self.share = share ** (1 / layers)
        widths = [round(channels * self.share ** (-convolution.widening * number)) for number in range(layers + 1)]
        options = {name: getattr(convolution, name) for name in ("norm", "activation", "rank", "hidden")}
        self.blocks = nn.ModuleList(
            LieBottleneck(narrow, wide, self.num_coordinates, **options) for narrow, wide in pairwise(widths)
        )
        norms: dict[str, type[nn.Module]] = {"batch": PointBatchNorm, "layer": nn.LayerNorm, "none": nn.Identity}
        self.norm = norms[convolution.norm](widths[-1])
        self.head = readout.head(widths[-1], out_channels, self.space.group.dim, "point_first")
        self.local = self._local(channels)

    @classmethod
    def qm9(cls, out_channels: int = 1, **options: Any) -> LieConvNet:
        """Network for molecules with the widths of the paper, invariant to translations: 21.3 M parameters.

        With frames it is invariant to rotations too.
        """
        frames = options.get("frames")
        preset = {
            "space": Euclidean(Translations(3)) if frames is None else None,
            "neighborhood": AllPairs(),
            "channels": 1536,
            "lifting": Lifting(local=0),
        }
        return cls(Species(), out_channels, **{**preset, **options})

    @classmethod
    def images(cls, in_channels: int = 1, out_channels: int = 10, *, frames: AnyFrames, **options: Any) -> LieConvNet:
        """Network for images as points, see :func:`image_points`: a tenth of the pixels is left at the end."""
        preset = {
            "space": Euclidean(SE(2)),
            "frames": frames,
            "neighborhood": Radius(3.0),
            "channels": 128,
            "lifting": Lifting(local=0),
            "convolution": ConvolutionOptions(downsampling=0.1),
        }
        return cls(in_channels, out_channels, **{**preset, **options})

    @property
    def symmetry(self) -> Symmetry:
        """That of the frames."""
        found = super().symmetry
        if self.share == 1:
            return found
        ties = "where points are equally far, as on grids, subsampling depends on their order"
        return replace(found, notes=(*found.notes, ties))

    def geometry(self, data: Any, *, generator: torch.Generator | None = None) -> LieConvGeometry:
        """Graph of every block, the points lifted once; in training mode random parts are new at every call."""
        generator = self._generator(generator)
        graph, neighborhood = self._lifted(data, generator), self.neighborhood
        dim = self.space.group.dim
        graphs: list[LiftedGraph] = []
        kept: list[Tensor | None] = []
        for _ in self.blocks:
            graphs.append(self._prepared(graph, generator))
            chosen = None
            if self.share < 1:
                places = graph.pos.detach()[:, :dim]
                chosen = farthest_points(places, fraction=self.share, batch=graph.batch).sort().values
                neighborhood = scaled(neighborhood, self.share ** (-1 / dim))
                graph = graph.subset(chosen, neighborhood)
            kept.append(chosen)
        return LieConvGeometry(tuple(graphs), tuple(kept), graph)

    def field(self, data: Any, geometry: LieConvGeometry | None = None) -> GroupField:
        """Field behind the last block and the points that are left there; arguments as in :class:`LieTransformer`."""
        geometry = self.geometry(data) if geometry is None else geometry
        x = self._embedded(data, geometry.graphs[0])
        for block, graph, kept in zip(self.blocks, geometry.graphs, geometry.kept, strict=True):
            x = block(x, graph, kept)
        return GroupField(self.norm(x), geometry.last)


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
    pos = pixel_positions(*images.shape[2:], dtype=images.dtype).to(images.device)
    inside = pos.norm(dim=1) < (torch.inf if radius is None else radius)
    x = images.flatten(2).transpose(1, 2)[:, inside]
    batch = torch.arange(len(images), device=images.device).repeat_interleave(x.shape[1])
    return x.flatten(0, 1), pos[inside].repeat(len(images), 1), batch
