"""A network of the relative element for every head: LieTransformer's location kernel."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from lieattn._checks import check_counts
from lieattn.geometry import LiftedGraph
from lieattn.nn.relative._base import RelativeFunction, check_coordinates
from lieattn.ops import Activation, RelativeTerms, head_networks
from lieattn.ops import activation as activation_named


class PerHeadMLP(RelativeFunction):
    """A network of the coordinates of the relative element for every head, whose outputs are added to the scores.

    Linear maps from the coordinates to the widths, each followed by the activation.

    The activation after the *last* map too is the authors': with the swish a score is then at least -0.28.

    Between the maps it keeps nothing, see :func:`lieattn.ops.head_networks`: memory is that of the result and not of
    the hidden units.

    Parameters
    ----------
    heads
        Number of networks.
    in_channels
        Coordinates of a relative element, ``graph.relative.num_coordinates``, which all networks see.
    hidden
        Units of both hidden layers.
    activation
        ``"silu"`` (swish), ``"relu"``, ``"gelu"``, ``"elu"`` or ``"none"``.
    """

    def __init__(self, heads: int, in_channels: int, hidden: int = 16, activation: Activation = "silu") -> None:
        super().__init__()
        check_counts(heads=heads, in_channels=in_channels, hidden=hidden)
        activation_named("activation", activation)
        self.activation: Activation = activation
        widths = (in_channels, hidden, hidden, 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            bound = 1 / math.sqrt(fan_in)
            self.weights.append(torch.empty(heads, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(heads, fan_out).uniform_(-bound, bound))

    def forward(self, graph: LiftedGraph, x: Tensor | None = None) -> RelativeTerms:
        """Terms with ``displacement_bias``."""
        return RelativeTerms(displacement_bias=self.numbers(graph.relative.coordinates), row=graph.relative.row)

    def numbers(self, x: Tensor) -> Tensor:
        """Numbers ``[*, heads]`` for inputs ``[*, in_channels]``, in the dtype of the weights."""
        weight = self.weights[0]
        check_coordinates(x, weight.shape[1])
        with torch.autocast(weight.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(weight.dtype)
            out = head_networks(rows, list(self.weights), list(self.biases), self.activation)
        return out.unflatten(0, x.shape[:-1]) if x.ndim != 2 else out

    def finish(self, first: Tensor) -> Tensor:
        """What follows the first linear map: ``[*, heads, hidden]`` before its activation to ``[*, heads]``."""
        act = activation_named("activation", self.activation)
        x = act(first.flatten(0, -3)).transpose(0, 1)
        for weight, bias in zip(list(self.weights)[1:], list(self.biases)[1:], strict=True):
            x = act(torch.baddbmm(bias[:, None], x, weight))
        return x[..., 0].T.unflatten(0, first.shape[:-2])
