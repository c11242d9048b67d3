"""Group convolution on grids and on point clouds: against loops, under every group, and against each other."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data

from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    PixelSquare,
    Radius,
    Stencil,
    lift,
    lift_rasters,
    pixel_positions,
    point_clouds,
)
from lieattn.groups import FiniteGroup, cyclic, cyclic_about, dihedral, reflection, trivial
from lieattn.nn import (
    AttentiveGroupConvolution,
    FieldBatchNorm,
    GridAttentiveConvolution,
    GridGroupConvolution,
    GridLiftingConvolution,
    GridSpatialPool,
    GroupConvolution,
    LieConvolution,
    act_on_grid,
    from_grid,
    grid_images,
    to_grid,
)
from lieattn.nn.relative import BumpKernel, NetworkKernel, TableKernel
from lieattn.testing import assert_equivariant, random_cloud, randomize
from tests.cases import GROUPS, SMALL_GROUPS, each, refuses, turns

LATTICE_GROUPS = {
    "Z2": trivial(2),
    "C2": cyclic(2),
    "C4": cyclic(4),
    "rows": reflection(2),
    "columns": reflection(2, axis=0),
    "diagonal": reflection(2, axis=(1.0, 1.0)),
    "D1": dihedral(1),
    "D2": dihedral(2),
    "D4": dihedral(4),
    **{name: GROUPS[name] for name in ("C4_about_z", "mirror3", "T", "O")},
}
every_lattice_group = each("group", LATTICE_GROUPS)


def grid_error(layer, group, x):
    """Return the largest error over the group, for a layer from planes or fields to fields."""
    out = layer(x)
    return max(
        float((layer(act_on_grid(group, h, x)) - act_on_grid(group, h, out)).abs().max().detach()) for h in turns(group)
    )


def sides_of(group, *sides):
    """Return rows and columns, and a third side in space."""
    return sides if group.dim == 2 else (sides[0] - 1, *sides)


def grid_graph(images, group, size):
    """Return the pixels of images ``[batch, ..., *sides]`` as lifted points."""
    batch, sides = images.shape[0], images.shape[-group.dim :]
    pos = pixel_positions(*sides, dtype=images.dtype)
    index = torch.arange(batch).repeat_interleave(len(pos))
    pixels = point_clouds(pos.repeat(batch, 1), batch=index, grid=torch.tensor([sides] * batch))
    return lift(pixels, group, PixelSquare(size))


# --- grids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@every_lattice_group
def test_grid_layers_commute_with_the_group(group, size):
    for pad, dilation, sides in ((0, 1, (8, 7)), (1, 2, (7, 9)), (2, 1, (6, 6))):
        if group.dim == 3:
            sides = (4, *(side - 3 for side in sides))
            if dilation * (size - 1) >= 4 + 2 * pad:
                continue
        options = {"pad": pad, "dilation": dilation}
        lifting = randomize(GridLiftingConvolution(group, 2, 3, size, **options)).double()
        convolution = randomize(GridGroupConvolution(group, 3, 2, size, **options)).double()
        x = torch.randn(2, 2, *sides, dtype=torch.float64)
        assert grid_error(lifting, group, x) < 1e-10
        assert grid_error(convolution, group, torch.randn(2, 3, group.order, *sides, dtype=torch.float64)) < 1e-10


@every_lattice_group
def test_grid_group_convolution_is_the_sum_of_the_paper(group):
    """f'(h, y) = μ Σ f(h̃, y + p) ψ(h⁻¹h̃, h⁻¹p), by loops over points, with matrices instead of indices."""
    dim = group.dim
    layer = randomize(GridGroupConvolution(group, 1, 1, 3, measure=0.7)).double()
    x = torch.randn(1, 1, group.order, *[4] * dim, dtype=torch.float64)
    with torch.no_grad():
        out = layer(x)
    inverse = torch.linalg.inv(group.elements)
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)[:dim]  # rows point down
    expected = torch.zeros(group.order, *[2] * dim, dtype=torch.float64)
    for h, step in itertools.product(range(group.order), itertools.product((-1, 0, 1), repeat=dim)):
        poses = group.index(inverse[h] @ group.elements)
        displacement = signs * torch.tensor(step[::-1], dtype=torch.float64)  # from axes of arrays to coordinates
        seen = (signs * (inverse[h] @ displacement)).flip(0).round().long().tolist()
        values = layer.weight[0, 0][(poses, *(1 + place for place in seen))].detach()
        window = x[(0, 0, slice(None), *(slice(1 + place, 3 + place) for place in step))]
        expected[h] += 0.7 * torch.einsum("g,g...->...", values, window)
    torch.testing.assert_close(out[0, 0], expected, rtol=1e-10, atol=1e-10)


