"""Networks as files."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lieattn._core.checks import check_arguments, kind
from lieattn._core.messages import needs_extra
from lieattn._core.values import plain_text
from lieattn.io._files import CheckpointError, check_format, digest, replace_text, replacing
from lieattn.io._record import (
    Record,
    TiedWeights,
    describe,
    make,
    uncompiled,
    uncompiled_names,
    with_earlier_defaults,
)

_KEY, _FORMAT = "lieattn", 2  # in format 1, the defaults are those of earlier versions
_ARGUMENT, _ENTRY = "argument.", "tensor-entry"  # prefix of tensors that are arguments, and key of references to them
_TRAINED = Path(__file__).parent.parent / "trained"
_HUB, _WEIGHTS = "hf:", "model.safetensors"  # start of names on the Hugging Face Hub, and the file of a repository
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+\b")  # of an object without a representation of its own

# The name of a license is for the user to state, between the lines of dashes.
_CARD = """---
library_name: lieattn
tags: [lieattn, equivariance, {tag}]
---

# {name}

A `{tag}` of {count:,} parameters, written by lieattn {version}. {guarantee}

```python
import lieattn

network = lieattn.load("hf:ORGANIZATION/{name}")  # pip install "lieattn[hub]"
```

## Data, training and results

To be stated: inputs and outputs with their units, the data and their license, the errors on data of a test set.
"""


def save(network: nn.Module, path: str | Path, *, card: bool = False) -> None:
    """Write a network to a file, with weights, arguments, group and geometry. :func:`load` reads it.

    The file has the safetensors format, so other programs can read the weights. It is written completely or not at all.
    ValueError is raised if weights are not finite or have parametrizations, if a part of the network does not record
    its arguments, or if the network was changed after its construction. Arguments are recorded by all networks of
    ``lieattn.models``, the heads of ``lieattn.nn``, and your own networks that derive from
    :class:`lieattn.models.Network`. Your own heads do not record theirs: construct them in a class derived from
    :class:`lieattn.models.FieldModel`. The training mode and frozen parameters are not saved.

    Parameters
    ----------
    network
        A network on any device and in any dtype. For a task of ``lieattn.train``, it is ``task.model``.
    path
        The file, usually ``NAME.safetensors``.
    card
        If True, ``path`` is a folder that can be uploaded to the Hugging Face Hub, as with ``hf upload``. It gets the
        file ``model.safetensors``, what its header says about the network as ``config.json``, and, unless there is one,
        the beginning of a model card, ``README.md``. State license and data there.
    """
    check_arguments(save, locals())
    from safetensors.torch import save as serialized

    network = uncompiled(network)
    if any(map(is_parametrized, network.modules())):
        advice = "remove_parametrizations of torch.nn.utils.parametrize keeps their values"
        raise ValueError(f"network: expected weights without parametrizations, such as a weight norm; {advice}")
    try:
        record = Record.of(network.state_dict(), describe(network)).uncompiled()
    except ValueError as error:
        raise ValueError(f"network: cannot be saved. {error}") from error
    _check_finite("network", record.weights)
    made = make(record.described)
    decided = {name: entry.get("geometry", {}) for name, entry in record.modules.items()}
    for name, part in made.named_modules() if isinstance(made, nn.Module) else ():
        if isinstance(part, TiedWeights):
            part.decide(decided.get(name, {}))
    if _structure(made) != _structure(network):
        raise ValueError("network: was changed after its construction; construct it with the arguments it needs now")
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in record.weights.items()}
    header: dict[str, Any] = {"format": _FORMAT, "version": importlib.metadata.version("lieattn")}
    header |= {"network": _apart(record.described, tensors), "modules": record.modules}
    header["digest"] = digest([header, sorted(tensors.items())])
    folder = Path(path)
    with replacing(folder / _WEIGHTS if card else folder) as part:
        part.write_bytes(serialized(tensors, {_KEY: json.dumps(header)}))
    if card:
        replace_text(folder / "config.json", json.dumps({"library_name": "lieattn", **header}, indent=2))
    if card and not (folder / "README.md").exists():
        facts = {"name": folder.resolve().name, "tag": type(network).__name__, "version": header["version"]}
        facts |= {"count": sum(weight.numel() for weight in network.parameters())}
        stated = getattr(network, "guarantee", "")
        replace_text(folder / "README.md", _CARD.format(**facts, guarantee=stated and f"Guarantee: {stated}."))


def trained_cards() -> dict[str, dict[str, Any]]:
    """Return the cards of the trained networks of the library by their names, which :func:`load` accepts."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(_TRAINED.glob("*.json"))}


@torch.inference_mode(False)  # weights that are created in inference mode can never be differentiated
def load(path: str | Path, trust: Sequence[str] = ()) -> nn.Module:
    """Load a network from a file or folder of :func:`save`, with its weights and their dtype, in eval mode on the CPU.

    A name without folder and extension, such as ``"qm9-homo"``, refers to a trained network of this library, unless a
    file has this name. ``lieattn models --trained`` lists these names, and so does FileNotFoundError, which is raised
    if there is neither a network nor a file. ``"hf:organization/name"`` refers to a repository of the Hugging Face Hub
    with the files of ``save(..., card=True)``, and ``"hf:organization/name@revision"`` to a branch, tag or commit of
    it. They are downloaded once, by huggingface_hub with its settings, such as ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``.
    FileNotFoundError is raised if there is no such file, and ConnectionError if it cannot be downloaded.

    The file contains no code. It names classes, which are imported if they belong to lieattn, torch.nn or a package in
    ``trust``, such as ``["mypackage"]`` for your own networks. ValueError is raised if the file names other classes, is
    damaged, has a newer format, or was not written by :func:`save`, if its weights are not finite, or if this version
    of the library constructs a network with another geometry from its arguments.
    """
    check_arguments(load, locals())
    path = _downloaded(str(path)) if str(path).startswith(_HUB) else _located(Path(path))
    record, what = _read(path), f"the network of {path}"
    _check_finite(str(path), record.weights)
    network = record.construct(path, what, trust)
    if not isinstance(network, nn.Module):
        raise CheckpointError(f"{path} is damaged: its header does not describe a network")
    record.restore(network, what)
    return network.eval()


