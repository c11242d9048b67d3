"""The choice of the backend that evaluates the operator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from threading import Lock
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from lieattn._core.checks import check_arguments, check_is
from lieattn._core.contexts import KEPT, transformed
from lieattn.geometry import Neighbors, Padding
from lieattn.ops._terms import Normalization, Pattern, Problem, RelativeTerms, check_operands, maps_channels

Backend = Literal["auto", "plain", "scatter", "dense", "numba", "triton"]
_VARIABLE = "LIEATTN_BACKEND"
# Triton reads this variable only once, when it decides whether kernels are interpreted on the CPU.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_PACKAGES = {"numba": "numba", "triton": "triton (3.6 or newer)", "scatter": "torch-scatter"}
_ENOUGH_KEYS = 96  # elements of a cloud from which matrix products are faster than the fused kernel with a bias
_COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """The ``backend`` that evaluates the operator, and the ``obstacles`` of faster ones, as a text for each name."""

    backend: str
    obstacles: dict[str, str]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.obstacles.items())
        return f"{self.backend} ({reasons})" if reasons else self.backend


def _checked(name: str, source: str) -> Backend:
    if name not in get_args(Backend):
        raise ValueError(f"{source}: expected one of {get_args(Backend)}, got {name!r}")
    return cast(Backend, name)


class _State:
    """The requested backend. It is shared by all threads, because gradients are computed in other threads."""

    default: ClassVar[Backend] = _checked(os.environ.get(_VARIABLE, "auto"), f"environment variable {_VARIABLE}")
    asked: ClassVar[Backend] = default
    counting: ClassVar[int] = 0  # number of open blocks of :func:`plain_layers`
    requests: ClassVar[dict[object, Backend]] = {}  # requests of the open ``with`` blocks, in their order
    lock: ClassVar[Lock] = Lock()


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Request a backend of the operator in a ``with`` block, for all threads of the process.

    If blocks of several threads overlap, the one entered last determines the backend until it is left. The environment
    variable ``LIEATTN_BACKEND``, read when the library is imported, sets the backend for the whole process.

    Parameters
    ----------
    name
        ``"plain"`` is the plain evaluation by torch. ``"scatter"`` is the same with sums and softmax over the lists of
        neighbors by torch-scatter. ``"numba"`` is the fused kernel for CPUs. ``"triton"`` is the fused kernel for CUDA;
        Triton's interpreter also runs it on CPUs, slowly, if the environment variable ``TRITON_INTERPRET`` was 1 from
        the start. ``"dense"`` is torch's scaled dot product attention for points that attend to their whole clouds.
        Cases that these do not support are evaluated plainly, with torch-scatter if it is installed. ``"auto"``, the
        default, is the fastest backend that supports the case.

    Examples
    --------
    >>> from lieattn.ops import backend
    >>> with backend("plain"):
    ...     pass
    """
    name = _checked(name, "name")
    if not _INSTALLED.get(name, True):
        raise ValueError(f"name: backend {name!r} needs the package {_PACKAGES[name]}, which is not installed")
    request = object()
    with _State.lock:
        _State.requests[request] = _State.asked = name
    try:
        yield
    finally:
        with _State.lock:
            del _State.requests[request]
            _State.asked = next(reversed(_State.requests.values()), _State.default)


KEPT.append(lambda: partial(backend, _State.asked))


def _recent_triton() -> bool:
    """Return whether Triton is installed in version 3.6 or later, which the kernels require."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 6)


# Constants, since torch.compile cannot trace these calls.
_INSTALLED = {
    "numba": find_spec("numba") is not None,
    "triton": _recent_triton(),
    "scatter": find_spec("torch_scatter") is not None,
}


def cpu_kernels() -> dict[str, str]:
    """Describe the ``"instruction set"`` of the kernels for CPUs and the work of their ``"threads"`` in words.

    The result is empty if Numba is not installed.
    """
    if not _INSTALLED["numba"]:
        return {}
    from lieattn.ops.kernels._compiled import instruction_set
    from lieattn.ops.kernels._threads import threads_report

    return {"instruction set": instruction_set(), "threads": threads_report()}


@contextmanager
def plain_layers() -> Iterator[None]:
    """Replace kernels that are not operators of torch by plain torch in a ``with`` block, in all threads."""
    with _State.lock:
        _State.counting += 1
    try:
        yield
    finally:
        with _State.lock:
            _State.counting -= 1


def fused_kernel(device: torch.device) -> Literal["numba", "triton"] | None:
    """Return the name of the fused kernels that can be used on a device, or None for plain torch."""
    check_is("device", device, torch.device)
    name = fused_backend(device)
    runs = device.type == "cpu" or name == "triton"
    wanted = _State.asked in ("auto", name) and not _State.counting and not transformed()
    return name if runs and _INSTALLED[name] and wanted else None


def may_choose() -> bool:
    """Return whether no backend was asked for, so that the fastest one is taken."""
    return _State.asked == "auto"


def is_recorded() -> bool:
    """Return whether torch compiles, exports or traces, so that kernels must be operators of torch."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def fused_backend(device: torch.device) -> Literal["numba", "triton"]:
    """Return the fused kernel for a device."""
    if device.type == "cuda" or (_INTERPRETED and _State.asked == "triton"):
        return "triton"
    return "numba"


