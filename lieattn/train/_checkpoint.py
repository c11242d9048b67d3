"""What a checkpoint holds beside Lightning's states, and how a network is made from it again.

The entry ``"lieattn"`` of a checkpoint has tensors and plain values only: the resolved configuration, the group,
the kind of input, and the states of the random generators.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from lieattn.train._errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from lieattn.train._task import PointSetTask

KEY = "lieattn"

T = TypeVar("T")


def describe_group(network: nn.Module) -> dict[str, Any] | None:
    """Name, order and dimension of ``network.group``; None for a network without one."""
    group = getattr(network, "group", None)
    return None if group is None else {"name": group.name, "order": group.order, "dim": group.dim}


def check_group(checkpoint: dict[str, Any], network: nn.Module) -> None:
    """Refuse the checkpoint of a network on another group.

    Raises
    ------
    CheckpointError
        If both groups are known and differ; the message names them.
    """
    saved, present = checkpoint.get(KEY, {}).get("group"), describe_group(network)
    if saved is not None and present is not None and saved != present:
        raise CheckpointError(
            f"the checkpoint was trained for {_group_in_words(saved)}, the network is built for "
            f"{_group_in_words(present)}: give the network the group of the checkpoint"
        )


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint without running code from it.

    Parameters
    ----------
    path
        A file that ``lieattn fit`` or a ``Trainer`` with a ``PointSetTask`` has written.

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

    The checkpoint names the network's class, which is imported: load files from people you trust.

    Parameters
    ----------
    path
        A checkpoint of ``lieattn fit``; one of a bare ``Trainer`` does not say how the network was built.

    Raises
    ------
    CheckpointError
        If it cannot be read, has no configuration, or the weights do not fit.
    """
    return network_of(read_checkpoint(path), str(path))


def load_task(path: str | Path) -> PointSetTask:
    """Build the task of a checkpoint again, whose predictions are in the units of the data, in eval mode on the CPU.

    The checkpoint names the classes, which are imported: load files from people you trust.

    Parameters
    ----------
    path
        A checkpoint of ``lieattn fit``.

    Raises
    ------
    CheckpointError
        As :func:`load_network`.
    """
    from lieattn.train._task import PointSetTask

    checkpoint = read_checkpoint(path)
    task = build(PointSetTask, _part(checkpoint, path, "model"), f"the task of {path}")  # type: ignore[type-abstract]
    check_group(checkpoint, task.network)
    weights = checkpoint["state_dict"]
    task.to(next((value.dtype for value in weights.values() if value.is_floating_point()), None))
    try:
        task.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {path} do not fit its network: {error}") from error
    return task.eval()


def load_data(path: str | Path, split: str = "test") -> Dataset[Any]:
    """Data set of the configuration in a checkpoint of ``lieattn fit``.

    Parameters
    ----------
    path
        The checkpoint.
    split
        ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

    Raises
    ------
    CheckpointError
        If it cannot be read, or its configuration has no such data set.
    """
    sets = _part(read_checkpoint(path), path, "data")
    if sets.get(split) is None:
        raise CheckpointError(f"{path} was trained without a data set for {split!r}")
    dataset: Dataset[Any] = build(Dataset, sets[split], f"the data of {path}")
    return dataset


def _part(checkpoint: dict[str, Any], path: str | Path, name: str) -> dict[str, Any]:
    part = checkpoint[KEY]["config"].get(name)
    if part is None:
        raise CheckpointError(f"{path} has no configuration, because it was not trained by `lieattn fit`")
    found: dict[str, Any] = part
    return found


def network_of(checkpoint: dict[str, Any], path: str) -> nn.Module:
    """Network of a checkpoint that was read already; ``path`` is for messages."""
    spec = checkpoint[KEY]["config"].get("model", {}).get("init_args", {}).get("network")
    if spec is None:
        raise CheckpointError(
            f"{path} does not say how its network was built, because it was not trained by `lieattn fit`"
        )
    network = build(nn.Module, spec, f"the network of {path}")
    check_group(checkpoint, network)
    prefix = "network."
    weights = {
        key.removeprefix(prefix): value for key, value in checkpoint["state_dict"].items() if key.startswith(prefix)
    }
    network.to(next((value.dtype for value in weights.values() if value.is_floating_point()), None))
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {path} do not fit its network: {error}") from error
    return network.eval()


def build(base: type[T], spec: dict[str, Any], what: str) -> T:
    """Build an object from ``class_path`` and ``init_args``, as configuration files have them.

    Parameters
    ----------
    base
        What it must be an instance of.
    spec
        ``{"class_path": ..., "init_args": ...}``, nested where an argument is an object.
    what
        What it is called in messages.

    Raises
    ------
    UsageError
        If a class does not exist or an argument does not fit; the message names it.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    register_types()
    parser: ArgumentParser = ArgumentParser(exit_on_error=False)
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


def _group_in_words(group: dict[str, Any]) -> str:
    return f"{group['name']} (order {group['order']}, in {group['dim']} dimensions)"