def _located(path: Path) -> Path:
    """Return the path itself, or the file of a trained network of this library if the path is its name."""
    trained = _TRAINED / f"{path.stem}.safetensors"
    if (path / _WEIGHTS).is_file():
        return path / _WEIGHTS
    if path.exists() or len(path.parts) != 1 or (path.suffix and not (trained.name == path.name and trained.is_file())):
        return path
    if path.suffix or not trained.is_file():
        names = ", ".join(sorted(file.stem for file in _TRAINED.glob("*.safetensors")))
        raise FileNotFoundError(errno.ENOENT, f"no such file; the trained networks are {names}", str(path))
    return trained


def _downloaded(name: str) -> Path:
    """Return the copy of the file of a network on the Hugging Face Hub in the cache of huggingface_hub."""
    with needs_extra(name, "hub"):
        from huggingface_hub import errors, hf_hub_download
    repository, _, revision = name.removeprefix(_HUB).partition("@")
    missing: dict[type[Exception], str] = {
        errors.RepositoryNotFoundError: "no such repository, or a private one: hf auth login",
        errors.RevisionNotFoundError: "no such branch, tag or commit",
        errors.EntryNotFoundError: f"no file {_WEIGHTS} there, which lieattn.save writes with card=True",
        errors.HFValidationError: "expected hf:ORGANIZATION/NAME or hf:ORGANIZATION/NAME@REVISION",
    }
    try:
        return Path(hf_hub_download(repository, _WEIGHTS, revision=revision or None, library_name="lieattn"))
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(f"{name} cannot be downloaded, and was not downloaded before: {error}") from error
    except tuple(missing) as error:
        reason = next(text for kinds, text in missing.items() if isinstance(error, kinds))
        raise FileNotFoundError(errno.ENOENT, reason, name) from error


def _read(path: Path) -> Record:
    """Return the content of a file, which is compared with its digest."""
    from safetensors import SafetensorError, safe_open

    path.open("rb").close()  # an error of the system then names the file
    if zipfile.is_zipfile(path):
        opened = "lieattn.train.load_network opens its network, and load_task its task"
        raise CheckpointError(f"{path} is not a file of lieattn.save. If it is a checkpoint of a training, {opened}")
    try:
        with torch.device("cpu"), safe_open(path, "pt") as file:  # safetensors 0.5 follows torch's default device
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or was not written by lieattn.save: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise CheckpointError(f"{path} was not written by lieattn.save: its header does not describe a network")
    number = header["format"]
    check_format(path, number, _FORMAT)
    if header.pop("digest", None) != digest([header, sorted(tensors.items())]):
        raise CheckpointError(f"{path} is damaged: its content differs from what was saved")
    weights = {name: value for name, value in tensors.items() if not name.startswith(_ARGUMENT)}
    described = _together(header["network"], tensors)
    return Record(weights, header["modules"], with_earlier_defaults(described) if number == 1 else described)


def _check_finite(what: str, weights: Mapping[str, Any]) -> None:
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.is_quantized or value.is_meta:
            found = "none" if isinstance(value, Tensor) and value.is_meta else f"quantized ones, {kind(value)},"
            raise ValueError(f"{what}: expected tensors with values as weights, got {found} for {name}")
        # Torch has no isfinite for dtypes of eight bits.
        if value.is_floating_point() and not torch.isfinite(value.float() if value.itemsize == 1 else value).all():
            raise ValueError(f"{what}: the weights {name} are not finite")


def _structure(network: nn.Module) -> tuple[Any, ...]:
    """Return modules, names and shapes of weights, and the geometry of each module, without dtypes and devices."""
    lists = (nn.ParameterList, nn.ParameterDict)  # their extra_repr contains dtypes and devices
    named = uncompiled_names(dict(network.named_modules()))  # compiled modules have the names of their originals
    classes = ((name, module, type(module)) for name, module in named.items())  # e3nn generates some of them
    modules = [
        (
            name,
            f"{cls.__module__}.{cls.__qualname__}",
            "" if isinstance(module, lists) else plain_text(_ADDRESS.sub("", module.extra_repr())),
        )
        for name, module, cls in classes
    ]
    record = Record.of(network.state_dict()).uncompiled()
    return modules, {name: value.shape for name, value in record.weights.items()}, record.modules


def _apart(described: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a description whose tensors are replaced by names of entries that are added to ``tensors``."""
    if isinstance(described, Tensor):
        name = f"{_ARGUMENT}{sum(name.startswith(_ARGUMENT) for name in tensors)}"
        tensors[name] = described.contiguous().clone()
        return {_ENTRY: name}
    if isinstance(described, dict):
        return {key: _apart(entry, tensors) for key, entry in described.items()}
    return [_apart(entry, tensors) for entry in described] if isinstance(described, list) else described


def _together(described: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the description that :func:`_apart` was called with."""
    if isinstance(described, dict):
        if _ENTRY in described:
            return tensors[described[_ENTRY]].clone()
        return {key: _together(entry, tensors) for key, entry in described.items()}
    return [_together(entry, tensors) for entry in described] if isinstance(described, list) else described
