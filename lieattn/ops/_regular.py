"""Linear maps between signals on a finite group."""

from __future__ import annotations

from torch import Tensor


def expand_kernel(kernel: Tensor, relative: Tensor) -> Tensor:
    """Write a kernel on H as the matrix W[g, :, h, :] = kernel[g⁻¹ h] that commutes with H.

    A linear map between signals on H commutes with the left regular representation if and only if it has
    this form; it has |H| times fewer parameters than a dense map.

    Parameters
    ----------
    kernel
        ``[order, out_channels, in_channels]``.
    relative
        ``[order, order]`` int64, index of g⁻¹ h (:attr:`lieattn.groups.FiniteGroup.relative`).

    Returns
    -------
    Tensor
        ``[order, out_channels, order, in_channels]``.
    """
    return kernel[relative].transpose(1, 2)
