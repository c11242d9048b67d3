"""Points and edges in the format of PyTorch Geometric, against the definition, in batches and in boxes."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.geometry import PrincipalFrames, Radius, point_clouds
from lieattn.geometry._search import images_within, pairs_between
from lieattn.models import FramewiseTransformer
from lieattn.transforms import (
    FarthestPoints,
    KNNGraph,
    RadiusGraph,
    fps,
    from_offsets,
    knn_graph,
    periodic_radius_graph,
    radius,
    radius_graph,
)


def points(number: int = 40, clouds: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, generator=generator), torch.randint(clouds, (number,), generator=generator)


def pairs(edges: torch.Tensor) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges.T}


@pytest.mark.parametrize("loop", [False, True])
def test_radius_graphs_are_all_pairs_within(loop):
    pos, batch = points()
    edges = radius_graph(pos, 1.5, batch, loop)
    assert torch.equal(edges, Radius(1.5, include_self=loop)(pos, batch).edge_index)
    assert torch.equal(radius_graph(pos, 1.5, batch, loop, "target_to_source"), edges.flip(0))


def test_nearest_have_one_center_in_row_one():
    pos, batch = points()
    edges = knn_graph(pos, 4, batch)
    assert torch.equal(edges[1].bincount(), torch.full((40,), 4))
    apart = torch.cdist(pos.double(), pos.double()).masked_fill(batch[:, None] != batch, torch.inf)
    apart.fill_diagonal_(torch.inf)
    nearest = apart.topk(4, largest=False).indices
    assert pairs(edges) == {(int(j), i) for i in range(40) for j in nearest[i]}
    with_self = knn_graph(pos, 4, batch, loop=True)
    assert torch.equal(with_self[1].bincount(), torch.full((40,), 4))
    assert {(i, i) for i in range(40)} <= pairs(with_self)
    assert pairs(knn_graph(pos, 1, batch, loop=True)) == {(i, i) for i in range(40)}


def test_ties_are_stable():
    grid = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))
    assert pairs(knn_graph(grid, 2)[:, :2]) == {(1, 0), (3, 0)}
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    moved = knn_graph(grid[order], 2, ties="all")
    assert pairs(order[moved]) == pairs(knn_graph(grid, 2, ties="all"))


def test_radius_between_two_sets():
    (x, batch_x), (y, batch_y) = points(), points(15, seed=1)
    apart = torch.cdist(y.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
    expected = ((apart <= 1.2) & (batch_y[:, None] == batch_x)).nonzero().T
    assert torch.equal(radius(x, y, 1.2, batch_x, batch_y), expected)
    with pytest.raises(ValueError, match="batch_x, batch_y: "):
        radius(x, y, 1.2, batch_x)
    with pytest.raises(ValueError, match="x, y: "):
        radius(x, y[:, :2], 1.2)
    with pytest.raises(ValueError, match=f"batch_x: expected one entry for each of {len(x)} points, got {len(x) - 1}"):
        radius(x, y, 1.2, batch_x[:-1], torch.cat([batch_x[-1:], batch_y]))  # together as long as the points


@pytest.mark.parametrize("method", ["tree", "cells"])
def test_methods_of_radius_between_two_sets_agree(method):
    (x, batch_x), (y, batch_y) = points(), points(15, seed=1)
    edges = radius(x, y, 1.2, batch_x, batch_y)
    found = pairs_between(x.double(), y.double(), batch_x, batch_y, 1.2, method)
    assert torch.equal(found, edges[0] * len(x) + edges[1])
    for one, other in ((x[:0], y), (x, y[:0])):
        clouds = torch.zeros(len(one), dtype=torch.int64), torch.zeros(len(other), dtype=torch.int64)
        assert pairs_between(one.double(), other.double(), *clouds, 1.2, method).shape == (0,)


def test_radius_does_not_search_pairs_within_a_set():
    """There are 4e10 pairs of points of x, which would need 640 GB."""
    x, y = torch.zeros(200_000, 3), torch.tensor([[3.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert torch.equal(radius(x, y, 1.0)[0], torch.ones(len(x), dtype=torch.int64))
    assert torch.equal(radius(y, x, 1.0)[1], torch.ones(len(x), dtype=torch.int64))


@pytest.mark.parametrize(("narrow", "wide"), [(torch.float16, torch.float32), (torch.float32, torch.float64)])
def test_radius_between_sets_of_different_dtypes(narrow, wide):
    """Neither set is rounded to the dtype of the other."""
    far = 4096.0 if narrow == torch.float16 else 2.0**25
    x, y = torch.tensor([[far]], dtype=narrow), torch.tensor([[far + 1]], dtype=wide)
    assert radius(x, y, 0.5).shape == radius(y, x, 0.5).shape == (2, 0)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_farthest_points_of_each_cloud(ratio):
    pos, batch = points()
    batch = batch.sort().values
    chosen = fps(pos, batch, ratio)
    counts = batch.bincount()
    assert torch.equal(batch[chosen].bincount(minlength=3), (ratio * counts - 1e-9).ceil().long())
    alone = [fps(pos[batch == cloud], ratio=ratio) for cloud in range(3)]
    starts = counts.cumsum(0) - counts
    assert torch.equal(chosen, torch.cat([start + one for start, one in zip(starts, alone, strict=True)]))
    with pytest.raises(ValueError, match="ratio: "):
        fps(pos, ratio=0.0)


def test_at_least_one_point_of_each_cloud_is_kept():
    pos, batch = torch.rand(7, 3), torch.tensor([0, 0, 0, 2, 2, 2, 2])
    assert batch[fps(pos, batch, ratio=1e-12)].tolist() == [0, 2]


def test_rounding_chooses_no_further_point():
    """0.07 * 100 is a little more than 7 in double precision."""
    assert len(fps(torch.randn(100, 3), ratio=0.07)) == 7


def test_options_of_transforms():
    data = Data(pos=torch.randn(20, 3))
    assert torch.equal(KNNGraph()(data).edge_index, knn_graph(data.pos, 6))
    assert torch.equal(RadiusGraph(1.0)(data).edge_index, radius_graph(data.pos, 1.0))
    grid = Data(pos=torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)))
    tied = KNNGraph(1, ties="all")(grid).edge_index
    assert torch.equal(tied, knn_graph(grid.pos, 1, ties="all"))
    assert tied.shape[1] > 9
    first = FarthestPoints(0.2, start="first")(data).pos
    assert torch.equal(first, data.pos[fps(data.pos, ratio=0.2, start="first")])
    assert torch.equal(first[0], data.pos[0])


def test_no_vector_of_a_cell_is_periodic():
    pos = torch.randn(10, 3)
    edges, shift = periodic_radius_graph(pos, 1.0, torch.eye(3), torch.zeros(3, dtype=torch.bool))
    assert torch.equal(edges, radius_graph(pos, 1.0))
    assert torch.equal(shift, torch.zeros(edges.shape[1], 3))


@pytest.mark.parametrize("sizes", [(4,), (1, 1), (2, 2), (4, 1, 6), (3, 0, 0)], ids=str)
@pytest.mark.parametrize("container", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_farthest_points_keep_names_of_points_in_batches(container, sizes):
    """A batch has one list for each cloud."""
    pos, _ = points(11)
    clouds = [Data(pos=pos[:n], names=container([f"{n} {i}" for i in range(n)]), smiles="C" * n) for n in sizes]
    batch = Batch.from_data_list(clouds)
    for found, one in zip(FarthestPoints(0.5)(batch).to_data_list(), clouds, strict=True):
        expected = FarthestPoints(0.5)(one)
        assert list(expected.names) == [one.names[point] for point in fps(one.pos, ratio=0.5)]
        assert type(found.names) is type(one.names)
        assert list(found.names) == list(expected.names)
        assert found.smiles == one.smiles
    assert [list(names) for names in batch.names] == [list(one.names) for one in clouds]


def test_transforms_set_edges_of_batches():
    pos, _ = points(12)
    batch = Batch.from_data_list([Data(pos=pos[:7]), Data(pos=pos[7:])])
    made = RadiusGraph(2.0, displacements=True)(batch)
    assert torch.equal(made.edge_index, radius_graph(pos, 2.0, batch.batch))
    torch.testing.assert_close(made.edge_vec, pos[made.edge_index[0]] - pos[made.edge_index[1]])
    assert batch.edge_index is None
    made = KNNGraph(2, force_undirected=True, displacements=True, flow="target_to_source")(batch)
    assert pairs(made.edge_index) == pairs(made.edge_index.flip(0))
    torch.testing.assert_close(made.edge_vec, pos[made.edge_index[1]] - pos[made.edge_index[0]])
    fewer = FarthestPoints(0.5)(
        Batch.from_data_list([Data(pos=pos[:7], z=torch.arange(7)), Data(pos=pos[7:], z=torch.arange(5))])
    )
    assert fewer.batch.tolist() == [0] * 4 + [1] * 3
    assert fewer.ptr.tolist() == [0, 4, 7]
    assert len(fewer.z) == len(fewer.pos) == 7
    with pytest.raises(ValueError, match="data: "):
        FarthestPoints()(made)


def test_batches_come_apart_again():
    """Clouds of a transformed batch equal clouds transformed alone, also if they had edges; the input is unchanged."""
    pos, _ = points(15)
    clouds = [Data(pos=part, y=torch.tensor([2.0 * len(part)])) for part in (pos[:6], pos[6:7], pos[7:])]
    old = [RadiusGraph(1.2, displacements=True)(cloud) for cloud in clouds]
    for cloud in old:
        cloud.edge_attr = torch.ones(cloud.num_edges)
    for made in (RadiusGraph(3.0), RadiusGraph(3.0, displacements=True), KNNGraph(2, force_undirected=True)):
        for given in (clouds, old):
            batch = Batch.from_data_list(given)
            for found, one in zip(made(batch).to_data_list(), given, strict=True):
                expected = made(one)
                assert set(found.keys()) == set(expected.keys())
                assert all(torch.equal(found[name], expected[name]) for name in expected.keys())
            for found, one in zip(batch.to_data_list(), given, strict=True):
                assert torch.equal(found.pos, one.pos)
                assert one.edge_index is None or torch.equal(found.edge_index, one.edge_index)
    fewer, counted = FarthestPoints(0.5), [Data(pos=one.pos, y=one.y, num_nodes=len(one.pos)) for one in clouds]
    for given in (clouds, counted):
        made = RadiusGraph(3.0)(fewer(Batch.from_data_list(given)))
        for found, one in zip(made.to_data_list(), given, strict=True):
            expected = RadiusGraph(3.0)(fewer(one))
            assert found.num_nodes == expected.num_nodes
            assert all(torch.equal(found[name], expected[name]) for name in ("pos", "y", "edge_index"))


def test_edges_of_before_leave_nothing():
    pos, _ = points(6)
    found = RadiusGraph(1.0)(RadiusGraph(2.0, displacements=True)(Data(pos=pos, cell=3 * torch.eye(3)[None])))
    assert len(found.edge_shift) == found.num_edges
    assert "edge_vec" not in found
    del found.cell
    assert "edge_shift" not in RadiusGraph(1.0)(found)


def test_features_of_edges_come_apart_although_they_are_added_later():
    pos, _ = points(12)
    given = {"edge_index": torch.tensor([[0], [1]]), "edge_attr": torch.ones(1, 1)}
    batch = Batch.from_data_list([Data(pos=pos[:7], **given), Data(pos=pos[7:], **given)])
    made = RadiusGraph(2.0)(batch)
    assert "edge_attr" not in made
    made.edge_attr = made.edge_index[0][:, None].float()
    parts = made.to_data_list()
    assert [len(part.edge_attr) for part in parts] == [part.num_edges for part in parts]
    assert torch.equal(torch.cat([part.edge_attr for part in parts]), made.edge_attr)
    assert len(batch[1].edge_attr) == 1


def test_images_in_boxes():
    pos = torch.rand(8, 3, generator=torch.Generator().manual_seed(2)) * 3
    cell = torch.tensor([[3.0, 0.2, 0.0], [0.0, 3.1, 0.3], [0.1, 0.0, 2.9]])
    edges, shift = periodic_radius_graph(pos, 2.0, cell)
    found = Radius(2.0, include_self=False)(pos, cell=cell)
    assert torch.equal(edges, found.edge_index)
    torch.testing.assert_close(shift, found.shift.to(shift))
    made = RadiusGraph(2.0, displacements=True)(Data(pos=pos, cell=cell[None], pbc=torch.ones(1, 3, dtype=torch.bool)))
    assert torch.equal(made.edge_index, edges)
    assert torch.equal(made.edge_shift, shift)
    torch.testing.assert_close(made.edge_vec, pos[edges[0]] + shift - pos[edges[1]])


PERIODIC = [[True, True, True], [True, False, True], [False, True, False], [False, False, False]]


@pytest.mark.parametrize("periodic", PERIODIC, ids=str)
@pytest.mark.parametrize(("number", "clouds", "side", "r"), [(40, 3, 5.0, 2.0), (10, 1, 2.0, 5.0), (200, 1, 8.0, 2.5)])
def test_vesin_finds_the_same_images(periodic, number, clouds, side, r):
    """The same edges and shifts for oblique cells, points inside and far outside, radii above and below the cell."""
    pytest.importorskip("vesin")
    generator = torch.Generator().manual_seed(number)
    cell = side * (torch.eye(3, dtype=torch.float64) + 0.15 * torch.randn(clouds, 3, 3, generator=generator).double())
    pbc = torch.tensor(periodic).expand(clouds, 3).clone()
    cloud = torch.arange(number) % clouds
    inside = torch.rand(number, 3, generator=generator, dtype=torch.float64)
    for fractional in (inside, 5 * inside - 2, inside + pbc[cloud] * (1e10 * inside).round()):
        pos = (fractional[:, None] @ cell[cloud])[:, 0]
        for include_self in (False, True):
            given = pos, cloud, r, include_self, cell, pbc
            found = images_within(*given, "cells")
            for ours, theirs in zip(found, images_within(*given, "vesin"), strict=True):
                assert torch.equal(ours, theirs)
            rows = torch.cat([found[0][:, None], found[1]], dim=1)
            assert torch.equal(rows, torch.unique(rows, dim=0)), "ascending, and each image once"


@pytest.mark.parametrize("periodic", PERIODIC[1:3], ids=str)
def test_points_far_away_where_clouds_are_not_periodic(periodic):
    """Vesin would end the process, or take minutes."""
    pbc = torch.tensor(periodic)
    pos = torch.rand(8, 3, dtype=torch.float64)
    pos[0] += 1e6 * ~pbc
    edges, shift = periodic_radius_graph(pos, 1.0, torch.eye(3, dtype=torch.float64), pbc)
    alone, own = periodic_radius_graph(pos[1:], 1.0, torch.eye(3, dtype=torch.float64), pbc)
    others = edges[1] > 0
    assert torch.equal(edges[:, others], alone + 1)
    assert torch.equal(shift[others], own)
    assert (edges[:, ~others] == 0).all()


def test_farthest_points_keep_the_cell_of_as_many_points_as_axes():
    data = Data(pos=torch.rand(3, 3), cell=torch.eye(3), pbc=torch.tensor([True, True, False]))
    for given in (data, Batch.from_data_list([data])):
        kept = FarthestPoints(0.5)(given)
        assert len(kept.pos) == 2
        assert torch.equal(kept.cell, torch.eye(3))
        assert kept.pbc.tolist() == [True, True, False]


def test_chosen_pixels_are_no_image():
    image = Data(pos=torch.randn(4, 2), x=torch.randn(4, 1), grid=torch.tensor([[2, 2]]))
    for data in (image, Batch.from_data_list([image, image])):
        kept = FarthestPoints(0.5)(data)
        assert "grid" not in kept
        assert point_clouds(kept).num_points == len(kept.pos) == len(data.pos) // 2
    assert "grid" in image


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_the_same_clouds_as_a_batch(dtype):
    """Data and outputs are equal, bit by bit, also with an empty cloud and with labels to ignore."""
    generator = torch.Generator().manual_seed(2)
    clouds = [
        Data(
            x=torch.randn(n, 2, generator=generator),
            pos=torch.randn(n, 3, generator=generator),
            normal=torch.randn(n, 3, generator=generator),
            y=torch.randint(-1, 3, (n,), generator=generator),
        )
        for n in (7, 1, 0, 12)
    ]
    own = Batch.from_data_list(clouds)
    own.mask = own.y >= 0
    assert 0 < int(own.mask.sum()) < len(own.y)
    item = {"coord": own.pos, "feat": own.x, "normal": own.normal, "segment": own.y.to(dtype), "name": list("abcd")}
    item["offset"] = torch.tensor([7, 8, 8, 20], dtype=dtype)
    batch = from_offsets(item)
    assert set(batch.keys()) == set(own.keys()) | {"segment", "name"}
    assert all(torch.equal(batch[name], own[name]) for name in own.keys())
    assert (batch.num_graphs, batch.num_nodes, batch.name) == (4, 20, item["name"])
    assert torch.equal(batch.ptr[1:], item["offset"])
    pooled = FramewiseTransformer(PrincipalFrames(), 2, 3, channels=8, layers=1, neighborhood=Radius(1.0))
    assert torch.equal(pooled(batch), pooled(own))


@pytest.mark.parametrize("name", ["segment", "category", "label"])
def test_labels_of_offset_batches_are_targets(name):
    item = {"coord": torch.randn(3, 3), "offset": torch.tensor([3]), name: torch.tensor([1, 0, 2]).int()}
    batch = from_offsets(item)
    assert batch.y.tolist() == [1, 0, 2]
    assert batch.y.dtype == torch.int64
    assert not {"mask", "x"} & set(batch.keys())
