"""Networks of edges and messages along edges: kernels against the explicit formulas."""

import itertools

import pytest
import torch
from torch import Tensor

from lieattn._core import numerics
from lieattn.geometry import Neighbors
from lieattn.ops import _edges, backend, edge_kernels, edge_messages, edge_moments, edge_units, group_attention
from lieattn.ops.kernels import _edges as _launch
from lieattn.testing import relative_error

DOUBLE = torch.float64
# frames, inputs, hidden units, channels, maps: full and partial tiles of frames, units and channels
SIZES = [(4, 1, 16, 24, 5), (24, 3, 16, 4, 2), (3, 5, 32, 25, 1), (1, 2, 8, 1, 3), (5, 3, 4, 7, 2), (6, 0, 24, 33, 1)]
TOLERANCES = ((DOUBLE, 1e-12), (torch.float32, 1e-5))


@pytest.fixture
def launched(monkeypatch):
    """Record the names of the executed kernels."""
    names = []
    pairs = (f"run_{what}{way}" for what in ("units", "messages", "moments", "gated") for way in ("", "_backward"))
    for name in (*pairs, "run_gated_again"):
        original = getattr(_launch, name)
        monkeypatch.setattr(_launch, name, lambda *a, f=original, n=name: names.append(n) or f(*a))
    return names


@pytest.fixture(autouse=True)
def always_fused(monkeypatch):
    """Use kernels although weights of edges need gradients, as positions do, and for few products."""
    for module, name in ((_edges, "_CACHED"), (_edges, "_KERNEL_PRODUCTS"), (numerics, "_MANY")):
        monkeypatch.setattr(module, name, 0)


# lanes of single precision, threads, and precisions, since each register needs kernels of its own
MACHINES = {"SSE": (4, 1, TOLERANCES[1:]), "this machine": (None, 3, TOLERANCES)}


def on_machines(cases):
    """Return all cases on this machine, and every second one with short vectors."""
    chosen = [(case, name) for n, case in enumerate(cases) for name in MACHINES if name != "SSE" or n % 2 == 0]
    return pytest.mark.parametrize(("case", "machine"), chosen, indirect=["machine"], ids=str)


@pytest.fixture
def machine(request, monkeypatch):
    """Set the width of registers and the number of threads, divide edges into parts, and yield the precisions."""
    lanes, threads, precisions = MACHINES[request.param]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(_launch, "_PART", 64)
    if lanes is not None:
        monkeypatch.setattr(_launch, "widest_lanes", lambda: lanes)
    yield precisions
    torch.set_num_threads(before)


def random_lists(points: int, edges: int) -> Neighbors:
    """Return random edges, where the last point is neither a source nor a target."""
    target = torch.randint(points - 1, (edges,)).sort().values
    row_ptr = torch.searchsorted(target, torch.arange(points + 1))
    return Neighbors(row_ptr, torch.randint(points - 1, (edges,)), target)


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def network_operands(dtype, edges, fiber, inputs, hidden, channels, maps):
    shapes = (edges, fiber, inputs), (edges, hidden), (edges,), (hidden, inputs), (hidden, hidden), (hidden,)
    return drawn(dtype, *shapes, *[(channels, hidden)] * maps)


def units_of(seen, shared, weight, first, second, bias):
    y = torch.nn.functional.silu(torch.einsum("efi,hi->efh", seen, first) + shared[:, None])
    return torch.nn.functional.silu(torch.einsum("efh,kh->efk", y, second) + bias) * weight[:, None, None]


def messages_of(units, weight, x, neighbors):
    incidence = torch.nn.functional.one_hot(neighbors.target, len(x)).to(x.dtype)
    return torch.einsum("ep,efk,ck,efc->pfc", incidence, units, weight, x[neighbors.source])


def moments_of(arrows, functions, neighbors):
    incidence = torch.nn.functional.one_hot(neighbors.target, neighbors.num_points).to(arrows.dtype)
    moments = torch.einsum("ep,er,ek->prk", incidence, arrows, functions)
    ends = neighbors.target, neighbors.source
    return moments, *(torch.einsum("er,erk->ek", arrows, moments[end]) for end in ends)


