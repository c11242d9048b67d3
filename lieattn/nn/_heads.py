"""Heads: outputs of any type from fields on the group."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_count, check_counts, check_features, check_is, may_read_values
from lieattn._core.contexts import as_without_autocast, without_autocast
from lieattn._core.messages import warn
from lieattn._core.numerics import LayerNorm
from lieattn.geometry import LiftedGraph, PointClouds
from lieattn.io import Recorded
from lieattn.nn._fields import FrameMatrices, project_field
from lieattn.nn._statistics import CloudPool, FiberPool
from lieattn.ops import activation as activation_named
from lieattn.ops import kinked
from lieattn.reps import Multiple, Pseudovector, Representation, SymmetricTensor, Vector

_ROUNDING = 100  # allowed rounding error of means of components, in units of the machine epsilon

Pooling = Literal["mean", "max", "sum", "none"]
"""Pooling of outputs over the points of each cloud; ``"none"`` for outputs at the points."""


class InvariantHead(Recorded, nn.Module):
    """Invariant numbers of every cloud or point, by one of the two read-outs of LieTransformer.

    Outputs have the dtype of the weights, also under autocast, so that energies of many atoms are not rounded.

    **Equivariance.** Outputs are invariant to translations of the field by the group. Pooled outputs do not depend on
    the order of the points.

    Parameters
    ----------
    channels, outputs
        Channels of the field, and numbers for each cloud.
    readout
        ``"pool_first"`` (the authors' ``model_1``) pools the field and then applies three linear maps, each after the
        activation. ``"point_first"`` (``lieconv``) applies the activation and one linear map to every element, and
        pools the results.
    pool
        ``"mean"`` or ``"max"`` over points and frames, ``"sum"`` over the points of the mean over frames, or ``"none"``
        for numbers of each point, averaged over frames only. The pooled field of an empty cloud is zero.
    activation, norm
        Name of the activation, and whether a layer normalization precedes each activation of ``"pool_first"``.
    """

    kind = "invariant"

    def __init__(
        self,
        channels: int,
        outputs: int,
        *,
        readout: Literal["pool_first", "point_first"] = "pool_first",
        pool: Pooling = "mean",
        activation: str = "silu",
        norm: bool = False,
    ) -> None:
        check_arguments(InvariantHead.__init__, locals())
        super().__init__()
        check_counts(channels=channels, outputs=outputs)
        activation_named("activation", activation)
        if norm and readout == "point_first":
            raise ValueError("norm: expected False, since readout 'point_first' has no normalization")
        self.outputs, self.readout, self.activation = outputs, readout, activation
        self.has_kinks = pool == "max" or kinked(self.activation)
        self.fiber_pool = FiberPool("max" if pool == "max" else "mean")
        self.cloud_pool = None if pool == "none" else CloudPool(pool)
        widths = [channels, channels, channels, outputs] if readout == "pool_first" else [channels, outputs]
        self.linears = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(LayerNorm(channels) if norm else nn.Identity() for _ in self.linears)

    def forward(self, x: Float[Tensor, "points fiber channels"], graph: PointClouds) -> Float[Tensor, "rows outputs"]:
        """Map a field ``[points, fiber, channels]`` to ``[clouds, outputs]``, or ``[points, outputs]``."""
        first = cast(nn.Linear, self.linears[0])
        check_features(x, first.weight, first.in_features)
        check_is("graph", graph, PointClouds)
        if x.ndim != 3 or len(x) != graph.num_points:
            raise ValueError(f"x: expected a field [points={graph.num_points}, fiber, channels], got {tuple(x.shape)}")
        act = activation_named("activation", self.activation)
        if self.readout == "point_first":
            return self._of_clouds(self.fiber_pool(as_without_autocast(first, act(x), first)), graph)

        def mapped(y: Tensor) -> Tensor:
            y = self._of_clouds(y, graph)
            for norm, linear in zip(self.norms, self.linears, strict=True):
                y = linear(act(norm(y)))
            return y

        return as_without_autocast(mapped, self.fiber_pool(x), first)

    def _of_clouds(self, x: Tensor, graph: PointClouds) -> Tensor:
        return x if self.cloud_pool is None else self.cloud_pool(x, graph)


class FieldHead(Recorded, nn.Module):
    r"""Head for a field of any type on the points, or for its mean or sum over each cloud, from a field on the group.

    .. math::  v(x) = \frac{1}{n} \sum_h \rho(h) \big( W_2 \, \sigma(W_1 F(x, h) + b_1) \big)

    Vectors at points of a sphere are tangent to it: their normal part is removed. The type ``"1o"`` keeps it, and so do
    sums with other fields.

    **Equivariance.** If the field is translated by h in H, the result is multiplied by ρ(h).

    Parameters
    ----------
    in_channels, hidden, activation
        Channels of the field; channels of the hidden layer, the same number if absent; name of its activation σ.
    rep
        Type ρ of the output: ``Vector(3)`` for forces, ``Pseudovector()`` for magnetic moments.
    pool
        ``"none"`` for a field on the points; ``"mean"`` or ``"sum"`` over the points of each cloud.
    """

    kind: Any

    def __init__(
        self,
        in_channels: int,
        rep: Representation,
        *,
        hidden: int | None = None,
        pool: Literal["mean", "sum", "none"] = "none",
        activation: str = "silu",
    ) -> None:
        check_arguments(FieldHead.__init__, locals())
        super().__init__()
        check_count("in_channels", in_channels)
        hidden = in_channels if hidden is None else hidden
        check_count("hidden", hidden)
        activation_named("activation", activation)
        self.kind, self.rep, self.activation = rep, rep, activation
        self.has_kinks = kinked(self.activation)
        self.linear1 = nn.Linear(in_channels, hidden)
        # The projection maps a bias to the invariants of ρ, and most types have none.
        self.linear2 = nn.Linear(hidden, rep.dim, bias=False)
        self.cloud_pool = None if pool == "none" else CloudPool(pool)

    def forward(
        self, x: Float[Tensor, "points fiber channels"], graph: FrameMatrices
    ) -> Float[Tensor, "rows {self.rep.dim}"]:
        """Map a field ``[points, fiber, in_channels]`` to ``[points | clouds, rep.dim]``.

        TypeError is raised if the head pools and ``graph`` is not a lifted graph.
        """
        values = project_field(self.components(x), graph, self.rep)
        if self.cloud_pool is None:
            part = self.rep.part if isinstance(self.rep, Multiple) else self.rep
            if isinstance(part, Vector) and isinstance(graph, LiftedGraph):
                values = graph.space.tangent(graph.pos, values.unflatten(1, (-1, part.dim))).flatten(1)
            return values
        if not isinstance(graph, PointClouds):
            raise TypeError(
                f"graph: expected a lifted graph, over whose clouds the head pools, got {type(graph).__name__}"
            )
        return self.cloud_pool(values, graph)

    def components(self, x: Float[Tensor, "points fiber channels"]) -> Float[Tensor, "points fiber {self.rep.dim}"]:
        """Return the components of the outputs in every frame, ``[points, fiber, rep.dim]``."""
        check_features(x, self.linear1.weight, self.linear1.in_features)
        if x.ndim != 3:
            raise ValueError(f"x: expected a field [points, fiber, channels], got {tuple(x.shape)}")
        components: Tensor = self.linear2(activation_named("activation", self.activation)(self.linear1(x)))
        return components


class VectorHead(FieldHead):
    """Head for vectors ``[points | clouds, outputs, dim]``, or ``[points | clouds, dim]`` if ``outputs`` is 1.

    **Equivariance.** If the field is translated by h in H, the vectors are multiplied by h.

    Parameters
    ----------
    in_channels, dim, outputs
        Channels of the field, number of components of a vector, and number of vectors.
    **options
        Options of :class:`FieldHead`: ``hidden``, ``pool`` and ``activation``.
    """

    def __init__(self, in_channels: int, dim: int = 3, *, outputs: int = 1, **options: Any) -> None:
        check_arguments(VectorHead.__init__, locals())
        check_counts(dim=dim, outputs=outputs)
        super().__init__(in_channels, outputs * Vector(dim), **options)
        self.outputs, self.dim, self.kind = outputs, dim, "vector"

    def forward(self, x: Float[Tensor, "points fiber channels"], graph: FrameMatrices) -> Float[Tensor, "rows ..."]:
        """Map a field ``[points, fiber, in_channels]`` to vectors."""
        vectors = super().forward(x, graph).unflatten(1, (self.outputs, self.dim))
        return vectors[:, 0] if self.outputs == 1 else vectors


class DipoleHead(Recorded, nn.Module):
    r"""Head for the dipole moment of every cloud, from a partial charge and a vector at each point.

    .. math::  \mu = \sum_i q_i (x_i - \bar x) + \mu_i

    **Equivariance.** Dipole moments rotate with the points under H. They are invariant to translations, since the
    positions are relative to the mean of the cloud.

    **Periodic clouds.** A lattice has no dipole moment of its own. The result is that of the given images of the
    points: another image of a point i, shifted by a lattice vector t, adds :math:`(q_i - \bar q) t`, with the mean
    charge :math:`\bar q`. So keep molecules whole, and do not wrap positions into the cell. Charges do not depend on
    the images.

    Parameters
    ----------
    in_channels, dim, hidden
        See :class:`VectorHead`; ``hidden`` is also the width of the network of the charges.
    neutral
        Whether all charges of a cloud are shifted by the same number so that they sum to ``graph.charge``, 0 if that is
        absent. Otherwise they are not shifted.
    """

    kind = "vector"
    sees_images = True  # see `lieattn.certify`

    def __init__(self, in_channels: int, dim: int = 3, *, hidden: int | None = None, neutral: bool = True) -> None:
        check_arguments(DipoleHead.__init__, locals())
        super().__init__()
        self.vector = VectorHead(in_channels, dim, hidden=hidden)
        hidden = self.vector.linear1.out_features
        self.charge = nn.Sequential(nn.Linear(in_channels, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.neutral = neutral

    def charges(self, x: Float[Tensor, "points fiber channels"], graph: PointClouds) -> Float[Tensor, " points"]:
        """Return partial charges ``[points]``, in the unit of the dipole over the unit of the positions.

        ValueError is raised if ``graph.charge`` is not ``[clouds]``, or is given with ``neutral=False``.
        """
        check_is("graph", graph, PointClouds)
        linear = self.vector.linear1
        check_features(x, linear.weight, linear.in_features)
        total = getattr(graph, "charge", None)
        if x.ndim != 3:
            raise ValueError(f"x: expected a field [points, fiber, channels], got {tuple(x.shape)}")
        if total is not None and (not self.neutral or total.shape != (graph.num_clouds,)):
            expected = (
                f"shape [{graph.num_clouds}], got {tuple(total.shape)}" if self.neutral else "None with neutral=False"
            )
            raise ValueError(f"graph.charge: expected {expected}")
        charge = self.charge(x.mean(dim=1))[:, 0]
        charge = charge.to(torch.promote_types(charge.dtype, torch.float32))
        if not self.neutral:
            return charge
        excess = graph.sum(charge)
        if total is not None:
            excess = excess - total.to(charge)
        return charge - (excess / graph.counts.clamp(min=1).to(charge))[graph.batch]

    def forward(self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph) -> Float[Tensor, "clouds dim"]:
        """Return dipole moments ``[clouds, dim]`` of a field ``[points, fiber, in_channels]``.

        With positions in Å and total charges ``graph.charge`` ``[clouds]`` in e, they are in e Å.
        """
        check_is("graph", graph, LiftedGraph)
        vectors = self.vector(x, graph)
        charges = self.charges(x, graph)
        places = graph.pos[:, : self.vector.dim]  # points can have directions besides
        centered = (places - graph.mean(places)[graph.batch]).to(charges.dtype)
        return graph.sum(vectors.to(charges.dtype) + charges[:, None] * centered)


class PolarizabilityHead(Recorded, nn.Module):
    r"""Head for a symmetric tensor of every cloud, including its trace: :math:`\alpha = \sum_i \alpha_i`.

    **Equivariance.** α ↦ R α Rᵀ under R in H. The tensor is invariant to translations.

    Parameters
    ----------
    in_channels, dim, hidden
        Channels of the field, dimension of the tensor (at least 2), and width of the hidden layer, ``in_channels`` if
        absent; see :class:`FieldHead`.
    """

    kind = "tensor"

    def __init__(self, in_channels: int, dim: int = 3, *, hidden: int | None = None) -> None:
        check_arguments(PolarizabilityHead.__init__, locals())
        super().__init__()
        check_count("dim", dim, least=2)
        self.rep = SymmetricTensor(dim)
        self.field = FieldHead(in_channels, self.rep, hidden=hidden)

    def forward(self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph) -> Float[Tensor, "clouds dim dim"]:
        """Map a field ``[points, fiber, in_channels]`` to tensors ``[clouds, dim, dim]``."""
        check_is("graph", graph, LiftedGraph)
        return self.rep.to_tensor(graph.sum(self.field(x, graph)))


class RotationHead(Recorded, nn.Module):
    r"""Head for the pose of every cloud in space: a rotation that is computed from two vectors.

    .. math::  R = (e_1, e_2, e_1 \times e_2), \qquad e_1 \propto v_1, \quad e_2 \propto v_2 - (e_1 \cdot v_2) e_1

    where :math:`v_1, v_2` are means over points and frames as in :class:`FieldHead`. R is a continuous function of
    these vectors, which is impossible with angles or quaternions (Zhou et al. 2019, arXiv 1812.07035).

    **Equivariance.** R ↦ det(g) g R under g in H, that is g R for rotations. Both vectors are pseudovectors, so that R
    is a rotation even if H has reflections; a cloud and its image under inversion then have the same pose.

    **Degenerate outputs.** If a rotation in H maps a cloud to itself, R is undetermined, because both vectors lie on
    the axis. If the directions are determined only by rounding, a UserWarning with the index of the first such cloud is
    issued (only on a CPU, since a GPU would have to be waited for), and the undetermined part of R is not equivariant.
    Outputs and gradients are finite.

    **Rounding.** Errors of R are those of the vectors, divided by the lengths of :math:`v_1` and of the part of
    :math:`v_2` across it. The vectors are nearly parallel for clouds that are nearly symmetric under a rotation, and
    if the directions of their components are near one line. Of random networks and clouds in float32, about one in
    twenty has errors above 1e-5.

    Parameters
    ----------
    in_channels, hidden
        See :class:`FieldHead`.
    """

    kind = "rotation"

    def __init__(self, in_channels: int, *, hidden: int | None = None) -> None:
        check_arguments(RotationHead.__init__, locals())
        super().__init__()
        self.field = FieldHead(in_channels, 2 * Pseudovector(), hidden=hidden)

    def forward(self, x: Float[Tensor, "points fiber channels"], graph: LiftedGraph) -> Float[Tensor, "clouds 3 3"]:
        """Map a field ``[points, fiber, in_channels]`` to rotations ``[clouds, 3, 3]``."""
        check_is("graph", graph, LiftedGraph)
        components = self.field.components(x)
        first, second = graph.mean(project_field(components, graph, self.field.rep)).split(3, dim=1)
        size = graph.mean(components.detach().to(first).square().mean(dim=(1, 2))).sqrt()[:, None]
        limit = _ROUNDING * torch.finfo(first.dtype).eps * size
        axes = torch.eye(3, dtype=first.dtype, device=first.device)
        with without_autocast(first.device):
            e1, vague = _direction(first, axes[0], limit)
            across = second - (e1 * second).sum(dim=1, keepdim=True) * e1
            e2, vague2 = _direction(across, torch.linalg.cross(e1, axes[e1.abs().argmin(dim=1)]), limit)
            matrices = torch.stack([e1, e2, torch.linalg.cross(e1, e2)], dim=-1)
        vague = vague | vague2
        if may_read_values(vague) and vague.any():
            found = f"{int(vague.sum())} of {len(vague)} clouds (the first has index {int(vague.int().argmax())})"
            what = "a rotation maps them to themselves, or they are empty"
            warn(f"RotationHead: the pose is undetermined for {found}: {what}")
        return matrices


def _direction(vectors: Tensor, otherwise: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize vectors ``[rows, 3]``, replace those with lengths up to a limit ``[rows, 1]``, and return a mask."""
    lost = vectors.detach().norm(dim=1, keepdim=True) <= limit
    kept = torch.where(lost, otherwise, vectors)
    return kept / kept.norm(dim=1, keepdim=True), lost[:, 0]


class Heads(Recorded, nn.Module):
    """Several heads that share one field, for networks with outputs of several kinds.

    **Equivariance.** That of each head for its output.

    Parameters
    ----------
    heads
        Mapping from the names of the outputs to their heads, for example from ``"energy"`` to an
        :class:`InvariantHead` and from ``"dipole"`` to a :class:`DipoleHead`.

    Raises
    ------
    TypeError
        If a head is not a module.
    ValueError
        If there are no heads, if a name is not an identifier or is that of an attribute of ``torch.nn.ModuleDict``, or
        if one head has two names.
    """

    def __init__(self, heads: Mapping[str, nn.Module]) -> None:
        check_arguments(Heads.__init__, locals())
        super().__init__()
        if not heads:
            raise ValueError("heads: expected at least one name with its head, got none")
        self.heads = nn.ModuleDict()
        for name, head in heads.items():
            if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict(), name):
                what = "names of outputs such as 'energy', and none of an attribute of torch.nn.ModuleDict"
                raise ValueError(f"heads: expected {what}, got {name!r}")
            check_is(f"heads[{name!r}]", head, nn.Module)
            if isinstance(head, Heads):
                raise ValueError(f"heads: expected one output for each head, got several for {name!r}")
            if same := [other for other, known in self.heads.items() if known is head]:
                raise ValueError(f"heads: expected a head of its own for {name!r}, got that of {same[0]!r}")
            self.heads[name] = head

    @property
    def kind(self) -> dict[str, Any]:
        """Kind of each output by its name."""
        return {name: getattr(head, "kind", "invariant") for name, head in self.heads.items()}

    @property
    def has_kinks(self) -> bool:
        """Whether first derivatives of an output are discontinuous, because of maxima or relu."""
        return any(getattr(head, "has_kinks", False) for head in self.heads.values())

    def forward(self, x: Tensor, graph: LiftedGraph) -> dict[str, Tensor]:
        """Return the output of each head by its name, for a field ``[points, fiber, channels]``."""
        return {name: head(x, graph) for name, head in self.heads.items()}