@every_lattice_group
def test_act_on_grid_moves_pixels_with_their_points(group):
    sides = [4] * group.dim
    image = torch.randn(1, 2, *sides, dtype=torch.float64)
    field = torch.randn(1, 2, group.order, *sides, dtype=torch.float64)
    pos = pixel_positions(*sides, dtype=torch.float64)
    for h in range(group.order):
        moved = group.act(h, pos)
        place = torch.cdist(moved, pos).argmin(dim=1)
        expected = torch.empty(len(pos), 2, dtype=torch.float64)
        expected[place] = from_grid(image, group.dim)
        torch.testing.assert_close(from_grid(act_on_grid(group, h, image), group.dim), expected, rtol=0, atol=0)
        expected = torch.empty(len(pos), group.order, 2, dtype=torch.float64)
        expected[place] = group.translate(h, from_grid(field, group.dim))
        torch.testing.assert_close(from_grid(act_on_grid(group, h, field), group.dim), expected, rtol=0, atol=0)


def test_quarter_turns_are_counter_clockwise():
    x = torch.randn(1, 1, 4, 6)
    torch.testing.assert_close(act_on_grid(cyclic(4), 1, x), x.rot90(1, (-2, -1)))
    voxels = torch.randn(1, 1, 3, 4, 6)  # about the axis of the layers, like the planar groups
    torch.testing.assert_close(act_on_grid(cyclic_about(4), 1, voxels), voxels.rot90(1, (-2, -1)))


STRIDES = {
    "odd": (cyclic(4), (7, 9), True),
    "even": (cyclic(4), (8, 8), False),
    "nothing is reversed": (trivial(2), (8, 8), True),
    # A mirror of x reverses columns only, so any number of rows keeps the symmetry, and the reverse.
    "odd columns": (reflection(2, 0), (6, 5), True),
    "even columns": (reflection(2, 0), (5, 6), False),
    "odd rows": (reflection(2, 1), (5, 6), True),
    "even rows": (reflection(2, 1), (6, 5), False),
    # Array rows run against the second coordinate: exchanging the coordinates reverses rows and columns.
    "exchange": (reflection(2, axis=(1.0, -1.0)), (4, 4), False),
    "transpose": (reflection(2, axis=(1.0, 1.0)), (4, 4), True),
    "cube": (cyclic_about(3, (1.0, 1.0, 1.0)), (4, 4, 4), False),
}


@pytest.mark.parametrize("case", STRIDES)
def test_strides_are_exact_or_refused(case):
    group, sides, exact = STRIDES[case]
    x, options = torch.randn(1, 1, *sides, dtype=torch.float64), {"stride": 2, "pad": 1}
    loose = GridLiftingConvolution(group, 1, 2, 3, inexact="allow", **options).double()
    error = grid_error(loose, group, x)
    assert error < 1e-12 if exact else error > 1e-3  # the reason for refusing
    layer = GridLiftingConvolution(group, 1, 2, 3, **options).double()
    if exact:
        layer(x)
        return
    side = next(side for side in sides if side % 2 == 0)
    with pytest.raises(ValueError, match=rf"stride 2 samples {side} pixels off .*use {side - 1} or {side + 1} pixels"):
        layer(x)
    with pytest.warns(UserWarning, match="stride 1 and pooling by 2"):
        GridLiftingConvolution(group, 1, 2, 3, inexact="warn", **options).double()(x)