def assert_same(found, wanted, operands, tolerance, pulled):
    """Compare values, and the gradients for given output gradients."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert relative_error(mine, theirs) < tolerance
    totals = (sum((out * pull).sum() for out, pull in zip(outs, pulled, strict=True)) for outs in (found, wanted))
    mine, theirs = (torch.autograd.grad(total, operands, allow_unused=True) for total in totals)
    for one, other in zip(mine, theirs, strict=True):
        assert relative_error(one, other) < tolerance


@on_machines(SIZES)
def test_networks_are_those_of_the_formula(case, machine, launched):
    for dtype, tolerance in machine:
        *operands, maps = *network_operands(dtype, 300, *case)[:6], network_operands(dtype, 300, *case)[6:]
        seen, shared, weight, first, second, bias = operands
        wanted = units_of(*operands)
        found = edge_units(seen, shared, weight, first, (second, bias))
        assert_same([found], [wanted], operands, tolerance, [torch.randn_like(wanted)])
        again = units_of(*operands)
        made = [torch.einsum("efk,ck->efc", again, last) for last in maps]
        found = edge_kernels(seen, shared, weight, first, (second, bias), maps)
        assert_same(found, made, (*operands, *maps), tolerance, [torch.randn_like(out) for out in made])
    assert launched == ["run_units", "run_units_backward"] * 2 * len(machine)


@on_machines([(4, 32, 25), (24, 16, 4), (1, 8, 1), (5, 4, 33)])
def test_messages_are_those_of_the_formula(case, machine, launched):
    (fiber, hidden, channels), neighbors = case, random_lists(9, 90)
    for dtype, tolerance in machine:
        operands = drawn(dtype, (90, fiber, hidden), (channels, hidden), (9, fiber, channels))
        wanted = messages_of(*operands, neighbors)
        found = edge_messages(*operands, neighbors)
        assert_same([found], [wanted], operands, tolerance, [torch.randn_like(wanted)])
        assert not found[-1].any()
    assert launched == ["run_messages", "run_messages_backward"] * len(machine)


GATED = ["run_gated", "run_gated_backward", "run_gated_again"]


def derivatives_of(out, operands, order):
    """Return the gradients of sums of squares of the derivatives of the order below."""
    found = [out]
    for number in range(order):
        total = sum(one.square().sum() for one in found)
        found = torch.autograd.grad(total, operands, create_graph=number + 1 < order)
    return found


@on_machines([(4, 24), (3, 20), (1, 8), (5, 12), (12, 18)])
def test_messages_of_given_kernels_are_those_of_the_formula(case, machine, launched):
    (fiber, channels), neighbors = case, random_lists(9, 90)
    for dtype, tolerance in machine:
        operands = drawn(dtype, (90, fiber, channels), (9, fiber, channels))
        identity = torch.eye(channels, dtype=dtype)
        for order in (1, 2):
            outs = [
                edge_messages(operands[0], None, operands[1], neighbors),
                messages_of(operands[0], identity, operands[1], neighbors),
            ]
            assert relative_error(*outs) < tolerance
            assert not outs[0][-1].any()
            for mine, theirs in zip(*(derivatives_of(out, operands, order) for out in outs), strict=True):
                assert relative_error(mine, theirs) < tolerance
    assert launched == [*GATED[:2], *GATED[:2], GATED[2], GATED[1]] * len(machine)


def test_messages_of_moving_points_by_kernels(monkeypatch, launched):
    """Second derivatives are those of kernels, and third ones those of plain torch."""
    monkeypatch.setattr(_edges, "_CACHED", 2**21)
    neighbors = random_lists(6, 40)
    operands = drawn(DOUBLE, (40, 2, 6), (4, 6), (6, 2, 4))
    assert torch.autograd.gradgradcheck(lambda *given: edge_messages(*given, neighbors, moving=True), operands)
    assert set(launched) == set(GATED)
    for order in (1, 2, 3):
        found = derivatives_of(edge_messages(*operands, neighbors, moving=True), operands, order)
        wanted = derivatives_of(messages_of(*operands, neighbors), operands, order)
        for mine, theirs in zip(found, wanted, strict=True):
            assert relative_error(mine, theirs) < 1e-10
    out = edge_messages(*operands, neighbors, moving=True)
    pulled = torch.randn(3, *out.shape, dtype=DOUBLE)
    many = torch.autograd.grad(out, operands, pulled, retain_graph=True, is_grads_batched=True)
    for number, pull in enumerate(pulled):
        for mine, theirs in zip(many, torch.autograd.grad(out, operands, pull, retain_graph=True), strict=True):
            assert relative_error(mine[number], theirs) < 1e-12


def test_kernels_and_signals_are_stored_in_any_order():
    neighbors, results = random_lists(6, 80), []
    turned = [tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in drawn(DOUBLE, (80, 2, 4), (6, 2, 4))]
    for name in ("numba", "plain"):
        with backend(name):
            out = edge_messages(turned[0], None, turned[1], neighbors)
            first = torch.autograd.grad(out.square().sum(), turned, create_graph=True)
            second = torch.autograd.grad(sum(grad.square().sum() for grad in first), turned)
        results.append([out, *first, *second])
    assert all(relative_error(mine, theirs) < 1e-12 for mine, theirs in zip(*results, strict=True))


def test_messages_store_nothing_but_kernels_for_second_derivatives():
    neighbors = random_lists(6, 80)
    kernels, x = drawn(DOUBLE, (80, 2, 4), (6, 2, 4))
    stored = set()

    def keep(tensor):
        if tensor.numel() >= kernels.numel():
            stored.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = edge_messages(kernels, None, x, neighbors)
        found = torch.autograd.grad(out.sum(), (kernels, x), create_graph=True)
    assert stored == {kernels.data_ptr()}
    assert all(grad.requires_grad for grad in found)


def test_sums_store_nothing_of_their_messages():
    neighbors, (messages,), stored = random_lists(6, 80), drawn(DOUBLE, (80, 2, 4)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(tensor.dtype), lambda _: None):
        total = neighbors.sum_to_targets(messages)
    assert total.requires_grad
    assert set(stored) <= {torch.int64}
    assert torch.autograd.gradcheck(neighbors.sum_to_targets, messages)
    assert torch.autograd.gradgradcheck(neighbors.sum_to_targets, messages)


@on_machines([(3, 8), (5, 32), (1, 4), (2, 12)])
def test_moments_are_those_of_the_formula(case, machine, launched):
    (size, count), neighbors = case, random_lists(9, 200)
    for dtype, tolerance in machine:
        arrows, functions = drawn(dtype, (200, size), (200, count))
        for needed in ((functions,), (arrows, functions)):
            arrows.requires_grad_(len(needed) == 2)
            wanted = moments_of(arrows, functions, neighbors)
            found = edge_moments(arrows, functions, neighbors)
            assert_same(found, wanted, needed, tolerance, [torch.randn_like(out) for out in wanted])
            assert not found[0][-1].any()
    assert launched == ["run_moments", "run_moments_backward"] * len(machine)


def with_gaps(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers have others between them in memory."""
    return torch.stack([tensor, torch.full_like(tensor, 77)], dim=-1)[..., 0]


