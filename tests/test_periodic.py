"""Periodic clouds: neighbors among all images, against a sum over images and against ASE."""

from types import SimpleNamespace

import pytest
import torch

from lieattn.geometry import (
    AllPairs,
    Nearest,
    PrincipalFrames,
    Radius,
    SampledFrames,
    _search,
    lift,
    point_clouds,
)
from lieattn.groups import SE, SO, cyclic, octahedral
from lieattn.ops import RelativeTerms, group_attention
from lieattn.spaces import Euclidean, Orbits

F64 = torch.float64

# Name: cell, pbc, radius. Radii range from a fraction of the cell to several cells.
SYSTEMS = {
    "cube": (3.0 * torch.eye(3), (True, True, True), 1.4),
    "beyond half": (3.0 * torch.eye(3), (True, True, True), 2.0),
    "several images": (torch.eye(3), (True, True, True), 2.6),
    "skewed": (torch.tensor([[2.0, 0, 0], [1.7, 0.9, 0], [-0.8, 1.1, 1.3]]), (True, True, True), 1.9),
    "left-handed": (torch.tensor([[0, 2.0, 0], [1.5, 0.2, 0], [0.1, 0.3, 2.5]]), (True, True, True), 2.17),
    "slab": (torch.tensor([[2.0, 0.3, 0], [0.4, 1.5, 0], [0, 0, 0]]), (True, True, False), 2.4),
    "slab with a skewed vector": (torch.tensor([[2.0, 0.3, 0], [0.4, 1.5, 0], [1.0, 1, 9]]), (True, True, False), 2.4),
    "wire": (torch.tensor([[0.0, 0, 0], [0.9, 0.4, 0.2], [0, 0, 0]]), (False, True, False), 2.0),
    "plane": (torch.tensor([[1.5, 0.2], [-0.7, 1.0]]), (True, True), 2.3),
    "line of the plane": (torch.tensor([[1.5, 0.2], [0.0, 0.0]]), (True, False), 2.3),
    "ring": (torch.tensor([[1.3]]), (True,), 3.0),
}
every_system = pytest.mark.parametrize("name", SYSTEMS)


def system(name, points=6, seed=0):
    """Return points ``[points, dim]`` inside and outside of the cell, cell and pbc in float64, and the radius."""
    cell, pbc, radius = SYSTEMS[name]
    generator = torch.Generator().manual_seed(seed)
    pos = 1.5 * torch.randn(points, len(cell), generator=generator, dtype=F64)
    return pos, cell.double(), torch.tensor(pbc), radius


def brute_force(pos, cell, pbc, radius, include_self):
    """Return all (target, source, displacement) within the radius, from many more images than necessary."""
    heights = 1 / torch.linalg.pinv(torch.where(pbc[:, None], cell, 0.0)).norm(dim=0).clamp(min=1e-9)
    spread = float((pos.amax(0) - pos.amin(0)).norm())
    most = [int((radius + spread) / h) + 2 if p else 0 for h, p in zip(heights.tolist(), pbc.tolist(), strict=True)]
    steps = all_steps(most)
    shift = steps.double() @ torch.where(pbc[:, None], cell, 0.0)
    displacement = pos + shift[:, None, None] - pos[:, None]
    within = displacement.norm(dim=-1) <= radius
    if not include_self:
        within &= steps.any(dim=1)[:, None, None] | ~torch.eye(len(pos), dtype=torch.bool)
    _, i, j = within.nonzero().unbind(1)
    return in_order(torch.cat([i[:, None], j[:, None], displacement[within]], dim=1))


def all_steps(most):
    """Return all combinations ``[ways, dim]`` of at most this many steps along each cell vector in both directions."""
    return torch.cartesian_prod(*(torch.arange(-m, m + 1) for m in most)).view(-1, len(most))


def in_order(rows):
    """Return rows ``[n, columns]`` in lexicographic order, the first two exact and the others up to rounding."""
    keys = (rows * 1e6).round().tolist()
    return rows[sorted(range(len(rows)), key=lambda row: keys[row])]


def table(neighbors, pos):
    displacement = neighbors.displacements(pos)
    return in_order(torch.cat([neighbors.target[:, None], neighbors.source[:, None], displacement], dim=1))


@every_system
@pytest.mark.parametrize("include_self", [True, False])
def test_neighbors_are_those_of_a_sum_over_images(name, include_self):
    pos, cell, pbc, radius = system(name)
    neighbors = Radius(radius, include_self=include_self)(pos, cell=cell, pbc=pbc)
    expected = brute_force(pos, cell, pbc, radius, include_self)
    assert len(expected) > 6
    torch.testing.assert_close(table(neighbors, pos), expected, rtol=0, atol=1e-9)
    assert neighbors.is_symmetric()
    assert (neighbors.target.diff() >= 0).all()