def test_batches_without_momentum_weigh_the_same():
    norm, expected = FieldBatchNorm(3, momentum=None), torch.nn.BatchNorm1d(3, momentum=None)
    for seed in range(3):
        x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(norm(x).flatten(0, 1), expected(x.flatten(0, 1)))
    torch.testing.assert_close(norm.running_var, expected.running_var)


def test_a_momentum_of_zero_keeps_the_running_statistics():
    norm = FieldBatchNorm(3, momentum=0.0)
    norm(torch.randn(5, 4, 3))
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))


def test_images_without_pixels_are_refused():
    layer = GridGroupConvolution(cyclic(4), 1, 2, 3, pad=2)
    with pytest.raises(ValueError, match="x: expected images with pixels, got 0 x 5 pixels"):
        layer(torch.randn(1, 1, 4, 0, 5))
    assert layer(torch.randn(0, 1, 4, 3, 5)).shape == (0, 2, 4, 5, 7)  # no images are fine


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_the_last_rows_and_columns_are_dropped(reduction):
    x, pool = torch.randn(2, 3, 5, 7), GridSpatialPool(2, reduction, inexact="allow")
    assert torch.equal(pool(x), pool(x[..., :4, :6]))


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_norm_and_pooling_commute_with_the_group(reduction):
    voxels = torch.randn(2, 3, 24, 4, 6, 2, dtype=torch.float64)
    assert grid_error(GridSpatialPool(2, reduction, dim=3), SMALL_GROUPS["O"], voxels) < 1e-12
    group = dihedral(4)
    norm, pool = randomize(FieldBatchNorm(3, axis=1)).double(), GridSpatialPool(2, reduction)
    norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 8, 6, 4, dtype=torch.float64)
    assert grid_error(lambda x: pool(norm(x)), group, x) < 1e-12
    norm.train()
    torch.testing.assert_close(norm(x).mean(dim=(0, 2, 3, 4)), norm.bias)
    with pytest.warns(UserWarning, match="breaks equivariance"):
        GridSpatialPool(2, inexact="warn")(x[..., :5, :])
    GridSpatialPool(2, inexact="allow")(x[..., :5, :])
    with pytest.raises(ValueError, match="expected images of at least 2 x 2 pixels"):
        pool(x[..., :1, :])


@pytest.mark.parametrize("dim", [2, 3])
def test_equal_maxima_share_the_gradient(dim):
    """The gradient moves with the image, also where relu made several pixels of a cell equal."""
    x = torch.randn(2, 3, *[4] * dim, dtype=torch.float64).relu()
    weight, pool = torch.randn(2, 3, *[2] * dim, dtype=torch.float64), GridSpatialPool(2, dim=dim)
    x[:, :, :2, :2] = 0.0

    def gradient(x, weight):
        x = x.clone().requires_grad_()
        return torch.autograd.grad((pool(x) * weight).sum(), x)[0]

    for axes in ((-1, -2), (-2, -1)):
        moved = gradient(x.rot90(1, axes), weight.rot90(1, axes))
        torch.testing.assert_close(moved, gradient(x, weight).rot90(1, axes))
    torch.testing.assert_close(pool(x), (F.max_pool2d, F.max_pool3d)[dim - 2](x, 2))


def test_measures_are_those_of_the_code():
    def measures(group):
        return [kind(group, 1, 1, 3).measure for kind in (GridGroupConvolution, GridAttentiveConvolution)]

    pi = torch.pi
    assert [measures(group) for group in (cyclic(4), dihedral(4))] == [[pi / 2, pi / 2], [pi, pi / 4]]
    assert [measures(group) for group in (trivial(2), reflection(2), SMALL_GROUPS["O"])] == [[1.0, 1.0]] * 3
    assert GridLiftingConvolution(cyclic(4), 1, 1, 3).measure == 1.0


