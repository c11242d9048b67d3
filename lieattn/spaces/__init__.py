"""Homogeneous spaces X = G/H: an origin, a section X → G, the stabilizer of the origin, and lifting points to G."""

from lieattn.spaces._space import Euclidean, HomogeneousSpace, Orbits, PositionDirection, Sphere

__all__ = ["Euclidean", "HomogeneousSpace", "Orbits", "PositionDirection", "Sphere"]
