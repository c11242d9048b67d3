"""Neighborhoods, tested against brute force, and the lists that they return."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lieattn.geometry import _search, find_neighbors, pixel_positions, point_clouds
from lieattn.geometry._neighbors import AllPairs, Given, Nearest, Neighbors, PixelSquare, Radius, scaled, smooth_cutoff
from lieattn.groups import cyclic, dihedral
from tests.cases import refuses

METHODS = ("tree", "cells")
RTOL = 1e-5  # the documented tie tolerance
quick = settings(max_examples=25, deadline=None, derandomize=True)

DEFINITIONS = [
    Radius(0.5),
    Radius(1.0, include_self=False),
    Radius(math.sqrt(2)),
    Radius(50.0),
    Nearest(1),
    Nearest(3, include_self=False),
    Nearest(4, ties="all"),
    Nearest(100, include_self=False),
    PixelSquare(1),
    PixelSquare(3, spacing=0.5, include_self=False),
    PixelSquare(5, spacing=0.5),
    PixelSquare(3, spacing=0.5, dilation=2),
    AllPairs(),
    AllPairs(include_self=False),
]


def reference(definition, pos, batch):
    """Return all edges (target, source) in order, from the definition, pair by pair."""
    points, cloud = pos.double().tolist(), batch.tolist()
    edges = []
    for i, x in enumerate(points):
        others = [j for j in range(len(points)) if cloud[j] == cloud[i] and j != i]
        away = {j: math.dist(x, points[j]) for j in others}
        match definition:
            case Radius():
                chosen = [j for j in others if away[j] <= definition.radius * (1 + RTOL)]
            case PixelSquare():
                step = definition.dilation * definition.spacing
                half = ((definition.size - 1) / 2 * step + 0.01 * definition.spacing) * (1 + RTOL)
                chosen = [j for j in others if max(abs(a - b) for a, b in zip(x, points[j], strict=True)) <= half]
                if definition.dilation > 1:
                    off = {j: [(a - b) / step for a, b in zip(x, points[j], strict=True)] for j in chosen}
                    off = {j: max(abs(s - round(s)) for s in steps) * definition.dilation for j, steps in off.items()}
                    chosen = [j for j in chosen if off[j] <= 0.01]
            case Nearest():
                chosen = reference_nearest(away, definition)
            case _:
                chosen = others
        edges += [(i, j) for j in sorted([*chosen, i] if definition.include_self else chosen)]
    return edges


def reference_nearest(away, definition):
    if len(away) <= definition.k:
        return list(away)
    kth = sorted(away.values())[definition.k - 1]
    inner = [j for j in away if away[j] < kth * (1 - RTOL)]
    shell = sorted(j for j in away if kth * (1 - RTOL) <= away[j] <= kth * (1 + RTOL))
    return inner + (shell if definition.ties == "all" else shell[: definition.k - len(inner)])


def edges_of(neighbors):
    return list(zip(neighbors.target.tolist(), neighbors.source.tolist(), strict=True))


def find(definition, pos, batch=None, method=None):
    return definition._find(pos, batch, None, method)


@st.composite
def clouds(draw):
    """Return points of several clouds, some empty: on a half-integer grid with ties and duplicates, or at random."""
    dim = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 5, 9, 14]), min_size=0, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    number = sum(sizes)
    if draw(st.booleans()):
        pos = torch.randint(-2, 3, (number, dim), generator=generator) / 2
    else:
        dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        pos = torch.randn(number, dim, generator=generator, dtype=dtype)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    if draw(st.booleans()):
        batch = batch[torch.randperm(number, generator=generator)]
    return pos, batch


@pytest.mark.filterwarnings("error")
def test_a_radius_can_be_a_numpy_number():
    radius = np.float32(1.5)
    assert Radius(radius) == Radius(1.5)
    assert Radius(radius).length == 1.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("definition", DEFINITIONS, ids=repr)
@quick
@given(clouds())
def test_equals_brute_force(definition, method, points):
    pos, batch = points
    neighbors = find(definition, pos, batch, method)
    assert edges_of(neighbors) == reference(definition, pos, batch)
    check_invariants(neighbors, len(pos))


def check_invariants(neighbors, num_points):
    row_ptr, source, target = neighbors.row_ptr, neighbors.source, neighbors.target
    assert neighbors.num_points == num_points
    assert {t.dtype for t in (row_ptr, source, target, neighbors.col_ptr, neighbors.col_edge)} == {torch.int64}
    for i in range(num_points):
        assert set(target[row_ptr[i] : row_ptr[i + 1]].tolist()) <= {i}
        mine = neighbors.col_edge[neighbors.col_ptr[i] : neighbors.col_ptr[i + 1]].tolist()
        assert mine == (source == i).nonzero().flatten().tolist()
    assert row_ptr[0] == neighbors.col_ptr[0] == 0
    assert row_ptr[-1] == neighbors.col_ptr[-1] == len(source) == len(target) == neighbors.num_edges
    assert torch.equal(neighbors.degree, torch.bincount(target, minlength=num_points))
    assert torch.equal(neighbors.edge_index, torch.stack([source, target]))


def test_nearest_is_not_symmetric():
    """Control: the most remote of three points is not the nearest of any other."""
    assert not Nearest(1)(torch.tensor([[0.0], [1.0], [3.0]])).is_symmetric()


@pytest.mark.parametrize("definition", DEFINITIONS, ids=repr)
def test_batch_and_ptr_say_the_same(definition):
    pos, ptr = torch.randn(9, 2), torch.tensor([0, 4, 4, 9, 9])
    batch = torch.tensor([0] * 4 + [2] * 5)
    for found in (definition(pos, ptr=ptr), definition(pos, batch, ptr)):
        assert torch.equal(found.edge_index, definition(pos, batch).edge_index)


@pytest.mark.parametrize("definition", [d for d in DEFINITIONS if not isinstance(d, AllPairs)], ids=repr)
def test_chunks_change_nothing(definition, monkeypatch):
    pos, batch = torch.randn(60, 2), torch.randint(3, (60,))
    whole = find(definition, pos, batch, "cells")
    monkeypatch.setattr(_search, "_CHUNK_PAIRS", 50)
    monkeypatch.setattr(_search, "_CHUNK_POINTS", 7)
    for method in METHODS:
        assert torch.equal(find(definition, pos, batch, method).edge_index, whole.edge_index)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("definition", [Radius(0.075), Nearest(8), PixelSquare(3, spacing=0.058)], ids=repr)
def test_cloud_of_10000_points(definition, method):
    pos = torch.rand(10_000, 3, generator=torch.Generator().manual_seed(0))
    neighbors = find(definition, pos, method=method)
    assert neighbors.num_points == 10_000
    for i in torch.arange(0, 10_000, 500).tolist():
        away = (pos.double() - pos[i].double()).abs()
        if isinstance(definition, Nearest):
            expected = away.norm(dim=1).argsort()[: definition.k + 1].sort().values
        elif isinstance(definition, Radius):
            expected = (away.norm(dim=1) <= definition.radius * (1 + RTOL)).nonzero().flatten()
        else:
            expected = (away.amax(dim=1) <= 1.01 * definition.spacing * (1 + RTOL)).nonzero().flatten()
        assert torch.equal(neighbors.source[neighbors.row_ptr[i] : neighbors.row_ptr[i + 1]], expected)


@pytest.mark.parametrize("method", METHODS)
def test_no_cap_on_neighbors(method):
    dense = torch.rand(200, 3) * 0.01
    pos = torch.cat([torch.rand(50, 3) + 5, dense, torch.rand(50, 3) - 5])
    degree = find(Radius(0.1), pos, method=method).degree
    assert degree[50:250].tolist() == [200] * 200


@pytest.mark.parametrize("method", METHODS)
def test_nearest_where_density_varies(method):
    """Length scales that differ by 1e6, many coincident points, clouds of all sizes: the search widens, then stops."""
    generator = torch.Generator().manual_seed(0)
    cluster = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    pos = torch.cat([cluster * 1e-3, cluster * 1e3, torch.ones(40, 2), torch.tensor([[0.0, 0.0], [9e9, 0.0]])])
    batch = torch.cat([torch.zeros(160), torch.tensor([1.0, 1.0])]).long()
    for definition in (Nearest(5), Nearest(5, ties="all"), Nearest(45)):
        assert edges_of(find(definition, pos, batch, method)) == reference(definition, pos, batch)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("definition", "shape"),
    [(Radius(1e-3), (30, 2)), (Radius(1e90), (30, 1)), (Radius(2.0), (30, 5)), (Nearest(4), (30, 6))],
    ids=repr,
)
def test_extreme_scales_and_dimensions(definition, shape, method):
    pos = torch.randint(3, shape, generator=torch.Generator().manual_seed(0)).double()
    pos[::3] += 1e9  # more cells of the size of the radius lie between them than an axis can have
    batch = torch.arange(len(pos)) % 2
    assert edges_of(find(definition, pos, batch, method)) == reference(definition, pos, batch)


@pytest.mark.parametrize("method", METHODS)
def test_cloud_ids_may_be_huge(method):
    batch = torch.tensor([10**12, 0, 10**12, 5])
    for definition in (Radius(9.0), Nearest(2), AllPairs()):
        assert edges_of(find(definition, torch.zeros(4, 1), batch, method)) == [
            (0, 0), (0, 2), (1, 1), (2, 0), (2, 2), (3, 3),
        ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("first", "last"), [(-1.0, 1.0), (1000.0, 1051.1)])
def test_pixel_square_of_small_and_far_pixels(first, last, method):
    """Rounding in float32 changes the distances of these pixels by up to 1e-3 of their spacing."""
    line = torch.linspace(first, last, 512)
    pos = torch.stack([line, torch.full_like(line, first)], dim=1)
    neighbors = find(PixelSquare(3, spacing=(last - first) / 511), pos, method=method)
    assert neighbors.num_edges == 3 * 512 - 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dilation", [2, 4])
def test_dilated_pixel_square_of_an_image(dilation, method):
    pos = pixel_positions(12, 12)
    square = PixelSquare(5, dilation=dilation)
    neighbors = find(square, pos, method=method)
    offsets = (pos[neighbors.source] - pos[neighbors.target]).unique(dim=0)
    steps = dilation * torch.arange(-2.0, 3.0)
    assert torch.equal(offsets, torch.cartesian_prod(steps, steps))
    assert square.length == square.scaled(3.0).length / 3 == 2 * dilation
    for element in dihedral(4).elements.float():
        assert torch.equal(find(square, pos @ element.T, method=method).edge_index, neighbors.edge_index)
    turned = find(square, pos @ cyclic(8).elements[1].float().T, method=method)
    assert turned.num_edges < neighbors.num_edges


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", [8, 96])
@pytest.mark.parametrize("degrees", [45, 30])
@pytest.mark.parametrize("definition", [Radius(2.0), Radius(math.sqrt(2)), Radius(1.0), Nearest(6)], ids=repr)
def test_rotated_grid_keeps_its_ties(definition, degrees, side, method):
    grid = torch.cartesian_prod(torch.arange(float(side)), torch.arange(float(side))) - (side - 1) / 2
    angle = torch.tensor(math.radians(degrees))
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    upright, turned = find(definition, grid, method=method), find(definition, grid @ turn.T, method=method)
    assert torch.equal(upright.edge_index, turned.edge_index)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("beyond", "tied"), [(0.8e-5, True), (1.2e-5, False)])
def test_ties_are_relative_to_the_last_of_the_nearest(beyond, tied, method):
    pos = torch.tensor([[0.0], [-3.0], [3.0 * (1 + beyond)]], dtype=torch.float64)
    found = find(Nearest(1, include_self=False, ties="all"), pos, method=method)
    assert found.source[: found.degree[0]].tolist() == [1, 2][: 1 + tied]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_nearest_among_many_points_at_few_places(k, method):
    generator = torch.Generator().manual_seed(k)
    places = torch.randn(5, 2, generator=generator)
    pos = places[torch.randint(5, (60,), generator=generator)]
    pos[::7] = torch.randn(9, 2, generator=generator)
    pos[1::9] = -0.0
    pos[2::9] = 0.0
    batch = (torch.arange(60) >= 25).long() * 3
    for definition in (Nearest(k), Nearest(k, include_self=False), Nearest(k, ties="all")):
        assert edges_of(find(definition, pos, batch, method)) == reference(definition, pos, batch)


@pytest.mark.parametrize("method", METHODS)
def test_zero_padding_takes_no_longer_than_other_points(method):
    """With an algorithm of quadratic cost, the test would take an hour."""
    pos = torch.zeros(60_000, 3)
    pos[:1000] = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    assert find(Nearest(16), pos, method=method).num_edges == 17 * len(pos)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_floating_dtype_without_gradient(dtype):
    pos = torch.tensor([[0.0], [1.0], [3.0]], dtype=dtype, requires_grad=True)
    neighbors = Radius(1.0)(pos)
    assert edges_of(neighbors) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)]
    assert neighbors.source.dtype == torch.int64


@pytest.mark.parametrize("definition", [*DEFINITIONS, Given(torch.empty(2, 0, dtype=torch.int64))], ids=repr)
def test_no_points(definition):
    for method in METHODS:
        neighbors = find(definition, torch.empty(0, 3), method=method)
        check_invariants(neighbors, 0)
    assert neighbors.num_edges == 0


@pytest.mark.parametrize(
    ("definition", "length"),
    [
        (Radius(3), 3.0),
        (PixelSquare(5, spacing=0.5), 1.0),
        (PixelSquare(1, spacing=0.5), 0.5),
        (PixelSquare(3, spacing=0.5, dilation=4), 2.0),
        (Nearest(3), None),
        (AllPairs(), None),
        (Given(torch.empty(2, 0, dtype=torch.int64)), None),
    ],
)
def test_length(definition, length):
    assert definition.length == length


def test_given_edges_are_sorted():
    edges = torch.tensor([[2, 0, 1, 1], [1, 1, 0, 2]])
    neighbors = Given(edges)(torch.zeros(4, 2), batch=torch.tensor([0, 0, 0, 1]))
    assert edges_of(neighbors) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    check_invariants(neighbors, 4)
    assert neighbors.is_symmetric()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n)), lambda n: n.to("cpu")])
@pytest.mark.parametrize("with_transpose", [False, True])
def test_copies_are_equal(copied, with_transpose):
    neighbors = Radius(1.0)(torch.randn(20, 2))
    if with_transpose:
        assert len(neighbors.col_ptr) == 21
    other = copied(neighbors)
    assert vars(other).keys() == vars(neighbors).keys()
    for name, tensor in vars(neighbors).items():
        assert vars(other)[name] is tensor is None or torch.equal(vars(other)[name], tensor)
    assert torch.equal(other.col_ptr, neighbors.col_ptr)
    assert torch.equal(other.col_edge, neighbors.col_edge)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("definition", DEFINITIONS, ids=repr)
def test_same_edges_on_a_gpu(definition):
    pos, batch = torch.randint(-3, 4, (500, 3)) / 2, torch.randint(4, (500,))
    there, here = definition(pos.cuda(), batch.cuda()), definition(pos, batch)
    assert there.device.type == "cuda"
    assert torch.equal(there.to("cpu").edge_index, here.edge_index)
    assert torch.equal(here.pin_memory().to("cuda", non_blocking=True).col_edge, there.col_edge)


def index(*values):
    return torch.tensor(values, dtype=torch.int64)


ALL = AllPairs()

test_false_input_is_named = refuses(
    (lambda: Neighbors(index(), index(), index()), "row_ptr: expected one entry more"),
    (lambda: Neighbors(index(0), index(1), index()), "source, target: .* got 1 and 0"),
)


class Listed:
    """A user-defined neighborhood without optional parts."""

    length = None

    def __call__(self, pos, batch=None, ptr=None):
        return ALL(pos, batch, ptr)


class Growing(Listed):
    """A user-defined neighborhood that states how it grows and at which distance neighbors have no effect."""

    def __init__(self, cutoff):
        self.length = self.cutoff = cutoff

    def scaled(self, factor):
        return Growing(self.cutoff * factor)


def test_definitions_of_a_users_own_without_a_length():
    with pytest.raises(TypeError, match=r"neighborhood: .* with the attribute length, a number or None, got"):
        find_neighbors(point_clouds(torch.randn(3, 2)), lambda pos, batch=None, ptr=None: AllPairs()(pos, batch))


def test_definitions_of_a_users_own():
    assert smooth_cutoff(Listed()) is None
    assert smooth_cutoff(scaled(Growing(1.5), 2.0)) == 3.0
    assert smooth_cutoff(Radius(1.5, smooth=True)) == 1.5
    assert smooth_cutoff(Radius(1.5)) is None
    with pytest.raises(ValueError, match=r"neighborhood: .* implement scaled\(factor\)"):
        scaled(Listed(), 2.0)


class Returned(Listed):
    """A user-defined neighborhood that returns what a function does."""

    def __init__(self, search, **attributes):
        self.search = search
        vars(self).update(attributes)

    def __call__(self, pos, batch=None, ptr=None):
        return self.search(pos, batch)


WRONG_LISTS = {  # expected error, and what a neighborhood returns for the points of two clouds
    "edges": (TypeError, "got a tensor of torch.int64", lambda pos, batch: ALL(pos, batch).edge_index),
    "nothing": (TypeError, "got NoneType", lambda pos, batch: None),
    "too few points": (ValueError, "lists of 6 points on cpu, got 5 points", lambda pos, batch: ALL(pos[:5])),
    "other clouds": (ValueError, "from point 3 to point 0 of another cloud", lambda pos, batch: Radius(9.0)(pos)),
    "all clouds": (ValueError, "got all pairs of several clouds", lambda pos, batch: ALL(pos)),
    "order": (ValueError, "distinct edges, sorted by target", lambda pos, batch: one_target([2, 1])),
    "repeated": (ValueError, "distinct edges, sorted by target", lambda pos, batch: one_target([1, 1])),
    "missing point": (ValueError, "from 0 to 5, got an edge from point 6", lambda pos, batch: one_target([1, 6])),
    "pointers": (ValueError, "sorted by target", lambda pos, batch: Neighbors(index(0, *[2] * 6), index(0), index(0))),
}


def one_target(sources):
    return Neighbors(index(0, *[len(sources)] * 6), index(*sources), index(*[0] * len(sources)))


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_lists_of_a_users_own_are_checked(name):
    """Otherwise clouds would see each other without a message, or errors would come from the inside of a layer."""
    error, message, search = WRONG_LISTS[name]
    clouds = point_clouds(torch.rand(6, 2), batch=index(0, 0, 0, 1, 1, 1))
    with pytest.raises(error, match=f"neighborhood: expected to return .*{message}"):
        find_neighbors(clouds, Returned(search))


@pytest.mark.parametrize("search", [ALL, Radius(0.5), Nearest(2), lambda pos, batch: one_target([0, 2])])
def test_right_lists_of_a_users_own_are_accepted(search):
    clouds = point_clouds(torch.rand(6, 2, requires_grad=True), batch=index(1, 1, 1, 2, 2, 2))
    found = find_neighbors(clouds, Returned(search))
    assert torch.equal(found.edge_index, search(clouds.pos, clouds.batch).edge_index)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_masks_and_small_integers_of_edges_are_counted(dtype):
    neighbors = AllPairs()(torch.rand(130, 2))
    total = neighbors.sum_to_targets(torch.ones(neighbors.num_edges, dtype=dtype))
    assert torch.equal(total, neighbors.degree)


@pytest.mark.parametrize(("cutoff", "error"), [("far", TypeError), (-1.0, ValueError), (math.nan, ValueError)])
def test_cutoffs_of_a_users_own_are_checked(cutoff, error):
    with pytest.raises(error, match=r"neighborhood\.cutoff: expected a"):
        smooth_cutoff(Returned(ALL, cutoff=cutoff))


def test_a_directed_cycle_is_not_symmetric():
    """Each point has one edge to it and one from it, but no edge has its reverse."""
    cycle = torch.tensor([[0, 1, 2], [1, 2, 0]])
    assert not Neighbors.from_edge_index(cycle, 3).is_symmetric()
    assert Neighbors.from_edge_index(torch.cat([cycle, cycle.flip(0)], dim=1), 3).is_symmetric()
