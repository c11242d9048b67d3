"""Published weights of the papers for the networks of this library."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_choice, check_count, check_has_numbers, may_read_values
from lieattn.geometry import FiniteFrames, LiftedGraph, Nearest, SampledFrames
from lieattn.groups import SE, FiniteGroup, cyclic, dihedral, linear_part, quaternion_from_rotation, trivial
from lieattn.models.attentive._networks import AttentionKind, AttentiveCNN, AttentiveNetwork
from lieattn.models.lie._network import AttentionOptions, Lifting, PairCoordinates, Readout
from lieattn.models.lie._networks import LieTransformer
from lieattn.spaces import Euclidean, HomogeneousSpace

# Mean and standard deviation of the training pixels in [0, 1], by which images are standardized.
_MEAN, _DEVIATION = 0.13246, 0.30119
_OVERSHOOT = 0.1  # of interpolated images, beyond the range of their pixels
_KINDS: dict[str, AttentionKind] = {"none": "none", "full": "full", "input": "input", "rh": "pose"}
_GROUPS = {"z2": partial(trivial, 2), "p4": partial(cyclic, 4), "p4m": partial(dihedral, 4)}
# The authors' index of each frame of this library in p4m. They reflect after rotating, MIR ROT^r = ROT^-r MIR.
_MIRRORED = [0, 1, 2, 3, 4, 7, 6, 5]
# The authors' names of the parameters and buffers of normalizations.
_NORM = {"weight": "gamma", "bias": "beta", "running_mean": "mean", "running_var": "var"}
# The authors' names of parameters of layers, by a part of the name here; all other parameters are kernels.
_LAYER = {"first": "W1", "second": "W2", "spatial": "psi_X", "gate": "w_H"}
Values = Tensor | np.ndarray[Any, Any]
Convention = Literal["log", "quaternion", "grid"]
_KERNELS = {
    "mlp": "sum",
    "dot_product_only": "content",
    "location_only": "location",
    "relative_position": "relative_position",
}
_NORMALIZATIONS = {
    "softmax": "softmax",
    "dot_product": "mean",
    "mean": "mean",
    "norm_exp": "exp-mean",
    "exp_mean": "exp-mean",
}
_FEATURES = {"1": "product", "2": "linear", "3": "mixed"}
_LOCATIONS = {"0": "coordinates", "1": "network", "2": "coordinates"}


def _stored_arrays(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of an .npz file; ValueError is raised for other files and for damaged ones."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return dict(archive)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"weights: expected an .npz file with arrays, got {str(path)!r}") from error


def published_attentive_cnn(weights: str | Path | Mapping[str, np.ndarray[Any, Any]]) -> AttentiveCNN:
    """Return the network for rotated MNIST with weights trained by the authors, in evaluation mode.

    The weights are part of a repository under the MIT license, copyright (c) 2019 Erik J Bekkers; copies of them must
    keep this notice. They were trained on transposed images, which :func:`lieattn.models.published_inputs` computes.

    Parameters
    ----------
    weights
        Path of an .npz file, or its arrays: ``group`` (``"z2"``, ``"p4"`` or ``"p4m"``); for each layer ``conv1`` to
        ``conv7``, ``.kernel`` ``[out, in, (frames,) size, size]``, ``.attention`` and its parameters ``.W1``, ``.W2``,
        ``.psi_X`` or ``.w_H``; for each normalization ``bn1`` to ``bn6``, ``.gamma``, ``.beta``, ``.mean``, ``.var``.
    """
    check_arguments(published_attentive_cnn, locals())
    if isinstance(weights, str | Path):
        weights = _stored_arrays(weights)
    arrays = weights
    kernel, name = _need(arrays, "conv1.kernel"), str(_need(arrays, "group"))
    if name not in _GROUPS:
        raise ValueError(f"weights: expected group 'z2', 'p4' or 'p4m', got {name!r}")
    attention = _KINDS.get(str(arrays.get("conv1.attention", "none")), "none")
    if attention == "full":
        attention = "spatial" if "conv1.W1" not in arrays else "full" if "conv1.psi_X" in arrays else "channel"
    channels, in_channels = kernel.shape[:2]
    hidden = arrays["conv2.W1"].shape[0 if attention == "input" else 1] if "conv2.W1" in arrays else channels
    network = AttentiveCNN(
        _GROUPS[name](),
        in_channels,
        len(_need(arrays, "conv7.kernel")),
        channels=channels,
        attention=attention,
        reduction=max(1, channels // hidden),
        spatial_size=arrays["conv1.psi_X"].shape[-1] if "conv1.psi_X" in arrays else 7,
    )
    with torch.no_grad():
        for number, layer in enumerate(network.layers, start=1):
            order = _MIRRORED if name == "p4m" and number > 1 else None
            for own, parameter in layer.named_parameters():
                theirs = next((_LAYER[part] for part in reversed(own.split(".")) if part in _LAYER), "kernel")
                _copy(parameter, arrays, f"conv{number}.{theirs}", order)
        for number, norm in enumerate(network.norms, start=1):
            for own, theirs in _NORM.items():
                _copy(norm.state_dict()[own], arrays, f"bn{number}.{theirs}")
    return network.eval()


def published_inputs(images: Values) -> Tensor:
    """Transpose images and standardize them by the statistics of the training pixels, as the published networks expect.

    Upright images ``[images, 28, 28]``, uint8 or floating in [0, 1], become ``[images, 1, 28, 28]`` float32.
    Interpolated values may exceed this range by 0.1. ValueError is raised if others do, or if there are not three axes.
    """
    check_arguments(published_inputs, locals())
    images = _tensor(images)
    check_has_numbers("images", images)
    if images.ndim != 3:
        raise ValueError(f"images: expected [images, rows, columns], got {tuple(images.shape)}")
    if images.dtype is torch.bool:
        raise ValueError("images: expected uint8 or floating values, got bool")
    scaled = images.to(torch.float32) / (1 if images.is_floating_point() else 255)
    if images.numel() > 0 and may_read_values(images):
        least, most = float(images.min()), float(images.max())
        if scaled.min() < -_OVERSHOOT or scaled.max() > 1 + _OVERSHOOT:
            expected = "floating values in [0, 1]" if images.is_floating_point() else "whole numbers up to 255"
            raise ValueError(f"images: expected {expected}, got values from {least:g} to {most:g}")
    return ((scaled - _MEAN) / _DEVIATION).mT[:, None].contiguous()


def published_accuracy(network: AttentiveNetwork, images: Values, labels: Values, *, batch_size: int = 200) -> float:
    """Return the share of upright images ``[images, 28, 28]`` that a published network assigns to their ``labels``."""
    check_arguments(published_accuracy, locals())
    check_count("batch_size", batch_size)
    images, labels = _tensor(images), _tensor(labels)
    if images.ndim != 3 or labels.shape != images.shape[:1] or len(images) == 0:
        raise ValueError(f"labels: expected one for each of {len(images)} images, got {tuple(labels.shape)}")
    correct = 0
    with torch.no_grad():
        for own, wanted in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            correct += int((network(published_inputs(own)).argmax(dim=1) == wanted).sum())
    return correct / len(images)


def _tensor(values: Values) -> Tensor:
    """Return an array, which may have negative strides, as a tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def _copy(own: Tensor, arrays: Mapping[str, np.ndarray[Any, Any]], name: str, order: list[int] | None = None) -> None:
    found = _tensor(_need(arrays, name))
    if found.numel() != own.numel():
        raise ValueError(f"weights: {name} has shape {tuple(found.shape)}, the network needs {tuple(own.shape)}")
    found = found.reshape(own.shape)
    if order is not None:
        # The axis of frames is before rows and columns in kernels, and last in matrices.
        axis = 2 if own.ndim == 5 else own.ndim - 1
        found = found.index_select(axis, torch.tensor(order))
    own.copy_(found)