def test_operands_lists_and_gradients_may_have_gaps_in_memory(launched):
    lists = random_lists(9, 90)
    network = network_operands(DOUBLE, 90, 3, 2, 8, 5, 2)
    messages, (arrows, functions) = drawn(DOUBLE, (90, 3, 8), (8, 8), (9, 3, 8)), drawn(DOUBLE, (90, 3), (90, 8))
    results = []
    for place in (lambda tensor: tensor, with_gaps):
        neighbors = Neighbors(*map(place, (lists.row_ptr, lists.source, lists.target)))
        seen, shared, weight, first, second, bias, *maps = map(place, network)
        outs = [
            edge_units(seen, shared, weight, first, (second, bias)),
            *edge_kernels(seen, shared, weight, first, (second, bias), maps),
            edge_messages(*map(place, messages), neighbors),
            *edge_moments(place(arrows).detach(), place(functions), neighbors),
        ]
        pulled = [place(torch.linspace(-1, 1, out.numel(), dtype=DOUBLE).view_as(out)) for out in outs]
        kept = [pull.clone() for pull in pulled]
        results.append([*outs, *torch.autograd.grad(outs, [*network, *messages, functions], pulled)])
        assert all(torch.equal(pull, before) for pull, before in zip(pulled, kept, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert len(launched) == 16


def test_networks_of_inputs_without_gradients(launched):
    seen, *operands, last = network_operands(DOUBLE, 70, 2, 3, 8, 4, 1)
    shared, weight, first, second, bias = operands
    found = edge_kernels(seen.detach(), shared, weight, first, (second, bias), [last])
    wanted = [torch.einsum("efk,ck->efc", units_of(seen, *operands), last)]
    assert_same(found, wanted, (*operands, last), 1e-12, [torch.randn_like(wanted[0])])
    assert launched == ["run_units", "run_units_backward"]


def test_gradients_of_some_operands_are_those_of_all(launched):
    """Weights that no gradient is asked for are left out, as they are for forces."""
    neighbors = random_lists(6, 70)
    *operands, last, x = *network_operands(DOUBLE, 70, 2, 2, 8, 3, 1), *drawn(DOUBLE, (6, 2, 3))
    seen, shared, weight, first, second, bias = operands
    units = edge_units(seen * 1, shared, weight, first, (second, bias))
    out = edge_messages(units, last, x * 1, neighbors).square().sum()
    every = torch.autograd.grad(out, [*operands, last, x], retain_graph=True)
    for operand, wanted in zip([*operands, last, x], every, strict=True):
        for again in (False, True):  # by kernels, and by plain torch
            (found,) = torch.autograd.grad(out, operand, retain_graph=True, create_graph=again)
            assert relative_error(found, wanted) < 1e-12
    assert set(launched) == {f"run_{what}{way}" for what in ("units", "messages", "gated") for way in ("", "_backward")}


def test_derivatives_of_moments_of_second_order():
    neighbors = random_lists(6, 70)
    arrows, functions, factors = drawn(DOUBLE, (70, 3), (70, 4), (70, 4))

    def derivatives(evaluate):
        outs = evaluate(arrows.detach(), functions * factors, neighbors)
        first = torch.autograd.grad(sum(out.pow(3).sum() for out in outs), (functions, factors), create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), (functions, factors))

    for mine, theirs in zip(derivatives(edge_moments), derivatives(moments_of), strict=True):
        assert relative_error(mine, theirs) < 1e-10


def test_derivatives_of_second_order():
    neighbors = random_lists(6, 70)
    seen, shared, weight, first, second, bias, last = network_operands(DOUBLE, 70, 2, 2, 4, 3, 1)
    (x,) = drawn(DOUBLE, (6, 2, 3))
    operands = seen, shared, weight, first, second, bias, last, x

    def derivatives(out):
        again = torch.autograd.grad(out.square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in again), operands)

    units = edge_units(seen, shared, weight, first, (second, bias))
    found = derivatives(edge_messages(units, last, x, neighbors))
    wanted = derivatives(messages_of(units_of(*operands[:6]), last, x, neighbors))
    (kernel,) = edge_kernels(seen, shared, weight, first, (second, bias), [last])
    summed = neighbors.sum_to_targets(kernel * x[neighbors.source])
    for mine, theirs, other in zip(found, wanted, derivatives(summed), strict=True):
        assert relative_error(mine, theirs) < 1e-10
        assert relative_error(other, theirs) < 1e-10