def explain(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    neighbors: Neighbors | None = None,
    *,
    pattern: Pattern = "joint",
    normalize: Normalization = "softmax",
    terms: RelativeTerms | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> Choice:
    """Return the backend of :func:`lieattn.ops.group_attention` for these arguments, and why no faster one is used.

    If ``neighbors`` is None, neighborhoods are assumed to be parts of clouds.

    Raises
    ------
    TypeError, ValueError
        If the operator does not accept these arguments. The message names the argument. Without ``neighbors``, only
        types are checked.

    Examples
    --------
    >>> import torch
    >>> from lieattn.ops import explain
    >>> x = torch.randn(10, 4, 2, 8)
    >>> explain(x, x, x, return_weights=True).obstacles["numba"]
    'it cannot return weights, since it never stores them'
    """
    check_arguments(explain, locals())
    terms = RelativeTerms() if terms is None else terms
    problem = Problem(query, key, value, cast(Neighbors, neighbors), terms, pattern, normalize, dropout)
    if neighbors is not None:
        check_operands(problem)
    return choose(problem, return_weights=return_weights, parts_of_clouds=neighbors is None)


def choose(problem: Problem, *, return_weights: bool, parts_of_clouds: bool = False) -> Choice:
    """Return the evaluator of the operator, for :func:`group_attention` and :func:`explain`.

    If ``parts_of_clouds``, neighborhoods are known not to be whole clouds, and their lists are not read.
    """
    obstacles = {}
    if transformed():
        alone = "transforms of torch.func need plain PyTorch operations"
        return Choice("plain", {fused_backend(problem.value.device): alone})
    if not parts_of_clouds:
        reason = _dense_obstacle(problem, return_weights)
        if reason is None:
            return Choice("dense", {})
        obstacles["dense"] = reason
    name = fused_backend(problem.value.device)
    reason = _fused_obstacle(problem, name, return_weights)
    if reason is None:
        return Choice(name, obstacles)
    obstacles[name] = reason
    reason = _scatter_obstacle(problem.value.device)
    return Choice("scatter", obstacles) if reason is None else Choice("plain", {**obstacles, "scatter": reason})


def _scatter_obstacle(device: torch.device) -> str | None:
    """Return the reason why torch-scatter does not evaluate the sums over lists of neighbors, or None if it does."""
    if _State.asked == "plain":
        return "backend 'plain' was asked for"
    if not _INSTALLED["scatter"]:
        return f"the package {_PACKAGES['scatter']} is not installed"
    if is_recorded():
        return "it cannot be compiled, exported or traced"
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not _scatters_on_cuda()):
        return f"it was not built for {device.type}"
    return None


def _scatters_on_cuda() -> bool:
    import torch_scatter  # noqa: F401  # defines the operator

    return bool(torch.ops.torch_scatter.cuda_version() >= 0)


def _dense_obstacle(problem: Problem, return_weights: bool) -> str | None:
    """Return the reason why matrix products over whole clouds do not evaluate these arguments, or None if they do."""
    p, asked = problem, _State.asked
    if asked not in ("auto", "dense"):
        return f"backend {asked!r} was asked for"
    whole = p.neighbors.whole_clouds
    if whole is None:
        return "it is not known that points attend to their whole clouds"
    biased = p.terms.displacement_bias is not None
    if p.query is None and not biased:
        return "there are no queries"
    other = next((name for name in p.terms.tables() if name != "displacement_bias"), None)
    patterns = ("joint",) if biased else ("joint", "framewise")
    drops = p.pattern == "framewise" and p.value.device.type == "cpu"  # by plain torch, faster than the kernel
    obstacles = (
        (p.neighbors.num_points == 0, "there are no points"),
        (
            p.pattern not in patterns,
            f"it does not support pattern {p.pattern!r}{' with terms.displacement_bias' * biased}",
        ),
        (p.normalize != "softmax" and not biased, f"it does not support normalize={p.normalize!r}"),
        (other is not None, f"it does not support terms.{other}"),
        (return_weights, "it cannot return weights, since it does not store them as lists of edges"),
        (p.dropout > 0 and not drops, "it cannot repeat the random weights of dropout for second derivatives"),
    )
    reason = next((reason for found, reason in obstacles if found), None)
    if reason is not None or asked == "dense":
        return reason
    return _faster_with_bias(p, whole) if biased else _faster_without_bias(p, whole)