test_grid_errors_name_the_argument = refuses(
    (lambda: GridLiftingConvolution(cyclic(8), 1, 1, 3), "group: expected a group of the plane or space that"),
    (lambda: GridGroupConvolution(cyclic(4), 1, 1, 3)(torch.randn(1, 1, 8, 5, 5)), r"x: expected a field on C4"),
    (lambda: GridLiftingConvolution(cyclic(4), 1, 1, 3)(torch.randn(1, 2, 5, 5)), r"x: expected planes \[batch, 1"),
    (lambda: GridLiftingConvolution(GROUPS["O"], 1, 1, 3)(torch.randn(1, 1, 5, 5)), r"\[batch, 1, layers, rows, col"),
    (lambda: FieldBatchNorm(3, axis=1)(torch.randn(2, 4, 5, 5)), "x: expected"),
    (lambda: act_on_grid(cyclic(4), 0, torch.randn(1, 1, 3, 5, 5)), "x: expected"),
    (lambda: to_grid(torch.randn(5, 1), torch.tensor([[2, 2]])), r"x: expected \[points=4"),
    (lambda: to_grid(torch.randn(8, 1), torch.tensor([[2, 2], [1, 4]])), "grid: expected"),
    (lambda: from_grid(torch.randn(2, 2)), "x: expected"),
)


test_borders_and_dilations_count_for_strides = refuses(
    (
        lambda: GridGroupConvolution(cyclic(4), 1, 1, 3, dilation=2)(torch.zeros(1, 1, 4, 4, 4)),
        "side 3 with dilation 2 and pad 0 does not fit into 4 x 4",
    ),
    (lambda: GridGroupConvolution(cyclic(4), 1, 1, 1, stride=4, pad=1)(torch.zeros(1, 1, 4, 2, 2)), "use 3 pixels, or"),
)


def test_initial_kernels_in_space_are_uniform():
    largest = float(GridGroupConvolution(LATTICE_GROUPS["T"], 2, 2, 3).weight.detach().abs().max())
    assert 0.9 * 54**-0.5 < largest <= 54**-0.5


# --- images as points -----------------------------------------------------------------------------------------


def image_batch(images):
    """Return images ``[images, channels, *sides]`` as points."""
    sides, dim = images.shape[2:], images.ndim - 2
    pos, grid = pixel_positions(*sides, dtype=images.dtype), torch.tensor([sides])
    return Batch.from_data_list([Data(x=from_grid(image[None], dim), pos=pos, grid=grid) for image in images])


@every_lattice_group
def test_moved_points_are_read_as_the_moved_image(group):
    images = torch.randn(3, 2, *sides_of(group, 4, 6), dtype=torch.float64)
    batch = image_batch(images)
    torch.testing.assert_close(grid_images(batch), images)
    torch.testing.assert_close(to_grid(batch.x, batch.grid), images)
    assert grid_images(images) is images
    for h in range(group.order):
        moved = batch.clone()
        moved.pos = group.act(h, batch.pos) + torch.tensor([3.25, -100.5, 7.0], dtype=torch.float64)[: group.dim]
        torch.testing.assert_close(grid_images(moved), act_on_grid(group, h, images), rtol=0, atol=0)


def test_points_off_the_lattice_are_refused():
    batch = image_batch(torch.randn(2, 1, 4, 4))
    turned = batch.clone()
    turned.pos = cyclic(8).act(1, batch.pos)
    with pytest.raises(ValueError, match="points are not on an upright lattice of 4 x 4 pixels"):
        grid_images(turned)
    with pytest.raises(TypeError, match="data: expected images"):
        grid_images(Data(pos=batch.pos))
    with pytest.raises(ValueError, match="data: expected points of images"):
        grid_images(Data(x=batch.x[:16], pos=batch.pos[:16]))
    with pytest.raises(ValueError, match=r"data\.x: expected a row for each of 16 points"):
        grid_images(Data(x=batch.x, pos=batch.pos[:16], grid=torch.tensor([[4, 4]])))
    with pytest.raises(ValueError, match=r"data\.x.*data\.pos|data\.pos.*data\.x"):
        grid_images(Data(x=batch.x[:16].to("meta"), pos=batch.pos[:16], grid=torch.tensor([[4, 4]])))
    with pytest.raises(ValueError, match="data: expected images"):
        grid_images(torch.randn(4, 4))
    single = Data(x=torch.ones(1, 1), pos=torch.tensor([[5.0, 2.0]]), grid=torch.tensor([[1, 1]]))
    assert grid_images(single).shape == (1, 1, 1, 1)


