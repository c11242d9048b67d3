"""Data sets as point sets for torch_geometric.

The package does not depend on ``lieattn``: any library that accepts a ``torch_geometric.data.Data`` can use it.
"""

from lieattn_datasets._clouds import Card, Clouds
from lieattn_datasets._image_folder import ImageFolder
from lieattn_datasets._image_transforms import (
    AveragePixels,
    DropBackground,
    DropPoints,
    RandomCrop,
    RandomWarpImage,
    RotateImage,
    Standardize,
)
from lieattn_datasets._images import ImagePoints, data_to_image, grid_positions, image_to_data
from lieattn_datasets._md17 import MD17_MOLECULES, RMD17, RMD17Subset
from lieattn_datasets._meshes import MeshError, normalize_cloud, read_mesh, sample_surface
from lieattn_datasets._mnist import MNIST, Digits, FashionMNIST, FashionMNIST900, RotatedMNIST, RotatedMNISTRecipe
from lieattn_datasets._modelnet import MeshFolder, ModelNet
from lieattn_datasets._molecules import ExtendedXYZ, MoleculeFeatures, Molecules
from lieattn_datasets._nbody import (
    ChargedParticles,
    NBody,
    NBodySimulated,
    charge_energy,
    simulate_charges,
)
from lieattn_datasets._photos import CIFAR10, CIFAR100, CIFAR10Subset, PatchCamelyon
from lieattn_datasets._procedural import SHAPE_CLASSES, ProceduralScenes, ProceduralShapes
from lieattn_datasets._qm9 import QM9, QM9GFN2, QM9Subset
from lieattn_datasets._shapes import AdrenalMNIST3D, MedMNIST, ModelNet10Tiny, ScanObjectNN, ShapePoints
from lieattn_datasets._smiles import SmilesTable
from lieattn_datasets._sphere import (
    SphericalImages,
    SphericalMNIST,
    areas_on_sphere,
    fibonacci_sphere,
    on_sphere,
    project_image,
)
from lieattn_datasets._toys import Constellation, Flights, Springs, simulate_springs, spring_energy
from lieattn_datasets._transforms import (
    RandomRotateFields,
    RandomRotatePoints,
    RandomScalePoints,
    RotatePoints,
    TransformFields,
    TransformPoints,
)
from lieattn_datasets._wind import WindOnSphere, wind_vectors
from lieattn_datasets._xtb import SMALL_MOLECULES, GFN2Labels, GFN2Molecules, embed_molecule, label_gfn2

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MD17_MOLECULES",
    "MNIST",
    "QM9",
    "QM9GFN2",
    "RMD17",
    "SHAPE_CLASSES",
    "SMALL_MOLECULES",
    "AdrenalMNIST3D",
    "AveragePixels",
    "CIFAR10Subset",
    "Card",
    "ChargedParticles",
    "Clouds",
    "Constellation",
    "Digits",
    "DropBackground",
    "DropPoints",
    "ExtendedXYZ",
    "FashionMNIST",
    "FashionMNIST900",
    "Flights",
    "GFN2Labels",
    "GFN2Molecules",
    "ImageFolder",
    "ImagePoints",
    "MedMNIST",
    "MeshError",
    "MeshFolder",
    "ModelNet",
    "ModelNet10Tiny",
    "MoleculeFeatures",
    "Molecules",
    "NBody",
    "NBodySimulated",
    "PatchCamelyon",
    "ProceduralScenes",
    "ProceduralShapes",
    "QM9Subset",
    "RMD17Subset",
    "RandomCrop",
    "RandomRotateFields",
    "RandomRotatePoints",
    "RandomScalePoints",
    "RandomWarpImage",
    "RotateImage",
    "RotatePoints",
    "RotatedMNIST",
    "RotatedMNISTRecipe",
    "ScanObjectNN",
    "ShapePoints",
    "SmilesTable",
    "SphericalImages",
    "SphericalMNIST",
    "Springs",
    "Standardize",
    "TransformFields",
    "TransformPoints",
    "WindOnSphere",
    "areas_on_sphere",
    "charge_energy",
    "data_to_image",
    "embed_molecule",
    "fibonacci_sphere",
    "grid_positions",
    "image_to_data",
    "label_gfn2",
    "normalize_cloud",
    "on_sphere",
    "project_image",
    "read_mesh",
    "sample_surface",
    "simulate_charges",
    "simulate_springs",
    "spring_energy",
    "wind_vectors",
]