def _need(arrays: Mapping[str, np.ndarray[Any, Any]], name: str) -> np.ndarray[Any, Any]:
    if name not in arrays:
        raise ValueError(f"weights: array {name!r} is missing")
    return arrays[name]


def published_table(group: FiniteGroup) -> Tensor:
    """Return the rows of the frame encoding in the authors' code of GSA-Nets, by output, query and key frame.

    The result is ``[order, order, order]`` int64. Eq. 16 and the code apply the output frame to the relative frame,
    although the latter is already invariant; the resulting layer is not equivariant. The index of a frame in the code
    is that of the inverse frame here (the code encodes A_h (x_j - x_i) at h), and the same holds for the rows of the
    encoding. ValueError is raised for groups without the tables of C_n or D_n, since the code has no other groups.
    """
    check_arguments(published_table, locals())
    order = group.order
    h, g, m = torch.meshgrid(*[torch.arange(order)] * 3, indexing="ij")
    if torch.equal(group.cayley, cyclic(order).cayley):
        theirs = (h + m - g) % order
    elif order % 2 == 0 and torch.equal(group.cayley, dihedral(order // 2).cayley):
        # In the code the shift is along the query axis: forward if the mirrored parts agree, and otherwise backward.
        n = order // 2
        mirrored = (g // n + h // n) % 2
        turned = torch.where(mirrored == 0, g % n + h % n, g % n - h % n) % n
        theirs = group.cayley[m, group.inverse_index[mirrored * n + turned]]
    else:
        raise ValueError(f"group: the published table is for C_n and D_n only, got {group.name}")
    inverse = group.inverse_index
    return inverse[theirs[inverse][:, inverse][:, :, inverse]]


def published_kernel(kernel: str, *, attention_fn: str = "softmax") -> dict[str, Any]:
    """Translate ``kernel_type`` and ``attention_fn`` of LieTransformer's code to options of ``AttentionOptions``.

    The result has the keys ``kernel``, ``normalize`` and, for codes of four digits, ``features`` and ``location`` of
    :class:`lieattn.models.AttentionOptions`. ValueError is raised for other names and codes.

    Parameters
    ----------
    kernel
        ``"mlp"``, ``"dot_product_only"``, ``"location_only"``, ``"relative_position"``, or four digits N C F P:
        normalization (1 softmax, 2 mean), combination (2 a network), features (1 dot product, 2 linear maps,
        3 linear maps and a shared one), location (0 and 2 the coordinates, 1 a network of them).
    attention_fn
        ``"softmax"``, ``"dot_product"`` (also ``"mean"``), or ``"norm_exp"`` (also ``"exp_mean"``). It is not used for
        codes of four digits, whose first digit is the normalization, as in the authors' code.

    Examples
    --------
    >>> published_kernel("2232")
    {'kernel': 'combined', 'normalize': 'mean', 'features': 'mixed', 'location': 'coordinates'}
    """
    if kernel in _KERNELS:
        check_choice("attention_fn", attention_fn, tuple(_NORMALIZATIONS))
        return {"kernel": _KERNELS[kernel], "normalize": _NORMALIZATIONS[attention_fn]}
    if len(kernel) != 4 or not kernel.isdigit():
        raise ValueError(f"kernel: expected one of {list(_KERNELS)} or four digits, got {kernel!r}")
    normalization, combination, features, location = list(kernel)
    if normalization not in "12" or combination != "2" or features not in _FEATURES or location not in _LOCATIONS:
        known = "digits N C F P with N 1 or 2, C 2, F 1, 2 or 3, and P 0, 1 or 2"
        raise ValueError(f"kernel: expected {known}, since others fail in the authors' code too, got {kernel!r}")
    return {
        "kernel": "combined",
        "normalize": "softmax" if normalization == "1" else "mean",
        "features": _FEATURES[features],
        "location": _LOCATIONS[location],
    }


@dataclass(frozen=True)
class PublishedCoordinates(PairCoordinates):
    """Coordinates of relative elements in the conventions of the authors of LieTransformer and LieConv.

    They are invariant when all elements g become u g, and are followed by the invariants of the orbits of both points.
    They are not divided by a length.

    Attributes
    ----------
    convention
        ``"log"``: the logarithm of g_j⁻¹ g_i, with angles of the plane in (-π, π]. ``"quaternion"``, for SO(3) and
        SE(3): the quaternion of g_j⁻¹ g_i with w >= 0, followed by its translation. ``"grid"``, for SE(2) with the same
        cyclic fiber over all points: the translation of g_i⁻¹ g_j, and its rotation as a number of steps from 0 to
        fiber - 1.
    """

    convention: Convention = "log"

    def __post_init__(self) -> None:
        check_choice("convention", self.convention, Convention)

    @property
    def continuous(self) -> bool:
        """True for ``"grid"`` only, since logarithms and quaternions jump at half turns."""
        return self.convention == "grid"

    def count(self, space: HomogeneousSpace) -> int:
        """Number of coordinates, including invariants of both points; ValueError if the space does not have them."""
        group = space.group
        linear = linear_part(group)
        rotations = linear.has_rotations and not (linear.has_reflections or linear.has_dilations)
        if self.convention == "log" and isinstance(linear, FiniteGroup):
            raise ValueError(f"convention: {group.name} has no logarithms; use a space such as Euclidean(SE(3))")
        if self.convention == "quaternion" and not (rotations and group.dim == 3):
            raise ValueError(f"convention: 'quaternion' is for SO(3) and SE(3), not for {group.name}")
        if self.convention == "grid" and not (group.is_affine and rotations and group.dim == 2):
            raise ValueError(f"convention: 'grid' is for SE(2) with a cyclic fiber, not for {group.name}")
        own = {"log": group.algebra_dim, "quaternion": 7 if group.is_affine else 4, "grid": 3}
        return own[self.convention] + 2 * space.num_invariants

    def __call__(self, graph: LiftedGraph) -> Tensor:
        """Return the coordinates ``[rows, fiber, fiber, k]``; ValueError for periodic clouds."""
        if graph.neighbors.shift is not None:
            raise ValueError(
                f"graph: expected coordinates 'smooth' or 'log' for periodic clouds, got {self.convention!r}"
            )
        space, row, elements = graph.space, graph.relative.row, graph.elements.contiguous()
        target, source = graph.neighbors.target, graph.neighbors.source
        if row is not None:
            edges = torch.arange(len(row), device=row.device)
            first = row.new_full((graph.relative.num_rows,), len(row)).scatter_reduce(0, row, edges, "amin")
            target, source = target[first], source[first]
        group, fiber = space.group, graph.fiber
        at_target, at_source = elements.index_select(0, target)[:, :, None], elements.index_select(0, source)[:, None]
        if self.convention == "grid":
            relative = group.relative(at_target, at_source)
            turn = group.linear(relative).detach()
            steps = torch.atan2(turn[..., 1, 0], turn[..., 0, 0]) * (fiber / (2 * math.pi))
            parts = [group.translation(relative), (steps.round() % fiber)[..., None]]
        else:
            relative = group.relative(at_source, at_target)
            if self.convention == "log":
                parts = [group.log(relative)]
            else:
                parts = [quaternion_from_rotation(group.linear(relative))]
                parts += [group.translation(relative)] if group.is_affine else []
        invariants = space.invariants(graph.pos)
        for index in (target, source):
            parts.append(invariants.index_select(0, index)[:, None, None].expand(-1, fiber, fiber, -1))
        return torch.cat(parts, dim=-1)


def published_qm9(out_channels: int = 1, **options: Any) -> LieTransformer:
    """Return the LieTransformer for QM9 of the authors' published run: 101.8 M parameters, with their quaternions.

    The authors' network uses 25 of the nearest 50 *elements* at random. This network uses about as many in training,
    half of the nearest 12 points with all of their frames. ``options`` replace arguments of :class:`LieTransformer`.
    """
    preset = {"frames": SampledFrames(4), "neighborhood": Nearest(12), "channels": 1504, "layers": 11}
    preset["lifting"] = Lifting(PublishedCoordinates("quaternion"), bound=True, neighbor_dropout=0.5, local=0)
    preset["attention"] = AttentionOptions("combined", normalize="mean", hidden=6, feature_channels=8)
    preset["readout"] = Readout(order="point_first")
    return LieTransformer.qm9(out_channels, **{**preset, **options})


def published_springs(rotations: int = 2, **options: Any) -> LieTransformer:
    """Return a potential of particles on springs, invariant to R^2 ⋊ C_n, where n is ``rotations``.

    It has 139,353 parameters. The features are (mass, k). ``options`` replace arguments of :class:`LieTransformer`.
    """
    preset = {"space": Euclidean(SE(2)), "frames": FiniteFrames(cyclic(rotations)), "channels": 80, "layers": 3}
    preset["lifting"] = Lifting(PublishedCoordinates("grid"), local=0)
    return LieTransformer.springs(**{**preset, **options})
