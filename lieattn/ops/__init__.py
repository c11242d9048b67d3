"""The operator: functions without parameters."""

from lieattn.ops._group_attention import group_attention
from lieattn.ops._regular import expand_kernel
from lieattn.ops._terms import Normalization, Pattern, RelativeTerms

__all__ = ["Normalization", "Pattern", "RelativeTerms", "expand_kernel", "group_attention"]
