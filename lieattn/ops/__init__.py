"""The attention operator."""

from lieattn.ops._attentive import AttentionMaps, attentive_convolution, convolution_responses, residual_branch
from lieattn.ops._attentive_clouds import attentive_sums, fuses_attentive_sums
from lieattn.ops._backend import Choice, backend, cpu_kernels, explain, fused_kernel
from lieattn.ops._edges import (
    bessel_functions,
    edge_kernels,
    edge_messages,
    edge_moments,
    edge_units,
    smooth_lengths,
    smooth_window,
)
from lieattn.ops._group_attention import group_attention
from lieattn.ops._head_networks import Activation, activation, head_networks, kinked
from lieattn.ops._operations import count_operations
from lieattn.ops._reference import reference_attention
from lieattn.ops._regular import fourier_linear, fourier_pays, tied_linear
from lieattn.ops._terms import Normalization, Pattern, RelativeTerms
from lieattn.ops.kernels._calls import release_memory

__all__ = [
    "Activation",
    "AttentionMaps",
    "Choice",
    "Normalization",
    "Pattern",
    "RelativeTerms",
    "activation",
    "attentive_convolution",
    "attentive_sums",
    "backend",
    "bessel_functions",
    "convolution_responses",
    "count_operations",
    "cpu_kernels",
    "edge_kernels",
    "edge_messages",
    "edge_moments",
    "edge_units",
    "explain",
    "fourier_linear",
    "fourier_pays",
    "fused_kernel",
    "fuses_attentive_sums",
    "group_attention",
    "head_networks",
    "kinked",
    "reference_attention",
    "release_memory",
    "residual_branch",
    "smooth_lengths",
    "smooth_window",
    "tied_linear",
]
