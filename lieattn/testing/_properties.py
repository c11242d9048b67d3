"""Properties that a network on clouds or images should have, as checks by name."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lieattn.io import Recorded, load, save
from lieattn.testing._equivariance import assert_certified, relative_error

if TYPE_CHECKING:
    from torch_geometric.data import Batch, Data

    Clouds = Sequence[Data] | Tensor

__all__ = ["PROPERTIES", "assert_conforms"]

_ALONE = 1e-9  # relative errors of float64, with a margin for many layers
_RASTER = "pixels, of images or of data with grid, are a raster; without grid they are checked as points"
_HALF = 0.1  # relative error of outputs where weights and signals have 8 bits


def assert_conforms(
    network: nn.Module, data: Batch | Clouds, properties: Iterable[str] | None = None
) -> dict[str, str]:
    """Raise AssertionError, with the name of the property, unless a network has all of these properties.

    Parameters
    ----------
    network
        Called with a ``Batch``, or with images. It returns ``[clouds, *]`` or ``[points, *]``, or a mapping or named
        tuple of such tensors. It stays as it is: checks call copies in eval mode. Apply :func:`randomize` first, since
        initial values can hide mistakes.
    data
        At least two clouds of different sizes, or images ``[images, channels, *sides]``.
    properties
        Names among :data:`PROPERTIES`, by default all.

    Returns
    -------
    Reasons, by name, why properties do not apply to this network, for example that its outputs depend on the order of
    the points.
    """
    chosen = set(PROPERTIES if properties is None else properties)
    if unknown := chosen - PROPERTIES.keys():
        raise ValueError(f"properties: expected names among {', '.join(PROPERTIES)}, got {', '.join(sorted(unknown))}")
    reasons = {name: _reason(name, network, data) for name in PROPERTIES if name in chosen}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _reason(name: str, network: nn.Module, data: Batch | Clouds) -> str | None:
    try:
        return PROPERTIES[name](network, data)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError(f"{name}: {kind}{error}") from error


# --- clouds and outputs ---------------------------------------------------------------------------------------


def _clouds(data: Batch | Clouds, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Return the clouds, or batches of one image, in a dtype."""
    if isinstance(data, Tensor):
        return list(data.to(dtype).split(1))
    parts = data.to_data_list() if hasattr(data, "to_data_list") else list(data)
    return [copy.copy(part).apply(lambda value: _cast(value, dtype)) for part in parts]


def _given(data: Batch | Clouds) -> Any:
    return data if isinstance(data, Tensor) else _clouds(data)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value.clone()


def _batch(clouds: Sequence[Any]) -> Any:
    from torch_geometric.data import Batch

    return torch.cat(list(clouds)) if isinstance(clouds[0], Tensor) else Batch.from_data_list(list(clouds))


