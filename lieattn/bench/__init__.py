"""Benchmarks that users can run on their own machines: ``lieattn bench NAME [--json FILE]``."""

from lieattn.bench._measure import BENCHMARKS, Record, compare, peak_memory, table, use_toy_sizes

__all__ = ["BENCHMARKS", "Record", "compare", "peak_memory", "table", "use_toy_sizes"]
