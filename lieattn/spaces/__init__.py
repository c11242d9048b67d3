"""Homogeneous spaces X = G/H."""

from lieattn.spaces._space import Euclidean, HomogeneousSpace, Orbits, PositionDirection, Sphere

__all__ = ["Euclidean", "HomogeneousSpace", "Orbits", "PositionDirection", "Sphere"]
