"""Networks that are named on the command line."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jsonargparse import ArgumentParser as SignatureParser
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lieattn.cli import ArgumentParser, natural, package, positive, take_settings
from lieattn.geometry import pixel_positions
from lieattn.io import trained_cards
from lieattn.models import CloudInputs, EquivariantModule, Symmetry
from lieattn.train import UsageError, load_data, parse_yaml, random_clouds, read_yaml, register_types, short_message

T = TypeVar("T")

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
            kind = type(found).__name__
            raise UsageError(f"{option}: {text} is a {kind}, which takes no arguments, got {sorted(settings)}")
        return found
    if not isinstance(found, type) and not settings and _needs_arguments(found):
        return found
    try:
        inspect.signature(found).bind(**settings)
    except ValueError:  # for example for classes that are written in C, which have no signature
        pass
    except TypeError as error:
        raise UsageError(f"{option}: {text}: {error}, it takes {inspect.signature(found)}") from error
    return found(**settings)


def settings_of(section: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return the values in settings ``"section.name=value"`` of a section by name, read as YAML."""
    given = (setting.split("=", 1) for setting in settings if setting.startswith(f"{section}."))
    return {name.removeprefix(f"{section}."): parse_yaml(f"--{name}", value) for name, value in given}


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
    return random_clouds(kind, number, seed, network)


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


def add_cloud_options(parser: ArgumentParser, clouds: int, what: str) -> None:
    """Add the argument that names a network, and the options that choose clouds for it."""
    add = parser.add_argument
    add("checkpoint", metavar="TARGET", help=what)
    given = "another data set, with arguments as --data.OPTION VALUE, or a YAML file with class_path and init_args"
    add("--data", metavar="CLASS", help=given)
    add("--random", action="store_true", help="use random clouds, even if the checkpoint has a test set")
    add("--clouds", type=positive, default=clouds, help=f"number of clouds (default {clouds})")
    add("--seed", type=natural, default=0, help="seed of random numbers (default 0)")
    named = "packages whose classes the checkpoint may use, besides this library and torch"
    add("--trust", action="extend", nargs="+", default=[], type=package, metavar="PACKAGE", help=named)


def parsed(parser: ArgumentParser, arguments: Sequence[str], sections: Sequence[str]) -> argparse.Namespace:
    """Parse the options; settings of these sections, such as ``--data.split test``, go to ``settings``."""
    settings, others = take_settings(arguments)
    for setting in settings:
        if setting.partition(".")[0] not in sections:
            raise UsageError(f"unrecognized arguments: --{setting}")
    options = parser.parse_args(others)
    options.settings = settings
    return options


def refuse(arguments: Sequence[str], *rules: tuple[object, Sequence[str], str]) -> None:
    """Raise UsageError if an option has no effect, by rules of a condition, names of options, and the reason.

    A name that ends with a dot stands for the options of a section.
    """
    for applies, names, reason in rules:
        for word in arguments if applies else ():
            name = word.partition("=")[0]
            if name in names or (f"{name.partition('.')[0]}." in names and "." in name):
                raise UsageError(f"{name}: cannot be used here, since {reason}")


def is_trained(name: str) -> bool:
    """Whether this is the name of a trained network of the library, and not the path of a file."""
    return name in trained_cards() and not Path(name).exists()


def is_network(name: str) -> bool:
    """Whether this is a network of the library, of the Hub or of ``lieattn.save``, and not a checkpoint."""
    return is_trained(name) or name.startswith("hf:") or Path(name).suffix == ".safetensors"


class Clouds(NamedTuple):
    """Clouds to measure on, a text that names their source, and the names of their classes, if they have names."""

    items: list[Data]
    source: str
    classes: Sequence[str] = ()


def item_of_card(name: str) -> Clouds:
    """The item on the card of a trained network."""
    item = trained_cards()[name]["example"]["input"]
    return Clouds([Data(**{key: torch.tensor(value) for key, value in item.items()})], "the item of its card")


def built(base: type[T], section: str, given: str, settings: Sequence[str]) -> T:
    """The object of ``--SECTION CLASS``, or of a YAML file, with its options, built as for ``lieattn fit``."""
    if Path(given).suffix in (".yaml", ".yml", ".json"):
        read_yaml(given, "class_path and init_args")  # an error then names the file
    register_types()
    parser = SignatureParser(exit_on_error=False)
    parser.add_subclass_arguments(base, section, required=True)
    own = [f"--{setting}" for setting in settings if setting.startswith(f"{section}.")]
    try:
        made: T = parser.instantiate(parser.parse_args([f"--{section}={given}", *own]))[section]
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise UsageError(short_message(error)) from error
    return made


def test_clouds(entry: dict[str, Any], network: nn.Module, options: argparse.Namespace) -> Clouds:
    """Clouds to measure on: random ones, or the first ones of a data set."""
    if options.data is not None:
        dataset: Any = built(Dataset, "data", options.data, options.settings)
        named = f"{options.data}({', '.join(setting.removeprefix('data.') for setting in options.settings)})"
    elif not options.random and (entry["config"].get("data") or {}).get("test") is not None:
        dataset, spec = load_data(options.checkpoint, "test", options.trust), entry["config"]["data"]["test"]
        given = ", ".join(f"{key}={value}" for key, value in spec.get("init_args", {}).items())
        named = f"{spec['class_path']}({given})"
    else:
        clouds = random_clouds(entry["input"], options.clouds, options.seed, network)
        drawn = "a random cloud" if options.clouds == 1 else f"{options.clouds} random clouds"
        return Clouds(clouds, f"{drawn} of {clouds[0].num_nodes} points")
    number = min(options.clouds, len(dataset))
    first = "the first cloud" if number == 1 else f"the first {number} clouds"
    items = [dataset[index] for index in range(number)]
    return Clouds(items, f"{first} of {named}", getattr(dataset, "classes", ()))
