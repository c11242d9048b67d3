"""From a field on lifted points to numbers for each cloud."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn

from lieattn.nn import CloudPool, FiberPool
from lieattn.ops import activation as activation_named

Readout = Literal["pool_first", "point_first"]
Pooling = Literal["mean", "max", "sum"]


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
        ``"mean"`` or ``"max"`` over points and frames, or ``"sum"`` over points of the mean over frames.
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
        self.cloud_pool = CloudPool(pool)
        widths = [channels, channels, channels, outputs] if readout == "pool_first" else [channels, outputs]
        self.linears = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) if norm else nn.Identity() for _ in self.linears)

    def forward(self, x: Tensor, batch: Tensor, num_clouds: int) -> Tensor:
        """``[points, fiber, channels]`` with clouds ``[points]`` to ``[clouds, outputs]``."""
        act = activation_named("activation", self.activation)
        if self.readout == "point_first":
            return self._pool(self.linears[0](act(x)), batch, num_clouds)
        y = self._pool(x, batch, num_clouds)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            y = linear(act(norm(y)))
        return y

    def _pool(self, x: Tensor, batch: Tensor, num_clouds: int) -> Tensor:
        pooled: Tensor = self.cloud_pool(self.fiber_pool(x), batch, num_clouds)
        return pooled
