"""Attentive group convolutional network for rotated MNIST.

D. W. Romero, E. J. Bekkers, J. M. Tomczak, M. Hoogendoorn, "Attentive Group Equivariant Convolutional Networks",
ICML 2020. The other networks of the paper are in files of their own beside this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lieattn._checks import check_count, check_dropout
from lieattn.groups import FiniteGroup
from lieattn.models._attentive_network import AttentionKind, AttentiveNetwork, convolution
from lieattn.models._published_attentive import load_weights, read_weights
from lieattn.nn import GridBatchNorm, GridGroupConvolution, GridLiftingConvolution, GridSpatialPool

_PLANAR_SIDE = 4  # of the kernel that ends the network


class AttentiveCNN(AttentiveNetwork):
    """The p4-CNN of rotated MNIST with attention: a lifting layer and six group convolutions, without border.

    Layers 1 to 6 with kernels of side 3, each with batch normalization and relu, 2 x 2 maximum pooling behind the
    second; a layer with kernels of side 4 to the classes; the maximum over the poses. An image of 28 x 28 pixels
    becomes 26, 24, 12, 10, 8, 6, 4, 1.

    **Equivariance.** The logits do not change under H acting on the image about its center, exactly.

    Parameters
    ----------
    group
        H; ``lieattn.groups.trivial(2)`` gives the planar network (20 channels in the paper).
    in_channels, classes
        Channels of the images, number of logits.
    channels
        Channels per pose.
    attention
        ``"none"``, ``"full"`` (α), ``"channel"`` (α_CH), ``"spatial"`` (α_SP), ``"input"`` (α_F) or ``"pose"``
        (α_RH).
    reduction
        Hidden width of channel attention is channels / reduction; in the first layer all of them.
    spatial_size
        Side of the kernels of spatial attention.
    dropout
        Behind layers 1, 3, 4, 5 and 6.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int = 1,
        classes: int = 10,
        *,
        channels: int = 10,
        attention: AttentionKind = "none",
        reduction: int = 2,
        spatial_size: int = 7,
        dropout: float = 0.3,
    ) -> None:
        super().__init__(group, in_channels, classes, attention)
        check_count("channels", channels)
        check_count("reduction", reduction)
        check_dropout("dropout", dropout)
        widths = [in_channels, *[channels] * 6, classes]
        self.layers = nn.ModuleList()
        for number, (before, behind) in enumerate(itertools.pairwise(widths)):
            layer = convolution(
                group,
                before,
                behind,
                _PLANAR_SIDE if number == 6 else 3,
                attention=attention,
                hidden=before if number == 0 else max(1, before // reduction),
                lifting=number == 0,
                spatial_size=spatial_size,
                spatial_dilation=4 if number == 0 and attention == "input" else 1,
            )
            self.layers.append(layer)
        self.norms = nn.ModuleList(GridBatchNorm(channels) for _ in range(6))
        self.pool = GridSpatialPool(2, "max")
        self.dropout = nn.Dropout(dropout)
        if group.order == 1:
            _draw_normal(self)

    def features(self, images: Tensor) -> list[Tensor]:
        """Fields behind the six blocks, then the logits."""
        fields = []
        x = images
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=False)):
            x = torch.relu(norm(layer(x)))
            fields.append(x)
            x = self.pool(x) if number == 1 else self.dropout(x)
        last = self.layers[-1](x)
        if last.shape[-2:] != (1, 1):
            raise ValueError(f"data: expected images of 28 x 28 pixels, got {tuple(images.shape[-2:])}")
        fields.append(last.flatten(2).amax(dim=-1))
        return fields


def published_attentive_cnn(weights: str | Path | Mapping[str, np.ndarray[Any, Any]]) -> AttentiveCNN:
    """Rotated MNIST network with weights that the authors trained, in evaluation mode.

    The weights are part of a repository under the MIT licence, copyright (c) 2019 Erik J Bekkers, whose notice must
    stay with copies of them. They were trained on transposed images; :func:`lieattn.models.published_inputs` makes
    these.

    Parameters
    ----------
    weights
        An .npz file, or its arrays: ``group`` (``"z2"``, ``"p4"`` or ``"p4m"``), for each layer ``conv1`` to ``conv7``
        ``.kernel`` ``[out, in, (poses,) size, size]``, ``.attention`` and ``.W1``, ``.W2``, ``.psi_X`` or ``.w_H`` with
        it, for each normalization ``bn1`` to ``bn6`` ``.gamma``, ``.beta``, ``.mean``, ``.var``.

    Raises
    ------
    ValueError
        If an array is missing or has another shape than the network's.
    """
    options, arrays = read_weights(weights)
    network = AttentiveCNN(**options)
    load_weights(list(network.layers), list(network.norms), arrays)
    return network.eval()


def _draw_normal(network: nn.Module) -> None:
    """Planar kernels start normal with deviation 1 / sqrt(fan in), as the authors' do."""
    for module in network.modules():
        if isinstance(module, GridLiftingConvolution | GridGroupConvolution):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