def _faster_with_bias(problem: Problem, clouds: Padding) -> str | None:
    """Return why the fused kernel is faster than matrix products if pairs have a bias, or None if it is not."""
    value = problem.value
    if value.device.type == "cuda":
        return "the fused kernel does not store scores of all pairs"
    few = value.shape[1] > 1 and clouds.shape[1] * value.shape[1] < _ENOUGH_KEYS
    return "the fused kernel is faster for few keys of several frames" if few and _INSTALLED["numba"] else None


def _faster_without_bias(problem: Problem, clouds: Padding) -> str | None:
    """Return why the fused kernel is faster without a bias, as measured on CPUs, or None if it is not.

    Torch's kernels are slow for matrix products of up to 8 channels.
    """
    value, query = problem.value, cast(Tensor, problem.query)
    if value.device.type != "cpu" or not _INSTALLED["numba"] or value.dtype not in (torch.float32, torch.float64):
        return None
    filled, channels = value.shape[2] % 8 == 0, max(query.shape[-1], value.shape[-1])
    joint = problem.pattern == "joint"
    keys = clouds.shape[1] * (value.shape[1] if joint else 1)
    if filled and channels <= 8 and (keys < 16 or (joint and value.shape[1] > 4)):
        return "the fused kernel is faster for a multiple of 8 heads with few channels"
    return None


def _fused_obstacle(problem: Problem, name: str, return_weights: bool) -> str | None:
    """Return the reason why the fused kernel of the device does not evaluate these arguments, or None if it does."""
    p = problem
    if _State.asked not in ("auto", name):
        return f"backend {_State.asked!r} was asked for"
    if not _INSTALLED.get(name, True):
        return f"the package {_PACKAGES[name]} is not installed"
    for tensor in p.operands().values():
        if tensor is not None and tensor.device.type != ("cpu" if name == "numba" else p.value.device.type):
            return f"it runs on {'CPUs' if name == 'numba' else 'CUDA'}, but the operands are on {tensor.device}"
        if tensor is not None and tensor.dtype not in _COMPUTED:
            return f"it does not support operands of {tensor.dtype}"
    if return_weights:
        return "it cannot return weights, since it never stores them"
    if p.pattern == "pooled" or (p.pattern == "joint" and p.terms.key_psi is not None):
        return _missing_pooled_case(p)
    return _missing_case(p)


def _missing_pooled_case(problem: Problem) -> str | None:
    """Return why no fused kernel supports pooled frames or keys with factors, or None if one does."""
    terms, made = problem.terms, f"pattern {problem.pattern!r}{' with terms.key_psi' * (problem.pattern == 'joint')}"
    matrix = next((psi for psi in ("psi", "key_psi") if maps_channels(psi, getattr(terms, psi))), None)
    obstacles = (
        (problem.query is None, f"it does not support {made} without queries"),
        (problem.normalize != "softmax", f"it does not support normalize={problem.normalize!r} with {made}"),
        (problem.dropout > 0, f"it does not support dropout with {made}"),
        (matrix is not None, f"it does not support terms.{matrix} that mixes channels"),
        (
            terms.fiber_key is not None or terms.fiber_bias is not None,
            f"it does not support tables of pairs of frames with {made}",
        ),
    )
    return next((reason for found, reason in obstacles if found), None)


def _missing_case(problem: Problem) -> str | None:
    terms = problem.terms
    if terms.key_psi is not None:
        return "it does not support terms.key_psi"
    if terms.fiber_key is not None and terms.fiber_key.ndim == 5:
        return "terms.fiber_key depends on the output frame, so scores are cubic in the number of frames"
    for name in ("psi", "beta"):
        table = getattr(terms, name)
        if table is not None and table.shape[2] > 1:
            return f"it does not support terms.{name} that depends on the key frame"
        if maps_channels(name, table):
            return f"it does not support terms.{name} that mixes channels"
    if problem.pattern == "query_sum":
        if terms.displacement_bias is not None and terms.displacement_bias.shape[2] > 1:
            return "terms.displacement_bias depends on the key frame, so a query sum is cubic in the number of frames"
        if problem.normalize in ("mean", "none"):
            return f"it does not support normalize={problem.normalize!r} with pattern 'query_sum'"
    return None
