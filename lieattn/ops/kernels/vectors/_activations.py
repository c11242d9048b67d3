# mypy: allow-untyped-defs
"""The swish and its derivative on tables of vectors."""

from lieattn.ops.kernels._compiled import part
from lieattn.ops.kernels.vectors._vectors import exp, fill, load, multiply_add, stay_apart, store


@part
def activate(u, vectors, lanes):
    """Replace u by its swish u σ(u)."""
    stay_apart()
    wide = len(lanes)
    one, zero = fill(u, 1.0, lanes), fill(u, 0.0, lanes)
    for at in range(0, vectors * wide, wide):
        value = load(u, at, lanes)
        store(u, at, value / (one + exp(zero - value)))


@part
def activate_with_slope(u, slope, vectors, lanes):
    """Replace u by its swish, and write the derivative to ``slope``."""
    stay_apart()
    wide = len(lanes)
    one, zero = fill(u, 1.0, lanes), fill(u, 0.0, lanes)
    for at in range(0, vectors * wide, wide):
        value = load(u, at, lanes)
        share = one / (one + exp(zero - value))
        value = value * share
        store(u, at, value)
        store(slope, at, multiply_add(value, one - share, share))


@part
def multiply(out, x, vectors, lanes):
    """Multiply a table of vectors by another, entry by entry."""
    wide = len(lanes)
    for at in range(0, vectors * wide, wide):
        store(out, at, load(out, at, lanes) * load(x, at, lanes))