def test_derivatives_of_second_order_if_operands_depend_on_each_other():
    """In a network, the field of a layer depends on the units that all layers share."""
    neighbors = random_lists(6, 70)
    operands = units, last, x = drawn(DOUBLE, (70, 2, 4), (3, 4), (6, 2, 3))
    by_kernels, by_formula = (
        derivatives_of(evaluate(units, last, evaluate(units, last, x, neighbors), neighbors), operands, 2)
        for evaluate in (edge_messages, messages_of)
    )
    for mine, theirs in zip(by_kernels, by_formula, strict=True):
        assert relative_error(mine, theirs) < 1e-10


def test_derivatives_of_third_order_of_attention_to_itself():
    neighbors, (x,) = random_lists(6, 70), drawn(DOUBLE, (6, 2, 2, 4))
    found = []
    for name in ("auto", "plain"):
        with backend(name):
            found += derivatives_of(group_attention(x, x, x, neighbors)[0], (x,), 3)
    assert relative_error(*found) < 1e-10


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(_launch, "_PART", 50)
    neighbors, before = random_lists(20, 200), torch.get_num_threads()
    operands = drawn(torch.float32, (200, 3, 16), (5, 16), (20, 3, 5))
    network = network_operands(torch.float32, 200, 3, 2, 16, 5, 2)
    results = []
    for number in (1, 3):
        torch.set_num_threads(number)
        out = edge_messages(*operands, neighbors)
        made = edge_kernels(*network[:4], tuple(network[4:6]), network[6:])
        made += edge_moments(network[0].detach()[:, 0], operands[0][:, 0], neighbors)
        gradients = torch.autograd.grad(out.square().sum(), operands)
        of_network = torch.autograd.grad(sum(one.square().sum() for one in made), (*network, operands[0]))
        results.append([out, *made, *gradients, *of_network])
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    "case", ["plain backend", "few rows", "five units", "half precision", "two dtypes", "autocast"]
)
def test_what_the_kernel_does_not_take_is_evaluated_in_plain_torch(case, launched):
    rows, hidden = (10 if case == "few rows" else 100), (5 if case == "five units" else 8)
    dtype = torch.bfloat16 if case == "half precision" else torch.float32
    operands = network_operands(dtype, rows, 1, 2, hidden, 3, 1)
    neighbors = random_lists(5, rows)
    (x,) = drawn(dtype, (5, 1, 3))
    evaluation = backend("plain" if case == "plain backend" else "auto")
    with evaluation, torch.autocast("cpu", enabled=case == "autocast"):
        if case == "two dtypes":
            operands[2], x = operands[2].double(), x.double()
        units = edge_units(*operands[:4], tuple(operands[4:6])).to(dtype)
        assert relative_error(units.double(), units_of(*(part.double() for part in operands[:6]))) < 2e-2
        wanted = messages_of(units.double(), operands[6].double(), x.double(), neighbors)
        assert relative_error(edge_messages(units, operands[6], x, neighbors).double(), wanted) < 2e-2
    assert launched == []


