"""What a checkpoint or a configuration describes: network, task, data set or clouds."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments
from lieattn._core.messages import needs_extra
from lieattn._core.names import full_names
from lieattn.geometry import pixel_positions
from lieattn.io import (
    KEY,
    CheckpointError,
    Record,
    UsageError,
    check_finite,
    check_group,
    check_trusted,
    read_checkpoint,
)
from lieattn.models import Preprocessed
from lieattn.transforms import Standardize

_KNOWN = frozenset({"x", "pos", "grid", "raster", "pixel", "batch", "ptr", "repeated", "edge_index"})
_MOST_NUMBERS = 256  # an attribute with more numbers than this is not kept

# How lines of jsonargparse's messages begin that list its attempts at reading a value.
_ATTEMPTS = (
    *("Does not validate against any of", "Subtypes: ", "Errors:", "Expected a <class 'NoneType'>"),
    *("Expected a path but", "Subclass types expect one of", "a class path (str)", "a dict with", "Subclasses are"),
    *("Given value type: ", "Given value: NestedArg", "Given value: Namespace"),
)
_MOST_GIVEN = 60  # a value with more characters is not repeated in a message

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def load_network(path: str | Path, trust: Sequence[str] = ()) -> nn.Module:
    """Rebuild the network of a checkpoint and load its weights. The network is on the CPU and in eval mode.

    It takes features as they are in the data, also if the training standardized them. The targets of a regressor were
    scaled in training, and so are the outputs of its network; ``load_task(path).model`` has the units of the data. The
    checkpoint comes from ``lieattn fit``, or from a ``Trainer`` with a task whose network records its arguments, as the
    networks of ``lieattn.models`` do. The classes and functions that it names are imported and called if they belong to
    lieattn, lieattn_datasets, torch.nn, torch.optim or torch_geometric.transforms, or to a package in ``trust``, such
    as ``["mypackage"]`` for networks of your own. CheckpointError is raised if the checkpoint names others, cannot be
    read, is damaged, or does not say how the network was built, or if the weights do not fit or are not finite.
    """
    check_arguments(load_network, locals())
    return loaded_from(path, nn.Module, "network", ("model", "init_args", "network"), "network.", trust)


def load_data(path: str | Path, split: str = "test", trust: Sequence[str] = ()) -> Dataset[Any]:
    """Rebuild the data set ``"train"``, ``"val"``, ``"test"`` or ``"predict"`` of a checkpoint.

    The data set reads its files from the folder that the checkpoint names, and downloads them to it if its class does
    so. For ``trust`` see :func:`load_network`. CheckpointError is raised if the checkpoint has no such data set.
    """
    check_arguments(load_data, locals())
    spec = trusted_spec(read_checkpoint(path), path, ("data", split), f"{split} set", trust)
    return build(Dataset, spec, f"the data of {path}")


def trusted_spec(
    checkpoint: dict[str, Any], path: str | Path, keys: Sequence[str], name: str, trust: Sequence[str]
) -> dict[str, Any]:
    """Return the class path and arguments of an object of a checkpoint.

    They are found at ``keys`` of its configuration, or in what its task has recorded. CheckpointError is raised if they
    are absent, or name classes or functions that are not trusted.
    """
    made = checkpoint[KEY].get("made")
    found: Any = checkpoint[KEY].get("config") or {"model": made}
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not found:
        own = "build it in Python, and read them with read_checkpoint and load_weights"
        reason = (
            f"{made}. To use its weights, {own}" if isinstance(made, str) else "it is not of `lieattn fit`, or had none"
        )
        raise CheckpointError(f"{path} does not say how its {name} was built: {reason}")
    check_trusted(found, path, trust)
    return found


def loaded_from(
    path: str | Path, base: type[M], name: str, keys: Sequence[str], prefix: str, trust: Sequence[str] = ()
) -> M:
    """Rebuild the module at these keys of the configuration, and load its weights in their precision."""
    checkpoint, what = read_checkpoint(path), f"the {name} of {path}"
    spec = trusted_spec(checkpoint, path, keys, name, trust)
    record = Record.of(checkpoint["state_dict"], spec, prefix).uncompiled()
    module = build(base, spec, what) if checkpoint[KEY].get("config") else record.construct(path, what, trust)
    if not isinstance(module, base):
        raise CheckpointError(f"{what} cannot be built: expected a {base.__name__}, got {type(module).__name__}")
    check_group(checkpoint, module)
    record.restore(module, what)
    check_finite(record.weights, module)
    mean, std = (checkpoint["state_dict"].get(f"input_{kind}") for kind in ("mean", "std"))
    return cast(M, with_features(module, mean, std) if prefix else module).eval()  # a task has them itself


def with_features(network: nn.Module, mean: Tensor | None, std: Tensor | None) -> nn.Module:
    """Return the network for features as they are in the data, if it was trained on standardized ones."""
    if mean is None or std is None:
        return network
    return Preprocessed(network, Standardize(mean.cpu(), std.cpu()))


def describe_input(batch: Batch) -> dict[str, Any]:
    """Describe the kind of the clouds of a batch in plain values.

    Features and coordinates are described by their sizes. For every other attribute of points, and for ``edge_attr``,
    the description has the ``shape`` for one point or pair, and the ``values`` of integers or the ``range`` of floating
    point numbers. For an attribute of whole clouds, it has the ``value`` of the first cloud, unless the batch was not
    made of clouds. Of ``edge_index``, it has the number of pairs.
    """
    x, pos, grid, pairs = (batch.get(name) for name in ("x", "pos", "grid", "edge_index"))
    grid = batch.get("raster") if grid is None else grid
    listed = {*batch.node_attrs(), *(("edge_attr",) if pairs is not None else ())}
    first = batch.get_example(0) if hasattr(batch, "_slice_dict") else {}
    found: dict[str, Any] = {}
    for name, value in batch.to_dict().items():
        if name in _KNOWN or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        value = value.detach().cpu()
        if name not in listed:
            if name in first and first[name].numel() <= _MOST_NUMBERS:
                found[name] = {"value": first[name].tolist(), "integer": not value.is_floating_point()}
        elif value.is_floating_point():
            found[name] = {"shape": list(value.shape[1:]), "range": [float(value.min()), float(value.max())]}
        elif len(values := value.unique().tolist()) <= _MOST_NUMBERS:
            found[name] = {"shape": list(value.shape[1:]), "values": values}
    return {
        "points": math.ceil((batch.num_nodes or 0) / batch.num_graphs),
        "pairs": None if pairs is None else math.ceil(pairs.shape[1] / batch.num_graphs),
        "channels": None if x is None else math.prod(x.shape[1:]),
        "dim": None if pos is None else int(pos.shape[1]),
        "grid": None if grid is None else grid[0].tolist(),
        "attributes": found,
    }


def random_clouds(kind: dict[str, Any] | None, number: int, seed: int, network: Any = None) -> list[Data]:
    """Draw random clouds of a kind, as described by ``describe_input``.

    They are images of noise, or normally distributed points about one unit apart. The vectors and other fields that are
    inputs of the network, if one is given, are normally distributed, and ``edge_index`` has different pairs. UsageError
    is raised if the kind is unknown.
    """
    check_arguments(random_clouds, locals())
    if kind is None or kind["dim"] is None:
        raise UsageError("the checkpoint does not describe its clouds: use --data to name a data set")
    generator = torch.Generator().manual_seed(seed)
    clouds = []
    for _ in range(number):
        if kind["grid"] is None:
            size = kind["points"] ** (1 / kind["dim"]) / 2
            cloud = Data(pos=size * torch.randn(kind["points"], kind["dim"], generator=generator))
        else:
            cloud = Data(pos=pixel_positions(*kind["grid"]), grid=torch.tensor([kind["grid"]]))
        if kind["channels"] is not None:
            cloud.x = torch.rand(len(cloud.pos), kind["channels"], generator=generator)
        points = pairs = len(cloud.pos)
        if kind.get("pairs") is not None:
            cloud.edge_index = _pairs(points, kind["pairs"], generator)
            pairs = cloud.edge_index.shape[1]
        for name, attribute in kind.get("attributes", {}).items():
            cloud[name] = _drawn(attribute, pairs if name == "edge_attr" else points, generator)
        for name in set(getattr(network, "vector_inputs", ())) - {"pos"}:
            cloud[name] = torch.randn(cloud.pos.shape, generator=generator)
        for name, rep in getattr(network, "field_inputs", {}).items():
            cloud[name] = torch.randn(points, rep.dim, generator=generator)
        clouds.append(cloud)
    return clouds


def _pairs(points: int, number: int, generator: torch.Generator) -> Tensor:
    """Draw up to this number of different pairs of points, int64 ``[2, pairs]``, none of a point with itself."""
    possible = points * (points - 1)  # not a permutation of all of them, which are 10^8 for 10^4 points
    places = torch.randint(max(possible, 1), (min(number, possible),), generator=generator).unique()
    source, other = places // max(points - 1, 1), places % max(points - 1, 1)
    return torch.stack([source, (source + 1 + other) % max(points, 1)])


def _drawn(attribute: dict[str, Any], rows: int, generator: torch.Generator) -> Tensor:
    if "value" in attribute:
        # Booleans, such as those of pbc, stay booleans.
        return torch.tensor(attribute["value"], dtype=None if attribute["integer"] else torch.float32)
    shape = (rows, *attribute["shape"])
    if "values" in attribute:
        values = torch.tensor(attribute["values"])
        return values[torch.randint(len(values), shape, generator=generator)]
    low, high = attribute["range"]
    return low + (high - low) * torch.rand(shape, generator=generator)


def read_yaml(path: str | Path, expected: str) -> dict[str, Any]:
    """Read a mapping from a YAML file; UsageError names a key that occurs twice, or an alias of itself."""
    check_arguments(read_yaml, locals())
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    with needs_extra("lieattn.train.read_yaml", "train"):
        content = parse_yaml(str(path), text)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected {expected}, got {content!r}")
    return content


def parse_yaml(what: str, text: str) -> Any:
    """Return the content of a YAML text, with full names of classes.

    UsageError, which names ``what`` it is, is raised if it cannot be read.
    """
    import yaml

    check_arguments(parse_yaml, locals())
    try:
        _check_keys(yaml.compose(text, yaml.SafeLoader), set())
        return full_names(yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{what} cannot be read: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from error


def _check_keys(node: Any, seen: set[int]) -> None:
    """Raise ValueError if a key occurs twice in a section; ``seen`` are sections that others may be aliases of."""
    if id(node) in seen or not isinstance(getattr(node, "value", None), list):
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for part in node.value:
        key, inner = part if isinstance(part, tuple) else (None, part)
        _check_keys(inner, seen)
        if key is None or not isinstance(key.value, str) or key.value == "<<":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            found = f"{key.value!r} in lines {lines[key.value]} and {line}"
            raise ValueError(f"expected each key of a section once, got {found}")
        lines[key.value] = line


def build(base: type[T], spec: Mapping[str, Any], what: str) -> T:
    """Build an instance of ``base`` from ``class_path`` and ``init_args``, as written in configuration files.

    Arguments may themselves be described in this way. UsageError is raised if a class does not exist or an argument
    does not fit; its message calls the object ``what``.
    """
    check_arguments(build, locals())
    with needs_extra("lieattn.train.build", "train"):
        from jsonargparse import ArgumentError, ArgumentParser

    register_types()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "object", required=True)
    try:
        made: T = parser.instantiate(parser.parse_object({"object": spec})).object
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be built: {short_message(error)}") from error
    return made


def short_message(error: Exception) -> str:
    """Return the cause and place of an error of jsonargparse.

    Its own message also lists every attempt at reading the value.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    in_code = isinstance(cause, LookupError | RuntimeError | AssertionError)
    if in_code and not type(cause).__module__.startswith("jsonargparse"):  # raised by the class to be built
        place = traceback.extract_tb(cause.__traceback__)[-1]
        return f"{type(cause).__name__}: {cause}, in {place.filename}, line {place.lineno}"
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(_ATTEMPTS)]
    given = [line for line in told if line.startswith("Given value: ")]
    told = [line for line in dict.fromkeys(told) if line not in given]
    # Lines about the other types that an argument may have; where one type fits, its own message is the reason.
    others = [line for line in told if line == "Expected a <class 'list'>"]
    others += [line for line in told if line.startswith("Import path ") and " does not " in line]
    if any(not line.endswith(":") for line in told if line not in others):
        told = [line for line in told if line not in others]
    told += [line for line in given[:1] if len(line) <= _MOST_GIVEN]
    ended = [line if line.endswith(":") else f"{line};" for line in told]
    return " ".join(ended).rstrip(";").replace('Parser key "', "").replace('":', ":")


def register_types() -> None:
    """Let configuration files name any function of ``lieattn.groups`` where a group is expected, and any space."""
    with needs_extra("lieattn.train.register_types", "train"):
        from jsonargparse import set_parsing_settings

    from lieattn.groups import Group
    from lieattn.spaces import HomogeneousSpace

    # FiniteGroup is final and the others are dataclasses, so jsonargparse would accept only their own constructors.
    set_parsing_settings(subclasses_enabled=[Group, HomogeneousSpace])