@pytest.mark.parametrize("method", ["vesin", "cells"])
def test_every_cloud_of_a_batch_has_its_own_cell(method, monkeypatch):
    if method == "vesin":
        pytest.importorskip("vesin")
    monkeypatch.setattr(_search, "_prefers_vesin", lambda *_: method == "vesin")
    parts = [system("cube", 5, 2), system("slab", 4, 3), system("skewed", 7, 4)]
    radius, shuffle = 2.1, torch.randperm(16, generator=torch.Generator().manual_seed(5))
    pos = torch.cat([part[0] for part in parts])[shuffle]
    batch = torch.tensor([0] * 5 + [1] * 4 + [3] * 7)[shuffle]
    unused = torch.zeros(3, 3, dtype=F64)
    cell = torch.stack([parts[0][1], parts[1][1], unused, parts[2][1]])
    pbc = torch.stack([parts[0][2], parts[1][2], torch.zeros(3, dtype=torch.bool), parts[2][2]])
    neighbors = Radius(radius)(pos, batch, cell=cell, pbc=pbc)
    assert (batch[neighbors.source] == batch[neighbors.target]).all()
    for cloud, part in zip((0, 1, 3), parts, strict=True):
        mine = (batch == cloud).nonzero()[:, 0]
        alone = Radius(radius)(pos[mine], cell=part[1], pbc=part[2])
        edges = batch[neighbors.target] == cloud
        rows = torch.cat([neighbors.target[edges, None], neighbors.source[edges, None]], dim=1)
        together = in_order(torch.cat([rows, neighbors.displacements(pos)[edges]], dim=1))
        expected = table(alone, pos[mine])
        expected[:, :2] = mine[expected[:, :2].long()].double()
        torch.testing.assert_close(together, in_order(expected), rtol=0, atol=1e-9)


def test_a_cloud_that_does_not_repeat_may_have_any_cell():
    pos, cell, _, radius = system("cube")
    never = torch.zeros(3, dtype=torch.bool)
    for given in (cell, torch.zeros(3, 3, dtype=F64)):
        neighbors = Radius(radius)(pos, cell=given, pbc=never)
        assert neighbors.shift is None
        assert torch.equal(neighbors.edge_index, Radius(radius)(pos).edge_index)
    assert point_clouds(pos, cell=cell, pbc=never).cell is None


@pytest.mark.parametrize("used", range(3))
@pytest.mark.parametrize("axis", range(3))
def test_unused_vectors_may_be_anything(used, axis):
    """A wire along any axis; without its own unit vectors, a cell with these would have the volume zero."""
    pos, _, _, radius = system("wire")
    pbc, cell = torch.arange(3) == used, torch.zeros(3, 3, dtype=F64)
    cell[used, axis] = 1.1
    expected = brute_force(pos, cell, pbc, radius, True)
    for unused in (0.0, 0.3, torch.nan):
        given = torch.where(pbc[:, None], cell, unused)
        torch.testing.assert_close(table(Radius(radius)(pos, cell=given, pbc=pbc), pos), expected, rtol=0, atol=1e-9)


def test_points_at_exactly_the_radius_are_all_neighbors():
    """A cubic lattice of spacing 1 has 6, 12 and 8 nearest images, with the rounding of any origin."""
    for origin in (0.0, 0.1, 1 / 3):
        for radius, number in ((1.0, 6), (2**0.5, 18), (3**0.5, 26)):
            pos = torch.full((1, 3), origin, dtype=torch.float32)
            neighbors = Radius(radius, include_self=False)(pos, cell=torch.eye(3))
            assert neighbors.num_edges == number


def test_no_points_and_no_clouds():
    cell = torch.eye(3)
    for batch in (None, torch.zeros(0, dtype=torch.int64)):
        neighbors = Radius(1.0)(torch.zeros(0, 3), batch, cell=cell)
        assert neighbors.num_points == neighbors.num_edges == 0
    graph = lift(point_clouds(torch.zeros(0, 3), cell=cell), octahedral(), Radius(1.0))
    assert graph.relative.positions.shape == (0, 24, 3)
    ptr = torch.tensor([0, 2, 2])
    assert lift(point_clouds(torch.rand(2, 3), ptr=ptr, cell=cell), octahedral(), Radius(1.0)).num_clouds == 2