@pytest.mark.parametrize("edges", [0, 1])
def test_no_edges_and_one(edges):
    neighbors = random_lists(4, edges)
    operands = drawn(DOUBLE, (edges, 3, 8), (5, 8), (4, 3, 5))
    out = edge_messages(*operands, neighbors)
    assert_same([out], [messages_of(*operands, neighbors)], operands, 1e-12, [torch.ones_like(out)])
    arrows, functions = drawn(DOUBLE, (edges, 3), (edges, 8))
    found = edge_moments(arrows, functions, neighbors)
    assert_same(found, moments_of(arrows, functions, neighbors), (functions,), 1e-12, list(map(torch.ones_like, found)))


@pytest.mark.parametrize("wrong", ["source", "row_ptr", "target"])
def test_lists_that_lead_elsewhere_are_refused(wrong):
    """With these indices, the kernel would read outside of its arrays."""
    neighbors = random_lists(6, 80)
    source, row_ptr, target = neighbors.source.clone(), neighbors.row_ptr.clone(), neighbors.target.clone()
    {"source": source, "row_ptr": row_ptr, "target": target}[wrong][3] = 2**40
    with pytest.raises(ValueError, match=f"neighbors: (?:source|row_ptr|target)|{wrong}"):
        edge_messages(*drawn(DOUBLE, (80, 1, 8), (5, 8), (6, 1, 5)), Neighbors(row_ptr, source, target))
    with pytest.raises(ValueError, match=f"neighbors: (?:source|row_ptr|target)|{wrong}"):
        edge_moments(torch.ones(80, 3), torch.ones(80, 8), Neighbors(row_ptr, source, target))


def test_maps_of_different_widths_are_evaluated_in_plain_torch(launched):
    operands = network_operands(DOUBLE, 70, 2, 2, 8, 3, 1)
    maps = [operands[6], *drawn(DOUBLE, (5, 8))]
    found = edge_kernels(*operands[:4], tuple(operands[4:6]), maps)
    units = units_of(*operands[:6])
    for mine, last in itertools.zip_longest(found, maps):
        assert relative_error(mine, torch.einsum("efk,ck->efc", units, last)) < 1e-12
    assert launched == []


def test_maps_without_channels_return_none():
    operands = network_operands(DOUBLE, 70, 2, 2, 8, 3, 1)[:6]
    (found,) = edge_kernels(*operands[:4], tuple(operands[4:]), [torch.zeros(0, 8, dtype=DOUBLE)])
    assert found.shape == (70, 2, 0)
