"""MNIST on the sphere, re-created from MNIST by a fixed recipe."""

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lieattn_datasets._checks import check_arguments
from lieattn_datasets._clouds import Clouds, Transform
from lieattn_datasets._files import Release, check_choice, check_count
from lieattn_datasets._sphere import angles_to_directions, choose_on_rings, sphere_data
from lieattn_datasets._splits import hold_out
from lieattn_datasets._streams import SPLITS, frozen_stream

_COUNTS = {("train", False): 5000, ("train", True): 2000, ("test", False): 1000, ("test", True): 1000}

_RELEASE = Release(
    dataset="Spherical MNIST, re-created",
    origin="The file is spherical_mnist_recipe.npz, made from MNIST by the recipe in the documentation of the class.",
    computed=("x_train_nr", "x_test_nr"),
    digests={"spherical_mnist_recipe.npz": "content:d679280247ec055f25e391746d702d58f872be14a025653f7360a453a3b1bb0f"},
)


class SphericalMNIST(Clouds):
    """MNIST digits on the sphere, unrotated or with a random rotation each, on a grid of 60 x 60 angles.

    A digit is centered at the north pole, by stereographic projection from the south pole with its outermost pixels at
    the equator, bilinear interpolation and rounding to uint8. For rotated digits the projection is sampled at rotated
    directions, ``rotated(s) = unrotated(R^T s)``. The data are similar to those of Cohen et al. (Spherical CNNs, 2018)
    but not the same, so results are not comparable. :class:`SphericalImages` does the same for other images and on
    other points.

    An item has ``pos`` float32 ``[points, 3]`` (unit vectors, the same for all items), ``x`` float32
    ``[points, 1]`` in [0, 1], ``area`` float32 ``[points]`` (the area of the sphere that each point represents,
    with the sum 4 pi), ``y`` int64 ``[1]``, and ``rotation`` ``[1, 3, 3]`` if it is rotated.

    Parameters
    ----------
    root
        Folder with ``spherical_mnist_recipe.npz``.
    split
        ``"train"`` (5,000 unrotated digits, of which the first 2,000 also exist rotated), ``"test"`` (1,000), or
        ``"valid"``.
    rotated
        Whether the digits are rotated. The usual protocols train and test on unrotated digits (NR/NR), train and test
        on rotated digits (R/R), or train on unrotated and test on rotated digits (NR/R).
    points
        Number of points that are kept of the 3,600 points of the grid. They are chosen once so that all represent about
        the same area (the grid itself is dense at the poles). Default: all.
    validation
        Number of training digits that are set aside as ``"valid"``, by a permutation with a fixed seed.
    seed
        Seed of the choice of points.
    verify
        Whether to compare the digest and the number of images. If False, any file in the same format is read.
    transform
        Function that is applied to each new ``Data``.
    """

    num_classes = 10

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "valid", "test"] = "train",
        *,
        rotated: bool = False,
        points: int | None = None,
        validation: int = 0,
        seed: int = 0,
        verify: bool = True,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(SphericalMNIST.__init__, locals())
        check_choice("split", split, SPLITS)
        path = _RELEASE.locate(root, *_RELEASE.digests, verify=verify)
        half = "test" if split == "test" else "train"
        kind = "r" if rotated else "nr"
        expected = {
            f"x_{half}_{kind}": "uint8 [images, beta, alpha]",
            f"y_{half}": "integer [labels]",
            "beta": "number [beta]",
            "alpha": "number [alpha]",
        }
        if rotated:
            expected[f"rot_{half}"] = "number [images, 3, 3]"
        images, labels, beta, alpha, *rotations = _RELEASE.read_npz(path, expected)
        if len(labels) < len(images) or not images.size:
            raise _RELEASE.damaged(path, f"has {len(labels)} labels for {len(images)} images")
        if verify:
            check_count(_RELEASE, path, len(images), _COUNTS[half, rotated])
        super().__init__(len(images), transform)
        self._rotations = rotations[0] if rotated else None
        edge = math.pi / (2 * len(beta))
        if not np.allclose(beta, edge * (2 * np.arange(len(beta)) + 1)) or np.abs(alpha).max() > 2 * math.pi:
            raise _RELEASE.damaged(path, "has beta other than pi (2 i + 1) / (2 n) from the north, or alpha in degrees")
        areas = 2 * math.pi * (np.cos(beta - edge) - np.cos(beta + edge))
        sizes = np.full(len(beta), len(alpha))
        chosen, self._areas = choose_on_rings(sizes, areas, points, frozen_stream(seed))
        self._directions = angles_to_directions(beta[:, None], alpha).reshape(-1, 3)[chosen]
        self._images = images.reshape(len(images), -1)[:, chosen]
        self._labels = _RELEASE.check_indices(path, f"y_{half}", labels[: len(images)], 10)
        if half == "train":
            self._indices = hold_out(len(images), validation, split)

    def _make(self, index: int) -> Data:
        data = sphere_data(self._directions, self._images[index, :, None] / 255, self._areas)
        data.y = torch.from_numpy(self._labels[index : index + 1].copy())
        if self._rotations is not None:
            data.rotation = torch.from_numpy(self._rotations[index : index + 1].astype(np.float32))
        return data

    def __repr__(self) -> str:
        return f"SphericalMNIST({len(self)} images on {len(self._areas)} points, 10 classes)"

    @property
    def labels(self) -> Tensor:
        """Class of each image, int64 ``[images]``, in the order of this data set."""
        return torch.from_numpy(self._labels[self._indices])