BAD_CELLS = {
    "zero": (torch.zeros(3, 3), None, r"cell: .* of cloud 0, whose volume is zero"),
    "flat": (torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0]]), None, "volume is zero"),
    "nearly flat": (torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 1e-9]]), None, "volume is zero"),
    "parallel in the slab": (
        torch.tensor([[1.0, 0, 0], [2, 0, 0], [0, 0, 1]]),
        torch.tensor([True, True, False]),
        "volume is zero",
    ),
    "nan": (torch.full((3, 3), torch.nan), None, "finite"),
    "no cell": (None, torch.ones(3, dtype=torch.bool), "pbc: expected a cell, since clouds are periodic"),
}


@pytest.mark.parametrize("case", BAD_CELLS)
def test_bad_cells(case):
    cell, pbc, message = BAD_CELLS[case]
    for call in (Radius(1.0), lambda pos, **lattice: point_clouds(pos, **lattice)):
        with pytest.raises(ValueError, match=message):
            call(torch.rand(4, 3), cell=cell, pbc=pbc)


@pytest.mark.parametrize("neighborhood", [AllPairs(), Nearest(3)])
def test_only_balls_have_images(neighborhood):
    """The error names the cell of the cloud that is periodic, which may have come with a data set."""
    cell, pbc = torch.stack([torch.eye(2), 2 * torch.eye(2)]), torch.tensor([[False, False], [True, False]])
    clouds = point_clouds(torch.rand(4, 2), batch=torch.tensor([0, 0, 1, 1]), cell=cell, pbc=pbc)
    with pytest.raises(ValueError, match="neighborhood: expected a Radius for periodic clouds") as error:
        lift(clouds, cyclic(4), neighborhood)
    found = "cell [[2.0, 0.0], [0.0, 2.0]] of cloud 1, periodic along pbc=[True, False]; remove the cell"
    for part in (repr(neighborhood), found):
        assert part in str(error.value)


def test_what_has_no_translations_or_no_center_cannot_repeat():
    pos, cell = torch.rand(4, 3) + 1, torch.eye(3)
    with pytest.raises(ValueError, match=r"cell: .* has no translations"):
        lift(point_clouds(pos, cell=cell), SampledFrames(2), Radius(1.0), Orbits(SO(3)))
    with pytest.raises(ValueError, match="of: periodic clouds have no center"):
        lift(point_clouds(pos, cell=cell), PrincipalFrames(), Radius(1.0))


# --- lifting --------------------------------------------------------------------------------------------------


def images_as_points(pos, cell, pbc, radius):
    """Return the points and all images within the radius of a point as a cloud, and the originals of the images."""
    steps = all_steps([12 if p else 0 for p in pbc.tolist()])
    images = pos + (steps.double() @ cell)[:, None]
    near = (images[:, :, None] - pos).norm(dim=-1).amin(2) <= radius * 1.001
    near &= steps.any(dim=1)[:, None]
    return torch.cat([pos, images[near]]), torch.cat([torch.arange(len(pos)), near.nonzero()[:, 1]])


def attend(graph, x, weight):
    """Apply attention with scores and values computed from displacements, on the points of a graph."""
    rho = torch.tanh(graph.relative.positions @ weight)[:, :, None]
    out, _ = group_attention(
        x[:, :, None],
        x[:, :, None],
        x[:, :, None],
        graph.neighbors,
        terms=RelativeTerms(positional_key=rho, beta=rho[:, :, None], row=graph.relative.row),
    )
    return out


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("name", ["beyond half", "several images", "skewed", "slab"])
def test_attention_sees_the_images(name):
    """A layer on the periodic cloud equals the same layer on the cloud with explicit images."""
    points = 2 if name == "several images" else 4
    pos, cell, pbc, radius = system(name, points)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(points, 24, 5, generator=generator, dtype=F64)
    weight = torch.randn(3, 5, generator=generator, dtype=F64)
    graph = lift(point_clouds(pos, cell=cell, pbc=pbc), octahedral(), Radius(radius))
    places, owners = images_as_points(pos, cell, pbc, radius)
    laid_out = lift(places, octahedral(), Radius(radius))
    expected = attend(laid_out, x[owners], weight)[:points]
    torch.testing.assert_close(attend(graph, x, weight), expected, rtol=1e-10, atol=1e-10)


def test_displacements_of_a_crystal_are_shared():
    """All points of a simple lattice share 27 displacements, however many points the cell has."""
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3).double()
    graph = lift(point_clouds(grid, cell=3 * torch.eye(3, dtype=F64)), octahedral(), Radius(1.8))
    assert graph.neighbors.num_edges == 27 * 27
    assert graph.relative.num_rows == 27


