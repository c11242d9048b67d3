"""Homogeneous spaces X = G/H: an origin, a section X → G, the stabilizer of the origin, and lifting points to G."""

from lieattn.spaces._euclidean import Euclidean
from lieattn.spaces._orbits import Orbits
from lieattn.spaces._space import HomogeneousSpace
from lieattn.spaces._sphere import PositionDirection, Sphere

__all__ = ["Euclidean", "HomogeneousSpace", "Orbits", "PositionDirection", "Sphere"]
