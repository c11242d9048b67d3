"""Point clouds, rasters and lifting. The tests of the neighbor search are in ``test_neighbors``."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.geometry import (
    AllPairs,
    Given,
    Nearest,
    Neighbors,
    PixelSquare,
    PointClouds,
    Radius,
    Raster,
    ScaleFrames,
    crop,
    flatten,
    lift,
    pixel_positions,
    point_clouds,
    pooling_cells,
    unflatten,
)
from lieattn.geometry._relative import _distinct
from lieattn.groups import SemidirectProduct, cyclic, cyclic_about, dihedral, tetrahedral, trivial
from lieattn.models import GSANet, Stages
from lieattn.nn import CloudNorm, CloudPool, FiberPool, GridPool
from lieattn.testing import random_cloud
from tests.cases import GROUPS, SMALL_GROUPS, each


def per_edge(graph):
    """Return relative positions ``[edges, fiber, dim]``, with the index applied."""
    table, index = graph.relative.positions, graph.relative.row
    return table if index is None else table[index]


def assert_same_graph(found, wanted, *, atol=0.0):
    assert found.group == wanted.group
    assert found.length == wanted.length
    assert found.num_clouds == wanted.num_clouds
    torch.testing.assert_close(found.pos, wanted.pos, rtol=0, atol=0)
    assert torch.equal(found.batch, wanted.batch)
    assert torch.equal(found.neighbors.row_ptr, wanted.neighbors.row_ptr)
    assert torch.equal(found.neighbors.source, wanted.neighbors.source)
    torch.testing.assert_close(per_edge(found), per_edge(wanted), rtol=0, atol=atol)
    assert (found.grid is None) == (wanted.grid is None)
    if found.grid is not None:
        assert torch.equal(found.grid, wanted.grid)


def image(height, width, channels=1, dtype=torch.float32):
    features = torch.randn(height * width, channels, dtype=dtype)
    grid = torch.tensor([[height, width]])
    return Data(x=features, pos=pixel_positions(height, width, dtype=dtype), grid=grid)


def rotation(degrees, dtype=torch.float32):
    angle = math.radians(degrees)
    matrix = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    return torch.tensor(matrix, dtype=torch.float64).to(dtype)


# --- the forms in which clouds come ---------------------------------------------------------------------------


SIZES = (5, 1, 7)


@pytest.fixture
def clouds():
    return [torch.randn(size, 2, dtype=torch.float64) for size in SIZES]


def test_all_forms_of_a_batch_give_the_same_graph(clouds):
    group, neighborhood = dihedral(3), Radius(1.2)
    pos = torch.cat(clouds)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    wanted = lift(pos, group, neighborhood, batch=batch)
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    padded = torch.full((3, max(SIZES), 2), torch.nan, dtype=torch.float64)
    padded[mask] = pos
    together = Batch.from_data_list([Data(pos=cloud) for cloud in clouds])
    forms = {
        "ptr": lift(pos, group, neighborhood, ptr=torch.tensor([0, 5, 6, 13])),
        "both": lift(pos, group, neighborhood, batch=batch, ptr=torch.tensor([0, 5, 6, 13])),
        "padded, not a number where nothing is": lift(padded, group, neighborhood, mask=mask),
        "Batch": lift(together, group, neighborhood),
        "PointClouds": lift(point_clouds(pos, batch=batch), group, neighborhood),
        "graph": lift(wanted, group, neighborhood),
    }
    for found in forms.values():
        # Matrix products of other sizes may round differently.
        assert_same_graph(found, wanted, atol=1e-15)
    wanted = lift(clouds[0], group, neighborhood)
    for form in (Data(pos=clouds[0]), clouds[0][None], Batch.from_data_list([Data(pos=clouds[0])])):
        assert_same_graph(lift(form, group, neighborhood), wanted)
    assert (wanted.length, lift(pos, group, neighborhood, length=3).length) == (1.2, 3.0)
    assert lift(pos, group, AllPairs()).length == 1.0


def test_arguments_come_before_what_the_object_carries(clouds):
    data = Data(pos=torch.cat(clouds), batch=torch.zeros(13, dtype=torch.int64))
    ids = torch.arange(13) % 3
    assert torch.equal(point_clouds(data, batch=ids).batch, ids)


@pytest.mark.parametrize("neighborhood", [Radius(1.2), Nearest(3), AllPairs(), PixelSquare(3)])
def test_unsorted_batch_is_the_sorted_one_with_other_numbers(clouds, neighborhood):
    pos = torch.cat(clouds)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    shuffle = torch.randperm(len(pos))
    wanted = lift(pos, cyclic(3), neighborhood, batch=batch)
    found = lift(pos[shuffle], cyclic(3), neighborhood, batch=batch[shuffle])
    keys = shuffle[found.neighbors.target] * len(pos) + shuffle[found.neighbors.source]
    order = keys.argsort()
    assert torch.equal(shuffle[found.neighbors.source][order], wanted.neighbors.source)
    assert torch.equal(shuffle[found.neighbors.target][order], wanted.neighbors.target)
    torch.testing.assert_close(per_edge(found)[order], per_edge(wanted), rtol=0, atol=0)


def test_clouds_do_not_see_each_other(clouds):
    pos = torch.cat([clouds[0], clouds[0]])  # at the same place
    graph = lift(pos, cyclic(4), AllPairs(), batch=torch.arange(10) // 5)
    assert graph.neighbors.num_edges == 2 * 25
    assert torch.equal(graph.batch[graph.neighbors.source], graph.batch[graph.neighbors.target])


def test_empty_clouds_are_counted_where_ptr_or_mask_say_so():
    pos = torch.randn(4, 2)
    assert point_clouds(pos, ptr=torch.tensor([0, 0, 4, 4])).num_clouds == 3
    assert point_clouds(pos, batch=torch.tensor([3, 1, 3, 3])).num_clouds == 4
    mask = torch.tensor([[False, False], [True, False]])
    clouds = point_clouds(torch.randn(2, 2, 2), mask=mask)
    assert (clouds.num_clouds, clouds.batch.tolist()) == (2, [1])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_flatten_and_unflatten_undo_each_other(shape):
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    padded = torch.randn(3, 3, *shape)
    flat = flatten(padded, mask)
    assert flat.shape == (4, *shape)
    again = unflatten(flat, mask)
    assert torch.equal(again[mask], padded[mask])
    assert (again[~mask] == 0).all()
    assert torch.equal(flatten(again, mask), flat)
    assert unflatten(flat.to(torch.float16), mask).dtype == torch.float16


# --- relative positions ---------------------------------------------------------------------------------------


@each("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_relative_positions_are_displacements_in_every_frame(group, dtype):
    pos, batch = random_cloud(group, 12, clouds=2, dtype=dtype)
    graph = lift(pos, group, Radius(1.5), batch=batch, length=0.7)
    displacement = (pos[graph.neighbors.source] - pos[graph.neighbors.target]).double() / 0.7
    wanted = torch.einsum("aij,ej->eai", torch.linalg.inv(group.elements), displacement)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert per_edge(graph).dtype == dtype
    torch.testing.assert_close(per_edge(graph).double(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@each("group", GROUPS)
def test_moving_the_points_permutes_the_fiber_of_relative_positions(group):
    pos, batch = random_cloud(group, 10, clouds=2)
    motions, neighborhood = SemidirectProduct(group), Radius(1.4)
    graph = lift(pos, group, neighborhood, batch=batch)
    for h in range(0, group.order, 1 + group.order // 24):
        g = motions.element(h, torch.randn(group.dim, dtype=torch.float64))
        moved = lift(motions.act(g, pos), group, neighborhood, batch=batch)
        assert torch.equal(moved.neighbors.source, graph.neighbors.source)
        assert torch.equal(moved.neighbors.row_ptr, graph.neighbors.row_ptr)
        wanted = group.translate(h, per_edge(graph))
        torch.testing.assert_close(per_edge(moved), wanted, rtol=0, atol=1e-11)


def test_another_permutation_of_the_fiber_would_be_seen():
    """Control: the law fails with h a instead of h⁻¹ a."""
    group = tetrahedral()
    pos, _ = random_cloud(group, 10)
    graph, moved = (lift(p, group, AllPairs()) for p in (pos, group.act(4, pos)))
    assert (per_edge(moved) - group.translate(int(group.inverse_index[4]), per_edge(graph))).abs().max() > 0.1


@pytest.mark.parametrize("group", SMALL_GROUPS.values(), ids=SMALL_GROUPS)
def test_frame_positions_are_points_in_every_frame(group):
    pos, _ = random_cloud(group, 6)
    graph = lift(pos, group, Radius(2.0))
    for a in range(group.order):
        wanted = group.act(int(group.inverse_index[a]), pos - pos.mean(dim=0)) / 2.0
        torch.testing.assert_close(graph.frame_positions()[:, a], wanted, rtol=0, atol=1e-12)


# --- distinct displacements -----------------------------------------------------------------------------------


def check_shared(graph):
    """Check that shared displacements equal the true ones up to rounding, and return the number of types."""
    pos, neighbors = graph.pos, graph.neighbors
    true = (pos[neighbors.source] - pos[neighbors.target]) / graph.length
    rounding = 32 * torch.finfo(pos.dtype).eps * float(pos.abs().max()) / graph.length
    identity = graph.group.identity_index
    assert (per_edge(graph)[:, identity] - true).abs().max() <= rounding
    index = graph.relative.row
    assert index.dtype == torch.int64
    assert index.shape == (neighbors.num_edges,)
    assert torch.equal(index.unique(), torch.arange(graph.relative.num_rows))  # no row without an edge
    return graph.relative.num_rows


def pixels(height=28, width=28, degrees=0.0, shift=(0.0, 0.0), unit=1.0, dtype=torch.float32):
    turned = pixel_positions(height, width, dtype=dtype) @ rotation(degrees, dtype).mT
    return unit * (turned + torch.tensor(shift, dtype=dtype))


WINDOW, DISC = PixelSquare(5), Radius(2.5)
AXIS, CELL, F64 = torch.arange(5.0), PixelSquare(3), torch.float64
# Points, neighborhood, and the number of distinct displacements. Rotated grids have up to four times as many.
GRIDS_SHARED = {
    "image": (pixels(), WINDOW, 25),
    "image, float64": (pixels(dtype=F64), WINDOW, 25),
    # Rounding moves displacements, which are multiples of the width of the bins, to both sides.
    "between representable places": (pixels(shift=(0.1, 0.1)), WINDOW, 25),
    "upright": (pixels(), DISC, 21),
    **{f"turned by {d}, {t}": (pixels(degrees=d, dtype=t), DISC, 21) for d in (30, 77.7) for t in (F64, torch.float32)},
    **{f"turned by {d}, shifted": (pixels(degrees=d, shift=(100.3, -40.7)), DISC, 21) for d in (30, 45)},
    "cubic lattice": (torch.cartesian_prod(AXIS, AXIS, AXIS), Radius(1.0), 7),
    "small": (pixels(9, 9, unit=1e-12, dtype=F64), PixelSquare(3, spacing=1e-12), 9),
    "large": (pixels(9, 9, unit=1e12, dtype=F64), PixelSquare(3, spacing=1e12), 9),
    "batch": (Batch.from_data_list([Data(pos=pixels(8, 8)), Data(pos=pixels(8, 5)), Data(pos=pixels(8, 8))]), CELL, 9),
    "two sizes": (Batch.from_data_list([Data(pos=pixels(4, 4)), Data(pos=2 * pixels(4, 4))]), AllPairs(), 98),
}


@pytest.mark.parametrize(("points", "neighborhood", "number"), GRIDS_SHARED.values(), ids=GRIDS_SHARED)
def test_displacements_on_grids_repeat(points, neighborhood, number, request):
    dim = point_clouds(points).pos.shape[1]
    graph = lift(points, cyclic(4) if dim == 2 else tetrahedral(), neighborhood)
    found = check_shared(graph)
    assert number <= found <= (4 * number if "turned" in request.node.name else number)
    assert graph.relative.positions.shape == (found, graph.fiber, dim)


def test_displacements_that_differ_by_more_than_rounding_are_told_apart():
    steps = torch.tensor([0.0, 17.0]).repeat(5)[:, None] * torch.finfo(torch.float32).eps
    first, row = _distinct(steps, torch.ones(10), torch.zeros(10, dtype=torch.int64))
    assert (first.tolist(), row.tolist()) == ([0, 1], [0, 1] * 5)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_continuous_cloud_shares_nothing(dim):
    graph = lift(torch.randn(200, dim), trivial(dim), Radius(0.3, include_self=False))
    assert graph.relative.row is None
    assert graph.relative.num_rows == graph.neighbors.num_edges


def test_a_far_cloud_does_not_coarsen_the_displacements_of_another():
    """The resolution depends on the coordinates of each cloud, not on the largest in the batch."""
    near, far = torch.randn(20, 2), pixel_positions(28, 28) + torch.tensor([1e5, 0.0])
    alone = lift(near, cyclic(4), Radius(1.5))
    both = lift(torch.cat([near, far]), cyclic(4), Radius(1.5), ptr=torch.tensor([0, 20, 804]))
    assert both.relative.row is not None
    found = per_edge(both)[: alone.neighbors.num_edges]
    torch.testing.assert_close(found, per_edge(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("beside", [0, 784])
def test_many_points_far_from_the_origin_are_no_grid(beside):
    """Their displacements are precise to a rounding step, and are not replaced by those of others in the same bin."""
    far = 30 * torch.rand(1000, 2) + 5e5
    pos = torch.cat([pixel_positions(28, 28)[:beside], far])
    graph = lift(pos, cyclic(4), Radius(2.0), ptr=torch.tensor([0, beside, len(pos)]))
    true = graph.neighbors.displacements(pos)
    assert torch.equal(per_edge(graph)[:, 0] * graph.length, true)


# --- gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", ["grid", "cloud"])
def test_points_can_need_gradients_after_a_graph_was_used(points):
    pos = pixel_positions(3, 4, dtype=torch.float64) if points == "grid" else torch.randn(9, 2, dtype=torch.float64)
    smooth, weight = Radius(1.2, smooth=True), torch.randn(4, dtype=torch.float64)

    def loss(graph):
        relative, window = graph.relative, graph.relative.log_window
        seen = relative.coordinates[:, :, :, :2].sum(dim=(2, 3)).sin() @ weight * window.exp()
        return (seen if relative.row is None else seen[relative.row]).sum()

    graph = lift(pos, cyclic(4), smooth)
    before = loss(graph)
    (expected,) = torch.autograd.grad(loss(lift(moved := pos.clone().requires_grad_(), cyclic(4), smooth)), moved)
    pos.requires_grad_()
    (found,) = torch.autograd.grad(loss(graph), pos)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss(graph), before)
    pos.requires_grad_(False)
    torch.testing.assert_close(loss(graph).detach(), before)


def test_poses_get_the_gradients_of_their_own_cloud():
    pos, batch = pixel_positions(3, 3, dtype=torch.float64).repeat(2, 1), torch.arange(18) // 9
    relative = lift(pos, cyclic(4), PixelSquare(3), batch=batch).relative
    pose = torch.eye(2, dtype=torch.float64).repeat(18, 1, 1).requires_grad_()
    posed = replace(relative, pose=pose)
    assert posed.row is None
    (grad,) = torch.autograd.grad(posed.positions.square().sum(), pose)
    torch.testing.assert_close(grad[:9].sum(dim=0), grad[9:].sum(dim=0))


def test_given_coordinates_keep_their_rows_and_points():
    pos = pixel_positions(3, 4, dtype=torch.float64)
    graph = lift(pos, cyclic(4), PixelSquare(3))
    graph = graph.with_relative(graph.relative.bounded())
    rows = graph.relative.row
    pos.requires_grad_()
    assert graph.relative.row is rows
    with pytest.raises(ValueError, match="coordinates depend on its points"):
        graph.at(pos + 1.0)
    with pytest.raises(ValueError, match=r"pos: expected \(12, 2\)"):
        lift(pos, cyclic(4), PixelSquare(3)).at(pos[1:])


def test_gradients_reach_every_coordinate_and_equal_finite_differences():
    group = dihedral(3)
    pos = pixel_positions(3, 4, dtype=torch.float64).requires_grad_()  # a grid, whose displacements repeat
    weight = torch.randn(46, 6, 2, dtype=torch.float64)

    def loss(p):
        # The radius is between two distances of the grid, so rounding does not change the edges.
        return (weight * per_edge(lift(p, group, Radius(1.2), length=0.5)).sin()).sum()

    graph = lift(pos, group, Radius(1.2))
    assert graph.relative.row is None
    assert graph.relative.num_rows == graph.neighbors.num_edges
    assert torch.autograd.gradcheck(loss, pos, eps=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(loss(pos), pos)
    assert (gradient.abs() > 1e-6).all()
    torch.testing.assert_close(gradient.sum(0), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)


def test_with_and_without_gradient_the_same_graph():
    pos = pixel_positions(6, 7, dtype=torch.float64)
    wanted = lift(pos, dihedral(4), PixelSquare(3))
    assert wanted.relative.row is not None
    assert_same_graph(lift(pos.clone().requires_grad_(), dihedral(4), PixelSquare(3)), wanted, atol=1e-15)


# --- graphs as values -----------------------------------------------------------------------------------------


def test_moving_to_another_device_moves_every_tensor():
    graph = lift(image(5, 5), cyclic(4), PixelSquare(3))
    assert graph.relative.positions.device.type == "cpu"  # computed properties are moved too
    graph = graph.to("meta")
    assert {t.device.type for t in (graph.pos, graph.batch, graph.grid, graph.relative.positions)} == {"meta"}
    assert graph.relative.row.device.type == "meta"
    assert graph.neighbors.device.type == "meta"
    assert graph.device.type == "meta"
    assert graph.group == cyclic(4)
    cpu = lift(image(5, 5), cyclic(4), PixelSquare(3))
    assert_same_graph(cpu.to("cpu", non_blocking=True), cpu)


def test_astype_rounds_the_coordinates_alone():
    graph = lift(torch.randn(9, 2, dtype=torch.float64), cyclic(8), Radius(1.0))
    assert graph.relative.positions.dtype == torch.float64  # computed properties are rounded
    low = graph.astype(torch.float32)
    assert {low.pos.dtype, low.relative.positions.dtype} == {torch.float32}
    assert low.neighbors.source is graph.neighbors.source
    torch.testing.assert_close(low.relative.positions, graph.relative.positions.float(), rtol=0, atol=0)


@pytest.mark.parametrize("data", [image(5, 4), Data(pos=torch.randn(7, 2))], ids=["grid", "cloud"])
def test_pickling_keeps_everything(data):
    graph = lift(data, dihedral(3), Radius(1.5))
    again = pickle.loads(pickle.dumps(graph))
    assert_same_graph(again, graph)
    assert again.group == dihedral(3)
    clouds = pickle.loads(pickle.dumps(point_clouds(data)))
    assert torch.equal(clouds.pos, graph.pos)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to pin memory for")
def test_pin_memory_and_copy_to_a_gpu():
    graph = lift(image(6, 5), cyclic(8), Radius(1.5))
    pinned = graph.pin_memory()
    assert all(t.is_pinned() for t in (pinned.pos, pinned.batch, pinned.grid, pinned.relative.positions))
    there = pinned.to("cuda", non_blocking=True)
    assert there.device.type == "cuda"
    assert_same_graph(there.to("cpu"), graph)
    on_gpu = lift(image(6, 5).to("cuda"), cyclic(8), Radius(1.5))
    assert torch.equal(on_gpu.neighbors.source.cpu(), graph.neighbors.source)
    torch.testing.assert_close(per_edge(on_gpu).cpu(), per_edge(graph), rtol=0, atol=1e-6)


# --- rasters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 4), (3, 2), (4, 4), (28, 28)])
def test_pixel_positions_against_numpy(height, width):
    rows, columns = np.mgrid[:height, :width]
    wanted = np.stack([columns - (width - 1) / 2, (height - 1) / 2 - rows], axis=-1).reshape(-1, 2)
    for dtype in (torch.float32, torch.float64):
        found = pixel_positions(height, width, dtype=dtype)
        assert found.dtype == dtype
        assert torch.equal(found, torch.from_numpy(wanted).to(dtype))
        assert torch.equal(found.sum(0), torch.zeros(2, dtype=dtype))  # centered on the image


def test_a_quarter_turn_of_the_positions_is_that_of_the_picture():
    """Rotations are counter-clockwise as displayed, like numpy's rot90, also for pictures that are not square."""
    picture = torch.arange(15.0).reshape(3, 5)
    turned = cyclic(4).act(1, pixel_positions(3, 5))
    wanted = torch.rot90(picture)
    order = [int((turned - p).abs().sum(1).argmin()) for p in pixel_positions(5, 3)]
    assert torch.equal(picture.flatten()[order], wanted.flatten())


