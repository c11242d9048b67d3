"""Numbers that a training begins with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sized
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.data import Batch

from lieattn._core.checks import kind
from lieattn._core.machine import summed
from lieattn.geometry import Radius, find_neighbors, point_clouds
from lieattn.io import UsageError, is_pretrained
from lieattn.models import DirectionConvNet
from lieattn.nn import FrameMessages
from lieattn.spaces import Euclidean

_LOG = logging.getLogger(__name__)
_SMALL, _LARGE = 0.05, 50.0  # deviations of features, and their size, that are far from 1
USUAL = 5  # size of untrained outputs, in their scale, which training reduces in a few steps


def spread_of_features(items: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of ``x`` over the points of all items, ``[channels]``.

    A channel that does not vary has the mean 0 and the deviation 1, so that it is kept. UsageError is raised if an item
    has no floating ``x``.
    """
    count, mean, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for index in range(len(cast(Sized, items))):
        x = items[index].get("x")
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else kind(x)
            raise UsageError(f"data.standardize: expected floating features x [points, channels], got {got}")
        if not x.numel():
            continue
        x = x.flatten(0, -2).double()
        total, own = count + len(x), x.mean(dim=0)
        squares = squares + (x - own).square().sum(dim=0) + (own - mean).square() * count * len(x) / total
        mean, count = mean + (own - mean) * len(x) / total, total
    std = (squares / max(count, 1)).sqrt()
    varies = std > 1e-6 * mean.abs()
    return torch.where(varies, mean, 0.0).float(), torch.where(varies, std, 1.0).float()


def size_of(values: Tensor) -> float:
    """Return the root of the mean square of these numbers in all processes."""
    values = values.detach().double().flatten()
    total, count = summed(torch.stack([values.square().sum(), values.new_tensor(float(len(values)))])).tolist()
    return math.sqrt(total / max(count, 1))


def scale_messages(network: nn.Module, run: Callable[[], object], heads: bool = False) -> bool:
    """Scale the kernels of messages so that no message is larger than the field that it is added to.

    The sizes are those of ``run``, which calls the network; blocks see the fields of the scaled blocks before them.
    With ``heads``, the last layers of :class:`DirectionConvNet` are scaled so that outputs are not larger than 1.
    Weights that are not trained, that are parametrized, or that come from a trained network, stay. Return whether a
    weight was changed.
    """
    factors: dict[nn.Module, float] = {}

    def scale(part: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        usual = inputs[0].detach() if isinstance(part, FrameMessages) else torch.ones_like(out)
        sizes = torch.stack([values.detach().double().square().sum() for values in (usual, out)])
        allowed, found = summed(sizes).tolist()
        if part not in factors and allowed < found < math.inf:
            factors[part] = math.sqrt(allowed / found)
        return out * factors.get(part, 1.0)

    found: list[tuple[nn.Module, nn.Module]] = []
    for one in network.modules():
        if isinstance(one, FrameMessages):
            found.append((one, one.kernel))
        elif heads and isinstance(one, DirectionConvNet):
            found.append((one.head, cast(nn.Sequential, one.head)[-1]))
    layers = {part: layer for part, layer in found if _may_change(layer)}
    hooks = [part.register_forward_hook(scale) for part in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        for part, factor in factors.items():
            for weight in layers[part].parameters():
                weight.mul_(factor)
    return bool(factors)


def _may_change(layer: nn.Module) -> bool:
    kept = is_parametrized(layer) or is_pretrained(layer)
    return not kept and all(weight.requires_grad for weight in layer.parameters())


@rank_zero_only
def note(message: str) -> None:
    """Tell the user about a training, also in the command, which hides what Lightning tells by its own functions."""
    _LOG.warning(message)


def note_inputs(network: nn.Module, batch: Batch, say: Callable[[str], None]) -> None:
    """Say once if features are far from the order of 1, and if neighborhoods are empty or whole clouds."""
    x = batch.get("x")
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x) > 1:
        spread, size = float(x.flatten(0, -2).std(dim=0).max()), float(x.abs().max())
        if 0 < spread < _SMALL or size > _LARGE:
            found = f"the deviation of its widest channel is {spread:.3g} and its largest number {size:.3g}"
            say(f"data.x: {found}, where 1 is usual; --data.standardize true scales the features")
    _note_neighbors(network, batch, say)


def _note_neighbors(network: nn.Module, batch: Batch, say: Callable[[str], None]) -> None:
    """Say how many neighbors points have if all points within a radius are alone, or see their whole clouds."""
    radii = [(type(one).__name__, getattr(one, "neighborhood", None), one) for one in network.modules()]
    for name, radius, module in radii:
        curved = not isinstance(getattr(module, "space", Euclidean), Euclidean | type)
        if not isinstance(radius, Radius) or curved or not isinstance(batch.get("pos"), Tensor):
            continue
        clouds = point_clouds(batch)
        neighbors = find_neighbors(clouds, radius)
        others = neighbors.degree - neighbors.target[neighbors.is_loop].bincount(minlength=clouds.num_points)
        several = (clouds.counts > 1)[clouds.batch]
        if not len(others) or not bool(several.any()):
            return
        mean = float(others.double().mean())
        if mean == 0:
            say(f"{name}: no point of the first batch has a neighbor within a radius of {radius.radius:g}; increase it")
        elif clouds.pbc is None and bool((others >= clouds.counts[clouds.batch] - 1).all()):
            what = f"all points of a cloud are neighbors, {mean:.3g} on average"
            say(f"{name}: {what}, within a radius of {radius.radius:g}, so a larger one changes nothing but the time")
        return