# --- point clouds ---------------------------------------------------------------------------------------------

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("lifting", [True, False], ids=["lifting", "group"])
@pytest.mark.parametrize("form", ["full", "separable", "bumps", "depthwise bumps"])
@pytest.mark.parametrize("name", ["C3", "D3", "T"])
def test_evaluations_of_a_kernel_agree(name, form, lifting):
    """Evaluation with the operator equals the sum over edges with the values of the kernel."""
    group = FiniteGroup.from_matrices(SMALL_GROUPS[name].elements.flip(0))  # the identity is the last element
    pos, batch = random_cloud(group, 10, clouds=2)
    graph = lift(pos, group, Radius(1.5), batch=batch)
    if "bumps" in form:
        kernel = BumpKernel(group, 2, 3 if form == "bumps" else 2, lifting=lifting, side=3, depthwise=form != "bumps")
    else:
        kernel = NetworkKernel(group, 2, 3, lifting=lifting, form=form, hidden=5)
    kernel = randomize(kernel.double())
    x = torch.randn(10, 1 if lifting else group.order, 2, dtype=torch.float64)
    with torch.no_grad():
        out, psi, row = kernel.convolve(x, graph), kernel(graph).psi, graph.relative.row
        messages = torch.einsum("eaboc,ebc->eao", psi if row is None else psi[row], x[graph.neighbors.source])
        expected = torch.zeros_like(out).index_add(0, graph.neighbors.target, messages)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("lifting", [True, False], ids=["lifting", "group"])
@pytest.mark.parametrize("name", ["table", "full", "separable", "bumps", "depthwise bumps"])
def test_dense_convolutions_of_rasters_equal_those_over_lists(name, lifting, reduction):
    group = dihedral(4)
    if name == "table":
        kernel = TableKernel.square(group, 2, 3, 3, lifting=lifting)
    elif "bumps" in name:
        kernel = BumpKernel(group, 2, 3 if name == "bumps" else 2, lifting=lifting, depthwise=name != "bumps")
    else:
        kernel = NetworkKernel(group, 2, 3, lifting=lifting, form=name)
    layer = randomize(GroupConvolution(kernel, reduction=reduction)).double()
    pos = pixel_positions(4, 5, dtype=torch.float64)
    clouds = point_clouds(
        pos.repeat(2, 1), batch=torch.arange(2).repeat_interleave(20), grid=torch.tensor([[4, 5]] * 2)
    )
    graph = lift(clouds, group, PixelSquare(3))
    dense = lift_rasters(clouds, FiniteFrames(group), PixelSquare(3), graph.space)
    assert isinstance(dense.terms, Stencil)
    x = torch.randn(40, *(() if lifting else (8,)), 2, dtype=torch.float64)
    torch.testing.assert_close(layer(x, dense), layer(x, graph), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [3, 5])
