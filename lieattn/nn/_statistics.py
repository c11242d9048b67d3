"""Layers with sums over points, frames or pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lieattn._core.checks import (
    axes_of,
    check_arguments,
    check_choice,
    check_count,
    check_counts,
    check_features,
    check_graph,
    check_is,
    check_positive,
    check_tensor,
    may_read_values,
)
from lieattn._core.contexts import is_batched, is_mapped, region, transformed
from lieattn._core.machine import processes, summed
from lieattn._core.messages import warn
from lieattn._core.numerics import LayerNorm, layer_norm, reduced
from lieattn.geometry import LiftedGraph, PointClouds, pooling_cells

Reduction = Literal["sum", "mean", "max"]
Inexact = Literal["refuse", "warn", "allow"]
"""Treatment of images on which a pooling or stride breaks the symmetry, see :class:`GridPool`."""

_MEANS: tuple[Callable[..., Tensor], ...] = (F.avg_pool2d, F.avg_pool3d)


class FiberPool(nn.Module):
    """Reduce a field over its fiber to a scalar field; ``reduction`` is ``"max"``, ``"mean"`` or ``"sum"``.

    **Equivariance.** The result is invariant, since the group permutes the fiber.
    """

    def __init__(self, reduction: Reduction = "max") -> None:
        check_arguments(FiberPool.__init__, locals())
        super().__init__()
        self.reduction: Reduction = reduction

    def forward(
        self, x: Float[Tensor, "*batch fiber channels"], graph: PointClouds | None = None
    ) -> Float[Tensor, "*batch channels"]:
        """Reduce ``[*, fiber, channels]`` to ``[*, channels]``; ``graph`` is not used."""
        check_is("x", x, Tensor)
        if x.ndim < 2:
            raise ValueError(f"x: expected a field [*, fiber, channels], got {tuple(x.shape)}")
        return x.amax(dim=-2) if self.reduction == "max" else getattr(x, self.reduction)(dim=-2)


class CloudPool(nn.Module):
    """Reduce over the points of each cloud; ``reduction`` is ``"sum"``, ``"mean"`` or ``"max"``.

    The result for an empty cloud is zero.

    **Equivariance.** The result is invariant to permutations of the points. The fiber is not reduced.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        check_arguments(CloudPool.__init__, locals())
        super().__init__()
        self.reduction: Reduction = reduction

    def forward(self, x: Float[Tensor, " points *rest"], graph: PointClouds) -> Float[Tensor, " clouds *rest"]:
        """Reduce ``[points, *]`` to ``[clouds, *]``."""
        check_graph(graph, PointClouds, x)
        reduce: Callable[[Tensor], Tensor] = getattr(graph, self.reduction)
        return reduce(x)


