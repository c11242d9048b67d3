"""From a field on lifted points to numbers or vectors for each cloud or point."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn

from lieattn.geometry import LiftedElements
from lieattn.nn import CloudPool, FiberPool, project_field
from lieattn.ops import activation as activation_named
from lieattn.reps import Vector

Readout = Literal["pool_first", "point_first"]
Pooling = Literal["mean", "max", "sum", "none"]


class CloudReadout(nn.Module):
    """Invariant outputs of every cloud, in one of the two ways of the authors.

    ``"pool_first"`` (their ``model_1``) pools the field over points and frames, then applies three linear maps, each
    behind the activation. ``"point_first"`` (their ``lieconv``) applies one linear map behind the activation to every
    element and pools the results.

    **Equivariance.** Pooling forgets the order of points and frames. An empty cloud has a pooled field of zero.

    Parameters
    ----------
    channels, outputs
        Channels of the field, numbers for each cloud.
    readout
        See above.
    pool
        ``"mean"`` or ``"max"`` over points and frames, ``"sum"`` over points of the mean over frames, or ``"none"`` for
        numbers of each point, where only frames are averaged.
    activation
        Name of the activation.
    norm
        Whether a layer normalization precedes each activation of ``"pool_first"``.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        *,
        readout: Readout = "pool_first",
        pool: Pooling = "mean",
        activation: str = "silu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        for argument, choice, allowed in (("readout", readout, Readout), ("pool", pool, Pooling)):
            if choice not in get_args(allowed):
                raise ValueError(f"{argument}: expected one of {get_args(allowed)}, got {choice!r}")
        if norm and readout == "point_first":
            raise ValueError("head_norm: readout 'point_first' has a linear map only, and no normalization")
        self.readout, self.activation = readout, activation
        self.fiber_pool = FiberPool("max" if pool == "max" else "mean")
        self.cloud_pool = None if pool == "none" else CloudPool(pool)
        widths = [channels, channels, channels, outputs] if readout == "pool_first" else [channels, outputs]
        self.linears = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) if norm else nn.Identity() for _ in self.linears)

    def forward(self, x: Tensor, batch: Tensor, num_clouds: int) -> Tensor:
        """``[points, fiber, channels]`` with clouds ``[points]`` to ``[clouds, outputs]``, or ``[points, outputs]``."""
        act = activation_named("activation", self.activation)
        if self.readout == "point_first":
            return self._pool(self.linears[0](act(x)), batch, num_clouds)
        y = self._pool(x, batch, num_clouds)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            y = linear(act(norm(y)))
        return y

    def _pool(self, x: Tensor, batch: Tensor, num_clouds: int) -> Tensor:
        pooled: Tensor = self.fiber_pool(x)
        return pooled if self.cloud_pool is None else self.cloud_pool(pooled, batch, num_clouds)


class VectorReadout(nn.Module):
    r"""Vectors of every cloud or point: the mean over frames of h_a w(x, a), w a network of two layers.

    **Equivariance.** Vectors turn with points and frames.

    Parameters
    ----------
    channels, outputs, dim
        Channels of the field, vectors for each cloud or point, dimension of the space.
    pool
        ``"mean"`` or ``"sum"`` over points, or ``"none"`` for vectors of each point.
    activation
        Name of the activation.
    """

    def __init__(
        self, channels: int, outputs: int, dim: int, *, pool: Pooling = "mean", activation: str = "silu"
    ) -> None:
        super().__init__()
        if pool not in ("mean", "sum", "none"):
            raise ValueError(f"pool: expected 'mean', 'sum' or 'none' for vectors, got {pool!r}")
        self.activation, self.rep = activation, outputs * Vector(dim)
        self.outputs, self.dim = outputs, dim
        self.linear1, self.linear2 = nn.Linear(channels, channels), nn.Linear(channels, outputs * dim, bias=False)
        self.cloud_pool = None if pool == "none" else CloudPool(pool)

    def forward(self, x: Tensor, graph: LiftedElements) -> Tensor:
        """``[points, fiber, channels]`` to ``[clouds | points, outputs, dim]``, without ``outputs`` for one vector."""
        act = activation_named("activation", self.activation)
        vectors = project_field(self.linear2(act(self.linear1(x))), graph, self.rep)
        if self.cloud_pool is not None:
            vectors = self.cloud_pool(vectors, graph.batch, graph.num_clouds)
        return vectors if self.outputs == 1 else vectors.unflatten(1, (self.outputs, self.dim))