@every_lattice_group
def test_grid_and_cloud_give_the_same(group, size, dtype):
    dim = group.dim
    x = torch.randn(2, 2, *((6, 5) if dim == 2 else (2, 3, 4)), dtype=dtype)
    graph = grid_graph(x, group, size)
    on_grid = GridLiftingConvolution(group, 2, 3, size, pad=size // 2).to(dtype)
    kernel = TableKernel.square(group, 2, 3, size, lifting=True).to(dtype)
    kernel.weight.data = on_grid.weight.data.reshape(kernel.weight.shape)
    with torch.no_grad():
        field = on_grid(x)
        found = GroupConvolution(kernel)(from_grid(x, dim), graph)
        torch.testing.assert_close(found, from_grid(field, dim), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        on_grid = GridGroupConvolution(group, 3, 2, size, pad=size // 2).to(dtype)
        kernel = TableKernel.square(group, 3, 2, size).to(dtype)
        kernel.weight.data = on_grid.weight.data.reshape(kernel.weight.shape)
        expected = from_grid(on_grid(field), dim)
        found = GroupConvolution(kernel)(from_grid(field, dim), graph)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("lifting", [True, False], ids=["lifting", "group"])
@pytest.mark.parametrize("name", ["C4", "D4", "C4_about_z", "T"])
def test_attention_can_be_any_group_convolution(name, lifting):
    """GSA-Nets, section 5.3: each head attends to one relative element only; on pixels, voxels and at borders."""
    group = GROUPS[name]
    x = torch.randn(1, 2, *(() if lifting else (group.order,)), *[3] * group.dim, dtype=torch.float64)
    graph = grid_graph(x, group, 3)
    offsets = pixel_positions(*[3] * group.dim, dtype=torch.float64)
    if name == "T":  # a cross instead of a cube: 84 elements instead of 324
        offsets = offsets[offsets.abs().sum(dim=1) <= 1]
        graph = lift(graph.pos, group, Radius(1.1))
    convolution = randomize(GroupConvolution(TableKernel(group, 2, 3, offsets, lifting=lifting)).double())
    attention = convolution.as_attention()
    field = from_grid(x, group.dim)
    with torch.no_grad():
        torch.testing.assert_close(attention(field, graph), convolution(field, graph), rtol=1e-12, atol=1e-12)
        weights = attention.weights(field, graph)
    inner = graph.neighbors.target == len(graph.pos) // 2  # which has all neighbors
    assert weights.shape[-1] == attention.heads == convolution.kernel.weight[0, 0].numel()
    most = weights[inner].flatten(2, -2).amax(dim=(0, 2))
    torch.testing.assert_close(most, torch.ones(group.order, attention.heads).double(), rtol=0, atol=0)
    other = GroupConvolution(NetworkKernel(group, 2, 3))
    with pytest.raises(ValueError, match="expected 'sum' and a TableKernel, got 'sum' and a NetworkKernel"):
        other.as_attention()


@pytest.mark.parametrize("lifting", [False, True])
def test_convolution_is_attention_in_smooth_neighborhoods(lifting):
    group = cyclic(4)
    graph = lift(pixel_positions(4, 4, dtype=torch.float64), group, Radius(1.6, smooth=True))
    convolution = randomize(GroupConvolution(TableKernel.square(group, 2, 3, 3, lifting=lifting)).double())
    x = torch.randn(16, *(() if lifting else (4,)), 2, dtype=torch.float64)
    with torch.no_grad():
        found = convolution.as_attention()(x, graph)
        torch.testing.assert_close(found, convolution(x, graph), rtol=1e-12, atol=1e-12)


def test_tables_serve_groups_that_leave_the_lattice():
    """C8 rotates offsets to places between pixels: the table has rows for them, and the layer is equivariant."""
    group = cyclic(8)
    pos = pixel_positions(4, 4, dtype=torch.float64)
    kernel = TableKernel(group, 1, 2, torch.tensor([[0.0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]]), lifting=True)
    layer = randomize(GroupConvolution(kernel).double())
    assert len(kernel.rows) == 9
    x = torch.randn(16, 1, dtype=torch.float64)
    assert_equivariant(lambda x, pos: layer(x, lift(pos, group, Radius(1.1))), group, x, pos, input_field=False)


def test_a_network_at_lattice_offsets_is_a_table():
    group = dihedral(4)
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    graph = grid_graph(x, group, 3)
    network = randomize(NetworkKernel(group, 2, 3, lifting=True, hidden=4).double())
    table = TableKernel.square(group, 2, 3, 3, lifting=True).double()
    offsets = lift(table.rows, trivial(2), Radius(0.1)).pos / graph.length
    units = torch.sin(network.position(offsets))
    table.weight.data = torch.einsum("rm,moc->ocr", units, network.mix)[:, :, None].detach()
    features = from_grid(x)
    with torch.no_grad():
        found, expected = GroupConvolution(network)(features, graph), GroupConvolution(table)(features, graph)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_means_divide_by_the_number_of_neighbors():
    group = cyclic(4)
    pos, _ = random_cloud(group, 10)
    graph = lift(pos, group, Radius(1.5))
    x, degree = torch.randn(10, 4, 2, dtype=torch.float64), graph.degree[:, None, None]
    kernel = randomize(NetworkKernel(group, 2, 3).double())
    for made in (GroupConvolution, AttentiveGroupConvolution):
        options = {"attention": "pose"} if made is AttentiveGroupConvolution else {}
        total = randomize(made(kernel, **options)).double()
        mean = made(kernel, reduction="mean", **options).double()
        mean.load_state_dict(total.state_dict())
        torch.testing.assert_close(mean(x, graph) * degree, total(x, graph), rtol=1e-12, atol=1e-12)
    lie = {
        divide: LieConvolution(2, 3, graph.relative.num_coordinates, divide=divide).double()
        for divide in ("none", "neighbors", "published")
    }
    for layer in lie.values():
        layer.load_state_dict(randomize(lie["none"]).state_dict())
    outs = {divide: layer(x, graph) for divide, layer in lie.items()}
    bias, count = lie["none"].bias, 4 * degree  # elements over a point
    torch.testing.assert_close((outs["neighbors"] - bias) * count, outs["none"] - bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outs["published"] * count, outs["none"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["full", "separable"])
def test_lonely_points_get_zero(form):
    layer = randomize(GroupConvolution(NetworkKernel(cyclic(4), 2, 3, form=form, hidden=4), reduction="mean"))
    graph = lift(100 * pixel_positions(2, 2), cyclic(4), Radius(0.1, include_self=False))
    assert (layer(torch.randn(4, 4, 2), graph) == 0).all()


@pytest.mark.parametrize("form", ["full", "separable"])
def test_networks_do_not_round_positions_under_autocast(form):
    graph = lift(3 * torch.randn(9, 2), cyclic(4), Radius(4.0))
    kernel = NetworkKernel(cyclic(4), 2, 3, form=form)
    expected = kernel.features(graph)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel.features(graph), expected)


@pytest.mark.parametrize(("form", "variance"), [("full", 1.0), ("separable", 1 / 3)])
def test_initial_values_of_networks(form, variance):
    kernel = NetworkKernel(cyclic(4), 20, 200, form=form, hidden=200, init_scale=0.5)
    values = kernel(lift(torch.randn(4, 2), cyclic(4), AllPairs())).psi.detach()
    assert float(values.square().mean()) == pytest.approx(0.5**2 * variance / 20, rel=0.1)


def test_a_window_makes_the_output_continuous():
    """The output must not jump when a point leaves the neighborhood."""
    group = cyclic(4)
    layer = randomize(GroupConvolution(NetworkKernel(group, 1, 1, lifting=True, window=True)).double())
    x = torch.ones(2, 1, dtype=torch.float64)

    def at(distance):
        pos = torch.tensor([[0.0, 0.0], [distance, 0.0]], dtype=torch.float64)
        return layer(x, lift(pos, group, Radius(1.0)))[0]

    assert (at(1 - 1e-6) - at(1 + 1e-4)).abs().max() < 1e-8
    assert (at(0.5) - at(1.5)).abs().max() > 1e-3
    whole = lift(torch.tensor([[0.0, 0.0], [1.5, 0.0]], dtype=torch.float64), group, AllPairs(), length=1.0)
    assert torch.equal(layer(x, whole)[0], at(1.5))  # neighbors beyond the length have no influence


test_cloud_errors_name_the_argument = refuses(
    (lambda: TableKernel(cyclic(4), 1, 1, torch.zeros(0, 2)), "offsets: expected"),
    (lambda: TableKernel(cyclic(4), 1, 1, torch.full((1, 2), torch.inf)), "offsets: expected finite"),
)


@pytest.mark.parametrize("kernel", [BumpKernel, NetworkKernel])
def test_kernels_are_for_their_group(kernel):
    """The number of its elements may be the same."""
    with pytest.raises(ValueError, match="graph: is lifted to D2, but this kernel is for C4"):
        kernel(cyclic(4), 2, 1).convolve(torch.randn(5, 4, 2), lift(torch.randn(5, 2), dihedral(2), Radius(1.0)))
