"""What a checkpoint holds beside Lightning's states, and how networks and data like those of it are made again.

The entry ``"lieattn"`` of a checkpoint has tensors and plain values only: the resolved configuration, the group,
the kind of input, and the states of the random generators.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lieattn.geometry import pixel_positions
from lieattn.groups import FiniteGroup

if TYPE_CHECKING:
    from lieattn.train._tasks import PointSetTask

KEY = "lieattn"
_KNOWN = frozenset({"x", "pos", "grid", "batch", "ptr"})
_MOST_NUMBERS = 256  # that are kept of an attribute

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


class UsageError(ValueError):
    """Settings that cannot work together, or lack something: reported in a line, not with a traceback."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be read, or does not belong to the network."""


def describe_group(network: nn.Module) -> dict[str, Any] | None:
    """Name, order and dimension of the group that the weights are tied to; None for a network without one.

    It is the attribute ``group`` of the network, or of the first module in it that has one.
    """
    groups = (getattr(module, "group", None) for module in network.modules())
    group = next((group for group in groups if isinstance(group, FiniteGroup)), None)
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

    CheckpointError is raised if the file is missing, damaged, or not such a checkpoint.
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

    The checkpoint must be one of ``lieattn fit``: that of a bare ``Trainer`` has no configuration. It names the
    network's class, which is imported: load files from people you trust. CheckpointError is raised if it cannot be
    read, has no configuration, or the weights do not fit.
    """
    return _loaded(path, nn.Module, "network", ("model", "init_args", "network"), "network.")


def load_task(path: str | Path) -> PointSetTask:
    """Build the task of a checkpoint again, whose predictions are in the units of the data, in eval mode on the CPU.

    ``path`` and errors are those of :func:`load_network`.
    """
    from lieattn.train._tasks import PointSetTask

    return _loaded(path, PointSetTask, "task", ("model",))  # type: ignore[type-abstract]


def load_data(path: str | Path, split: str = "test") -> Dataset[Any]:
    """Data set ``"train"``, ``"val"``, ``"test"`` or ``"predict"`` of a checkpoint; CheckpointError if it has none."""
    return build(Dataset, _spec(read_checkpoint(path), path, f"{split} set", ("data", split)), f"the data of {path}")


def _loaded(path: str | Path, base: type[M], name: str, keys: Sequence[str], prefix: str = "") -> M:
    """The module that the configuration of a checkpoint has at these keys, with its weights and their precision."""
    checkpoint = read_checkpoint(path)
    module = build(base, _spec(checkpoint, path, name, keys), f"the {name} of {path}")
    check_group(checkpoint, module)
    state: dict[str, Tensor] = checkpoint["state_dict"]
    weights = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    module.to(next((value.dtype for value in weights.values() if value.is_floating_point()), None))
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {path} do not fit its {name}: {error}") from error
    return module.eval()


def _spec(checkpoint: dict[str, Any], path: str | Path, name: str, keys: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint[KEY]["config"]
    for key in keys:
        found = found.get(key) or {}
    if not found:
        raise CheckpointError(f"{path} does not say how its {name} was built: it is not of `lieattn fit`, or had none")
    return found


def read_yaml(path: str | Path, expected: str) -> dict[str, Any]:
    """Read a mapping from a YAML file; UsageError says what was expected."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected {expected}, got {content!r}")
    return content


def build(base: type[T], spec: Mapping[str, Any], what: str) -> T:
    """Build an instance of ``base`` from ``class_path`` and ``init_args``, as configuration files have them.

    Arguments may be such objects themselves. UsageError is raised if a class does not exist or an argument does not
    fit; its message calls the object ``what``.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    register_types()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "object", required=True)
    try:
        made: T = parser.instantiate(parser.parse_object({"object": spec})).object
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be built: {error}") from error
    return made


def register_types() -> None:
    """Let configuration files name a function of ``lieattn.groups`` wherever a group is expected, and any space."""
    from jsonargparse import set_parsing_settings

    from lieattn.groups import Group
    from lieattn.spaces import HomogeneousSpace

    # FiniteGroup is final, the others are dataclasses: jsonargparse would accept their own constructors alone.
    set_parsing_settings(subclasses_enabled=[Group, HomogeneousSpace])


def describe_input(batch: Batch) -> dict[str, Any]:
    """Kind of the clouds of a batch, in plain values.

    Of attributes beside features and coordinates it keeps: of those of points ``shape`` (that of one point), and the
    ``values`` that integers have or the ``range`` of other numbers; of those of clouds the ``value`` of the first one.
    """
    x, pos, grid = batch.get("x"), batch.get("pos"), batch.get("grid")
    of_points, first = set(batch.node_attrs()), batch.get_example(0)
    found: dict[str, Any] = {}
    for name, value in batch.to_dict().items():
        if name in _KNOWN or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        value = value.detach().cpu()
        if name not in of_points:
            if first[name].numel() <= _MOST_NUMBERS:
                found[name] = {"value": first[name].tolist(), "integer": not value.is_floating_point()}
        elif value.is_floating_point():
            found[name] = {"shape": list(value.shape[1:]), "range": [float(value.min()), float(value.max())]}
        elif len(values := value.unique().tolist()) <= _MOST_NUMBERS:
            found[name] = {"shape": list(value.shape[1:]), "values": values}
    return {
        "points": math.ceil((batch.num_nodes or 0) / batch.num_graphs),
        "channels": None if x is None else int(x[0].numel()),
        "dim": None if pos is None else int(pos.shape[1]),
        "grid": None if grid is None else grid[0].tolist(),
        "attributes": found,
    }


def random_clouds(kind: dict[str, Any] | None, number: int, seed: int, vectors: tuple[str, ...] = ()) -> list[Data]:
    """Clouds of a kind, see :func:`describe_input`: images of noise, or normally distributed points about a unit apart.

    Attributes named in ``vectors`` are normally distributed vectors. UsageError is raised if the kind is unknown.
    """
    if kind is None or kind["dim"] is None:
        raise UsageError("the checkpoint does not know the kind of its clouds: give a data set with --data")
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
        for name, attribute in kind.get("attributes", {}).items():
            cloud[name] = _drawn(attribute, len(cloud.pos), generator)
        for name in vectors:
            cloud[name] = torch.randn(cloud.pos.shape, generator=generator)
        clouds.append(cloud)
    return clouds


def _drawn(attribute: dict[str, Any], points: int, generator: torch.Generator) -> Tensor:
    if "value" in attribute:
        return torch.tensor(attribute["value"], dtype=torch.int64 if attribute["integer"] else torch.float32)
    shape = (points, *attribute["shape"])
    if "values" in attribute:
        values = torch.tensor(attribute["values"])
        return values[torch.randint(len(values), shape, generator=generator)]
    low, high = attribute["range"]
    return low + (high - low) * torch.rand(shape, generator=generator)
