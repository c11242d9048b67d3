"""Homogeneous spaces X = G/H: the origin, its stabilizer H, a section X → G, and the lift of points to G."""

from lieattn.spaces._space import Euclidean, HomogeneousSpace, Orbits, PositionDirection, Sphere

__all__ = ["Euclidean", "HomogeneousSpace", "Orbits", "PositionDirection", "Sphere"]
