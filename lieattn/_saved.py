"""Networks as files that make them again: weights, how the network was made, and what the weights are for."""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lieattn._checks import check_arguments
from lieattn._digest import digest
from lieattn._files import replacing
from lieattn._recorded import describe, make
from lieattn._tied import TiedWeights
from lieattn._trust import untrusted_names

_KEY, _FORMAT = "lieattn", 1
_ARGUMENT, _ENTRY = "argument.", "tensor-entry"  # names of tensors that are arguments, and what refers to them
_TRAINED = Path(__file__).parent / "trained"


def save(network: nn.Module, path: str | Path) -> None:
    """Write a network to a file from which :func:`load` makes it again: weights, arguments, group and geometry.

    The file is one of safetensors, so weights can be read by any program that knows these. It is written whole or not
    at all. ValueError is raised if weights are not finite, if a part of the network does not record its arguments (all
    of ``lieattn.models``, the heads of ``lieattn.nn`` and networks of your own that derive from
    :class:`lieattn.models.Network` do), or if the network was changed after its construction. Whether it is in training
    mode, and what was frozen, is not kept.

    Parameters
    ----------
    network
        A network on any device, in any dtype, however it was trained; ``task.model`` of a task of ``lieattn.train``.
    path
        The file, by custom ``NAME.safetensors``.
    """
    check_arguments(save, locals())
    from safetensors.torch import save_file

    network = getattr(network, "_orig_mod", network)  # of a compiled one
    try:
        described = describe(network)
    except ValueError as error:
        raise ValueError(f"network: cannot be saved. {error}") from error
    state = network.state_dict()
    _check_finite("network", state)
    made = _made(described)
    decided = {name: entry.get("geometry", {}) for name, entry in _metadata(state).items()}
    for name, part in made.named_modules() if isinstance(made, nn.Module) else ():
        if isinstance(part, TiedWeights):
            part._decide(decided.get(name, {}))
    if _structure(made) != _structure(network):
        raise ValueError("network: was changed after its construction; construct it with the arguments it needs now")
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    header: dict[str, Any] = {"format": _FORMAT, "version": importlib.metadata.version("lieattn")}
    header |= {"network": _apart(described, tensors), "modules": _metadata(state)}
    header["digest"] = digest([header, sorted(tensors.items())])
    with replacing(path) as part:
        save_file(tensors, part, {_KEY: json.dumps(header)})


def trained_cards() -> dict[str, dict[str, Any]]:
    """The cards of the trained networks that come with the library, by name: what :func:`load` gives for a name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(_TRAINED.glob("*.json"))}


def load(path: str | Path, trust: Sequence[str] = ()) -> nn.Module:
    """Make the network of a file of :func:`save` again, with its weights and their dtype, in eval mode on the CPU.

    A name without a folder and an ending, such as ``"qm9-homo"``, is that of a trained network of this library, unless
    there is such a file: ``lieattn models --trained`` lists them. FileNotFoundError lists the names, too, if there is
    neither.

    No code of the file is run. It names classes, which are imported if they are of lieattn, torch.nn or of a package
    in ``trust``, such as ``["mypackage"]`` for networks of your own. ValueError is raised if it names others, is
    damaged, of a newer format, or not such a file, if its weights are not finite, or if this version of the library
    makes a network of another geometry from its arguments; OSError if it cannot be read.
    """
    check_arguments(load, locals())
    path = _located(Path(path))
    header, tensors = _read(path)
    described = _together(header["network"], tensors)
    for name in untrusted_names(described, trust):
        package = name.partition(".")[0]
        raise ValueError(
            f"{path} names {name}, which would be imported and called. If you trust this package, pass "
            f"trust=[{package!r}]"
        )
    weights = OrderedDict((name, value) for name, value in tensors.items() if not name.startswith(_ARGUMENT))
    setattr(weights, "_metadata", header["modules"])  # noqa: B010 - where load_state_dict looks for it
    _check_finite(str(path), weights)
    try:
        network = _made(described)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its network cannot be constructed here. {error}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{path} is damaged: its header does not describe a network")
    network.to(next((value.dtype for value in weights.values() if value.is_floating_point()), None))
    for name, own in itertools.chain(network.named_parameters(), network.named_buffers()):
        if name in weights:
            own.data = own.data.to(weights[name].dtype)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ValueError(f"{path}: the weights do not fit the network that is constructed here. {reason}") from error
    return network.eval()


def _located(path: Path) -> Path:
    """The file itself, or that of a trained network of this library, whose name it is."""
    if path.exists() or len(path.parts) != 1 or path.suffix:
        return path
    if not (trained := _TRAINED / f"{path}.safetensors").is_file():
        names = ", ".join(sorted(file.stem for file in _TRAINED.glob("*.safetensors")))
        raise FileNotFoundError(errno.ENOENT, f"no such file; the trained networks are {names}", str(path))
    return trained


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file, checked."""
    from safetensors import SafetensorError, safe_open

    path.open("rb").close()  # so that an error of the system says which file
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or was not written by lieattn.save: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise ValueError(f"{path} was not written by lieattn.save: its header does not describe a network")
    if header["format"] > _FORMAT:
        newer = f"has format {header['format']}, but this version reads formats up to {_FORMAT}"
        raise ValueError(f"{path} {newer}: pip install --upgrade lieattn")
    known = header.pop("digest", None)
    if known != digest([header, sorted(tensors.items())]):
        raise ValueError(f"{path} is damaged: its content differs from what was saved")
    return header, tensors


def _made(described: Any) -> Any:
    """The network of a description; the random numbers of the process stay as they are."""
    with torch.random.fork_rng(devices=[]):
        return make(described)


def _check_finite(what: str, weights: Mapping[str, Tensor]) -> None:
    for name, value in weights.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{what}: the weights {name} are not finite")


def _structure(network: nn.Module) -> tuple[Any, ...]:
    """Modules, names and shapes of weights, and the geometry of each module; nothing of dtypes and devices."""
    lists = (nn.ParameterList, nn.ParameterDict)  # which print those of their parameters
    classes = ((name, module, type(module)) for name, module in network.named_modules())  # e3nn makes some as it goes
    modules = [
        (name, f"{cls.__module__}.{cls.__qualname__}", "" if isinstance(module, lists) else module.extra_repr())
        for name, module, cls in classes
    ]
    state = network.state_dict()
    return modules, [(name, value.shape) for name, value in state.items()], _metadata(state)


def _metadata(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Versions of the modules and what their weights are tied to, see :class:`lieattn.models.EquivariantModule`."""
    return dict(getattr(state, "_metadata", {}))


def _apart(described: Any, tensors: dict[str, Tensor]) -> Any:
    """A description whose tensors are names of entries that are added to ``tensors``."""
    if isinstance(described, Tensor):
        name = f"{_ARGUMENT}{sum(name.startswith(_ARGUMENT) for name in tensors)}"
        tensors[name] = described.contiguous().clone()
        return {_ENTRY: name}
    if isinstance(described, dict):
        return {key: _apart(entry, tensors) for key, entry in described.items()}
    return [_apart(entry, tensors) for entry in described] if isinstance(described, list) else described


def _together(described: Any, tensors: dict[str, Tensor]) -> Any:
    """What :func:`_apart` was given."""
    if isinstance(described, dict):
        if _ENTRY in described:
            return tensors[described[_ENTRY]].clone()
        return {key: _together(entry, tensors) for key, entry in described.items()}
    return [_together(entry, tensors) for entry in described] if isinstance(described, list) else described