def _copy(network: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    return copy.deepcopy(network).to(dtype).eval()


def _outputs(network: Callable[..., Any], *given: Any) -> dict[str, Tensor]:
    """Return the outputs by name; the name of a single one is ``"output"``."""
    found = network(*given)
    found = found._asdict() if hasattr(found, "_asdict") else found
    return dict(found) if isinstance(found, Mapping) else {"output": found}


def _assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Raise AssertionError if outputs differ by more than a tolerance, relative to the largest one or 1."""
    if found.keys() != expected.keys():
        raise AssertionError(f"{what}: expected the outputs {sorted(expected)}, got {sorted(found)}")
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise AssertionError(f"{what}: {name} has shape {tuple(found[name].shape)}, not {tuple(value.shape)}")
        ours, theirs = (part.detach().double().nan_to_num(nan=0.0) for part in (found[name], value))
        same_holes = torch.equal(found[name].isnan(), value.isnan())  # stresses are NaN where they are not defined
        error = relative_error(ours, theirs) if same_holes else float("inf")
        if not error <= tolerance:
            raise AssertionError(
                f"{what}: {name} changes by {error:.1e}, relative to its size; allowed {tolerance:.0e}"
            )


def _rows(outputs: Mapping[str, Tensor], clouds: Sequence[Any], number: int) -> dict[str, Tensor]:
    """Return the outputs of one cloud of a batch, or of its points."""
    sizes = [1 if isinstance(cloud, Tensor) else int(cloud.num_nodes) for cloud in clouds]
    ends = torch.tensor(sizes).cumsum(0)
    at_points = slice(int(ends[number]) - sizes[number], int(ends[number]))
    of_points = {name: len(value) == sum(sizes) for name, value in outputs.items()}
    return {
        name: value[at_points] if of_points[name] else value[number : number + 1] for name, value in outputs.items()
    }


def _total(outputs: Mapping[str, Tensor]) -> Tensor:
    """Return a loss for which stresses may be NaN, where they are not defined."""
    return torch.stack([value.nan_to_num().square().sum() for value in outputs.values()]).sum()


def _is_raster(data: Batch | Clouds) -> bool:
    return isinstance(data, Tensor) or any(cloud.get("grid") is not None for cloud in _clouds(data))


def _moving(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the vectors and other fields that are inputs of a network."""
    return (*getattr(network, "vector_inputs", ()), *getattr(network, "field_inputs", ()))


def _geometry(network: Any, data: Any) -> tuple[Any, ...]:
    """Return the geometry as a further argument, for networks whose geometry can be computed outside of a graph."""
    return () if isinstance(data, Tensor) or not hasattr(network, "geometry") else (network.geometry(data),)


# --- properties -----------------------------------------------------------------------------------------------


def _equivariance(network: nn.Module, data: Batch | Clouds) -> str | None:
    """The symmetry that the network states is exact, and the outputs depend on the data."""
    if getattr(network, "symmetry", None) is None:
        return "the network states no symmetry"
    assert_certified(network, _given(data), elements=2, rotations=0, continuity=False, dtypes=(torch.float64,))
    return None


def _continuity(network: nn.Module, data: Batch | Clouds) -> str | None:
    """Outputs do not jump as points move, if the network states this by ``jumps = ()``."""
    if _is_raster(data):
        return _RASTER
    if getattr(network, "symmetry", None) is None or getattr(network, "jumps", None) != ():
        return "the network does not state that nothing jumps"
    assert_certified(network, _given(data), elements=1, rotations=0, dtypes=(torch.float64,))
    return None


def _batches(network: nn.Module, data: Batch | Clouds) -> None:
    """A batch has the outputs of its clouds, in any order."""
    network, clouds = _copy(network), _clouds(data)
    alone = [_outputs(network, _batch([cloud])) for cloud in clouds]
    for order in (range(len(clouds)), reversed(range(len(clouds)))):
        placed = list(order)
        together = _outputs(network, _batch([clouds[number] for number in placed]))
        for place, number in enumerate(placed):
            found = _rows(together, [clouds[number] for number in placed], place)
            _assert_alike(found, alone[number], _ALONE, f"cloud {number} in a batch, against the same cloud alone")


def _order(network: nn.Module, data: Batch | Clouds) -> str | None:
    """Outputs of clouds do not depend on the order of the points, and those of points move with these."""
    if _is_raster(data):
        return _RASTER
    if getattr(network, "sees_order", False):
        return "the network states that its outputs depend on the order of the points"
    network, clouds = _copy(network), _clouds(data)
    for number, cloud in enumerate(clouds):
        order = torch.arange(int(cloud.num_nodes or 0)).roll(1).flip(0)
        before, after = (_outputs(network, _batch([one])) for one in (cloud, cloud.subgraph(order)))
        points = [name for name, value in before.items() if len(value) == len(order) > 1]
        moved = {name: value[order] if name in points else value for name, value in before.items()}
        _assert_alike(after, moved, _ALONE, f"cloud {number} with its points in another order")
    return None


def _precision(network: nn.Module, data: Batch | Clouds) -> None:
    """Outputs in float32 are those in float64, up to rounding, and have the dtype of the weights."""
    single = _copy(network, torch.float32)
    clouds = _clouds(data, torch.float32)
    expected = _outputs(_copy(single), _batch(_clouds(_batch(clouds))))
    found = _outputs(single, _batch(clouds))
    for name, value in found.items():
        if value.is_floating_point() and value.dtype != torch.float32:
            raise AssertionError(f"{name} has dtype {value.dtype}, although weights and data have float32")
    _assert_alike(found, expected, 1e-4, "float32 against float64")


def _autocast(network: nn.Module, data: Batch | Clouds) -> None:
    """Outputs under autocast to bfloat16 are those in float32, up to the rounding of signals."""
    network, given = _copy(network, torch.float32), _batch(_clouds(data, torch.float32))
    expected = _outputs(network, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = _outputs(network, given)
    _assert_alike(found, expected, _HALF, "autocast to bfloat16 against float32")


def _half(network: nn.Module, data: Batch | Clouds) -> None:
    """Outputs with weights and data in bfloat16 are those in float32, up to the rounding of signals."""
    narrow, given = _copy(network, torch.bfloat16), _batch(_clouds(data, torch.bfloat16))
    expected = _outputs(_copy(narrow, torch.float32), _batch(_clouds(given, torch.float32)))
    _assert_alike(_outputs(narrow, given), expected, _HALF, "bfloat16 against float32")


def _device(network: nn.Module, data: Batch | Clouds) -> str | None:
    """Outputs on a GPU are those on the CPU."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    network, given = _copy(network), _batch(_clouds(data))
    expected = _outputs(network, given)
    found = _outputs(network.cuda(), given.to("cuda"))
    _assert_alike({name: value.cpu() for name, value in found.items()}, expected, 1e-8, "on a GPU, against the CPU")
    return None


def _compile(network: nn.Module, data: Batch | Clouds) -> None:
    """The network compiles without a graph break, given the result of its method ``geometry`` if it has one."""
    network, given = _copy(network, torch.float32), _batch(_clouds(data, torch.float32))
    geometry = _geometry(network, given)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = _outputs(network, given, *geometry)
        found = _outputs(torch.compile(network, fullgraph=True, backend="eager"), given, *geometry)
    _assert_alike(found, expected, 1e-5, "compiled, against the network itself")


@torch.no_grad()
def _export(network: nn.Module, data: Batch | Clouds) -> None:
    """The network exports as a function of features and vectors, and the saved program has the same outputs."""
    network, given = _copy(network, torch.float32), _batch(_clouds(data, torch.float32))
    geometry, images = _geometry(network, given), isinstance(given, Tensor)
    names = () if images else tuple(name for name in ("x", *_moving(network)) if name in given)

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *values: Tensor) -> dict[str, Tensor]:
            cloud = values[0] if images else copy.copy(given).update(dict(zip(names, values, strict=True)))
            return _outputs(self.network, cloud, *geometry)

    values = (given,) if images else tuple(given[name] for name in names)
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of torch.export.load
        torch.export.save(torch.export.export(Exported(), values, strict=False), file)
        file.seek(0)
        program = torch.export.load(file).module()
    for inputs in (values, tuple(0.5 * value for value in values)):
        _assert_alike(program(*inputs), Exported()(*inputs), 1e-5, "exported, against the network itself")


def _save(network: nn.Module, data: Batch | Clouds) -> None:
    """A copy, a pickle, a state dict and a file of :func:`lieattn.save` have all that a training has changed."""
    given = _batch(_clouds(data))
    trained, fresh = _copy(network).train(), _copy(network)
    _outputs(trained, given)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(torch.sin(torch.arange(weight.numel())).view_as(weight), alpha=0.1)
    trained.eval()
    expected = _outputs(trained, given)
    fresh.load_state_dict(trained.state_dict())
    kept = {"a state dict": fresh, "copy.deepcopy": copy.deepcopy(trained)}
    kept["a pickle"] = pickle.loads(pickle.dumps(trained))
    if isinstance(trained, Recorded):
        with tempfile.TemporaryDirectory() as folder:
            save(trained, path := Path(folder) / "network.safetensors")
            packages = {type(part).__module__.partition(".")[0] for part in trained.modules()}
            kept["lieattn.load"] = again = load(path, trust=sorted(packages))
        if repr(again) != repr(trained) or getattr(again, "guarantee", None) != getattr(trained, "guarantee", None):
            raise AssertionError(f"the network from lieattn.load is {again}, not {trained}")
    for way, other in kept.items():
        _assert_alike(_outputs(other, given), expected, 0.0, f"the network from {way}, against the one that was saved")


def _degenerate(network: nn.Module, data: Batch | Clouds) -> str | None:
    """Outputs and gradients are finite for clouds of few, coincident or isolated points, unless these are refused.

    Other clouds of a batch do not change.
    """
    if _is_raster(data):
        return _RASTER
    network, (usual, *_) = _copy(network), _clouds(data)
    expected = _outputs(network, _batch([usual]))
    hard = dict(_hard(usual))
    with contextlib.suppress(Exception):  # one of the clouds may be refused
        clouds = [usual, *hard.values()]
        _assert_finite(network, clouds, *_tried(network, clouds), expected, "a batch of them")
        return None
    for name, cloud in hard.items():
        try:
            tried = _tried(network, [usual, cloud])
        except ValueError:
            continue  # the network says so
        _assert_finite(network, [usual, cloud], *tried, expected, f"a batch with {name}")
    return None


def _tried(network: nn.Module, clouds: Sequence[Data]) -> tuple[Data, dict[str, Tensor]]:
    """Return clouds as a batch whose positions need gradients, and the outputs."""
    given = _batch(clouds)
    given.pos.requires_grad_()
    with warnings.catch_warnings(action="ignore"):
        return given, _outputs(network, given)


def _assert_finite(
    network: nn.Module,
    clouds: Sequence[Data],
    given: Data,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    what: str,
) -> None:
    """Raise AssertionError unless outputs and gradients are finite, and those of the first cloud are as expected."""
    network.zero_grad()
    (_total(found) + 0.0 * given.pos.sum()).backward()
    if not all(bool(value.isfinite().all()) for name, value in found.items() if name != "stress"):
        raise AssertionError(f"{what}: outputs are not finite")  # except for stresses of clouds without a volume
    for slope in (given.pos.grad, *(weight.grad for weight in network.parameters())):
        if slope is not None and not bool(slope.isfinite().all()):
            raise AssertionError(f"{what}: gradients are not finite")
    _assert_alike(_rows(found, clouds, 0), expected, _ALONE, f"{what}: the other cloud")


def _hard(cloud: Data) -> Iterator[tuple[str, Data]]:
    """Yield clouds, by name, at which norms, frames and means are not defined or not differentiable."""
    points, half = int(cloud.num_nodes or 0), int(cloud.num_nodes or 0) // 2
    every = torch.arange(points)
    for name, kept in {"one point": every[:1], "two points": every[:2]}.items():
        yield name, cloud.subgraph(kept)
    start, rest = cloud.pos[:1], cloud.pos[1:]
    places = {"coincident points": start.expand_as(cloud.pos), "isolated points": torch.cat([start - 1e3, rest])}
    places["pairs of coincident points"] = cloud.pos[every % max(half, 1)]
    places["points on a line"] = start + torch.linspace(-1, 1, points).to(start)[:, None] * torch.ones_like(start)
    for name, pos in places.items():
        other = copy.copy(cloud)
        other.pos = pos.clone()
        yield name, other
    yield "no points", cloud.subgraph(every[:0])  # last, where a network may forget it


def _gradients(network: nn.Module, data: Batch | Clouds) -> None:
    """Gradients of weights, features, vectors and positions are those of finite differences, in float64.

    In training, each call has the same random numbers.
    """
    network, given = _copy(network), _batch(_clouds(data))
    step, tolerance = (1e-8, 1e-3) if getattr(network, "has_kinks", True) else (1e-6, 1e-5)  # kinks are not crossed
    named, images = dict(network.named_parameters()), isinstance(given, Tensor)
    names = () if images else ("x", "pos", *_moving(network))
    inputs = {"images": given} if images else {name: given[name] for name in names if name in given}
    values = named | inputs
    directions = {
        name: torch.cos(torch.arange(value.numel(), dtype=torch.float64) + len(name)).view_as(value)
        for name, value in values.items()
    }

    def total(size: Tensor, moving: Iterable[str]) -> Tensor:
        """Return a weighted sum of the outputs after a step along the directions of some of the tensors."""
        moved = {name: values[name] + size * directions[name] for name in moving}
        own = {name: value for name, value in moved.items() if name in named}
        new = moved.get("images", given) if images else copy.copy(given)
        for name in moved.keys() & inputs.keys() - {"images"}:
            new[name] = moved[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            outputs = _outputs(torch.func.functional_call, network, own, (new,)).values()
        seen = [value for value in outputs if value.requires_grad]  # forces in eval mode, for example, are detached
        parts = ((torch.linspace(0.5, 1.5, v.numel()).to(v).view_as(v) * v).nan_to_num().sum() for v in seen)
        return sum(parts, start=0 * size)

    for what, moving in (("weights", named), ("inputs", inputs)):
        for training in (False, True):
            network.train(training)
            sizes = [torch.tensor(sign * step, dtype=torch.float64, requires_grad=True) for sign in (0, 1, -1)]
            values_at = [total(size, moving) for size in sizes]
            (slope,) = torch.autograd.grad(values_at[0], sizes[0])
            wanted = (values_at[1] - values_at[2]).detach() / (2 * step)
            mode = "training" if training else "eval mode"
            where = f"gradients of {what} in {mode}, against finite differences"
            _assert_alike({"derivative": slope}, {"derivative": wanted}, tolerance, where)


def _training(network: nn.Module, data: Batch | Clouds) -> None:
    """In training, all parameters have finite gradients."""
    network = _copy(network, torch.float32).train()
    outputs = _outputs(network, _batch(_clouds(data, torch.float32)))
    _total(outputs).backward()
    for name, weight in network.named_parameters():
        if weight.requires_grad and weight.grad is None:
            raise AssertionError(f"{name} has no gradient, so it does not learn")
        if weight.grad is not None and not bool(weight.grad.isfinite().all()):
            raise AssertionError(f"gradients of {name} are not finite")


def _repeats(network: nn.Module, data: Batch | Clouds) -> None:
    """In eval mode, calls have the same bits each time, and change neither the network nor the data."""
    network, given = _copy(network), _batch(_clouds(data))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    before = given.clone()
    expected = _outputs(network, given)
    for number in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            _assert_alike(_outputs(network, given), expected, 0.0, "the second call in eval mode, against the first")
    with torch.no_grad():
        _assert_alike(_outputs(network, given), expected, _ALONE, "without gradients, against the same call with them")
    network.train().eval()
    _assert_alike(_outputs(network, given), expected, 0.0, "in eval mode again, after train()")
    changed = [name for name, value in network.state_dict().items() if not torch.equal(value, state[name])]
    if changed:
        raise AssertionError(f"calls in eval mode change {', '.join(changed)}")
    kept = torch.equal(given, before) if isinstance(given, Tensor) else _same_data(given, before)
    if not kept:
        raise AssertionError("the network changes the data of the caller")


def _same_data(one: Data, other: Data) -> bool:
    return set(one.keys()) == set(other.keys()) and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one
        if isinstance(value, Tensor)
    )


PROPERTIES: dict[str, Callable[[nn.Module, Any], str | None]] = {
    "equivariance": _equivariance,
    "continuity": _continuity,
    "batches": _batches,
    "order": _order,
    "precision": _precision,
    "autocast": _autocast,
    "half": _half,
    "device": _device,
    "compile": _compile,
    "export": _export,
    "save": _save,
    "degenerate": _degenerate,
    "gradients": _gradients,
    "training": _training,
    "repeats": _repeats,
}
"""Checks ``(network, data)`` by name, see :func:`assert_conforms`.

They raise AssertionError if the network does not have the property, and return None, or the reason why it does not
apply.
"""
