"""The operator: functions without parameters."""

from lieattn.ops._backend import Choice, backend, explain
from lieattn.ops._group_attention import group_attention
from lieattn.ops._regular import expand_kernel, fourier_linear, fourier_pays, tied_linear
from lieattn.ops._terms import Normalization, Pattern, RelativeTerms

__all__ = [
    "Choice",
    "Normalization",
    "Pattern",
    "RelativeTerms",
    "backend",
    "expand_kernel",
    "explain",
    "fourier_linear",
    "fourier_pays",
    "group_attention",
    "tied_linear",
]
