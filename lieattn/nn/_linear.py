"""Linear maps that commute with the group."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lieattn._core.checks import check_arguments, check_count, check_counts, check_features, check_last, check_tensor
from lieattn._core.numerics import ExactConstants
from lieattn.groups import FiniteGroup, check_group, real_irreps
from lieattn.io import TiedWeights
from lieattn.ops import fourier_linear, fourier_pays, tied_linear
from lieattn.reps import Irreps

_RANK = 1e-9  # nonzero singular values are at least 1, as an irrep of H within degree l has at most 2l + 1 rows


class GroupLinear(ExactConstants, TiedWeights):
    r"""Group-tied linear map, which mixes frames and channels at every point.

    .. math::  f'(x, g) = \sum_h W(g^{-1} h) f(x, h) + b

    **Equivariance.** It commutes with the left regular representation of H.

    Parameters
    ----------
    group, in_channels, out_channels, bias
        H, channels per frame, and whether to add b.
    fourier
        Whether the map is evaluated in the Fourier basis of H (true) or as one dense matrix product (false); by default
        whichever is cheaper.
    """

    relative: Tensor
    transform: Tensor
    matrices: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        bias: bool = True,
        fourier: bool | None = None,
    ) -> None:
        check_arguments(GroupLinear.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        self.group = group
        bound = 1 / math.sqrt(group.order * in_channels)
        self.weight = nn.Parameter(torch.empty(group.order, out_channels, in_channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_channels).uniform_(-bound, bound)) if bias else None
        self.register_buffer("relative", group.relative_index.clone(), persistent=False)
        irreps = real_irreps(group)
        self.copies = tuple(irrep.copies for irrep in irreps)
        degrees = [irrep.degree for irrep in irreps for _ in range(irrep.copies)]
        self.fourier = fourier_pays(group.order, degrees, in_channels, out_channels) if fourier is None else fourier
        if self.fourier:
            transform = torch.cat([irrep.basis.flatten(0, 1) for irrep in irreps])
            matrices = torch.cat([irrep.matrices.flatten(1) for irrep in irreps], dim=1).contiguous()
            self.degrees = tuple(irrep.degree for irrep in irreps)
            self.register_constant("transform", transform)
            self.register_constant("matrices", matrices)

    def forward(self, x: Float[Tensor, "*batch fiber channels"]) -> Float[Tensor, "*batch fiber outputs"]:
        """Map ``[*, fiber, in_channels]`` to ``[*, fiber, out_channels]``."""
        check_features(x, self.weight)
        order, _, in_channels = self.weight.shape
        check_last("x", x, (order, in_channels), f"fields on {self.group.name}")
        if self.fourier:
            transform = self.transform.to(self.weight.dtype)
            matrices = self.matrices.to(self.weight.dtype)
            parts = matrices.split([degree**2 for degree in self.degrees], dim=1)
            irreps = [part.reshape(order, d, d) for part, d in zip(parts, self.degrees, strict=True)]
            y = fourier_linear(x, self.weight, transform, irreps, self.copies)
        else:
            y = tied_linear(x, self.weight, self.relative)
        return y if self.bias is None else y + self.bias

    def to_irreps(self, irreps: Irreps | str | None = None) -> Any:
        r"""Return the ``e3nn.o3.Linear`` that acts on Fourier transforms as the layer acts on fields, as a warm start.

        .. math::  F'^l_{m; c', n'} = \sum_{c, n} F^l_{m; c, n} \sum_u D^l_{n' n}(u) W(u)_{c' c}

        For a complete band ``irreps``, ``IrrepsToFiber(linear(FiberToIrreps(f)))`` equals ``layer(f)``. If the layer
        has a bias, the band must contain 0e (otherwise ValueError). The result has the dtype and device of the layer,
        and its weights are copies.
        """
        check_arguments(GroupLinear.to_irreps, locals())
        from e3nn import o3

        _, out_channels, in_channels = self.weight.shape
        source = FiberToIrreps(self.group, in_channels, irreps)
        target = FiberToIrreps(self.group, out_channels, irreps)
        if self.bias is not None and all((degree, parity) != (0, 1) for _, degree, parity in source.band.parts):
            raise ValueError(f"irreps: expected 0e among them, since the layer has a bias, got {source.band.spec}")
        linear = o3.Linear(source.irreps.to_e3nn(), target.irreps.to_e3nn(), biases=self.bias is not None)
        linear = linear.to(self.weight)
        kernel = self.weight.detach().to(torch.float64)
        weights = []
        for path in linear.instructions:
            if path.i_in == -1:  # a bias, which is not among the weights
                continue
            wigner = Irreps(str(source.band.to_e3nn()[path.i_in].ir)).matrix(self.group.elements).to(kernel.device)
            weights.append(torch.einsum("ukn,uoc->cnok", wigner, kernel).flatten() / path.path_weight)
        with torch.no_grad():
            linear.weight.copy_(torch.cat(weights))
            if self.bias is not None:
                linear.bias.copy_(self.bias / _response_to_bias(source))
        return linear

    @staticmethod
    def from_irreps(linear: nn.Module, source: FiberToIrreps, target: IrrepsToFiber) -> GroupLinear:
        """Return the layer that equals ``target(linear(source(f)))``, as a single matrix product.

        ``linear`` is an ``e3nn.o3.Linear``, or another affine module that is equivariant to O(3), from
        ``source.irreps`` to ``target.irreps``. The result has its dtype and device. ValueError is raised if the groups
        differ.
        """
        check_arguments(GroupLinear.from_irreps, locals())
        if source.group != target.group:
            found = f"{source.group.name} and {target.group.name}"
            raise ValueError(f"source, target: expected the same group, got {found}")
        group = source.group
        parameter = next(linear.parameters())
        layer = GroupLinear(group, source.channels, target.channels).to(parameter)
        # For each c, a field that is 1 for the identity frame and channel c, and 0 elsewhere; the last field is zero.
        impulses = parameter.new_zeros(source.channels + 1, group.order, source.channels)
        impulses[:-1, group.identity_index] = torch.eye(source.channels).to(parameter)
        with torch.no_grad():
            response = target(linear(source(impulses)))
            bias = response[-1].mean(dim=0)
            # The response at frame g to the impulse at the identity is W(g⁻¹).
            layer.weight.copy_((response[:-1] - bias)[:, group.inverse_index.to(parameter.device)].permute(1, 2, 0))
            if layer.bias is not None:
                layer.bias.copy_(bias)
        return layer


class ZonalLinear(ExactConstants, TiedWeights):
    r"""Linear map that mixes directions and channels, and depends only on the angles between directions.

    .. math::  f'(x, a) = \sum_l \sum_b P_l(n_a, n_b) \, f(x, b) \, W_l + c

    The :math:`P_l` are the projections on the common eigenspaces of all kernels that are functions of
    :math:`\langle n_a, n_b \rangle`. On the whole sphere these are the spaces of spherical harmonics of one degree.

    **Equivariance.** It commutes with all rotations and reflections that permute the directions.

    Parameters
    ----------
    directions
        Unit vectors ``[directions, dim]``, the same for all points up to a rotation; otherwise ValueError.
    in_channels, out_channels, bias
        As for ``torch.nn.Linear``.
    """

    basis: Tensor

    def __init__(self, directions: Tensor, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        check_arguments(ZonalLinear.__init__, locals())
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        basis, self.sizes = _zonal_basis(directions)
        self.largest = max(range(len(self.sizes)), key=lambda index: (self.sizes[index], index))
        self.register_constant("basis", basis)
        # The first space has one function, which is constant if all directions have the same angles with the others.
        self.begins_constant = bool((basis[0] - basis[0].mean()).abs().max() < 1e-9)
        bound = 1 / math.sqrt(in_channels)
        self.weight = nn.Parameter(torch.empty(len(self.sizes), in_channels, out_channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def tied_to(self) -> dict[str, str]:
        """Return the dimensions of the eigenspaces, which weights must share with the module."""
        return {"directions": "+".join(map(str, self.sizes))}

    def forward(self, x: Float[Tensor, "*batch directions channels"]) -> Float[Tensor, "*batch directions outputs"]:
        """Map ``[*, directions, in_channels]`` to ``[*, directions, out_channels]``."""
        check_features(x, self.weight)
        check_last("x", x, (len(self.basis), self.weight.shape[1]), "fields over directions")
        # All spaces get the weights of the largest one; the other spaces add the difference to their own weights.
        weights, bias = self.weight.unbind(), self.bias
        shared = weights[self.largest]
        y = x @ shared
        for index, (functions, weight) in enumerate(zip(self.basis.split(self.sizes), weights, strict=True)):
            if index == self.largest:
                continue
            if index == 0 and self.begins_constant:  # a mean is much faster than many small matrix products
                part, bias = F.linear(x.mean(dim=-2), (weight - shared).T, bias).unsqueeze(-2), None
            else:
                functions = functions.to(weight.dtype)
                part = functions.T @ (functions @ x @ (weight - shared))
            y = y + part
        return y if bias is None else y + bias


def _zonal_basis(directions: Tensor) -> tuple[Tensor, list[int]]:
    """Return orthonormal functions ``[directions, directions]`` of the directions, space by space, and the sizes."""
    check_tensor("directions", directions, "a floating tensor [directions, dim]")
    lengths = directions.double().norm(dim=-1) if directions.ndim == 2 else directions.new_zeros(1)
    if directions.numel() == 0 or not torch.allclose(lengths, torch.ones_like(lengths), atol=1e-5):
        raise ValueError(f"directions: expected unit vectors [directions, dim], got {tuple(directions.shape)}")
    cosines = directions.detach().double().cpu() @ directions.detach().double().cpu().T
    # Eigenvalues of a kernel that differ for all spaces, in descending order; constant functions have the largest.
    numbers, columns = torch.linalg.eigh((1.3 * cosines).exp() + 0.1 * cosines.square())
    numbers, basis = numbers.flip(0), columns.T.flip(0).contiguous()
    first = [0, *(1 + torch.nonzero(numbers[:-1] - numbers[1:] > 1e-5).flatten()).tolist(), len(numbers)]
    return basis, [stop - start for start, stop in pairwise(first)]


@lru_cache(maxsize=64)
def band_limit(group: FiniteGroup) -> Irreps:
    """Return irreps of O(3), lowest degrees first, whose matrix elements on H span all functions on H.

    For groups of rotations the parity has no effect, and degree l has the parity of the harmonics, (-1)^l. Irreps that
    do not add functions are left out. ValueError is raised if H does not act on R^3 by orthogonal matrices, or if
    degrees up to 11 do not suffice (for rotations about an axis by less than 1/23 of a turn).
    """
    _check_spatial(group)
    parities = (1, -1) if bool((torch.linalg.det(group.elements) < 0).any()) else (1,)
    found: list[str] = []
    rank = 0
    for degree in range(Irreps.max_degree + 1):
        for natural in parities:
            parity = "e" if natural * (-1) ** degree == 1 else "o"
            candidate = [*found, f"{degree}{parity}"]
            larger = int(torch.linalg.matrix_rank(_transform(group, Irreps("+".join(candidate)))))
            if larger > rank:
                found, rank = candidate, larger
            if rank == group.order:
                return Irreps("+".join(found))
    irreps = f"irreps up to degree {Irreps.max_degree}"
    raise ValueError(f"group: {irreps} do not separate the {group.order} elements of {group.name}")


class _FiberFourier(ExactConstants, TiedWeights):
    """Base class of both Fourier transforms.

    The ``irreps`` of the features are (2l + 1) · channels copies of each irrep of the ``band``. The transform is
    ``complete`` if the band spans all functions on H, so that fields are recovered from their irreps. It is
    ``independent`` if features are recovered from their field.
    """

    table: Tensor

    def __init__(self, group: FiniteGroup, channels: int, irreps: Irreps | str | None = None) -> None:
        check_arguments(_FiberFourier.__init__, locals())
        super().__init__()
        _check_spatial(group)
        check_count("channels", channels)
        self.group, self.channels = group, channels
        band = band_limit(group) if irreps is None else Irreps(irreps) if isinstance(irreps, str) else irreps
        kinds = [(degree, parity) for _, degree, parity in band.parts]
        if len(set(kinds)) != len(kinds) or any(count != 1 for count, _, _ in band.parts):
            raise ValueError(f"irreps: expected each irrep once, since channels set the copies, got {band.spec}")
        self.band = band
        self.irreps = Irreps("+".join(f"{(2 * term.ir.l + 1) * channels}x{term.ir}" for term in band.to_e3nn()))
        transform = _transform(group, band)
        rank = int(torch.linalg.matrix_rank(transform, rtol=_RANK))
        self.complete = rank == group.order
        self.independent = rank == sum(size**2 for size in _sizes(band))
        self._keep(transform)

    def _keep(self, table: Tensor) -> None:
        """Register the matrix of :func:`_transform`, or its inverse."""
        self.register_constant("table", table.contiguous())

    def _blocks(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the part of the table for each irrep, with two axes in place of axis ``dim``, in the dtype of x."""
        sizes = _sizes(self.band)
        parts = self.table.to(x.dtype).split([size**2 for size in sizes], dim=dim)
        return [part.unflatten(dim, (size, size)) for part, size in zip(parts, sizes, strict=True)]

    def extra_repr(self) -> str:
        """Return group, channels and band as text."""
        return f"{self.group.name}, channels={self.channels}, band={self.band.spec}, complete={self.complete}"


class FiberToIrreps(_FiberFourier):
    r"""Fourier transform over the fiber: from a field on the group to features of O(3) in the layout of e3nn.

    .. math::  F^l_{m; c, n} = \sqrt{\frac{2l + 1}{|H|}} \sum_h D^l_{mn}(h) f(x, h)_c

    Each channel c gives 2l + 1 copies of the irrep of degree l, with the indices ``c (2l + 1) + n``. Every linear map
    from regular features to irreps of the band that commutes with H is this transform followed by an
    ``e3nn.o3.Linear``. The normalization is the component normalization of e3nn: independent components of variance 1
    are mapped to components of variance 1 on average.

    **Equivariance.** If the field is translated by h in H, the features are multiplied by ρ(h).

    Parameters
    ----------
    group, channels
        H in O(3), and the channels of the field.
    irreps
        The band, with each irrep of O(3) once, for example ``"0e + 1o + 2e"``. The default is the smallest band
        for which the transform is invertible. ValueError is raised for repeated irreps.
    """

    def forward(self, x: Float[Tensor, "*batch fiber channels"]) -> Float[Tensor, "*batch {self.irreps.dim}"]:
        """Map a field ``[*, fiber, channels]`` to features ``[*, irreps.dim]``."""
        check_last("x", x, (self.group.order, self.channels), self.group.name)
        blocks = self._blocks(x, 0)
        return torch.cat([torch.einsum("mnh,...hc->...cnm", block, x).flatten(-3) for block in blocks], dim=-1)


class IrrepsToFiber(_FiberFourier):
    r"""Inverse Fourier transform over the fiber: from features of O(3) to a field on the group.

    It is the pseudo-inverse of :class:`FiberToIrreps` and has the same parameters. With a complete band (the default),
    ``IrrepsToFiber(FiberToIrreps(f)) == f``. The composition in the other order is a projection on the features that a
    field on H can represent. These are all features if the irreps are independent, which holds for degrees up to 1 for
    T and O and up to 2 for I. In this case the inverse is

    .. math::  f(x, h)_c = \sum_l \sqrt{\frac{2l + 1}{|H|}} \sum_{mn} D^l_{mn}(h) F^l_{m; c, n}

    **Equivariance.** If the features are multiplied by ρ(h), h in H, the field is translated by h.
    """

    def _keep(self, table: Tensor) -> None:
        super()._keep(torch.linalg.pinv(table, rtol=_RANK))

    def forward(self, x: Float[Tensor, "*batch {self.irreps.dim}"]) -> Float[Tensor, "*batch fiber channels"]:
        """Map features ``[*, irreps.dim]`` to a field ``[*, fiber, channels]``."""
        check_last("x", x, (self.irreps.dim,), self.irreps.name)
        pieces = x.split([self.channels * size**2 for size in _sizes(self.band)], dim=-1)
        field = x.new_zeros(*x.shape[:-1], self.group.order, self.channels)
        for piece, block in zip(pieces, self._blocks(x, 1), strict=True):
            copies = piece.unflatten(-1, (self.channels, *block.shape[1:]))
            field = field + torch.einsum("hmn,...cnm->...hc", block, copies)
        return field


def _response_to_bias(source: FiberToIrreps) -> float:
    # 1/√|H|, unless H also fixes a component of higher degree, which then shares the bias in the inverse transform.
    inverse = IrrepsToFiber(source.group, 1, source.band)
    kinds = [(degree, parity) for _, degree, parity in source.band.parts]
    feature = torch.zeros(inverse.irreps.dim, dtype=torch.float64)
    feature[sum(size**2 for size in _sizes(source.band)[: kinds.index((0, 1))])] = 1
    return float(inverse(feature).mean())


def _sizes(band: Irreps) -> list[int]:
    return [2 * degree + 1 for _, degree, _ in band.parts]


def _transform(group: FiniteGroup, band: Irreps) -> Tensor:
    """Return rows √((2l + 1) / |H|) D^l_mn(h) for l, m, n in this order: ``[Σ (2l + 1)², order]`` float64."""
    matrix, sizes = band.matrix(group.elements), _sizes(band)
    rows = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        block = matrix[:, end - size : end, end - size : end]
        rows.append(math.sqrt(size / group.order) * block.flatten(1).T)
    return torch.cat(rows)


def _check_spatial(group: FiniteGroup) -> None:
    check_group("group", group)
    if group.dim != 3 or not group.is_orthogonal:
        raise ValueError(f"group: expected a group of orthogonal 3 x 3 matrices, got {group}")