class GridPool(nn.Module):
    """Pool cells of size x size pixels of an image; ``reduction`` is ``"max"``, ``"mean"`` or ``"sum"``.

    If the height or width of an image is not a multiple of ``size``, its last rows or columns are dropped. This breaks
    the symmetry, because a rotated image loses other pixels. In this case ``inexact="refuse"`` raises ValueError,
    ``"warn"`` issues a warning, and ``"allow"`` does neither.

    **Equivariance.** The pooling commutes with quarter turns and reflections of the raster if no rows or columns are
    dropped, and with every motion of the coordinates that keeps the raster.
    """

    def __init__(self, size: int = 2, reduction: Reduction = "max", *, inexact: Inexact = "refuse") -> None:
        check_arguments(GridPool.__init__, locals())
        super().__init__()
        check_count("size", size)
        self.size, self.inexact, self.reduction = size, inexact, reduction

    def cells(self, grid: Int[Tensor, "clouds dim"]) -> tuple[Int[Tensor, " points"], Int[Tensor, "clouds dim"]]:
        """Return the cell of each point, -1 for dropped points, and the pooled grid ``[clouds, 2]``."""
        cell, pooled, exact = pooling_cells(grid, self.size)
        if not exact and self.inexact != "allow":
            sides = grid[(grid % self.size != 0).any(dim=1)][0].tolist()
            warn_or_raise(self.inexact, _drops_pixels(sides, self.size))
        return cell, pooled

    def forward(self, x: Float[Tensor, " points *rest"], graph: PointClouds) -> Float[Tensor, " cells *rest"]:
        """Pool ``[points, *]`` on the rasters of a graph to ``[cells, *]``; ValueError if the graph has no ``grid``."""
        check_graph(graph, PointClouds, x)
        if graph.grid is None:
            raise ValueError("graph: pooling of pixels needs the size of each image, grid [clouds, 2], got None")
        cell, grid = self.cells(graph.grid)
        return self.reduce(x, cell, int(grid.prod(dim=1).sum()))

    def reduce(
        self, x: Float[Tensor, " points *rest"], cell: Int[Tensor, " points"], num_cells: int
    ) -> Float[Tensor, " {num_cells} *rest"]:
        """Pool ``[points, *]`` to ``[cells, *]``, with the cells of :meth:`cells`."""
        return _reduce(x, cell, num_cells, self.reduction)

    def centers(self, pos: Tensor, cell: Tensor, num_cells: int) -> Tensor:
        """Return the centers ``[cells, dim]`` of the cells, the means of the coordinates ``[points, dim]``."""
        return _reduce(pos, cell, num_cells, "mean")


class GridSpatialPool(nn.Module):
    """:class:`GridPool` for a field on a grid with ``dim`` sides, frame by frame; ``"max"`` or ``"mean"``.

    **Equivariance.** That of :class:`GridPool`, also of the gradients, since equal maxima share them.
    """

    def __init__(
        self,
        size: int = 2,
        reduction: Literal["max", "mean"] = "max",
        *,
        dim: int = 2,
        inexact: Inexact = "refuse",
    ) -> None:
        check_arguments(GridSpatialPool.__init__, locals())
        super().__init__()
        check_count("size", size)
        check_choice("dim", dim, (2, 3))
        self.size, self.reduction, self.dim, self.inexact = size, reduction, dim, inexact

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``[*, rows, columns]`` to ``[*, rows / size, columns / size]``; in space, layers are also pooled."""
        check_is("x", x, Tensor)
        if x.ndim <= self.dim:
            raise ValueError(f"x: expected [*, {axes_of(self.dim)}], got {tuple(x.shape)}")
        leading, sides = x.shape[: -self.dim], x.shape[-self.dim :]
        if min(sides) < self.size:
            cell, found = (" x ".join(map(str, shape)) for shape in ([self.size] * self.dim, sides))
            raise ValueError(f"x: expected images of at least {cell} pixels, the size of a cell, got {found}")
        if any(side % self.size for side in sides):
            warn_or_raise(self.inexact, _drops_pixels(sides, self.size))
        if self.reduction == "max":
            return _maxima_of_cells(x, self.size, self.dim)
        return _MEANS[self.dim - 2](x.flatten(0, -self.dim - 1)[:, None], self.size)[:, 0].unflatten(0, leading)


def _maxima_of_cells(x: Tensor, size: int, dim: int) -> Tensor:
    """Pool the last axes. Equal maxima share the gradient; that of torch's pooling depends on the order of pixels."""
    inside = [-1 - 2 * number for number in range(dim)]  # the axes of the pixels of a cell, from the last one
    for axis in inside:
        kept = x.shape[axis] // size
        x = x.narrow(axis, 0, kept * size).unflatten(axis, (kept, size))
    # A copy with these axes first takes half the time of a maximum over several axes.
    return x.movedim(inside, list(range(dim))).flatten(0, dim - 1).amax(dim=0)


def warn_or_raise(inexact: Inexact, message: str) -> None:
    """Raise ValueError or issue a warning, depending on ``inexact``, for an image that breaks the symmetry."""
    if inexact == "refuse":
        raise ValueError(message)
    if inexact == "warn":
        warn(message)