@pytest.mark.parametrize("frames", [SampledFrames(3), PrincipalFrames(of="neighborhood", cutoff=2.2)], ids=repr)
def test_lifted_elements_see_the_images(frames):
    pos, cell, pbc, radius = system("left-handed", points=4)
    space = Euclidean(SE(3))
    graph = lift(point_clouds(pos, cell=cell, pbc=pbc), frames, Radius(radius), space)
    expected = torch.einsum("eaji,ej->eai", graph.frames[graph.neighbors.target], graph.neighbors.displacements(pos))
    seen = graph.relative.coordinates[:, :, 0, :3] * radius
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
    # If cell and points are rotated together, principal frames see the same, up to the order of the fiber.
    if isinstance(frames, PrincipalFrames):
        turn = SO(3).sample(generator=torch.Generator().manual_seed(3), dtype=F64)
        turned = lift(point_clouds(pos @ turn.T, cell=cell @ turn.T, pbc=pbc), frames, Radius(radius), space)
        assert torch.equal(turned.neighbors.edge_index, graph.neighbors.edge_index)
        before, after = (g.relative.coordinates.sin().sum((1, 2)) for g in (graph, turned))
        torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


def test_a_deformed_graph_has_the_deformed_cell():
    """A part of its points, whose neighbors are found again, is that of a new lift, with derivatives."""
    pos, cell, pbc, radius = system("skewed", points=4)
    strain = torch.rand(1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    deformation = (torch.eye(3, dtype=F64) + 0.05 * strain).requires_grad_()
    graph = lift(point_clouds(pos, cell=cell, pbc=pbc), octahedral(), Radius(radius))
    moved, kept = graph.at(pos @ deformation[0], deformation), torch.tensor([0, 2])
    torch.testing.assert_close(moved.cell, graph.cell @ deformation)
    found = moved.subset(kept, Radius(radius)).relative.positions
    new = lift(point_clouds(pos[kept] @ deformation[0], cell=moved.cell, pbc=pbc), octahedral(), Radius(radius))
    assert len(found) == len(new.relative.positions)
    energies = found.pow(3).sum(), new.relative.positions.pow(3).sum()
    torch.testing.assert_close(*(torch.autograd.grad(e, deformation, retain_graph=True)[0] for e in energies))
    with pytest.raises(ValueError, match="deformation, pos: expected the same dtype and device"):
        graph.at(pos, deformation.float())


# --- values ---------------------------------------------------------------------------------------------------


def test_data_attributes_are_read():
    pos, cell, pbc, radius = system("slab")
    data = SimpleNamespace(pos=pos, cell=cell[None], pbc=pbc[None])
    clouds = point_clouds(data)
    assert clouds.cell.shape == (1, 3, 3)
    assert clouds.pbc.tolist() == [[True, True, False]]
    expected = lift(point_clouds(pos, cell=cell, pbc=pbc), octahedral(), Radius(radius))
    assert torch.equal(lift(data, octahedral(), Radius(radius)).relative.positions, expected.relative.positions)


def test_single_precision_finds_the_same_pairs():
    pos, cell, pbc, radius = system("several images")
    double = Radius(radius)(pos.float().double(), cell=cell.float().double(), pbc=pbc)
    single = Radius(radius)(pos.float(), cell=cell.float(), pbc=pbc)
    assert torch.equal(single.edge_index, double.edge_index)
    torch.testing.assert_close(single.shift, double.shift, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_cell", [torch.float64, torch.float32, torch.float16], ids=str)
def test_cells_may_have_another_dtype_than_the_points(dtype, of_cell):
    pos = torch.tensor([[0.0, 0.0], [0.5, 0.0]])
    found = Radius(1.0)(pos.to(dtype), cell=torch.eye(2, dtype=of_cell))
    expected = Radius(1.0)(pos, cell=torch.eye(2))
    assert torch.equal(found.edge_index, expected.edge_index)
    assert torch.equal(found.shift, expected.shift)


def test_atoms_at_the_origin_share_displacements():
    cell = 0.3 * torch.eye(2).repeat(3, 1, 1)
    relative = lift(point_clouds(torch.zeros(3, 2), batch=torch.arange(3), cell=cell), cyclic(4), Radius(0.5)).relative
    assert relative.num_rows == relative.neighbors.num_edges // 3


def test_cells_alone_can_need_gradients():
    grid = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    clouds = point_clouds(grid, cell=3 * torch.eye(2, dtype=torch.float64))
    graph = lift(clouds, cyclic(4), Radius(1.2), length=1.0)
    deformation = torch.eye(2, dtype=torch.float64)[None].requires_grad_()
    positions = graph.at(grid, deformation).relative.positions[:, 0]
    (found,) = torch.autograd.grad(positions.square().sum(), deformation)
    neighbors = graph.neighbors
    wanted = 2 * neighbors.shift.mT @ neighbors.displacements(grid)
    torch.testing.assert_close(found[0], wanted)
    assert wanted.abs().max() > 1
