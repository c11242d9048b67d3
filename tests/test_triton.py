"""The Triton kernels against the plain evaluation: in Triton's interpreter, compiled, and on a GPU if there is one.

The import of Triton decides whether kernels are interpreted, so the tests of the interpreter run in a separate process,
which ``test_in_the_interpreter`` starts.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from lieattn.geometry import Neighbors
from lieattn.ops import RelativeTerms, backend, explain, group_attention, reference_attention
from lieattn.ops import _plain as plain
from lieattn.ops import _pooled as pooled
from lieattn.ops._terms import Problem
from lieattn.ops.kernels.attention import _operator
from lieattn.ops.kernels.attention._operator import dropout_mask
from tests.cases import some

pytest.importorskip("triton", minversion="3.6", reason="triton is not installed: pip install lieattn[gpu]")
import triton

from lieattn.ops.kernels.triton import _backward, _forward, _lanes, _lanes_backward, _launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="needs kernels that are compiled")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), compiled]


def shorten_the_interpreter():
    """Let Triton's interpreter compute what depends on types once, and not look for integer overflow.

    It replaces the operations of the language at every call of a function of a kernel, which takes half of its time and
    has no further effect. Shapes and names of types, which each operation computes, take a third of the rest. Overflow,
    which takes a quarter, is not looked for on GPUs either; the indices of these tests are small.
    """
    from triton.language.core import block_type, is_builtin, tensor
    from triton.runtime import interpreter

    patch, modules = interpreter._patch_lang, (triton.language, triton.language.core)
    numpy_type, of_block, of_tensor = interpreter._get_np_dtype, block_type.__init__, tensor.__init__
    numpy_types, blocks, tensors = {}, {}, {}

    @cache
    def named(function):
        values = function.__globals__.values()
        return [module for module in modules if any(value is module for value in values)]

    def patch_where_needed(function):
        if any(is_builtin(module.load) for module in named(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    def known_numpy_type(kind):
        if kind.scalar.name not in numpy_types:
            numpy_types[kind.scalar.name] = numpy_type(kind)
        return numpy_types[kind.scalar.name]

    def known_block(self, element, shape):
        key = (element.name, *shape)
        if key not in blocks:
            of_block(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def known_tensor(self, handle, kind):
        key = kind.name if kind.is_block() else ""
        if key not in tensors:
            of_tensor(self, handle, kind)
            tensors[key] = {
                name: value for name, value in vars(self).items() if name not in ("handle", "type", "dtype")
            }
        vars(self).update(tensors[key], handle=handle, type=kind, dtype=kind.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_where_needed, known_numpy_type
    block_type.__init__, tensor.__init__ = known_block, known_tensor
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


if INTERPRETED:
    shorten_the_interpreter()

SEED, DROPOUT = 2**40 + 77, 0.4
FRAMES = ("fiber_key", "fiber_bias")
KEYS = ("positional_key", "displacement_bias", *FRAMES)
# pattern, normalize, tables, probability of dropout
CASES = {
    "query sum": ("query_sum", "softmax", KEYS, 0),
    "query sum with affine values": ("query_sum", "softmax", ("positional_key", "psi", "beta"), DROPOUT),
    "query sum, exp-mean": ("query_sum", "exp-mean", (*KEYS, "beta"), DROPOUT),
    "lifting": ("lifting", "softmax", ("positional_key",), 0),
    "joint": ("joint", "softmax", (), 0),
    "joint, all tables": ("joint", "softmax", (*KEYS, "psi", "beta"), DROPOUT),
    "joint, bias of pairs": ("joint", "softmax", ("pair_bias", "fiber_bias"), 0),
    "joint, mean": ("joint", "mean", (*KEYS, "psi", "beta"), DROPOUT),
    "framewise": ("framewise", "softmax", (*KEYS, "psi", "beta"), DROPOUT),
    "framewise, exp-mean": ("framewise", "exp-mean", ("positional_key",), 0),
    "framewise, none": ("framewise", "none", ("displacement_bias", "psi"), 0),
    "location only": ("location", "softmax", ("pair_bias", "fiber_bias"), 0),
    "convolution": ("location", "none", ("psi", "beta"), 0),
    "pooled": ("pooled", "softmax", ("positional_key", "displacement_bias", "frame_keys", "frame_values", "beta"), 0),
    "pooled values": ("pooled", "softmax", ("frame_values",), 0),
}
# By the public operator only, which makes a pooled problem of it.
OF_ELEMENTS = {
    "joint, keys of pairs": ("joint", "softmax", ("positional_key", "frame_keys", "frame_values", "beta"), 0)
}
HARDLY_ANY = {"one point": ([0, 1], [0]), "no neighbors": ([0, 0, 0], []), "no points": ([0], [])}


def problem(case, fiber=3, heads=2, depth=3, width=2, dtype=torch.float64, indexed=True, device="cpu", lists=None):
    """Return operands of a case. The neighbor lists have a point without neighbors, and a type without edges."""
    pattern, normalize, names, dropout = (CASES | OF_ELEMENTS)[case]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    row_ptr, source = ([0, 3, 3, 5], [0, 2, 1, 2, 0]) if lists is None else lists
    target = torch.repeat_interleave(torch.tensor(row_ptr).diff())
    neighbors = Neighbors(*(torch.as_tensor(t, dtype=torch.int64, device=device) for t in (row_ptr, source, target)))
    edges = len(source)
    index = (torch.randint(3, (edges,), generator=generator) + torch.arange(edges) % 2).to(device) if indexed else None
    types, frames = 5 if indexed else edges, 1 if pattern == "lifting" else fiber
    outs = fiber + 1 if pattern in ("lifting", "query_sum") else fiber
    tables = {
        "positional_key": ("positional_key", (types, outs, 1, depth)),
        "displacement_bias": ("displacement_bias", (types, outs, 1, heads)),
        "pair_bias": ("displacement_bias", (types, outs, frames, 1)),
        "fiber_key": ("fiber_key", (frames, frames, heads, depth)),
        "fiber_bias": ("fiber_bias", (frames, 1, heads)),
        "psi": ("psi", (types, outs, 1, heads, width)),
        "beta": ("beta", (types, 1, 1, heads, 1)),
        "frame_keys": ("key_psi", (types, outs, frames, 1, depth)),
        "frame_values": ("psi", (types, 1, frames, heads, width)),
    }
    terms = RelativeTerms(**{tables[name][0]: draw(*tables[name][1]) for name in names}, row=index)
    points = len(row_ptr) - 1
    one = pattern == "pooled" and "frame_keys" not in names  # the operator sums over frames that no table distinguishes
    keys = 1 if one else frames
    query, key, value = (draw(points, n, heads, size) for n, size in ((frames, depth), (keys, depth), (frames, width)))
    if pattern == "location":
        query = key = None
    pattern = {"lifting": "query_sum", "location": "joint"}.get(pattern, pattern)
    return (query, key, value), neighbors, terms, index, pattern, normalize, dropout


def problem_of(signals, neighbors, terms, pattern, normalize, dropout=0.0):
    """Return all operands, including absent ones, and the resulting problem of a kernel."""
    names = ("positional_key", "displacement_bias", "fiber_key", "fiber_bias", "psi", "beta", "key_psi")
    operands = [*signals, *(getattr(terms, name) for name in names)]
    query, key, value, *tables = (None if t is None else t.detach() for t in operands)
    terms = RelativeTerms(*tables, row=terms.row)
    return operands, Problem(query, key, value, neighbors, terms, pattern, normalize, dropout)


def reference(operands, given, grad_out=None):
    """Return output and gradients by the plain evaluation."""

    def drop(weights):
        mask = dropout_mask(given, SEED).to(weights.device)
        return weights * (mask if weights.ndim == mask.ndim else mask[..., 0])

    query, key, value, *tables = operands
    terms = RelativeTerms(*tables, row=given.terms.row)
    watched = replace(given, query=query, key=key, value=value, terms=terms)
    evaluate = pooled.attend if given.pattern == "pooled" else plain.attend
    out, _ = evaluate(watched, drop if given.dropout > 0 else None)
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    grads = torch.autograd.grad(out, [t for t in operands if t is not None], grad_out)
    return out.detach(), grad_out, grads


def close(found, expected, tolerance):
    assert found.shape == expected.shape
    if not expected.numel():
        return
    scale = expected.abs().max().clamp(min=1)
    assert (found.to(expected.dtype) - expected).abs().max() <= tolerance * scale


def check(case, tolerance, again=False, **options):
    signals, neighbors, terms, _index, pattern, normalize, dropout = problem(case, **options)
    operands, given = problem_of(signals, neighbors, terms, pattern, normalize, dropout)
    expected, grad_out, grads = reference(operands, given)
    out, norm = _launch.run_forward(given, SEED)
    close(out, expected, tolerance)
    found = _launch.run_backward(given, SEED, grad_out, norm)
    assert [g.numel() == 0 for g in found] == [t is None or not t.numel() for t in operands]
    for grad, wanted in zip((g for g in found if g.numel()), (g for g in grads if g.numel()), strict=True):
        assert grad.dtype == wanted.dtype
        close(grad, wanted, tolerance)
    if again:
        repeated = _launch.run_backward(given, SEED, grad_out, norm)
        assert all(torch.equal(one, other) for one, other in zip(found, repeated, strict=True))


@pytest.fixture(params=[True, False], ids=["an edge in a lane", "an edge in a tile"])
def lanes(request, monkeypatch):
    """Use the kernels for small fibers, in which each lane has an edge of its own, or those for all fibers."""
    if not request.param:
        monkeypatch.setattr(_launch, "_PAIRS", 0)
        monkeypatch.setattr(_launch, "_FACTORS", 32)  # two of four padded frames at a time, if they are pooled
    return request.param


@interpreted
@pytest.mark.parametrize("case", some(CASES, ("query sum", "joint, all tables", "framewise", "convolution", "pooled")))
def test_equals_plain(case, lanes):
    if CASES[case][0] != "pooled" or not lanes:  # pooled frames have tiles only
        check(case, 1e-12)


@interpreted
@pytest.mark.parametrize("clouds", HARDLY_ANY)
@pytest.mark.parametrize("case", some(["joint, all tables", "query sum", "pooled"], ["query sum"]))
def test_clouds_of_hardly_any_points(case, clouds):
    check(case, 1e-12, lists=HARDLY_ANY[clouds])


@interpreted
@pytest.mark.parametrize("case", some(["query sum", "joint, all tables"], ["query sum"]))
def test_edges_that_are_their_own_type(case, lanes):
    check(case, 1e-12, heads=1, indexed=False)


@interpreted
@pytest.mark.parametrize(("depth", "width", "wanted"), [(8, 8, True), (3, 6, True), (5, 8, False), (8, 7, False)])
def test_lanes_have_no_odd_number_of_channels_above_three(depth, width, wanted):
    signals, neighbors, terms, _, *rest = problem("framewise", depth=depth, width=width)
    assert _launch._Call(problem_of(signals, neighbors, terms, *rest)[1]).lanes == wanted


@interpreted
def test_sources_of_many_edges_are_split_among_programs(lanes, monkeypatch):
    monkeypatch.setattr(_launch, "_MOST_EDGES", 2)
    check("joint", 1e-12, heads=1, lists=([0, 3, 7, 7, 12], [0, 1, 3, 0, 1, 1, 3, 1, 1, 1, 0, 1]))


@interpreted
def test_sorted_edges_are_kept_with_the_geometry_and_no_longer(monkeypatch):
    signals, neighbors, terms, _index, pattern, normalize, _ = problem(
        "query sum", fiber=1, heads=1, lists=([0, 1, 2], [1, 0])
    )
    _, given = problem_of(signals, neighbors, terms, pattern, normalize)
    out, norm = _launch.run_forward(given, SEED)
    before, first = len(_launch._KNOWN), _launch.run_backward(given, SEED, out, norm)
    assert len(_launch._KNOWN) == before + 2  # the sources, and the types
    with monkeypatch.context() as patch:
        patch.setattr(torch, "sort", None)
        again = _launch.run_backward(given, SEED, out, norm)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    terms.row.add_(0)  # another version of the tensor, which is sorted again
    with monkeypatch.context() as patch:
        patch.setattr(torch, "sort", None)
        with pytest.raises(TypeError):
            _launch.run_backward(given, SEED, out, norm)
    del given, neighbors, terms, _index
    assert len(_launch._KNOWN) == before


@interpreted
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("case", some(["query sum", "framewise", "joint, all tables"], ["query sum"]))
def test_more_edges_than_lanes(case, indexed, monkeypatch):
    monkeypatch.setattr(_launch, "_LANES", 2)
    check(case, 1e-12, fiber=2, heads=1, indexed=indexed, lists=([0, 3, 3, 6], [0, 2, 0, 1, 0, 0]))


@interpreted
@pytest.mark.parametrize("case", some(["query sum", "joint", "joint, bias of pairs", "framewise"], ["joint"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_fibers_as_matrix_products(case, dtype):
    check(case, 1e-12 if dtype == torch.float64 else 1e-5, fiber=17, depth=5, heads=1, dtype=dtype)


@interpreted
def test_more_heads_than_a_block_of_the_dropout_mask():
    check("joint, mean", 1e-12, fiber=2, heads=5, lists=([0, 1], [0]))


@interpreted
def test_many_edges_of_a_type_are_split_among_programs(lanes, monkeypatch):
    monkeypatch.setattr(_launch, "_EDGES_A_PROGRAM", 1)
    check("location only", 1e-12, fiber=2, heads=1, lists=([0, 4, 8, 11], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]))


@interpreted
@pytest.mark.slow
def test_large_scores_do_not_overflow(lanes):
    check("location only", 1e-12)
    signals, neighbors, terms, _index, pattern, normalize, _ = problem("joint", dtype=torch.float32)
    with torch.no_grad():
        signals[0].mul_(1e4)
    operands, given = problem_of(signals, neighbors, terms, pattern, normalize)
    out, _ = _launch.run_forward(given, SEED)
    expected, _, _ = reference(operands, given)
    close(out, expected, 1e-5)


@interpreted
def test_the_lowest_scores_have_weights():
    signals, neighbors, terms, _index, pattern, normalize, _ = problem("location only")
    with torch.no_grad():
        terms.displacement_bias.mul_(1e40).sub_(1e41)
    operands, given = problem_of(signals, neighbors, terms, pattern, normalize)
    close(_launch.run_forward(given, SEED)[0], reference(operands, given)[0], 1e-12)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # warnings of the interpreter: log(0) and 0 / 0
@pytest.mark.parametrize(
    ("case", "lanes"),
    [
        ("joint, bias of pairs", False),
        pytest.param("query sum", True, marks=pytest.mark.slow),
        pytest.param("framewise, none", True, marks=pytest.mark.slow),
    ],
    indirect=["lanes"],
)
def test_keys_masked_by_infinite_biases(case, lanes):
    """Masks for some frames of a key, for a whole key, and for all keys of a point, whose output is then 0."""
    signals, neighbors, terms, _index, pattern, _, _ = problem(case, heads=1, indexed=False)
    _, given = problem_of(signals, neighbors, terms, pattern, "softmax")
    bias = given.terms.displacement_bias
    bias[0, 0], bias[1] = -torch.inf, -torch.inf
    for masked, defined in ((slice(1, 2), slice(None)), (slice(3, 5), slice(2))):
        bias[masked] = -torch.inf
        leaves = {name: t.clone().requires_grad_() for name, t in given.operands().items() if t is not None}
        query, key, value = (leaves.get(name) for name in ("query", "key", "value"))
        names = {"rho": "positional_key", "bias": "displacement_bias"}
        tables = {names.get(name, name): t for name, t in leaves.items() if name not in ("query", "key", "value")}
        expected = reference_attention(
            query, key, value, neighbors, terms=RelativeTerms(**tables), pattern=pattern, scale=1
        )
        out, norm = _launch.run_forward(given, SEED)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
        grad_out = torch.zeros_like(out)
        grad_out[defined] = 1
        wanted = iter(torch.autograd.grad(expected, list(leaves.values()), grad_out))
        found = _launch.run_backward(given, SEED, grad_out, norm)
        for name, grad in zip(given.operands(), found, strict=True):
            if name in leaves:
                torch.testing.assert_close(grad, next(wanted), rtol=1e-12, atol=1e-12, equal_nan=True)
    assert out[2].isnan().all()


@interpreted
@pytest.mark.parametrize(
    ("case", "dtype", "lanes"),
    [
        ("query sum", torch.float16, True),
        ("joint", torch.bfloat16, False),
        pytest.param("framewise", torch.bfloat16, True, marks=pytest.mark.slow),
    ],
    indirect=["lanes"],
)
def test_half_precision_keeps_statistics_in_float32(case, dtype, lanes):
    """Signals in half precision with tables in float32 give the results of float32 for the rounded signals."""
    signals, neighbors, terms, _index, pattern, normalize, _ = problem(case, heads=1, dtype=torch.float32)
    half = tuple(t.detach().to(dtype) for t in signals)
    exact = [t.float().requires_grad_() for t in half]
    operands, wide = problem_of(exact, neighbors, terms, pattern, normalize)
    _, narrow = problem_of(half, neighbors, terms, pattern, normalize)
    expected, grad_out, grads = reference(operands, wide)
    out, norm = _launch.run_forward(narrow, SEED)
    assert out.dtype == dtype
    assert norm.dtype == torch.float32
    assert torch.equal(norm, _launch.run_forward(wide, SEED)[1])
    close(out, expected, torch.finfo(dtype).eps)
    found = [g for g in _launch.run_backward(narrow, SEED, grad_out, norm) if g.numel()]
    assert [g.dtype for g in found[:3]] == [dtype] * 3
    for grad, wanted in zip(found, grads, strict=True):
        close(grad, wanted, torch.finfo(dtype).eps)


def penalty(case, name, dtype=torch.float64):
    """Return first and second derivatives through the public operator, as in training on forces."""
    few = {"fiber": 2, "heads": 1, "lists": ([0, 2, 3], [0, 1, 1])}
    signals, neighbors, terms, _index, pattern, normalize, _ = problem(case, dtype=dtype, **few)
    with backend(name):
        assert explain(*signals, terms=terms, pattern=pattern, normalize=normalize).backend == name
        out, _ = group_attention(*signals, neighbors, terms=terms, pattern=pattern, normalize=normalize)
        (force,) = torch.autograd.grad(out.float().square().sum(), signals[0], create_graph=True)
        return out, force, *torch.autograd.grad(force.float().square().sum(), [*signals, *terms.tables().values()])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", some(["query sum", "joint", *OF_ELEMENTS], OF_ELEMENTS))
def test_behind_the_public_operator(case, dtype):
    for found, expected in zip(penalty(case, "triton", dtype), penalty(case, "plain"), strict=True):
        assert found.dtype == dtype
        close(found, expected, 1e-12 if dtype == torch.float64 else 0.1)


@interpreted
@pytest.mark.slow
def test_is_a_proper_operator():
    signals, neighbors, terms, index, pattern, normalize, _ = problem("framewise, exp-mean", fiber=2, heads=1)
    tables = (terms.positional_key, *(None,) * 6)
    lists = neighbors.row_ptr, neighbors.source, neighbors.target, index, torch.tensor(SEED)
    with backend("triton"):
        torch.library.opcheck(_operator._forward, (*signals, *tables, *lists, pattern, normalize, 0.0))


@compiled
def test_in_the_interpreter():
    files = (__file__, str(Path(__file__).with_name("test_triton_layers.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


LAUNCHED = ("largest_places", "channel_sums", "pixel_gradients", "tap_products")  # kernels of attentive convolution


class Compilation:
    """Compiles the kernels of modules instead of launching them; ``machine_code`` has the result for each kernel."""

    def __init__(self, modules, architecture, monkeypatch, cache):
        from triton.runtime import JITFunction, driver

        self.architecture, self.machine_code = architecture, {}
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setattr(driver, "_active", self)
        for module in modules:
            for name in ("forward", *(name for name in vars(module) if name.startswith("backward_")), *LAUNCHED):
                kernel = getattr(module, name, None)
                if isinstance(kernel, JITFunction):
                    monkeypatch.setattr(module, name, _Compiled(kernel, self.machine_code))

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class _Compiled:
    def __init__(self, kernel, machine_code):
        self.kernel, self.machine_code = kernel, machine_code

    def __getitem__(self, grid):
        def build(*arguments, **options):
            self.machine_code[self.kernel.__name__] = self.kernel.warmup(*arguments, grid=grid, **options).asm["cubin"]

        return build


@compiled
@pytest.mark.parametrize(
    ("case", "fiber", "architecture"),
    [
        pytest.param("joint, all tables", 3, 90, marks=pytest.mark.slow),
        pytest.param("joint, all tables", 9, 90, marks=pytest.mark.slow),
        ("joint, bias of pairs", 9, 90),
        ("pooled", 4, 80),
        pytest.param("query sum", 24, 90, marks=pytest.mark.slow),
        pytest.param("pooled", 8, 90, marks=pytest.mark.slow),
        pytest.param("framewise", 4, 80, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_a_gpu_that_is_not_here(case, fiber, architecture, monkeypatch, tmp_path):
    """Triton's compiler compiles the interpreted kernels down to machine code; nothing is launched."""
    built = Compilation((_forward, _backward, _lanes, _lanes_backward), architecture, monkeypatch, tmp_path)
    signals, neighbors, terms, _index, pattern, normalize, dropout = problem(case, fiber=fiber, dtype=torch.float32)
    _, given = problem_of(signals, neighbors, terms, pattern, normalize, dropout)
    out, norm = _launch.run_forward(given, SEED)
    _launch.run_backward(given, SEED, out, norm)
    assert set(built.machine_code) == {"forward", "backward_targets", "backward_sources", "backward_types"}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fiber", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_on_a_gpu(case, fiber, device, lanes):
    check(case, 1e-4, fiber=fiber, depth=8, width=8, dtype=torch.float32, device=device, again=True)
    check(case, 1e-11, fiber=fiber, depth=8, width=8, dtype=torch.float64, device=device)
