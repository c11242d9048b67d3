"""The entry ``"lieattn"`` of a checkpoint.

The entry contains tensors and plain values only: the resolved configuration, the group, the kind of input, the states
of the random generators, and digests of all entries. A checkpoint is not trusted: its content is compared with the
digests, and it may name classes of trusted packages only.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lieattn._core.checks import check_arguments
from lieattn._core.kept_tables import first_dtype
from lieattn.geometry import pixel_positions
from lieattn.groups import FiniteGroup
from lieattn.io import DIGESTS, KEY, damaged_entries, first_fault, make, uncompiled_names, untrusted_names
from lieattn.train._configuration import UsageError, build

FORMAT = 2  # version of the entry "lieattn"; version 1 had no digests
_KNOWN = frozenset({"x", "pos", "grid", "batch", "ptr", "repeated", "edge_index"})
_MOST_NUMBERS = 256  # an attribute with more numbers than this is not kept

M = TypeVar("M", bound=nn.Module)


class CheckpointError(UsageError):
    """A checkpoint that cannot be read, or does not belong to the network."""


def describe_group(network: nn.Module) -> dict[str, Any] | None:
    """Return name, order and dimension of the finite group that the weights are tied to; None if there is none.

    The group is the attribute ``group`` of the network, or of the first module in it that has one.
    """
    groups = (getattr(module, "group", None) for module in network.modules())
    group = next((group for group in groups if isinstance(group, FiniteGroup)), None)
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
    return checkpoint


def check_content(checkpoint: dict[str, Any], name: str, apart: Container[str] = ()) -> None:
    """Raise CheckpointError if the format is newer, or if entries other than those in ``apart`` were changed."""
    number = checkpoint[KEY].get("format")
    if not isinstance(number, int) or number < 1:
        raise CheckpointError(f"{name} is damaged: its format is {number!r}, not a number")
    if number > FORMAT:
        raise CheckpointError(
            f"{name} has format {number}, but this version reads formats up to {FORMAT}: pip install --upgrade lieattn"
        )
    if (number > 1 or DIGESTS in checkpoint[KEY]) and (damaged := damaged_entries(checkpoint, apart)):
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


def check_finite(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Raise CheckpointError, naming the parameter, if a weight is NaN or infinite."""
    for name, weight in module.named_parameters():
        if name in weights and weights[name].shape == weight.shape and not torch.isfinite(weights[name]).all():
            raise CheckpointError(f"the weights {name} of the checkpoint are not finite: use an earlier one")


def load_network(path: str | Path, trust: Sequence[str] = ()) -> nn.Module:
    """Rebuild the network of a checkpoint and load its weights. The network is on the CPU and in eval mode.

    The checkpoint comes from ``lieattn fit``, or from a ``Trainer`` with a task whose network records its arguments, as
    the networks of ``lieattn.models`` do. The classes and functions that it names are imported and called if they
    belong to lieattn, lieattn_datasets, torch.nn, torch.optim or torch_geometric.transforms, or to a package in
    ``trust``, such as ``["mypackage"]`` for networks of your own. CheckpointError is raised if the checkpoint names
    others, cannot be read, is damaged, or does not say how the network was built, or if the weights do not fit or are
    not finite.
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


def check_trusted(config: Any, path: str | Path, trust: Sequence[str]) -> None:
    """Raise CheckpointError if a configuration names classes or functions outside the packages that are trusted."""
    for name in untrusted_names(config, trust):
        package = name.partition(".")[0]
        raise CheckpointError(
            f"{path} names {name}, which would be imported and called. If the code is yours or you trust it: "
            f"--trust {package}, in Python trust=[{package!r}]"
        )


def loaded_from(
    path: str | Path, base: type[M], name: str, keys: Sequence[str], prefix: str, trust: Sequence[str] = ()
) -> M:
    """Rebuild the module at these keys of the configuration, and load its weights in their precision."""
    checkpoint = read_checkpoint(path)
    spec, what = trusted_spec(checkpoint, path, keys, name, trust), f"the {name} of {path}"
    module = build(base, spec, what) if checkpoint[KEY].get("config") else _made(base, spec, what)
    module.to(first_dtype(module, checkpoint["state_dict"], prefix))
    load_weights(module, checkpoint, what, prefix)
    return module.eval()


def _made(base: type[M], spec: Any, what: str) -> M:
    """Rebuild an object from what a task has recorded; CheckpointError if it is no instance of ``base``."""
    try:
        module = make(spec)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be built: {error}") from error
    if not isinstance(module, base):
        raise CheckpointError(f"{what} cannot be built: expected a {base.__name__}, got {type(module).__name__}")
    return module


def load_weights(module: nn.Module, checkpoint: dict[str, Any], what: str, prefix: str = "") -> None:
    """Load the weights of a checkpoint whose names have the prefix into a module.

    CheckpointError is raised if the weights do not fit or are not finite; its message calls the module ``what``.
    """
    check_group(checkpoint, module)
    state: dict[str, Tensor] = checkpoint["state_dict"]
    own = prefix.removesuffix(".")
    weights = OrderedDict((key.removeprefix(prefix), state[key]) for key in state if key.startswith(prefix))
    metadata = {key: entry for key, entry in getattr(state, "_metadata", {}).items() if f"{key}.".startswith(prefix)}
    # load_state_dict reads the metadata of the modules from this attribute.
    metadata = {key.removeprefix(own).removeprefix("."): entry for key, entry in metadata.items()}
    if not weights.keys() <= module.state_dict().keys():  # perhaps of a network that was compiled in training
        weights, metadata = OrderedDict(uncompiled_names(weights)), uncompiled_names(metadata)
    vars(weights)["_metadata"] = metadata
    try:
        module.load_state_dict(weights)
    except (AttributeError, TypeError, RuntimeError) as error:  # damaged metadata, or weights that do not fit
        raise CheckpointError(f"the weights do not fit {what}: {first_fault(error)}") from error
    check_finite(weights, module)


def describe_input(batch: Batch) -> dict[str, Any]:
    """Describe the kind of the clouds of a batch in plain values.

    Features and coordinates are described by their sizes. For every other attribute of points, and for ``edge_attr``,
    the description has the ``shape`` for one point or pair, and the ``values`` of integers or the ``range`` of floating
    point numbers. For an attribute of whole clouds, it has the ``value`` of the first cloud, unless the batch was not
    made of clouds. Of ``edge_index``, it has the number of pairs.
    """
    x, pos, grid, pairs = (batch.get(name) for name in ("x", "pos", "grid", "edge_index"))
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


def random_clouds(kind: dict[str, Any] | None, number: int, seed: int, vectors: tuple[str, ...] = ()) -> list[Data]:
    """Draw random clouds of a kind, as described by ``describe_input``.

    They are images of noise, or normally distributed points about one unit apart. Attributes named in ``vectors`` are
    normally distributed vectors, and ``edge_index`` has different pairs. UsageError is raised if the kind is unknown.
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
        for name in vectors:
            cloud[name] = torch.randn(cloud.pos.shape, generator=generator)
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
