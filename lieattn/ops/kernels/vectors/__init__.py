"""Vectors of a few lanes for Numba."""
