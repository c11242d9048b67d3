"""Point sets: neighborhoods and lifting, computed once per batch and shared by all layers."""

from lieattn.geometry._grid import crop, pixel_positions, pooling_cells
from lieattn.geometry._lifted_elements import LiftedElements, lift_elements
from lieattn.geometry._lifted_graph import LiftedGraph, Neighborhood, find_neighbors, in_frames, lift
from lieattn.geometry._lifts import FiniteFrames, GivenFrames, Lift, SampledFrames
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import AllPairs, Given, Nearest, PixelSquare, Radius
from lieattn.geometry._padding import Padding, padding
from lieattn.geometry._point_clouds import PointClouds, flatten, point_clouds, unflatten
from lieattn.geometry._principal_frames import DegenerateFramesWarning, PrincipalFrames
from lieattn.geometry._relative import join_coordinates
from lieattn.geometry._scale import ScaledGraph, ScaleFiber, lift_scales
from lieattn.geometry._subsample import farthest_by_distance, farthest_points

__all__ = [
    "AllPairs",
    "DegenerateFramesWarning",
    "FiniteFrames",
    "Given",
    "GivenFrames",
    "Lift",
    "LiftedElements",
    "LiftedGraph",
    "Nearest",
    "Neighborhood",
    "Neighbors",
    "Padding",
    "PixelSquare",
    "PointClouds",
    "PrincipalFrames",
    "Radius",
    "SampledFrames",
    "ScaleFiber",
    "ScaledGraph",
    "crop",
    "farthest_by_distance",
    "farthest_points",
    "find_neighbors",
    "flatten",
    "in_frames",
    "join_coordinates",
    "lift",
    "lift_elements",
    "lift_scales",
    "padding",
    "pixel_positions",
    "point_clouds",
    "pooling_cells",
    "unflatten",
]
