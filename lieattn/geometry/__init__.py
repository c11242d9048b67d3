"""The lift of point clouds, which is computed once per batch for all layers."""

from lieattn.geometry._clouds import PointClouds, point_clouds
from lieattn.geometry._frames import FiniteFrames, Frames, GivenFrames, GroupFrames, SampledFrames, Sites
from lieattn.geometry._grid import Raster, crop, pixel_positions, pooling_cells
from lieattn.geometry._indices import Padding, flatten, padding, unflatten
from lieattn.geometry._lift import ScaleFrames, Stencil, lift, lift_rasters, natural_space
from lieattn.geometry._lifted_graph import LiftedGraph, Piece, pieces
from lieattn.geometry._neighbor_lists import Neighbors
from lieattn.geometry._neighbors import (
    AllPairs,
    Given,
    Nearest,
    Neighborhood,
    PixelSquare,
    Radius,
    find_neighbors,
    scaled,
    smooth_cutoff,
)
from lieattn.geometry._principal_frames import DegenerateFramesWarning, PrincipalFrames, sign_group
from lieattn.geometry._relative import RelativeElements, num_coordinates
from lieattn.geometry._subsample import Coarse, coarsen, farthest_by_distance, farthest_points

__all__ = [
    "AllPairs",
    "Coarse",
    "DegenerateFramesWarning",
    "FiniteFrames",
    "Frames",
    "Given",
    "GivenFrames",
    "GroupFrames",
    "LiftedGraph",
    "Nearest",
    "Neighborhood",
    "Neighbors",
    "Padding",
    "Piece",
    "PixelSquare",
    "PointClouds",
    "PrincipalFrames",
    "Radius",
    "Raster",
    "RelativeElements",
    "SampledFrames",
    "ScaleFrames",
    "Sites",
    "Stencil",
    "coarsen",
    "crop",
    "farthest_by_distance",
    "farthest_points",
    "find_neighbors",
    "flatten",
    "lift",
    "lift_rasters",
    "natural_space",
    "num_coordinates",
    "padding",
    "pieces",
    "pixel_positions",
    "point_clouds",
    "pooling_cells",
    "scaled",
    "sign_group",
    "smooth_cutoff",
    "unflatten",
]
