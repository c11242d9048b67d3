"""Benchmarks that users can run on their own machines: ``lieattn bench NAME [--json FILE]``."""

from collections.abc import Mapping

from lieattn.bench._literal import ATTENTIVE, GSA_NET, LIETRANSFORMER
from lieattn.bench._measure import Benchmark, peak_memory
from lieattn.bench._operators import ATTENTION, SCALING, WHOLE_CLOUDS
from lieattn.bench._steps import EPOCHS, FIBERS, FORCES, FRAMEWISE

__all__ = ["BENCHMARKS", "Benchmark", "peak_memory"]

BENCHMARKS: Mapping[str, Benchmark] = {
    "attention": ATTENTION,
    "whole-clouds": WHOLE_CLOUDS,
    "epochs": EPOCHS,
    "attentive": ATTENTIVE,
    "gsa-net": GSA_NET,
    "framewise": FRAMEWISE,
    "fibers": FIBERS,
    "forces": FORCES,
    "lietransformer": LIETRANSFORMER,
    "scaling": SCALING,
}
"""The benchmarks by name."""
