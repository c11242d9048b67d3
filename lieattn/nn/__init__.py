"""Layers: parameters around the operator, ``layer(x, graph) -> x`` on fields ``[points, fiber, channels]``."""

from lieattn.nn._attention import GroupSelfAttention, LiftingSelfAttention
from lieattn.nn._block import PreNormBlock
from lieattn.nn._linear import GroupLinear
from lieattn.nn._norm import CloudNorm
from lieattn.nn._pool import CloudPool, FiberPool, GridPool, pooled_positions
from lieattn.nn._positional import (
    CoordinateEncoding,
    CoordinateNetwork,
    FiberEncoding,
    KeyEncoding,
    MLPEncoding,
    PositionalEncoding,
    RotaryEncoding,
    TableEncoding,
)

__all__ = [
    "CloudNorm",
    "CloudPool",
    "CoordinateEncoding",
    "CoordinateNetwork",
    "FiberEncoding",
    "FiberPool",
    "GridPool",
    "GroupLinear",
    "GroupSelfAttention",
    "KeyEncoding",
    "LiftingSelfAttention",
    "MLPEncoding",
    "PositionalEncoding",
    "PreNormBlock",
    "RotaryEncoding",
    "TableEncoding",
    "pooled_positions",
]
