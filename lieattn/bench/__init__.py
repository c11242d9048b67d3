"""Benchmarks that users can run on their own machines: ``lieattn bench NAME [--json FILE]``."""

from lieattn.bench._measure import BENCHMARKS, Benchmark, peak_memory, use_toy_sizes

__all__ = ["BENCHMARKS", "Benchmark", "peak_memory", "use_toy_sizes"]
