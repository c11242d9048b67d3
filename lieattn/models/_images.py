"""What networks on images share: a group about the centers of the images, vectors at the pixels, and a field there."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from lieattn._checks import check_counts
from lieattn.geometry import Raster, point_clouds
from lieattn.groups import FiniteGroup, check_group
from lieattn.models._network import GroupField, Network, Symmetry, VectorEmbedding
from lieattn.nn import grid_images


class ImageNetwork(Network):
    """A network on equally large images, as tensors or as points of their pixels; see :class:`AttentiveNetwork`.

    ``limits`` are sentences about where the promise ends.
    """

    limits: ClassVar[tuple[str, ...]] = ()

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
        check_counts(in_channels=in_channels, out_channels=out_channels)
        self.group, self.in_channels, self.out_channels = group, in_channels, out_channels
        self.vector_inputs = tuple(vector_inputs)
        self.vectors = VectorEmbedding(self.vector_inputs, 2, stem_channels)

    @property
    def symmetry(self) -> Symmetry:
        """The group, about the centers of the images."""
        return Symmetry(self.group, "images about their centers", translations=False, notes=self.limits)

    def field(self, data: Any, geometry: Any = None) -> GroupField:
        """Field behind the last block, in raster order, and the pixels of the raster that is left.

        Parameters
        ----------
        data
            Images ``[images, in_channels, rows, columns]``; or a torch_geometric ``Data`` or ``Batch`` of their pixels,
            see :func:`lieattn.nn.grid_images`.
        geometry
            None: images need none.
        """
        x, raster = self.last_field(self.images(data), self.embedded_vectors(data))
        return GroupField(x, raster.lift(self.group, 3, x.device))

    @abc.abstractmethod
    def last_field(self, images: Tensor, vectors: Tensor | None) -> tuple[Tensor, Raster]:
        """Field ``[points, order, channels]`` behind the last block, and its raster."""

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
