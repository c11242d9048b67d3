"""The rotated MNIST networks that the authors of attentive group convolution trained, and how to feed them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lieattn._checks import check_count
from lieattn.groups import FiniteGroup, cyclic, dihedral, trivial
from lieattn.models.attentive import AttentionKind, AttentiveCNN, AttentiveNetwork

# Statistics of the training pixels in [0, 1] by which images are standardized.
_MEAN, _DEVIATION = 0.13246, 0.30119
_KINDS: dict[str, AttentionKind] = {"none": "none", "full": "full", "input": "input", "rh": "pose"}
_NORM = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}


def published_attentive_cnn(weights: str | Path | Mapping[str, np.ndarray[Any, Any]]) -> AttentiveCNN:
    """Rotated MNIST network with weights that the authors trained, in evaluation mode.

    The weights are part of a repository under the MIT licence, copyright (c) 2019 Erik J Bekkers, whose notice must
    stay with copies of them. They were trained on transposed images; :func:`lieattn.models.published_inputs` makes
    these.

    Parameters
    ----------
    weights
        An .npz file, or its arrays: ``group`` (``"z2"``, ``"p4"`` or ``"p4m"``), for each layer ``conv1`` to ``conv7``
        ``.kernel`` ``[out, in, (frames,) size, size]``, ``.attention`` and ``.W1``, ``.W2``, ``.psi_X`` or ``.w_H``
        with it, for each normalization ``bn1`` to ``bn6`` ``.gamma``, ``.beta``, ``.mean``, ``.var``.

    Raises
    ------
    ValueError
        If an array is missing or has another shape than the network's.
    """
    arrays = _arrays(weights)
    kernel = _need(arrays, "conv1.kernel")
    attention = _KINDS.get(str(arrays.get("conv1.attention", "none")), "none")
    if attention == "full":
        attention = "spatial" if "conv1.W1" not in arrays else "full" if "conv1.psi_X" in arrays else "channel"
    channels, in_channels = kernel.shape[:2]
    hidden = arrays["conv2.W1"].shape[0 if attention == "input" else 1] if "conv2.W1" in arrays else channels
    group, order = _group(str(_need(arrays, "group")))
    network = AttentiveCNN(
        group,
        in_channels,
        len(_need(arrays, "conv7.kernel")),
        channels=channels,
        attention=attention,
        reduction=max(1, channels // hidden),
        spatial_size=arrays["conv1.psi_X"].shape[-1] if "conv1.psi_X" in arrays else 7,
    )
    with torch.no_grad():
        for number, layer in enumerate(network.layers, start=1):
            for name, parameter in _parameters(layer).items():
                _copy(parameter, arrays, f"conv{number}.{name}", None if number == 1 else order)
        for number, norm in enumerate(network.norms, start=1):
            for name, own in _NORM.items():
                _copy(getattr(norm, own), arrays, f"bn{number}.{name}", None)
    return network.eval()


def published_inputs(images: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Images as the published networks take them: transposed, standardized by the training pixels.

    Parameters
    ----------
    images
        ``[images, 28, 28]``, uint8 or floating in [0, 1], upright.

    Returns
    -------
    Tensor
        ``[images, 1, 28, 28]`` float32.
    """
    images = torch.as_tensor(images)
    if images.ndim != 3:
        raise ValueError(f"images: expected [images, rows, columns], got {tuple(images.shape)}")
    scaled = images.to(torch.float32) / (1 if images.is_floating_point() else 255)
    return ((scaled - _MEAN) / _DEVIATION).mT[:, None].contiguous()


def published_accuracy(
    network: AttentiveNetwork,
    images: Tensor | np.ndarray[Any, Any],
    labels: Tensor | np.ndarray[Any, Any],
    *,
    batch_size: int = 200,
) -> float:
    """Share of upright images ``[images, 28, 28]`` that a published network puts into their classes ``[images]``."""
    check_count("batch_size", batch_size)
    images, labels = torch.as_tensor(images), torch.as_tensor(labels)
    if images.ndim != 3 or labels.shape != images.shape[:1] or len(images) == 0:
        raise ValueError(f"labels: expected one for each of {len(images)} images, got {tuple(labels.shape)}")
    correct = 0
    with torch.no_grad():
        for own, wanted in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            correct += int((network(published_inputs(own)).argmax(dim=1) == wanted).sum())
    return correct / len(images)


def _arrays(weights: str | Path | Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    if isinstance(weights, str | Path):
        with np.load(weights, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    return dict(weights)


def _group(name: str) -> tuple[FiniteGroup, list[int] | None]:
    """Our group, and their index of each of our frames."""
    if name == "z2":
        return trivial(2), None
    if name == "p4":
        return cyclic(4), None
    if name == "p4m":
        # They mirror after turning, MIR ROT^r, which is ROT^-r MIR.
        return dihedral(4), [0, 1, 2, 3, 4, 7, 6, 5]
    raise ValueError(f"weights: expected group 'z2', 'p4' or 'p4m', got {name!r}")


def _parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters of a layer by their names in the files."""
    theirs = {
        "weight": "kernel",
        "convolution.weight": "kernel",
        "attention.first": "W1",
        "attention.second": "W2",
        "attention.spatial": "psi_X",
        "gate.channel.first": "W1",
        "gate.channel.second": "W2",
        "gate.spatial.weight": "psi_X",
        "gate.weight": "w_H",
    }
    return {theirs[name]: parameter for name, parameter in layer.named_parameters()}


def _copy(own: Tensor, arrays: Mapping[str, np.ndarray[Any, Any]], name: str, order: list[int] | None) -> None:
    found = torch.from_numpy(np.ascontiguousarray(_need(arrays, name)))
    if found.numel() != own.numel():
        raise ValueError(f"weights: {name} has shape {tuple(found.shape)}, the network needs {tuple(own.shape)}")
    found = found.reshape(own.shape)
    if order is not None:
        # Kernels have their frames before rows and columns, matrices have them last.
        axis = 2 if own.ndim == 5 else own.ndim - 1
        found = found.index_select(axis, torch.tensor(order))
    own.copy_(found)


def _need(arrays: Mapping[str, np.ndarray[Any, Any]], name: str) -> np.ndarray[Any, Any]:
    if name not in arrays:
        raise ValueError(f"weights: array {name!r} is missing")
    return arrays[name]
