"""Networks and data that are given by their place in Python, ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lieattn.geometry import pixel_positions
from lieattn.io import loaded
from lieattn.models import CloudInputs, EquivariantModule, Symmetry
from lieattn.train import UsageError, random_clouds

_SPECIES = (1, 6, 7, 8)  # atomic numbers of random molecules


def is_named(text: str) -> bool:
    """Whether a target is ``package.module:name``, and not a file."""
    module, _, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return all(part.isidentifier() for part in parts) and not Path(text).exists()


def named(option: str, text: str) -> Any:
    """Return the object at ``package.module:name``; the working directory is searched last."""
    module, _, path = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UsageError(f"{option}: there is no module {module!r}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{option}: {getattr(found, '__name__', found)!s} has no {name!r}")
        found = getattr(found, name)
    return found


def made(option: str, text: str, settings: Mapping[str, Any]) -> Any:
    """Return the named object. A class is called, and so is a function if it needs no arguments or has settings."""
    found = named(option, text)
    if isinstance(found, nn.Module) or not callable(found):
        if settings:
            raise UsageError(
                f"{option}: {text} is a {type(found).__name__}, which takes no arguments, got {sorted(settings)}"
            )
        return found
    if isinstance(found, type) or settings or not _needs_arguments(found):
        _check_settings(option, text, found, settings)
        return found(**settings)
    return found


def _check_settings(option: str, text: str, found: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:  # for example for classes that are written in C
        return
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise UsageError(f"{option}: {text}: {error}, it takes {signature}") from error


def settings_of(section: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return the values in settings ``"section.name=value"`` of a section by name, read as YAML."""
    given = (setting.split("=", 1) for setting in settings if setting.startswith(f"{section}."))
    return {name.removeprefix(f"{section}."): loaded(f"--{name}", value) for name, value in given}


def given_clouds(text: str, number: int, settings: Mapping[str, Any]) -> list[Data] | Tensor:
    """Return the first clouds or images of the named data."""
    data = made("--data", text, settings)
    data = data.to_data_list() if isinstance(data, Batch) else [data] if isinstance(data, Data) else data
    if isinstance(data, Tensor):
        return data[:number]
    if isinstance(data, Mapping) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UsageError(f"--data: expected clouds or a tensor of images at {text}, got {type(data).__name__}")
    return [data[index] for index in range(min(number, len(data)))]


def drawn_clouds(
    network: Any, number: int, points: int, dim: int | None, features: int | None, seed: int
) -> list[Data]:
    """Random clouds with ``pos`` [points, dim], atomic numbers ``z`` and, if asked for or needed, features ``x``.

    They also have the vectors that the network states as its inputs, and 1 for each number of a whole cloud. If the
    dimension is None, it is that of the network's group, or 3.
    """
    if dim is None:
        group = Symmetry.stated_by(network).group
        dim = 3 if group is None else group.dim
    features = _needed_features(network) if features is None else features
    attributes: dict[str, Any] = {"z": {"values": list(_SPECIES), "shape": []}}
    for name in getattr(network, "cloud_inputs", ()):
        attributes[name] = {"value": [1.0], "integer": False}
    kind = {"dim": dim, "points": points, "grid": None, "channels": features, "attributes": attributes}
    return random_clouds(kind, number, seed, tuple(getattr(network, "vector_inputs", ())))


def _needed_features(network: Any) -> int | None:
    """The number of features ``x`` that a network of the library, or the one inside of it, needs; None for none."""
    for module in network.modules() if isinstance(network, nn.Module) else ():
        inputs = getattr(module, "inputs", None)
        own = inputs.points if isinstance(inputs, CloudInputs) else inputs
        if isinstance(module, EquivariantModule) and isinstance(own, int):
            return own if own > 1 else None
    return None


def drawn_images(network: Any, number: int, shape: Sequence[int], seed: int) -> list[Data] | Tensor:
    """Random images ``[number, channels, *sides]``, or their pixels as points for networks of the library."""
    images = torch.rand(number, *shape, generator=torch.Generator().manual_seed(seed))
    if not isinstance(network, EquivariantModule):
        return images
    sides = shape[1:]
    pos, grid = pixel_positions(*sides), torch.tensor([sides])
    return [Data(x=image.flatten(1).mT.contiguous(), pos=pos, grid=grid) for image in images]


def _needs_arguments(function: Callable[..., Any]) -> bool:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(one.default is one.empty and one.kind not in several for one in parameters)
