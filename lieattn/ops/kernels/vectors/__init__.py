"""Vectors of a few lanes for Numba, and products of small tables of vectors."""
