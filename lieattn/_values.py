"""Equality of values that users derive classes from, with attributes of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def equal_values(one: Any, other: Any) -> bool:
    """Return whether two objects have the same class and equal attributes, among them tensors and arrays."""
    mine, others = vars(one), vars(other)
    return type(one) is type(other) and mine.keys() == others.keys() and all(_equal(mine[k], others[k]) for k in mine)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
