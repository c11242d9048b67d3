"""What networks on images share: a group about the centers of the images, vectors at the pixels, and a field there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lieattn._checks import check_count
from lieattn.geometry import Raster, point_clouds
from lieattn.groups import FiniteGroup, check_group
from lieattn.models._network import Network, Symmetry, VectorEmbedding
from lieattn.nn import grid_images


class ImageNetwork(Network):
    """A network on equally large images, as tensors or as points of their pixels.

    Parameters
    ----------
    group
        H: quarter turns and mirrors that keep the lattice of pixels.
    in_channels, out_channels
        Channels of the images, number of outputs.
    stem_channels
        Channels of the first field, to which vectors at the pixels are added.
    vector_inputs
        Attributes of the points with vectors ``[points, 2]`` that turn along.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        stem_channels: int,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_group("group", group)
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        self.group, self.in_channels, self.out_channels = group, in_channels, out_channels
        self.vector_inputs = tuple(vector_inputs)
        self.vectors = VectorEmbedding(self.vector_inputs, 2, stem_channels)

    @property
    def symmetry(self) -> Symmetry:
        """The group, about the centers of the images."""
        return Symmetry(self.group, "images about their centers", translations=False, notes=self._limits())

    def _limits(self) -> tuple[str, ...]:
        """Sentences about where the promise ends."""
        return ()

    def images(self, data: Any) -> Tensor:
        """Images ``[images, in_channels, rows, columns]`` of the data, checked."""
        images = grid_images(data)
        if images.shape[1] != self.in_channels or not images.is_floating_point():
            raise ValueError(
                f"data: expected floating images with {self.in_channels} channels, got {images.dtype} "
                f"{tuple(images.shape)}"
            )
        return images

    def embedded_vectors(self, data: Any) -> Tensor | None:
        """Vector inputs on the raster ``[images, stem_channels, order, rows, columns]``, None without."""
        if not self.vector_inputs:
            return None
        if isinstance(data, Tensor):
            raise TypeError(f"data: vectors {self.vector_inputs} are attributes of points, got images as a tensor")
        raster, order = Raster.read(point_clouds(data))
        embedded = self.vectors(data, raster.lift(self.group, 1, order.device))
        return None if embedded is None else raster.unflatten(embedded[order]).permute(0, 4, 3, 1, 2)


def plus_vectors(x: Tensor, vectors: Tensor | None) -> Tensor:
    """A field plus the vectors at its pixels, whose images may have a wider border."""
    if vectors is None:
        return x
    border = (vectors.shape[-1] - x.shape[-1]) // 2
    rows, columns = (slice(border, side - border) for side in vectors.shape[-2:])
    return x + vectors[..., rows, columns]
