"""Checkpoints of trainings.

The entry ``"lieattn"`` of a checkpoint contains tensors and plain values only: the resolved configuration or the
description of the task, the group, the kind of input, the states of the random generators, and digests of all entries.
A checkpoint is not trusted: its content is compared with the digests, and it may name classes of trusted packages only.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._core.checks import check_arguments
from lieattn.io._files import CheckpointError, check_format, digest
from lieattn.io._record import Record, with_earlier_defaults

KEY = "lieattn"
"""Entry of a checkpoint that this library writes."""
FORMAT = 3
"""Version of this entry; version 1 had no digests, and 2 the defaults of earlier versions."""
_DIGESTS = "digests"
_VERSION = "pytorch-lightning_version"


def add_digests(checkpoint: dict[str, Any]) -> None:
    """Write the digests of all entries into the entry ``KEY``.

    They include the keys: a file stores equal strings once, so damage to a string changes keys and values alike.
    """
    checkpoint[KEY][_DIGESTS] = {key: digest([key, value]) for key, value in _entries(checkpoint).items()}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of ``lieattn fit``, or of a ``Trainer`` with a ``PointSetTask``, without running code from it.

    CheckpointError is raised if the file is missing, damaged, or not such a checkpoint, if its format is newer than
    this version of the library knows, or if weights are not finite. Damage is detected by digests of the content, or,
    in checkpoints from before version 0.2, which have no digests, by the checksums of the file.
    """
    check_arguments(read_checkpoint, locals())
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}" + (": it is a folder" if path.is_dir() else ""))
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} is a network of lieattn.save, which has neither task nor data, and is no checkpoint: "
            f"`lieattn certify` and `lieattn picture` take it, in Python lieattn.load"
        )
    try:
        return _read(path)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # its message advises the user to load the file all the same
        raise CheckpointError(f"{path} is damaged, or holds more than tensors and plain values: not loaded") from error
    except Exception as error:  # damaged bytes can make torch's reader raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is damaged, or is not a checkpoint: {reason}") from error


def _read(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is damaged, or is not a checkpoint: it is not a file of torch.save")
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
            raise CheckpointError(f"{path} is damaged, or is not a checkpoint: its parts are larger than the file")
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    entry, weights = (checkpoint.get(key) if isinstance(checkpoint, dict) else None for key in (KEY, "state_dict"))
    if not isinstance(entry, dict) or not isinstance(weights, dict):
        raise CheckpointError(
            f"{path} was not written by lieattn: it has no entry {KEY!r} or no weights. Checkpoints of a Trainer have "
            "both if its module is a task of lieattn.train; save networks of other modules with lieattn.save"
        )
    check_content(checkpoint, str(path))
    if not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} is damaged: not all of its weights are tensors")
    if entry["format"] == 1:
        with zipfile.ZipFile(path) as archive:
            if (member := archive.testzip()) is not None:
                raise CheckpointError(f"{path} is damaged: {member} differs from what was saved")
    if entry["format"] < FORMAT:
        entry.update({key: with_earlier_defaults(entry[key]) for key in ("config", "made") if key in entry})
    return checkpoint


def check_content(checkpoint: dict[str, Any], name: str, apart: Container[str] = ()) -> None:
    """Raise CheckpointError if the format is newer, or if entries other than those in ``apart`` were changed."""
    number = checkpoint[KEY].get("format")
    if not isinstance(number, int) or number < 1:
        raise CheckpointError(f"{name} is damaged: its format is {number!r}, not a number")
    check_format(name, number, FORMAT)
    if (number > 1 or _DIGESTS in checkpoint[KEY]) and (damaged := _damaged_entries(checkpoint, apart)):
        raise CheckpointError(f"{name} is damaged: not as they were saved are {', '.join(map(repr, damaged))}")
    _check_saved_files(checkpoint.get("callbacks"), name)


def _check_saved_files(states: Any, name: str) -> None:
    """Raise CheckpointError if the states of callbacks contain paths that lead out of a folder.

    ModelCheckpoint deletes files that it has saved before, if the names of their folders begin with its own.
    """
    for state in states.values() if isinstance(states, dict) else ():
        values = state.values() if isinstance(state, dict) else ()
        texts = (text for value in values for text in (value if isinstance(value, dict) else [value]))
        if wrong := [text for text in texts if isinstance(text, str) and ".." in Path(text).parts]:
            raise CheckpointError(f"{name} is damaged: a callback names the file {wrong[0]!r}")


def _damaged_entries(checkpoint: dict[str, Any], apart: Container[str]) -> list[str]:
    """Return the names of entries that are missing or have changed; of all entries, if there are no digests."""
    known, entries = checkpoint[KEY].get(_DIGESTS), _entries(checkpoint)
    if not isinstance(known, dict) or KEY not in known:
        return list(entries)
    checked = {key: value for key, value in known.items() if key not in apart}
    return [key for key, value in checked.items() if key not in entries or digest([key, entries[key]]) != value]


def _entries(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the entries as they were saved. Lightning overwrites its version in the checkpoint while it loads."""
    legacy = f"legacy_{_VERSION}"
    entries = {key: value for key, value in checkpoint.items() if key != legacy}
    if legacy in checkpoint:
        entries[_VERSION] = checkpoint[legacy]
    return {**entries, KEY: {key: value for key, value in checkpoint[KEY].items() if key != _DIGESTS}}


def check_finite(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Raise CheckpointError, naming the parameter, if a weight is NaN or infinite."""
    for name, weight in module.named_parameters():
        if name in weights and weights[name].shape == weight.shape and not torch.isfinite(weights[name]).all():
            raise CheckpointError(f"the weights {name} of the checkpoint are not finite: use an earlier one")


def describe_group(network: nn.Module) -> dict[str, Any] | None:
    """Return name, order and dimension of the finite group that the weights are tied to; None if there is none.

    The group is the attribute ``group`` of the network, or of the first module in it that has one.
    """
    groups = (getattr(module, "group", None) for module in network.modules())
    group = next((group for group in groups if hasattr(group, "cayley")), None)
    return None if group is None else {"name": group.name, "order": group.order, "dim": group.dim}


def check_group(checkpoint: dict[str, Any], network: nn.Module) -> None:
    """Raise CheckpointError, naming both groups, if the checkpoint belongs to a network on another group."""
    saved, present = checkpoint.get(KEY, {}).get("group"), describe_group(network)
    if saved is not None and present is not None and saved != present:
        words = "{name} (order {order}, in {dim} dimensions)"
        of_checkpoint = words.format(**saved) if isinstance(saved, dict) and saved.keys() == present.keys() else saved
        raise CheckpointError(
            f"the checkpoint was trained for {of_checkpoint}, the network is built for "
            f"{words.format(**present)}: give the network the group of the checkpoint"
        )


def load_weights(module: nn.Module, checkpoint: dict[str, Any], what: str, prefix: str = "") -> None:
    """Load the weights of a checkpoint whose names have the prefix into a module.

    CheckpointError is raised if the weights do not fit or are not finite; its message calls the module ``what``.
    """
    check_group(checkpoint, module)
    record = Record.of(checkpoint["state_dict"], prefix=prefix)
    record.load_into(module, what)
    check_finite(record.weights, module)
