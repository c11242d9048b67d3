"""Linear maps between signals on a finite group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lieattn._core.checks import check_arguments, check_count, check_features, check_tensor, kind

# A product with the small Fourier matrix has about a quarter of the speed of a large matrix product.
_TRANSFORM_COST = 4
# Overhead of its small steps for every point, in multiply-adds of a large product.
_OVERHEAD = 24_000


def tied_linear(
    x: Float[Tensor, "*batch order inputs"],
    kernel: Float[Tensor, "order outputs inputs"],
    relative: Int[Tensor, "order order"],
) -> Float[Tensor, "*batch order outputs"]:
    """Compute f'(g) = Σ_h kernel[g⁻¹ h] f(h) as one dense matrix product.

    **Equivariance.** A linear map between signals on H commutes with the left regular representation if and only if it
    has this form. It has |H| times fewer parameters than a dense map.

    ``relative`` is the index of g⁻¹ h (:attr:`lieattn.groups.FiniteGroup.relative_index`), which is not checked.
    """
    _check_kernel(kernel)
    _check_relative(relative, kernel)
    order, out_channels, in_channels = kernel.shape
    _check_field(x, kernel)
    matrix = kernel[relative].transpose(1, 2).reshape(order * out_channels, order * in_channels)
    return F.linear(x.flatten(-2), matrix).unflatten(-1, (order, out_channels))


def fourier_linear(
    x: Float[Tensor, "*batch order inputs"],
    kernel: Float[Tensor, "order outputs inputs"],
    fourier: Float[Tensor, "order order"],
    irreps: Sequence[Float[Tensor, "order _ _"]],
    copies: Sequence[int],
) -> Float[Tensor, "*batch order outputs"]:
    r"""Evaluate :func:`tied_linear` in the Fourier basis of H, in which it is block diagonal.

    On the copies of an irreducible representation ρ in the regular one, the map acts by
    :math:`\sum_k \rho(k) \otimes W(k)`. For each pair of channels, this requires Σ degree² copies products instead of
    |H|² (for the rotations of the cube, 64 instead of 576), and in addition two products with the orthogonal Fourier
    matrix.

    ``x``, ``kernel`` and the result are those of :func:`tied_linear`. ``fourier`` contains the bases of all irreps as
    rows, copy by copy (:class:`lieattn.groups.RealIrrep`). ``irreps`` are the matrices ``[order, degree, degree]`` of
    each irrep, in the dtype of ``x``, and ``copies`` are their multiplicities in the regular representation.
    """
    _check_kernel(kernel)
    order, out_channels, in_channels = kernel.shape
    _check_field(x, kernel)
    _check_basis(kernel, fourier, irreps, copies)
    spectrum = fourier @ x.reshape(-1, order, in_channels)
    flat = kernel.flatten(1)
    mapped, start = [], 0
    for matrices, count in zip(irreps, copies, strict=True):
        degree = matrices.shape[1]
        rows = count * degree
        block = (matrices.flatten(1).T @ flat).view(degree, degree, out_channels, in_channels)
        block = block.permute(1, 3, 0, 2).reshape(degree * in_channels, degree * out_channels)
        part = spectrum[:, start : start + rows].reshape(-1, degree * in_channels) @ block
        mapped.append(part.view(-1, rows, out_channels))
        start += rows
    return (fourier.T @ torch.cat(mapped, dim=1)).view(*x.shape[:-2], order, out_channels)


def fourier_pays(order: int, degrees: Sequence[int], in_channels: int, out_channels: int) -> bool:
    """Estimate from numbers of operations whether :func:`fourier_linear` is faster than :func:`tied_linear`.

    ``degrees`` contains the degree of every copy of every irrep of the group of this ``order``.
    """
    check_arguments(fourier_pays, locals())
    blocks = sum(degree**2 for degree in degrees) * in_channels * out_channels
    transforms = _TRANSFORM_COST * order**2 * (in_channels + out_channels)
    return blocks + transforms + _OVERHEAD < order**2 * in_channels * out_channels


def _check_kernel(kernel: Tensor) -> None:
    """Raise an error unless ``kernel`` is a kernel."""
    check_tensor("kernel", kernel, "a floating tensor [order, out_channels, in_channels]")
    if kernel.ndim != 3 or kernel.numel() == 0:
        raise ValueError(f"kernel: expected [order, out_channels, in_channels], got {tuple(kernel.shape)}")


def _check_relative(relative: Tensor, kernel: Tensor) -> None:
    """Raise an error unless dtype, shape and device of the index fit the kernel."""
    order = len(kernel)
    check_tensor("relative", relative, f"a tensor [{order}, {order}] of int64", torch.int64)
    if relative.shape != (order, order):
        raise ValueError(f"relative: expected [{order}, {order}] for the kernel, got {tuple(relative.shape)}")
    if relative.device != kernel.device and relative.device.type != "cpu":
        raise ValueError(f"relative: expected a tensor on {kernel.device} like kernel, got one on {relative.device}")


def _check_field(x: Tensor, kernel: Tensor) -> None:
    """Raise an error unless the kernel maps these features."""
    order, _, in_channels = kernel.shape
    if isinstance(x, Tensor) and x.shape[-2:] == (order, in_channels) and x.dtype == kernel.dtype:
        if x.device == kernel.device:  # a faster test for the common case
            return
    check_features(x, kernel, beside="the kernel")
    if x.shape[-2:] != (order, in_channels):
        raise ValueError(f"x: expected [*, {order}, {in_channels}] for the kernel, got {tuple(x.shape)}")


def _check_basis(kernel: Tensor, fourier: Tensor, irreps: Sequence[Tensor], copies: Sequence[int]) -> None:
    """Raise an error unless Fourier matrix and irreps fit the kernel."""
    order = len(kernel)
    check_features(fourier, kernel, argument="fourier", beside="the kernel")
    if fourier.shape != (order, order):
        raise ValueError(f"fourier: expected [{order}, {order}] for the kernel, got {tuple(fourier.shape)}")
    for argument, given in (("irreps", irreps), ("copies", copies)):
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(f"{argument}: expected a sequence, got {kind(given)}")
    if len(irreps) != len(copies):
        raise ValueError(f"irreps, copies: expected the same number of entries, got {len(irreps)} and {len(copies)}")
    for matrices, count in zip(irreps, copies, strict=True):
        check_features(matrices, kernel, argument="irreps", beside="the kernel")
        if matrices.ndim != 3 or matrices.shape != (order, matrices.shape[1], matrices.shape[1]):
            raise ValueError(f"irreps: expected [{order}, degree, degree], got {tuple(matrices.shape)}")
        check_count("copies", count)
    rows = sum(matrices.shape[1] * count for matrices, count in zip(irreps, copies, strict=True))
    if rows != order:
        raise ValueError(f"irreps, copies: expected {order} rows in total, as in fourier, got {rows}")