GRIDS = {"square": [(6, 6)], "wide": [(3, 8)], "mixed": [(4, 4), (7, 3), (3, 5), (4, 4)], "odd": [(5, 7), (9, 3)]}


def numbered(sizes):
    """Return numbers of the points of each image, as pictures."""
    starts = np.cumsum([0, *(h * w for h, w in sizes)])
    return [np.arange(a, b).reshape(size) for a, b, size in zip(starts, starts[1:], sizes, strict=False)]


@pytest.mark.parametrize("sizes", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("margin", [0, 1])
def test_crop_against_numpy(sizes, margin):
    kept, grid = crop(torch.tensor(sizes), margin)
    wanted = [p[margin : p.shape[0] - margin, margin : p.shape[1] - margin] for p in numbered(sizes)]
    assert kept.tolist() == np.concatenate([p.ravel() for p in wanted]).tolist()
    assert grid.tolist() == [list(p.shape) for p in wanted]


@pytest.mark.parametrize("sizes", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pooling_cells_against_numpy(sizes, size):
    cell, grid, exact = pooling_cells(torch.tensor(sizes), size)
    wanted = np.full(sum(h * w for h, w in sizes), -1)
    number = 0
    for picture in numbered(sizes):
        for row in range(picture.shape[0] // size):
            for column in range(picture.shape[1] // size):
                block = picture[size * row : size * (row + 1), size * column : size * (column + 1)]
                wanted[block] = number
                number += 1
    assert cell.tolist() == wanted.tolist()
    assert grid.tolist() == [[h // size, w // size] for h, w in sizes]
    assert exact == all(h % size == 0 and w % size == 0 for h, w in sizes)


def images(sizes):
    """Return images of these sizes as point clouds."""
    pos = torch.cat([pixel_positions(*size) for size in sizes])
    ptr = torch.tensor([0, *np.cumsum([h * w for h, w in sizes])])
    return point_clouds(pos, ptr=ptr, grid=torch.tensor(sizes))


@pytest.mark.parametrize("reduction", ["max", "mean", "sum"])
def test_grid_pool_against_torch(reduction):
    sizes = [(4, 6), (2, 2), (6, 4)]
    pictures = [torch.randn(h, w, 3, 2, dtype=torch.float64) for h, w in sizes]
    x = torch.cat([p.flatten(0, 1) for p in pictures])
    pool = GridPool(2, reduction)
    cell, grid = pool.cells(torch.tensor(sizes))
    found = pool.reduce(x, cell, int(grid.prod(1).sum()))
    assert torch.equal(pool(x, images(sizes)), found)
    blocks = [p.unfold(0, 2, 2).unfold(1, 2, 2).flatten(-2) for p in pictures]
    reduced = [b.amax(-1) if reduction == "max" else getattr(b, reduction)(-1) for b in blocks]
    torch.testing.assert_close(found, torch.cat([r.flatten(0, 1) for r in reduced]))


def test_pooled_positions_are_centers_of_cells():
    sizes = torch.tensor([[4, 6], [5, 3]])
    pos = torch.cat([pixel_positions(4, 6), pixel_positions(5, 3)])
    cell, grid, _ = pooling_cells(sizes, 2)
    found = GridPool().centers(pos, cell, int(grid.prod(1).sum()))
    assert torch.equal(found[:6], 2 * pixel_positions(2, 3))
    assert torch.equal(found[6:], 2 * pixel_positions(2, 1) + torch.tensor([-0.5, 0.5]))


def test_pixels_at_one_place_are_no_raster():
    pos = pixel_positions(2, 3)
    clouds = Data(pos=pos, grid=torch.tensor([[2, 3]]))
    assert Raster.read(point_clouds(clouds))[0].sides == (2, 3)
    clouds.pos = torch.cat([pos[:1], pos[:1], pos[2:]])
    with pytest.raises(ValueError, match="points are not on an upright lattice of 2 x 3 pixels"):
        Raster.read(point_clouds(clouds))


# --- degenerate clouds through every layer --------------------------------------------------------------------


def coincident(dim):
    point = torch.arange(1.0, dim + 1)
    return torch.stack([point, point, point, point + 0.5])


CLOUDS = {
    "no points": lambda dim: torch.zeros(0, dim),
    "one point": lambda dim: torch.full((1, dim), 3.0),
    "isolated points": lambda dim: 100 * torch.arange(4.0)[:, None].expand(-1, dim),
    "coincident points": coincident,
    "all at one place": lambda dim: torch.ones(5, dim),
}
NEIGHBORHOODS = {
    "radius": Radius(1.0),
    "radius without self": Radius(1.0, include_self=False),
    "nearest": Nearest(2),
    "nearest without self": Nearest(2, include_self=False, ties="all"),
    "square": PixelSquare(3),
    "all pairs": AllPairs(),
    "no edges": Given(torch.zeros(2, 0, dtype=torch.int64)),
}
PLANE, SPACE = cyclic(4), cyclic_about(3)


@each("cloud", CLOUDS)
@pytest.mark.parametrize("neighborhood", NEIGHBORHOODS.values(), ids=NEIGHBORHOODS)
@pytest.mark.parametrize("group", [PLANE, SPACE], ids=["plane", "space"])
def test_degenerate_clouds_can_be_lifted(cloud, neighborhood, group):
    pos = cloud(group.dim)
    graph = lift(pos, group, neighborhood)
    assert graph.num_points == len(pos)
    assert graph.num_clouds == 1
    assert graph.relative.positions.shape == (graph.relative.num_rows, group.order, group.dim)
    assert torch.isfinite(graph.relative.positions).all()
    assert per_edge(graph).shape == (graph.neighbors.num_edges, group.order, group.dim)
    assert graph.frame_positions().shape == (len(pos), group.order, group.dim)
    assert_same_graph(pickle.loads(pickle.dumps(graph)), graph)


def test_maxima_of_zero_have_the_whole_gradient():
    """An initial value of zero would take a share of it."""
    x = torch.tensor([[0.0], [-1.0], [-2.0], [-3.0]], dtype=torch.float64, requires_grad=True)
    image = point_clouds(Data(pos=pixel_positions(2, 2, dtype=torch.float64), grid=torch.tensor([[2, 2]])))
    empty_first = point_clouds(torch.zeros(4, 2), batch=torch.ones(4, dtype=torch.int64))
    for pool, clouds in ((GridPool(2), image), (CloudPool("max"), image), (CloudPool("max"), empty_first)):
        pooled = pool(x, clouds)
        assert torch.equal(pooled, torch.zeros_like(pooled))
        (found,) = torch.autograd.grad(pooled.square().sum() + pooled.sum(), x, create_graph=True)
        assert found.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
        (second,) = torch.autograd.grad(found.sum(), x)
        assert second.flatten().tolist() == [2.0, 0.0, 0.0, 0.0]
    same = torch.full((4, 1), -2.0, requires_grad=True)
    CloudPool("max")(same, empty_first).sum().backward()
    assert same.grad.flatten().tolist() == [0.25] * 4  # equal maxima share it


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_pooling_nothing(reduction):
    empty = torch.zeros(0, 4, 3, requires_grad=True)
    assert FiberPool(reduction)(empty).shape == (0, 3)
    nothing = point_clouds(torch.zeros(0, 2), ptr=torch.tensor([0, 0, 0]))
    assert torch.equal(CloudPool(reduction)(empty, nothing), torch.zeros(2, 4, 3))
    x = torch.randn(3, 4, 3)
    pooled = CloudPool(reduction)(x, point_clouds(torch.zeros(3, 2), batch=torch.tensor([2, 0, 2])))
    assert torch.equal(pooled[1], torch.zeros(4, 3))
    torch.testing.assert_close(pooled[0], x[1])
    cell, grid = GridPool(2, reduction).cells(torch.zeros(0, 2, dtype=torch.int64))
    assert (cell.shape, grid.shape) == ((0,), (0, 2))
    assert GridPool(2, reduction).reduce(empty, cell, 0).shape == (0, 4, 3)


def network(group, neighborhood, blocks=(2,), crops=None):
    stages = Stages(blocks, crops=crops)
    return GSANet(group, 1, 3, channels=8, heads=2, neighborhood=neighborhood, blocks=stages)


def test_a_batch_without_clouds_has_no_logits():
    data = Data(x=torch.zeros(0, 1), pos=torch.zeros(0, 2), batch=torch.zeros(0, dtype=torch.int64))
    assert network(PLANE, Radius(1.0)).eval()(data).shape == (0, 3)
    data.ptr, data.grid = torch.tensor([0]), torch.zeros(0, 2, dtype=torch.int64)
    for net in (network(PLANE, Radius(1.0)), network(PLANE, PixelSquare(3), blocks=(1, 1), crops=(1, 0))):
        assert net.eval()(data).shape == (0, 3)


def test_geometry_made_beforehand_gives_the_same_logits():
    net = network(PLANE, PixelSquare(3), blocks=(1, 1), crops=(1, 0)).eval()
    batch = Batch.from_data_list([image(6, 8), image(10, 4)])
    geometry = net.geometry(batch)
    assert isinstance(geometry.clouds[-1], PointClouds)
    assert torch.equal(net(batch, geometry), net(batch))
    assert torch.equal(net(batch, pickle.loads(pickle.dumps(geometry))), net(batch))


@pytest.mark.parametrize(
    ("batch", "each"),
    [
        ([0, 0, 1, 1, 2, 2], 2),
        ([0, 0, 0, 1, 1, 1], 3),
        (None, 6),
        ([0, 1, 0, 1, 0, 1], None),
        ([0, 0, 0, 0, 1, 2], None),
    ],
)
def test_clouds_of_equal_size_are_known_and_change_no_sums(batch, each):
    batch = None if batch is None else torch.tensor(batch)
    clouds = point_clouds(torch.randn(6, 3), batch=batch)
    assert clouds.each == each
    unknown = replace(clouds, each=None)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    norm = CloudNorm(5).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    torch.testing.assert_close(clouds.sum(x), unknown.sum(x))
    torch.testing.assert_close(clouds.mean(x), unknown.mean(x))
    torch.testing.assert_close(norm(x, clouds), norm(x, unknown))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64])
def test_sums_and_means_of_masks_and_integers(dtype):
    numbers = torch.tensor([1, 1, 0, 1, 100, 100]).to(dtype)
    alike = point_clouds(torch.randn(3, 2, 3))
    for clouds in (alike, replace(alike, each=None)):
        wanted = torch.tensor([2, 1, 2 if dtype == torch.bool else 200])
        assert torch.equal(clouds.sum(numbers), wanted)
        assert torch.equal(clouds.mean(numbers), wanted / 2)
    clouds = point_clouds(torch.randn(6, 3), batch=torch.tensor([0, 2, 1, 1, 2, 2]))
    assert torch.equal(clouds.sum(torch.ones(6, dtype=dtype)), clouds.counts)
    assert torch.equal(clouds.mean(torch.ones(6, dtype=dtype)), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_many_numbers_in_half_precision_are_rounded_once(dtype):
    clouds = point_clouds(torch.zeros(5001, 3), batch=torch.tensor([0] * 5000 + [1]))
    edges = Neighbors.from_edge_index(torch.stack([torch.arange(5001), clouds.batch]), 5001)
    ones = torch.ones(5001, dtype=dtype)
    for x in (ones, ones[:, None].expand(-1, 3)):
        wanted = torch.tensor([5000, 1]).to(dtype).view(2, *[1] * (x.ndim - 1)).expand(2, *x.shape[1:])
        assert torch.equal(clouds.sum(x), wanted)
        assert torch.equal(edges.sum_to_targets(x)[:2], wanted)
        assert torch.equal(clouds.mean(100 * x), torch.full_like(wanted, 100))


def test_graphs_of_some_points_do_not_keep_the_size_of_clouds():
    graph = lift(torch.randn(2, 5, 3), tetrahedral(), Radius(2.0))
    assert graph.each == 5
    assert graph.subset(torch.tensor([0, 1, 2, 5]), Radius(2.0)).each is None


def test_means_of_clouds_of_equal_size_are_over_all_scales():
    graph = lift(torch.randn(2, 5, 3), ScaleFrames(tetrahedral()), Radius(2.0))
    assert graph.each is None
    places = graph.by_level(graph.pos).mean(dim=1).view(2, 5, 3)
    torch.testing.assert_close(graph.mean(graph.pos), places.mean(dim=1))


def test_vectors_in_frames_are_those_of_all_points():
    graph = lift(torch.randn(2, 5, 3), tetrahedral(), Radius(2.0))
    for shape in ((9, 1, 3), (10, 1, 2), (10, 3)):
        with pytest.raises(ValueError, match=r"vectors: expected \[10, count, 3\]"):
            graph.seen_in_frames(torch.zeros(shape))
