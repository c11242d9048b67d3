"""What a checkpoint holds beside Lightning's states, and how a network is made from it again.

The entry ``"lieattn"`` of a checkpoint has tensors and plain values only: the resolved configuration, the group,
the kind of input, and the states of the random generators.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lieattn.train._errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from lieattn.train._tasks import PointSetTask

KEY = "lieattn"

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def describe_group(network: nn.Module) -> dict[str, Any] | None:
    """Name, order and dimension of ``network.group``; None for a network without one."""
    group = getattr(network, "group", None)
    return None if group is None else {"name": group.name, "order": group.order, "dim": group.dim}


def check_group(checkpoint: dict[str, Any], network: nn.Module) -> None:
    """Raise CheckpointError, which names both groups, for the checkpoint of a network on another group."""
    saved, present = checkpoint.get(KEY, {}).get("group"), describe_group(network)
    if saved is not None and present is not None and saved != present:
        words = "{name} (order {order}, in {dim} dimensions)"
        raise CheckpointError(
            f"the checkpoint was trained for {words.format(**saved)}, the network is built for "
            f"{words.format(**present)}: give the network the group of the checkpoint"
        )


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of ``lieattn fit``, or of a ``Trainer`` with a ``PointSetTask``, without running code from it.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, or not such a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is damaged, or no checkpoint: {reason}") from error
    if not isinstance(checkpoint, dict) or KEY not in checkpoint or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} was not written by lieattn: it has no entry {KEY!r} or no weights")
    return checkpoint


def load_network(path: str | Path) -> nn.Module:
    """Build the network of a checkpoint again and load its weights, in eval mode on the CPU.

    The checkpoint must be one of ``lieattn fit``: that of a bare ``Trainer`` does not say how the network was built. It
    names the network's class, which is imported: load files from people you trust.

    Raises
    ------
    CheckpointError
        If it cannot be read, has no configuration, or the weights do not fit.
    """
    checkpoint = read_checkpoint(path)
    spec = checkpoint[KEY]["config"].get("model", {}).get("init_args", {}).get("network")
    if spec is None:
        reason = "because it was not trained by `lieattn fit`"
        raise CheckpointError(f"{path} does not say how its network was built, {reason}")
    network = build(nn.Module, spec, f"the network of {path}")
    check_group(checkpoint, network)
    weights = {key: value for key, value in checkpoint["state_dict"].items() if key.startswith("network.")}
    return _with_weights(network, {key.removeprefix("network."): value for key, value in weights.items()}, path)


def load_task(path: str | Path) -> PointSetTask:
    """Build the task of a checkpoint again, whose predictions are in the units of the data, in eval mode on the CPU.

    ``path`` and errors are those of :func:`load_network`.
    """
    from lieattn.train._tasks import PointSetTask

    checkpoint = read_checkpoint(path)
    task = build(PointSetTask, _part(checkpoint, path, "model"), f"the task of {path}")  # type: ignore[type-abstract]
    check_group(checkpoint, task.network)
    return _with_weights(task, checkpoint["state_dict"], path)


def load_data(path: str | Path, split: str = "test") -> Dataset[Any]:
    """Data set ``"train"``, ``"val"``, ``"test"`` or ``"predict"`` of the configuration in a checkpoint.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read, or its configuration has no such data set.
    """
    sets = _part(read_checkpoint(path), path, "data")
    if sets.get(split) is None:
        raise CheckpointError(f"{path} was trained without a data set for {split!r}")
    return build(Dataset, sets[split], f"the data of {path}")


def _part(checkpoint: dict[str, Any], path: str | Path, name: str) -> dict[str, Any]:
    part: dict[str, Any] | None = checkpoint[KEY]["config"].get(name)
    if part is None:
        raise CheckpointError(f"{path} has no configuration, because it was not trained by `lieattn fit`")
    return part


def _with_weights(module: M, weights: Mapping[str, Tensor], path: str | Path) -> M:
    """The module in eval mode with the weights, and in their precision."""
    module.to(next((value.dtype for value in weights.values() if value.is_floating_point()), None))
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {path} do not fit its network: {error}") from error
    return module.eval()


def build(base: type[T], spec: Mapping[str, Any], what: str) -> T:
    """Build an instance of ``base`` from ``class_path`` and ``init_args``, as configuration files have them.

    Arguments may be such objects themselves; ``what`` is the name of the object in messages.

    Raises
    ------
    UsageError
        If a class does not exist or an argument does not fit; the message names it.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    register_types()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "object", required=True)
    try:
        config = parser.parse_object({"object": spec})
    except ArgumentError as error:
        raise UsageError(f"{what} cannot be built: {error}") from error
    made: T = parser.instantiate(config).object
    return made


def register_types() -> None:
    """Let configuration files name a function of ``lieattn.groups`` wherever a group is expected, and any space."""
    from jsonargparse import set_parsing_settings

    from lieattn.groups import Group
    from lieattn.spaces import HomogeneousSpace

    # FiniteGroup is final, the others are dataclasses: jsonargparse would accept their own constructors alone.
    set_parsing_settings(subclasses_enabled=[Group, HomogeneousSpace])
