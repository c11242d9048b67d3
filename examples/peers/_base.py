"""Base class of the adapters, which reads batches and computes outputs from features."""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lieattn.geometry import Neighbors, PointClouds, Radius, find_neighbors, point_clouds

KINDS = 10
"""Number of rows of embedding tables: nuclear charges up to that of fluorine, and 0."""


class Points(NamedTuple):
    """Inputs of networks: kinds of points, input vectors, and edges without loops."""

    clouds: PointClouds
    lists: Neighbors
    kinds: Tensor  # [points] int64, nuclear charges; 1 and 2 for charges of particles below and above zero
    given: Tensor  # [points, vector_inputs, 3]
    between: Tensor  # [edges, 3], x_source - x_target

    @property
    def pos(self) -> Tensor:
        """Positions ``[points, 3]``."""
        return self.clouds.pos

    def sum_to_targets(self, messages: Tensor) -> Tensor:
        """Sum messages ``[edges, *]`` at their targets."""
        return self.lists.sum_to_targets(messages)


class Peer(nn.Module, abc.ABC):
    """Base class of the adapters, which reads data and pools the outputs of the points over each cloud.

    Parameters
    ----------
    width
        Number of channels, by which ``lieattn compare`` matches parameters or work.
    out_channels
        Number of outputs of a cloud, for ``kind`` "invariant".
    kind, pool
        As in :class:`lieattn.models.FramewiseTransformer`; one vector for ``kind`` "vector".
    radius
        Radius of the neighborhoods, at which radial functions end.
    vector_inputs
        Attributes of the data with vectors that rotate with the points, such as velocities.
    """

    directed = True  # whether features contain vectors
    takes_vectors = False

    def __init__(
        self,
        width: int,
        *,
        out_channels: int = 1,
        kind: Literal["invariant", "vector"] = "invariant",
        pool: Literal["mean", "sum", "none"] = "mean",
        radius: float = 4.0,
        vector_inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if vector_inputs and not self.takes_vectors:
            raise ValueError(f"vector_inputs: expected none for {type(self).__name__}, got {list(vector_inputs)}")
        if kind == "vector" and pool == "none" and not self.directed:
            raise ValueError(
                f"kind: expected 'invariant', got 'vector' for {type(self).__name__}, which has no directed features; "
                "use forces that are gradients of an energy, computed by lieattn.models.EnergyForces"
            )
        self.width, self.out_channels, self.kind, self.pool = width, out_channels, kind, pool
        self.vector_inputs, self.neighborhood = tuple(vector_inputs), Radius(radius, include_self=False)

    def read(self, data: Data) -> Points:
        """Return the clouds, kinds, input vectors and edges of a batch."""
        clouds = point_clouds(data)
        lists = find_neighbors(clouds, self.neighborhood)
        kinds = data.z if data.get("z") is not None else 1 + (data.x[:, 0] > 0).long()
        given = [data[name].to(clouds.pos).reshape(-1, 1, 3) for name in self.vector_inputs]
        vectors = torch.cat([clouds.pos.new_zeros(len(kinds), 0, 3), *given], dim=1)
        return Points(clouds, lists, kinds, vectors, lists.displacements(clouds.pos))

    def forward(self, data: Data) -> Tensor:
        """Return numbers ``[clouds, out_channels]``, or vectors ``[clouds, 3]`` or ``[points, 3]``."""
        points = self.read(data)
        outputs = self.outputs(points)
        pooled = outputs if self.pool == "none" else getattr(points.clouds, self.pool)(outputs)
        return cast(Tensor, pooled)

    @abc.abstractmethod
    def outputs(self, points: Points) -> Tensor:
        """Return the outputs of the points, before they are pooled."""


class FeaturePeer(Peer):
    """Base class of the adapters of networks that compute features, from which the outputs are read.

    Invariant outputs are numbers of each point. Vectors are sums of the directed features, with coefficients that are
    computed from the invariant features. Vectors that are summed over a cloud also contain a term of charges times
    positions, like dipoles in PaiNN. All vectors contain the vector inputs, with coefficients of the same form.
    """

    @abc.abstractmethod
    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return invariant features ``[points, *]``, and directed features ``[points, 3, *]`` or None."""

    def outputs(self, points: Points) -> Tensor:
        """Return the outputs of the points, computed from the features."""
        invariant, directed = self.features(points)
        if self.kind == "invariant":
            return cast(Tensor, self.head(invariant))
        vectors = points.given.transpose(1, 2)
        if directed is not None:
            vectors = torch.cat([directed, vectors], dim=2)
        if self.pool == "sum":
            center = points.clouds.mean(points.pos)[points.clouds.batch]
            vectors = torch.cat([vectors, (points.pos - center)[:, :, None]], dim=2)
        coefficients = self.head(invariant)
        return (vectors * coefficients[:, None]).sum(dim=2)

    def make_head(self, channels: int, vectors: int) -> None:
        """Construct the read-out for these numbers of invariant and directed features."""
        width = self.out_channels
        if self.kind == "vector":
            width = vectors + len(self.vector_inputs) + (self.pool == "sum")
        self.head = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, width))


class BesideStraightLines:
    """Transform of charged particles: the target y becomes its difference to motion on straight lines."""

    def __call__(self, data: Data) -> Data:
        """Return a new item with the target ``y - pos - time * vel``, where time is ``[1]``."""
        data = copy.copy(data)
        data.y = data.y - data.pos - data.time * data.vel
        return data
