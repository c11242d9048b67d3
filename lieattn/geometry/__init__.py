"""Point sets: neighborhoods and lifting, computed once per batch and shared by all layers."""

from lieattn.geometry._grid import crop, pixel_positions, pooling_cells
from lieattn.geometry._lifted_graph import LiftedGraph, Neighborhood, lift
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import AllPairs, Given, Nearest, PixelSquare, Radius
from lieattn.geometry._point_clouds import PointClouds, flatten, point_clouds, unflatten

__all__ = [
    "AllPairs",
    "Given",
    "LiftedGraph",
    "Nearest",
    "Neighborhood",
    "Neighbors",
    "PixelSquare",
    "PointClouds",
    "Radius",
    "crop",
    "flatten",
    "lift",
    "pixel_positions",
    "point_clouds",
    "pooling_cells",
    "unflatten",
]
