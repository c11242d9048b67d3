"""Source, terms and size of each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Card(NamedTuple):
    """Source, terms (license) and size of a data set, in words. The README of the data sets has the details."""

    source: str
    terms: str
    size: str


_MNIST, _CC_BY_SA, _NONE = (
    "60,000 + 10,000 images, 28 x 28, one channel, uint8, 10 classes",
    "CC BY-SA 3.0",
    "no rights reserved",
)
_DERIVED = "CC BY-SA 3.0 (derived from MNIST)"
_CIFAR = Card(
    'A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009',
    "no license stated; citation requested",
    "50,000 + 10,000 images, 32 x 32, RGB, uint8, 10 or 100 (fine) classes",
)
_RMD17 = Card(
    "A. Christensen, O. A. von Lilienfeld",
    "CC0",
    "100,000 frames (azobenzene 99,988) of each of ten molecules of 9 to 24 atoms",
)
_CHARGES = Card("simulated", _NONE, "7,000 systems of 5 particles at times 0 .. 5")
_SPHERE = Card(
    "MNIST digits by stereographic projection onto the sphere", _DERIVED, "60 x 60 points (latitude x longitude)"
)
_OF_YOURS = "those of your files"

CARDS: Mapping[str, Card] = {
    "Digits": Card(
        "part of scikit-learn",
        "CC BY 4.0 (UCI)",
        "1,797 images, 8 x 8, one channel, values 0 .. 16 (scaled to [0, 1]), 10 classes",
    ),
    "MNIST": Card('"The MNIST database of handwritten digits", Y. LeCun, C. Cortes, C. Burges', _CC_BY_SA, _MNIST),
    "FashionMNIST": Card(
        "H. Xiao, K. Rasul, R. Vollgraf, 2017, repository zalandoresearch/fashion-mnist", "MIT", _MNIST
    ),
    "FashionMNIST900": Card(
        "Fashion-MNIST, 90 images per class", "MIT", "900 images, 28 x 28, one channel, uint8, 10 classes"
    ),
    "RotatedMNIST": Card(
        "H. Larochelle, D. Erhan, A. Courville, J. Bergstra, Y. Bengio",
        "none stated; derived from MNIST",
        "12,000 + 50,000 images, 28 x 28, one channel, intensities in [0, 1]",
    ),
    "RotatedMNISTRecipe": Card(
        "made from MNIST by the recipe in the class's documentation", _DERIVED, "10,000 / 2,000 / 50,000 images"
    ),
    "CIFAR10": _CIFAR,
    "CIFAR100": _CIFAR,
    "CIFAR10Subset": Card(
        "CIFAR-10",
        "research use; not to be redistributed with a package",
        "its first 2,000 training and first 1,000 test images",
    ),
    "PatchCamelyon": Card(
        "repository basveeling/pcam, Zenodo record 2546921; from Camelyon16",
        "CC0",
        "262,144 / 32,768 / 32,768 patches, 96 x 96, RGB, uint8, 2 classes",
    ),
    "ImageFolder": Card("your own images", _OF_YOURS, "all PNG and JPEG images in the folder"),
    "QM9": Card(
        "R. Ramakrishnan, P. Dral, M. Rupp, O. A. von Lilienfeld, Scientific Data 1, 140022 (2014)",
        "CC0",
        "130,831 molecules of H, C, N, O, F, up to 29 atoms",
    ),
    "QM9Subset": Card("a sample of QM9", "CC0", "14,308 molecules, 258,945 atoms, H, C, N, O"),
    "QM9GFN2": Card("GFN2-xTB single points (tblite 0.8.0, accuracy 0.01)", _NONE, "those of `QM9Subset`"),
    "RMD17": _RMD17,
    "RMD17Subset": Card(_RMD17.source, _RMD17.terms, "1,000 + 1,000 frames of each of ten molecules"),
    "GFN2Molecules": Card("generated from SMILES with rdkit", _NONE, "81 molecules of H, C, N, O, F"),
    "ExtendedXYZ": Card("frames of ase, or an extended XYZ file", _OF_YOURS, "all frames of the file"),
    "NBody": _CHARGES,
    "NBodyTrajectories": Card("simulated", _NONE, "50 systems of 5 particles at 51 times, 0 .. 5"),
    "NBodySimulated": _CHARGES,
    "Springs": Card(
        "simulated, following LieConv and LieTransformer", _NONE, "3,000 / 2,000 / 2,000 or any other sizes"
    ),
    "Constellation": Card(
        "generated, following LieTransformer", _NONE, "10,000 / 1,000 / 1,000 or any other sizes, 3 to 34 points"
    ),
    "SphericalMNIST": _SPHERE,
    "SphericalImages": _SPHERE,
    "WindOnSphere": Card(
        "NCEP reanalysis, long-term monthly means of the wind at 200 hPa",
        "US government data; repository MIT",
        "12 months on 73 x 144 points every 2.5 degrees",
    ),
    "ModelNet": Card(
        'Z. Wu et al., "3D ShapeNets", CVPR 2015',
        "academic research; the models belong to their authors",
        "ModelNet10: 3,991 + 908 meshes, 10 classes; ModelNet40: 9,843 + 2,468, 40 classes",
    ),
    "MeshFolder": Card("your own meshes", _OF_YOURS, "all meshes in the folder"),
    "ModelNet10Tiny": Card(
        "ModelNet10, voxels of 30 x 30 x 30",
        "academic research; not to be redistributed",
        "400 + 200 shapes, 512 surface voxels each, 10 classes, no normals",
    ),
    "AdrenalMNIST3D": Card(
        'J. Yang et al., "MedMNIST v2", Scientific Data 2023',
        "CC BY 4.0",
        "1,584 binary masks of 28 x 28 x 28, 2 classes",
    ),
    "ProceduralScenes": Card(
        "generated with trimesh", _NONE, "800 / 160 / 240 or any other sizes, three solids of six kinds"
    ),
    "ProceduralShapes": Card("generated with trimesh", _NONE, "1,600 / 320 / 480 or any other sizes, sixteen classes"),
}
"""Cards of all data sets. Keys are the names of their classes."""