def _drops_pixels(sides: Sequence[int], size: int) -> str:
    fits = [-(-side // size) * size for side in sides]
    cell, image, exact = (" x ".join(map(str, shape)) for shape in ([size] * len(sides), sides, fits))
    what = f"pooling {cell} drops rows or columns of a {image} image, which breaks equivariance to rotations"
    return f"{what}; {exact} would be exact"


def _reduce(x: Tensor, cell: Tensor, num_cells: int, reduction: Reduction) -> Tensor:
    check_tensor("x", x, "floating features [points, *]")
    check_tensor("cell", cell, "the cells of points, int64", torch.int64)
    check_count("num_cells", num_cells, least=0)
    if cell.ndim != 1 or x.ndim == 0 or cell.shape != x.shape[:1]:
        raise ValueError(
            f"cell: expected an entry for each of {len(x) if x.ndim else 0} points as in x, got {tuple(cell.shape)}"
        )
    if cell.device != x.device or (may_read_values(cell) and cell.numel() and int(cell.max()) >= num_cells):
        raise ValueError(f"cell, num_cells: expected cells below {num_cells} on {x.device} like x")
    # Points of no cell go into one more cell. Removing them would make shapes depend on the data.
    cell = torch.where(cell >= 0, cell, num_cells)
    return reduced(x, cell, num_cells + 1, reduction)[:num_cells]


class _Affine(nn.Module):
    """Base class of normalizations with a gain and a shift for each channel."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        check_arguments(_Affine.__init__, locals())
        super().__init__()
        check_count("channels", channels)
        check_positive(eps=eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))


class CloudNorm(_Affine):
    """Joint normalization of GSA-Nets: over all points, frames and channels of a cloud together.

    It uses the population variance, with ``eps`` inside the square root, and a gain and a shift for each channel. On a
    fiber of scales each scale is normalized separately, so that boundary effects at its ends do not spread.

    **Equivariance.** It commutes with any group and with permutations, since the statistics are sums over points and
    frames.

    Parameters
    ----------
    channels, eps
        Channels of the field, and number that is added to the variance.
    """

    def __init__(self, channels: int, eps: float = 1e-12) -> None:
        super().__init__(channels, eps)

    def forward(self, x: Float[Tensor, " points *rest"], graph: PointClouds) -> Float[Tensor, " points *rest"]:
        """Normalize ``[points, *, channels]`` over the clouds of a graph."""
        check_graph(graph, PointClouds, x)
        check_features(x, self.weight)
        if x.ndim < 2 or x.shape[0] != graph.num_points or x.shape[-1] != len(self.weight):
            raise ValueError(f"x: expected [points={graph.num_points}, *, {len(self.weight)}], got {tuple(x.shape)}")
        graph = graph.scales if isinstance(graph, LiftedGraph) else graph
        wide = x if x.dtype == torch.float64 else x.float()
        per_point = wide.flatten(1)
        if (clouds := graph.by_cloud(per_point)) is not None:
            normal = layer_norm(clouds, clouds.shape[1:], eps=self.eps)
            return normal.view_as(x).to(x.dtype) * self.weight + self.bias
        entries = graph.counts.clamp(min=1) * per_point.shape[1]

        def mean(values: Tensor) -> Tensor:
            return (graph.sum(values.sum(dim=1)) / entries).index_select(0, graph.batch)[:, None]

        centered = per_point - mean(per_point)
        normal = centered * torch.rsqrt(mean(centered.square()) + self.eps)
        return normal.view_as(x).to(x.dtype) * self.weight + self.bias


class FiberNorm(_Affine):
    """Layer normalization over the fiber and channels of each point, with one gain and shift for each channel.

    **Equivariance.** It commutes with the group, which permutes the fiber and does not change the statistics.

    Parameters
    ----------
    channels, eps
        Channels of the field, and number that is added to the variance.
    """

    def forward(self, x: Float[Tensor, "points fiber channels"]) -> Float[Tensor, "points fiber channels"]:
        """Normalize ``[points, fiber, channels]``."""
        check_features(x, self.weight, len(self.weight))
        weight, bias = self.weight.expand(x.shape[-2:]), self.bias.expand(x.shape[-2:])
        return layer_norm(x, x.shape[-2:], weight, bias, self.eps)


class PointBatchNorm(_Affine):
    """Batch normalization over all points and frames of a batch of clouds, as in the code of LieConv.

    The output is (x - mean) / sqrt(max(variance, eps)) times a gain plus a shift. The variance is the population
    variance, and the running average is that of the sample variance. A batch without points does not change the running
    statistics. In training with several processes, the statistics are those of the points of all processes, as for one
    process with the whole batch.

    **Equivariance.** That of :class:`CloudNorm`.

    Parameters
    ----------
    channels, eps, momentum
        Channels of the field, smallest variance, and weight of a batch in the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        check_arguments(PointBatchNorm.__init__, locals())
        super().__init__(channels, eps)
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Float[Tensor, " points *rest"]) -> Float[Tensor, " points *rest"]:
        """Normalize ``[points, *, channels]``."""
        check_features(x, self.weight, len(self.weight))
        mean, variance = self.running_mean, self.running_var
        if self.training:
            _check_not_mapped(x, mean)
            wide = (x if x.dtype == torch.float64 else x.float()).reshape(-1, x.shape[-1])
            mean, variance, rows = _moments(wide)
            if rows and not region.get().again:
                _follow(self, mean, variance * (rows / max(rows - 1, 1)), self.momentum)
        normal = (x - mean) * torch.rsqrt(variance.clamp(min=self.eps))
        return normal.to(x.dtype) * self.weight + self.bias


def _check_not_mapped(x: Tensor, running: Tensor) -> None:
    """Raise RuntimeError if ``torch.func.vmap`` maps over batches that share their running statistics."""
    if is_mapped(x) and not is_batched(running):
        reason = "torch.func.vmap cannot map over batches in training mode, since they share running statistics"
        advice = "call eval(), or map over the statistics too, see torch.func.stack_module_state"
        raise RuntimeError(f"x: {reason}; {advice}")


def _follow(norm: Any, mean: Tensor, variance: Tensor, share: float) -> None:
    """Move the running statistics of a normalization towards those of a batch."""
    for running, seen in ((norm.running_mean, mean), (norm.running_var, variance)):
        with torch.no_grad():
            running.lerp_(seen.detach().to(running), share)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return mean and population variance ``[channels]`` of rows ``[rows, channels]`` of all processes, and a count."""
    if processes() == 1:
        mean = rows.mean(dim=0)
        return mean, (rows - mean).square().mean(dim=0), float(len(rows))
    totals = summed(torch.cat([rows.sum(dim=0), rows.new_tensor([float(len(rows))])]))
    count = totals[-1].detach().clamp(min=1)
    mean = totals[:-1] / count
    return mean, summed((rows - mean).square().sum(dim=0)) / count, float(totals[-1].detach())


def norm_layer(norm: str, channels: int, eps: float = 1e-5) -> nn.Module:
    """Return the normalization with the name ``"layer"``, ``"batch"`` or ``"none"``."""
    check_positive(eps=eps)
    if norm == "layer":
        return LayerNorm(channels, eps=eps)
    return PointBatchNorm(channels, eps) if norm == "batch" else nn.Identity()


class FieldBatchNorm(_NormBase):
    """Batch normalization over all points, images and frames, with one gain and shift for each channel.

    It is the batch normalization of torch, except that in training with several processes the statistics are those of
    all processes, as for one process with the whole batch.

    **Equivariance.** It commutes with the group, since the statistics are sums over frames and positions.

    Parameters
    ----------
    channels, eps, momentum
        As for ``torch.nn.BatchNorm2d``.
    axis
        Axis of the channels: -1 for fields of points, 1 for fields on grids; otherwise ValueError.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float | None = 0.1, axis: int = -1) -> None:
        check_arguments(FieldBatchNorm.__init__, locals())
        check_count("channels", channels)
        check_positive(eps=eps)
        check_choice("axis", axis, (-1, 1))
        super().__init__(channels, eps=eps, momentum=momentum)
        self.axis = axis

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Normalize a field ``[points, *, channels]``, or ``[images, channels, *]`` with ``axis=1``."""
        check_features(input, self.weight, argument="x")
        if input.ndim < 2:
            raise ValueError(f"x: expected a field [*, channels], got {tuple(input.shape)}")
        x = input if self.axis == 1 else input.flatten(0, -2)
        if x.shape[1] != self.num_features:
            raise ValueError(f"x: expected {self.num_features} channels on axis {self.axis}, got {tuple(input.shape)}")
        updates = self.training and not region.get().again
        if updates:
            _check_not_mapped(x, cast(Tensor, self.running_mean))
            cast(Tensor, self.num_batches_tracked).add_(1)
        # Second derivatives of torch's function are wrong where reverse mode follows forward mode.
        if self.training and (processes() > 1 or transformed()):
            return self._by_moments(x, updates).view_as(input)
        known = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        # A recomputation must save the same number of tensors, but not update the running statistics.
        if self.training and region.get().again:
            known = known[0].clone(), known[1].clone()
        normal = F.batch_norm(x, *known, self.weight, self.bias, self.training, self._share(), self.eps)
        return normal.view_as(input)

    def _share(self) -> float:
        """Return the weight of this batch in the running averages; without momentum all batches weigh the same."""
        if self.momentum is not None or not self.training:
            return self.momentum or 0.0
        return 1.0 / float(cast(Tensor, self.num_batches_tracked))

    def _by_moments(self, x: Tensor, updates: bool) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        rows = wide.movedim(1, -1)
        mean, variance, count = _moments(rows.reshape(-1, self.num_features))
        if updates and count > 1:
            _follow(self, mean, variance * (count / (count - 1)), self._share())
        normal = (rows - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return normal.movedim(-1, 1).to(x.dtype)


class GroupSqueezeExcite(nn.Module):
    r"""Group squeeze-and-excite (Affine Self Convolution, Eq. 15): scale each channel by a function of the cloud.

    .. math::  f'_c(x, h) = f_c(x, h) \, \operatorname{sigmoid}(W_1 \operatorname{relu}(W_2 m + b_2) + b_1)_c

    where m is the mean of the field over the points of its cloud and over the fiber. There are channels //
    ``reduction`` hidden units, at least 1. In the paper the reduction is 16 on Z² and 4 on p4.

    **Equivariance.** It commutes with any group, since the mean over points and frames is invariant.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        check_arguments(GroupSqueezeExcite.__init__, locals())
        super().__init__()
        check_counts(channels=channels, reduction=reduction)
        self.squeeze = nn.Linear(channels, max(1, channels // reduction))
        self.excite = nn.Linear(self.squeeze.out_features, channels)

    def scale(self, x: Float[Tensor, "points *rest channels"], graph: PointClouds) -> Float[Tensor, "clouds channels"]:
        """Return the factors ``[clouds, channels]`` for a field ``[points, *, channels]``."""
        check_graph(graph, PointClouds, x)
        check_features(x, self.squeeze.weight)
        channels = self.squeeze.in_features
        if x.ndim < 2 or x.shape[0] != graph.num_points or x.shape[-1] != channels:
            raise ValueError(f"x: expected [points={graph.num_points}, *, {channels}], got {tuple(x.shape)}")
        mean = graph.mean(x.flatten(1, -2).mean(dim=1) if x.ndim > 2 else x)
        return self.excite(F.relu(self.squeeze(mean))).sigmoid()

    def forward(self, x: Float[Tensor, " points *rest"], graph: PointClouds) -> Float[Tensor, " points *rest"]:
        """Scale a field ``[points, *, channels]``."""
        factors = self.scale(x, graph).index_select(0, graph.batch)
        return x * factors.view(len(x), *[1] * (x.ndim - 2), factors.shape[1])
