"""Data sets as point sets, for torch_geometric. Files are read from a folder and never downloaded.

Independent of ``lieattn``: whatever takes a ``torch_geometric.data.Data`` can use it.
"""

from lieattn_datasets._amat import RotatedMNIST
from lieattn_datasets._cifar import CIFAR10, CIFAR100
from lieattn_datasets._digits import Digits
from lieattn_datasets._grid import data_to_image, grid_positions, image_to_data
from lieattn_datasets._idx import MNIST, FashionMNIST
from lieattn_datasets._images import ImagePoints
from lieattn_datasets._npz import CIFAR10Subset, FashionMNIST900, RotatedMNISTRecipe
from lieattn_datasets._pcam import PatchCamelyon
from lieattn_datasets._transforms import (
    PermutePoints,
    RandomRotatePoints,
    RotateImage,
    RotatePoints,
    Standardize,
    TransformPoints,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "CIFAR10Subset",
    "Digits",
    "FashionMNIST",
    "FashionMNIST900",
    "ImagePoints",
    "PatchCamelyon",
    "PermutePoints",
    "RandomRotatePoints",
    "RotateImage",
    "RotatePoints",
    "RotatedMNIST",
    "RotatedMNISTRecipe",
    "Standardize",
    "TransformPoints",
    "data_to_image",
    "grid_positions",
    "image_to_data",
]
