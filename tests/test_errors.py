"""Bad input: every error names the argument, shows the value, and says what is allowed."""

import math
import re

import pytest
import torch
from torch import zeros
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Constant

from lieattn.geometry import (
    AllPairs,
    Given,
    LiftedGraph,
    Nearest,
    Piece,
    PixelSquare,
    PrincipalFrames,
    Radius,
    crop,
    flatten,
    lift,
    pieces,
    pixel_positions,
    point_clouds,
    pooling_cells,
    unflatten,
)
from lieattn.groups import (
    SE,
    SO,
    Dilations,
    FiniteGroup,
    RotationDilations,
    SemidirectProduct,
    commuting_product,
    cyclic,
    cyclic_about,
    dihedral,
    direct_product,
    inversion,
    octahedral,
    reflection,
    tetrahedral,
    trivial,
)
from lieattn.models import FiniteSE2Transformer, FramewiseTransformer, GSANet, Preprocessed, published_table
from lieattn.models.gsa import Dropouts, GSAOptions, Stages
from lieattn.nn import (
    CloudNorm,
    CloudPool,
    FiberPool,
    GridPool,
    GroupAttention,
    GroupLinear,
    GroupSelfAttention,
    LieSelfAttention,
    LiftingConvolution,
    LiftingSelfAttention,
    PreNormBlock,
)
from lieattn.nn.relative import (
    CombinedScore,
    CoordinateEncoding,
    EdgeNetwork,
    FiberEncoding,
    MLPEncoding,
    NetworkKernel,
    PositionalValues,
    RelativePositionTable,
    RotaryEncoding,
    TableEncoding,
    TableKernel,
)
from lieattn.ops import RelativeTerms, fused_kernel, group_attention
from lieattn.spaces import Euclidean
from lieattn.testing import assert_equivariant

NAN, INF = math.nan, math.inf
POINTS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
IMAGES = torch.tensor([[8, 8], [4, 7]])
BALL = Radius(1.5)
SHEARED = cyclic(4).conjugate(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "sheared")


def spoiled(point, value):
    pos = POINTS.clone()
    pos[point, 1] = value
    return pos


def lifted(group=None, pos=POINTS, neighborhood=BALL, grid=None, **options):
    points = pos if grid is None else point_clouds(pos, grid=grid)
    return lift(points, group or cyclic(4), neighborhood, **options)


def image(height, width, channels=1):
    grid = torch.tensor([[height, width]])
    return Data(x=torch.zeros(height * width, channels), pos=pixel_positions(height, width), grid=grid)


def integers(*values, **options):
    return torch.tensor(values, dtype=torch.int64, **options)


def check(table):
    """Return a test with one case per row: call, error class, and parts of the message, in order."""
    rows = [(call, error, pieces) for call, error, *pieces in table]
    return pytest.mark.parametrize(("call", "error", "pieces"), rows, ids=["|".join(row[2]) for row in rows])


def assert_raises(call, error, pieces):
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    assert re.search(".*".join(re.escape(piece) for piece in pieces), str(caught.value), re.DOTALL), str(caught.value)


# --- groups ---------------------------------------------------------------------------------------------------

FULL = FiniteGroup.from_matrices
PERMUTED = FiniteGroup.from_permutations
TURN = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
MOVES = SemidirectProduct(cyclic(4))

GROUPS = [
    (lambda: cyclic(0), ValueError, "n: expected an integer of at least 1", "got 0"),
    (lambda: cyclic(-3), ValueError, "n: ", "got -3"),
    (lambda: cyclic(4.0), ValueError, "n: expected an integer", "got 4.0"),
    (lambda: cyclic(True), ValueError, "n: expected an integer", "got True"),
    (lambda: cyclic("4"), ValueError, "n: expected an integer", "got '4'"),
    (lambda: dihedral(0), ValueError, "n: ", "at least 1", "got 0"),
    (lambda: trivial(0), ValueError, "dim: ", "at least 1", "got 0"),
    (lambda: inversion(0), ValueError, "dim: ", "at least 1", "got 0"),
    (lambda: reflection(0), ValueError, "dim: ", "at least 1", "got 0"),
    (lambda: reflection(2, 2), ValueError, "axis: ", "-2 <= axis < 2", "got 2"),
    (lambda: reflection(2, (0, 0)), ValueError, "axis: ", "not all zero", "got (0, 0)"),
    (lambda: reflection(2, (1, 0, 0)), ValueError, "axis: expected 2", "(1, 0, 0)"),
    (lambda: cyclic_about(3, (0, 0, 0)), ValueError, "axis: expected 3", "(0, 0, 0)"),
    (lambda: cyclic_about(3, (0, NAN, 0)), ValueError, "axis: ", "finite", "(0, nan, 0)"),
    (lambda: cyclic_about(3, (0, 1)), ValueError, "axis: expected 3", "(0, 1)"),
    (lambda: reflection(2, axis=1.5), ValueError, "axis: expected 2", "got 1.5"),
    (lambda: cyclic_about(3, "xyz"), ValueError, "axis: expected 3", "'xyz'"),
    (lambda: cyclic_about(0), ValueError, "n: ", "at least 1", "got 0"),
    (lambda: commuting_product(cyclic(4), octahedral()), ValueError, "first, second: ", "C4 acts on R^2", "O on R^3"),
    (
        lambda: commuting_product(cyclic(4), reflection(2)),
        ValueError,
        "element 1 of C4 and element 1 of mirror2 do not commute",
        "direct_product",
    ),
    (lambda: commuting_product(cyclic(4), cyclic(2)), ValueError, "'C4xC2'", "elements 0 and 6 are the same"),
    (lambda: direct_product(cyclic(4), "C2"), TypeError, "second: ", "FiniteGroup", "'C2'"),
    (lambda: commuting_product(None, cyclic(2)), TypeError, "first: ", "FiniteGroup", "None"),
    (lambda: SemidirectProduct("C4"), TypeError, "stabilizer: expected a group", "'C4'"),
    (lambda: FiniteGroup("G", [[[1.0]]]), TypeError, "matrices of 'G'", "tensor", "got list"),
    (lambda: FULL(zeros(1, 2, 2) + 1j, "G"), TypeError, "'G'", "real", "complex64"),
    (lambda: FULL(zeros(1, 0, 0), "G"), ValueError, "'G'", "dim >= 1", "(1, 0, 0)"),
    (lambda: FULL(zeros(2, 2), "G"), ValueError, "matrices of 'G'", "[order, dim, dim]", "(2, 2)"),
    (lambda: FULL(zeros(0, 2, 2), "G"), ValueError, "'G'", "order >= 1", "(0, 2, 2)"),
    (lambda: FULL(zeros(1, 2, 3), "G"), ValueError, "'G'", "[order, dim, dim]", "(1, 2, 3)"),
    (lambda: FULL(zeros(2, 2, 2) + NAN, "G"), ValueError, "'G'", "element 0", "not finite"),
    (
        lambda: FULL(torch.eye(2).expand(2, 2, 2) * torch.tensor([1.0, INF])[:, None, None], "G"),
        ValueError,
        "'G'",
        "element 1",
        "not finite",
    ),
    (lambda: FULL(zeros(1, 2, 2), "G"), ValueError, "'G'", "element 0 has no inverse"),
    (lambda: FULL(cyclic(4).elements[[0, 1, 2, 1]], "G"), ValueError, "'G'", "elements 1 and 3 are the same"),
    (
        lambda: FULL(cyclic(4).elements[:2], "G"),
        ValueError,
        "'G' is not closed",
        "elements[1] @ elements[1]",
        "1.0e+00 away",
        "tolerance 1e-09",
        "FiniteGroup.generate",
    ),
    (lambda: FULL(cyclic(2).elements[1:], "G"), ValueError, "'G' is not closed", "elements[0]"),
    (lambda: FULL(2 * torch.eye(2)[None], "G"), ValueError, "'G' is not closed", "elements[0]"),
    (lambda: PERMUTED([[0, 1, 2], [1, 1, 2]], "G"), ValueError, "permutations of 'G'", "row 1 is [1, 1, 2]", "0..2"),
    (lambda: PERMUTED([[0, 2]], "G"), ValueError, "'G'", "row 0 is [0, 2]", "0..1"),
    (lambda: PERMUTED([[0.0, 1.0]], "G"), ValueError, "'G'", "integers", "torch.float32"),
    (lambda: PERMUTED([[False, True]], "G"), ValueError, "'G'", "integers", "torch.bool"),
    (lambda: PERMUTED([], "G"), ValueError, "permutations of 'G'", "integers", "(0,)"),
    (lambda: PERMUTED([[]], "G"), ValueError, "permutations of 'G'", "(1, 0)"),
    (lambda: PERMUTED([[0, 1], [0]], "G"), ValueError, "'G'", "integers", "[[0, 1], [0]]"),
    (lambda: PERMUTED([[0, 1, 2], [1, 2, 0]], "G"), ValueError, "'G' is not closed"),
    (lambda: FiniteGroup.generate(TURN, "G", max_order=50), ValueError, "'G'", "more than max_order=50"),
    (lambda: FiniteGroup.generate(TURN + NAN, "G"), ValueError, "generators of 'G'", "element 0", "not finite"),
    (lambda: FiniteGroup.generate(TURN[:0], "G"), ValueError, "generators of 'G'", "(0, 2, 2)"),
    (lambda: FiniteGroup.generate(TURN[0], "G"), ValueError, "'G'", "(2, 2)"),
    (lambda: cyclic(4).conjugate(zeros(2, 2)), ValueError, "by: ", "invertible", "[0.0, 0.0]"),
    (lambda: cyclic(4).conjugate(torch.eye(3)), ValueError, "by: ", "[2, 2]", "(3, 3)"),
    (lambda: cyclic(4).conjugate(TURN[0] + INF), ValueError, "by: ", "not finite"),
    (lambda: cyclic(4).act(4, zeros(5, 2)), ValueError, "g: ", "0..3 of C4", "got 4"),
    (lambda: cyclic(4).act(integers(1, 9), zeros(2, 2)), ValueError, "g: ", "0..3 of C4", "[1, 9]"),
    (lambda: cyclic(4).translate(7, zeros(4, 1)), ValueError, "g: ", "C4", "got 7"),
    (lambda: cyclic(4).act(-1, zeros(2)), ValueError, "g: ", "0..3 of C4", "got -1"),
    (lambda: cyclic(4).act(integers(0, -1), zeros(2)), ValueError, "g: ", "0..3 of C4"),
    (lambda: MOVES.element(4, zeros(2)), ValueError, "linear: ", "0..3 of C4", "got 4"),
    (lambda: cyclic(4).index(torch.eye(3)), ValueError, "[*, 2, 2] for C4", "(3, 3)"),
    (
        lambda: cyclic(4).index(cyclic(8).elements),
        ValueError,
        "matrices: number 1 is not an element of C4",
        "7.1e-01 away",
        "tolerance 1e-06",
    ),
    (lambda: cyclic(4).act(1, zeros(5, 3)), ValueError, "points: ", "[*, 2] for C4", "(5, 3)"),
    (lambda: cyclic(4).translate(1, zeros(5, 3, 2)), ValueError, "f: ", "C4", "(5, 3, 2)"),
    (lambda: cyclic(4).translate(1, zeros(4)), ValueError, "f: ", "[*, 4, channels]", "(4,)"),
    (lambda: MOVES.element(1, zeros(3)), ValueError, "translation: ", "R^2 x| C4", "(3,)"),
    (lambda: MOVES.element(1, integers(1, 2)), ValueError, "translation: ", "torch.int64"),
    (lambda: MOVES.act(torch.eye(3), zeros(4, 3)), ValueError, "points: ", "(4, 3)"),
    (lambda: MOVES.act_vectors(torch.eye(3), zeros(3)), ValueError, "vectors: ", "(3,)"),
    (lambda: cyclic(4).act(True, zeros(5, 2)), ValueError, "g: ", "0..3", "True"),
    (lambda: MOVES.act(torch.eye(3), [1.0, 2.0]), TypeError, "points: ", "floating", "list"),
    (lambda: cyclic(8).act(1, integers(1, 2)), TypeError, "points: ", "torch.int64"),
    (lambda: MOVES.act("turn", zeros(2)), TypeError, "g: ", "R^2 x| C4", "str"),
    (lambda: MOVES.act(torch.eye(3).expand(4, 3, 3), zeros(5, 2)), ValueError, "g, points: ", "(4,) and (5,)"),
    (lambda: MOVES.act(torch.eye(3).double(), zeros(5, 2)), ValueError, "g, points: ", "float64", "float32"),
    (lambda: SO(3).check("g", torch.eye(3, device="meta")), ValueError, "g: ", "meta device"),
    (lambda: SO(3).sample(2, generator=0), TypeError, "generator: ", "Generator", "int"),
    (lambda: SO(3).sample(2, dtype=torch.int64), ValueError, "dtype: ", "torch.int64"),
    (lambda: SO(3).sample(2, device="attic"), ValueError, "device: ", "'attic'"),
    (lambda: SO(3).sample(-2), ValueError, "shape: ", "-2"),
    (
        lambda: Dilations(2).exp(torch.tensor([[1.0], [1000.0]])),
        ValueError,
        "a: ",
        "-88.7 to 88.7",
        "torch.float32",
        "1000.0",
    ),
    (lambda: RotationDilations(2).exp(torch.tensor([-1000.0, 0.0])), ValueError, "a: ", "-88.7 to 88.7"),
    (lambda: cyclic(4).index(TURN, tolerance="small"), ValueError, "tolerance: ", "'small'"),
    (lambda: MOVES.inverse(2 * torch.eye(3)), ValueError, "is not an element of C4", "1.0e+00 away"),
]


@check(GROUPS)
def test_groups(call, error, pieces):
    assert_raises(call, error, pieces)


# --- point clouds and lifting ---------------------------------------------------------------------------------

MASK = torch.ones(1, 6, dtype=torch.bool)

CLOUDS = [
    (lambda: lifted(pos=[[0.0, 1.0]]), TypeError, "points: ", "tensor", "got list"),
    (lambda: lifted(pos=None), TypeError, "points: ", "got NoneType"),
    (lambda: lifted(pos=Data(x=POINTS)), TypeError, "data.pos: ", "[points, dim]", "Data with x"),
    (lambda: lifted(pos=[[0.0, 1.0]]), TypeError, "points: ", "with pos", "got list"),
    (lambda: lifted(pos=integers(*[[1, 2]] * 3)), TypeError, "pos: ", "floating", "torch.int64"),
    (lambda: lifted(pos=zeros(3)), ValueError, "pos: ", "[points, dim]", "(3,)"),
    (lambda: lifted(pos=zeros(1, 2, 3, 2)), ValueError, "pos: ", "[points, dim]", "(1, 2, 3, 2)"),
    (lambda: lifted(pos=zeros(3, 0)), ValueError, "pos: ", "dim >= 1", "(3, 0)"),
    (lambda: lifted(pos=spoiled(3, NAN)), ValueError, "pos: ", "finite", "nan", "point 3"),
    (lambda: lifted(pos=spoiled(4, INF)), ValueError, "pos: ", "finite", "inf", "point 4"),
    (lambda: lifted(pos=spoiled(0, -INF)), ValueError, "pos: ", "finite", "-inf", "point 0"),
    (
        lambda: lifted(pos=Batch.from_data_list([Data(pos=POINTS), Data(pos=spoiled(2, NAN))])),
        ValueError,
        "pos: ",
        "finite",
        "nan",
        "point 8",
    ),
    (lambda: lifted(pos=spoiled(5, NAN)[None], mask=MASK), ValueError, "pos: ", "finite", "nan", "point 5"),
    (lambda: lifted(pos=POINTS.double() * 1e200), ValueError, "pos: ", "at most 1e+100", "point 0"),
    (lambda: lifted(pos=POINTS * 1e20), ValueError, "pos: ", "at most 1e+15", "larger unit"),
    (lambda: lifted(length=1e-20), ValueError, "pos: ", "at most 1e+15", "length 1e-20"),
    (lambda: lifted(batch=[0] * 6), TypeError, "batch: ", "int64", "got list"),
    (lambda: lifted(batch=zeros(6, dtype=torch.int32)), TypeError, "batch: ", "int64", "int32"),
    (lambda: lifted(batch=zeros(6)), TypeError, "batch: ", "int64", "float32"),
    (lambda: lifted(batch=integers([0] * 6)), ValueError, "batch: ", "1 dimension", "(1, 6)"),
    (lambda: lifted(batch=integers(0, 0)), ValueError, "batch: ", "6 points", "got 2"),
    (lambda: lifted(batch=integers(0, 0, -1, 0, 0, 0)), ValueError, "batch: ", "from 0", "batch[2] = -1"),
    (
        lambda: lifted(batch=zeros(6, dtype=torch.int64, device="meta")),
        ValueError,
        "batch: ",
        "expected on cpu",
        "meta",
    ),
    (lambda: lifted(ptr=torch.tensor([0.0, 6.0])), TypeError, "ptr: ", "int64", "float32"),
    (lambda: lifted(ptr=integers(0, 5)), ValueError, "ptr: ", "0 to 6", "0 to 5"),
    (lambda: lifted(ptr=integers(1, 6)), ValueError, "ptr: ", "0 to 6", "1 to 6"),
    (lambda: lifted(ptr=integers(0, 5, 2, 6)), ValueError, "ptr: ", "ascending", "5 before 2"),
    (lambda: lifted(ptr=integers()), ValueError, "ptr: ", "0 to 6", "no entries"),
    (lambda: lifted(ptr=integers(0, 6, device="meta")), ValueError, "ptr: ", "expected on cpu", "meta"),
    (
        lambda: lifted(ptr=integers(0, 3, 6), batch=integers(0, 0, 1, 1, 1, 1)),
        ValueError,
        "batch, ptr: ",
        "same clouds",
        "batch[2] = 1",
        "cloud 0",
    ),
    (lambda: lifted(mask=MASK), ValueError, "mask: ", "[clouds, N, dim]", "(6, 2)"),
    (lambda: lifted(pos=POINTS[None], mask=MASK[:, :5]), ValueError, "mask: ", "(1, 6)", "(1, 5)"),
    (lambda: lifted(pos=POINTS[None], mask=zeros(1, 6)), TypeError, "mask: ", "bool", "float32"),
    (lambda: lifted(pos=POINTS[None], mask=[[True] * 6]), TypeError, "mask: ", "bool", "got list"),
    (lambda: lifted(pos=POINTS[None], mask=MASK.to("meta")), ValueError, "mask: ", "expected on cpu", "meta"),
    (
        lambda: point_clouds(point_clouds(POINTS), batch=integers(*[0] * 6)),
        ValueError,
        "batch, ptr, mask, grid, cell, pbc: ",
        "expected None",
        "PointClouds",
    ),
    (
        lambda: lifted(pos=point_clouds(POINTS), grid=integers([2, 3])),
        ValueError,
        "batch, ptr, mask, grid, cell, pbc: ",
        "expected None",
        "PointClouds",
    ),
    (
        lambda: lifted(pos=POINTS[None], batch=integers(*[0] * 6)),
        ValueError,
        "batch, ptr: expected None",
        "padded points",
    ),
    (lambda: flatten(POINTS[None], MASK[:, 1:]), ValueError, "mask: ", "(1, 6)", "(1, 5)"),
    (lambda: unflatten(POINTS, MASK[:, 1:]), ValueError, "flat: ", "expected 5", "got 6"),
    (lambda: unflatten(torch.tensor(1.0), MASK), ValueError, "flat: ", "got 0"),
    (lambda: unflatten(POINTS, zeros(1, 6)), TypeError, "mask: ", "bool", "float32"),
    (lambda: lifted(grid=integers(2, 3)), ValueError, "grid: ", "2 dimension", "(2,)"),
    (lambda: lifted(grid=integers([1, 2, 3])), ValueError, "grid: ", "[clouds, 2]", "(1, 3)"),
    (lambda: lifted(grid=[[2, 3]]), TypeError, "grid: ", "int64", "got list"),
    (lambda: lifted(grid=integers([2, 3], device="meta")), ValueError, "grid: ", "expected on cpu", "meta"),
    (lambda: lifted(grid=torch.tensor([[2.0, 3.0]])), TypeError, "grid: ", "int64", "float32"),
    (lambda: lifted(grid=integers([2, 4])), ValueError, "grid: image 0", "6 points", "[2, 4]"),
    (lambda: lifted(grid=integers([-2, -3])), ValueError, "grid: image 0", "[-2, -3]"),
    (lambda: lifted(grid=integers([2, 3], [2, 3])), ValueError, "grid: ", "[1, 2]", "(2, 2)"),
    (
        lambda: point_clouds(POINTS, batch=integers(1, 1, 0, 0, 1, 1), grid=integers([1, 2], [2, 2])),
        ValueError,
        "grid: ",
        "raster order",
        "batch is not sorted",
    ),
    (lambda: lifted(group="C4"), TypeError, "frames: ", "PrincipalFrames()", "'C4'"),
    (lambda: lifted(group=octahedral()), ValueError, "points: O acts on 3", "[points, 3]", "[points, 2]"),
    (lambda: lifted(group=octahedral(), pos=POINTS[None]), ValueError, "points: O acts on 3", "[points, 2]"),
    (
        lambda: lifted(group=SHEARED),
        ValueError,
        "neighborhood: ",
        "sheared",
        "distances",
        "Radius(radius=1.5",
        "orthonormal basis",
    ),
    (
        lambda: lifted(group=SHEARED, neighborhood=Nearest(2)),
        ValueError,
        "neighborhood: ",
        "sheared",
        "distances",
        "Nearest(k=2",
    ),
    (lambda: lifted(neighborhood=1.5), TypeError, "neighborhood: ", "Radius(1.5)", "got 1.5"),
    (lambda: lift(POINTS, cyclic(4), None), TypeError, "neighborhood: ", "got None"),
    (lambda: lifted(neighborhood=Radius), TypeError, "neighborhood: ", "got <class", "Radius"),
    (lambda: lifted(length="1"), TypeError, "length: ", "number", "got str"),
    (lambda: lifted(length=0), ValueError, "length: ", "positive finite", "got 0"),
    (lambda: lifted(length=-1.5), ValueError, "length: ", "positive finite", "got -1.5"),
    (lambda: lifted(length=NAN), ValueError, "length: ", "positive finite", "got nan"),
    (lambda: lifted(length=INF), ValueError, "length: ", "positive finite", "got inf"),
    (lambda: LiftedGraph.collate([]), ValueError, "graphs: ", "at least one", "none"),
    (
        lambda: LiftedGraph.collate([lifted(), lifted(cyclic(8))]),
        ValueError,
        "graphs: graph 1",
        "group",
        "'C8'",
        "'C4'",
    ),
    (lambda: LiftedGraph.collate([lifted(), lifted(length=2)]), ValueError, "graphs: graph 1", "length", "2.0 and 1.5"),
    (
        lambda: LiftedGraph.collate([lifted(), lifted(grid=integers([2, 3]))]),
        ValueError,
        "graphs: graph 1",
        "grid",
        "given and absent",
    ),
    (
        lambda: LiftedGraph.collate([lifted(), lifted(pos=POINTS.double())]),
        ValueError,
        "graphs: graph 1",
        "dtype",
        "torch.float64 and torch.float32",
    ),
    (
        lambda: LiftedGraph.collate([lifted(), lifted().to("meta")]),
        ValueError,
        "graphs: graph 1",
        "device",
        "meta and cpu",
    ),
    (lambda: lifted().astype(torch.int64), ValueError, "dtype: ", "floating", "torch.int64"),
    (lambda: pixel_positions(-1, 3), ValueError, "height: ", "at least 1", "got -1"),
    (lambda: pixel_positions(3, 3, dtype=torch.int64), ValueError, "dtype: ", "floating", "torch.int64"),
    (lambda: crop(IMAGES[0], 1), ValueError, "grid: ", "2 dimension", "(2,)"),
    (lambda: crop(IMAGES.float(), 1), TypeError, "grid: ", "int64", "float32"),
    (lambda: crop(IMAGES, 0.5), ValueError, "margin: ", "integer", "got 0.5"),
    (lambda: pooling_cells(IMAGES[0], 2), ValueError, "grid: ", "2 dimension", "(2,)"),
    (lambda: crop(IMAGES, 2), ValueError, "margin: ", "2 pixels", "image 1, [4, 7]"),
    (lambda: crop(IMAGES, -1), ValueError, "margin: ", "at least 0", "got -1"),
    (lambda: pooling_cells(IMAGES, 0), ValueError, "size: ", "at least 1", "got 0"),
]


@check(CLOUDS)
def test_clouds_and_lifting(call, error, pieces):
    assert_raises(call, error, pieces)


def edge(source, target):
    return Given(integers([source], [target]))


NEIGHBORHOODS = [
    (lambda: Radius(0), ValueError, "radius: ", "positive finite", "got 0"),
    (lambda: Radius(-1.0), ValueError, "radius: ", "positive finite", "got -1.0"),
    (lambda: Radius(NAN), ValueError, "radius: ", "positive finite", "got nan"),
    (lambda: Radius(INF), ValueError, "radius: ", "positive finite", "got inf"),
    (lambda: Radius("1"), TypeError, "radius: ", "number", "got str"),
    (lambda: Radius(1.0, include_self=1), TypeError, "include_self: ", "True or False", "got 1"),
    (lambda: PixelSquare(4), ValueError, "size: ", "odd", "got 4"),
    (lambda: PixelSquare(0), ValueError, "size: ", "at least 1", "got 0"),
    (lambda: PixelSquare(-3), ValueError, "size: ", "at least 1", "got -3"),
    (lambda: PixelSquare(3.0), ValueError, "size: ", "integer", "got 3.0"),
    (lambda: PixelSquare(3, spacing=0), ValueError, "spacing: ", "positive finite", "got 0"),
    (lambda: Nearest(0), ValueError, "k: ", "at least 1", "got 0"),
    (lambda: Nearest(2.0), ValueError, "k: ", "integer", "got 2.0"),
    (lambda: Nearest(2, ties="some"), ValueError, "ties: ", "('index', 'all')", "'some'"),
    (lambda: AllPairs(include_self=None), TypeError, "include_self: ", "True or False", "None"),
    (lambda: Given(zeros(2, 3)), TypeError, "edge_index: ", "int64", "float32"),
    (lambda: Given(integers([0, 1], [1, 2], [2, 0])), ValueError, "edge_index: ", "[2, edges]", "(3, 2)"),
    (lambda: lifted(neighborhood=edge(0, 6)), ValueError, "edge_index: ", "0 to 5", "0 to 6"),
    (lambda: lifted(neighborhood=edge(0, -1)), ValueError, "edge_index: ", "0 to 5", "0 to -1"),
    (
        lambda: lifted(neighborhood=edge(0, 5), batch=integers(0, 0, 0, 1, 1, 1)),
        ValueError,
        "edge_index: ",
        "within clouds",
        "point 0",
        "point 5",
    ),
    (lambda: lifted(neighborhood=Given(integers([0, 0], [5, 5]))), ValueError, "edge_index: ", "once", "0 to 5"),
]


@check(NEIGHBORHOODS)
def test_neighborhoods(call, error, pieces):
    assert_raises(call, error, pieces)


# --- the operator ---------------------------------------------------------------------------------------------

SIGNAL = torch.zeros(6, 4, 2, 3)
NEIGHBORS = lifted().neighbors
EDGES = NEIGHBORS.num_edges


def attend(query=SIGNAL, key=SIGNAL, value=SIGNAL, **options):
    return group_attention(query, key, value, NEIGHBORS, **options)


def attend_with(terms, **options):
    return attend(terms=RelativeTerms(**terms), **options)


OPERATOR = [
    (lambda: attend(pattern="all"), ValueError, "pattern: ", "'joint'", "got 'all'"),
    (lambda: attend(normalize="sum"), ValueError, "normalize: ", "'softmax'", "got 'sum'"),
    (lambda: attend(dropout=1.0), ValueError, "dropout: ", "[0, 1)", "got 1.0"),
    (lambda: attend(dropout=-0.1), ValueError, "dropout: ", "[0, 1)", "got -0.1"),
    (lambda: attend(dropout=NAN), ValueError, "dropout: ", "[0, 1)", "got nan"),
    (lambda: attend(key=None), ValueError, "query, key: ", "both, or neither"),
    (lambda: attend(query=SIGNAL[:5]), ValueError, "query: ", "points=6", "(5, 4, 2, 3)"),
    (lambda: attend(key=SIGNAL[:5]), ValueError, "key: ", "points=6", "(5, 4, 2, 3)"),
    (lambda: attend(value=SIGNAL[:5]), ValueError, "value: ", "points=6", "(5, 4, 2, 3)"),
    (lambda: attend(value=SIGNAL[:, :, :1]), ValueError, "query: ", "1 heads as in value", "got 2"),
    (lambda: attend(key=SIGNAL[..., :2]), ValueError, "key: ", "dim 3 as in query", "got 2"),
    (lambda: attend(key=SIGNAL[:, :2]), ValueError, "key: ", "fiber of 4 as in value", "got 2"),
    (lambda: attend(query=SIGNAL[:, :1]), ValueError, "query: ", "'joint'", "fiber of 4", "got 1"),
    (lambda: attend(*[SIGNAL.to("meta")] * 3), ValueError, "query: ", "cpu like neighbors", "meta"),
    (lambda: attend_with({"row": integers(0, 1)}), ValueError, "terms.row: ", f"[{EDGES}]", "(2,)"),
    (
        lambda: attend_with({"psi": zeros(3, 4, 1, 2, 3)}),
        ValueError,
        "terms.psi: ",
        f"({EDGES}, 4, 4, 2, 3)",
        "(3, 4, 1, 2, 3)",
    ),
    (lambda: attend_with({"beta": zeros(EDGES, 4)}), ValueError, "terms.beta: ", f"({EDGES}, 4)"),
    (lambda: attend_with({"fiber_bias": zeros(8, 8, 2)}), ValueError, "terms.fiber_bias: ", "(4, 4, 2)", "(8, 8, 2)"),
    (
        lambda: attend_with({"positional_key": zeros(EDGES, 4, 2, 3)}, query=None, key=None),
        ValueError,
        "terms.positional_key: ",
        "query is None",
    ),
    (
        lambda: attend_with({"psi": zeros(EDGES, 4, 4, 2, 3)}, pattern="framewise"),
        ValueError,
        "terms.psi: ",
        "key axis must be 1",
        "got 4",
    ),
    (lambda: RelativeTerms(psi=SIGNAL).plus(RelativeTerms(psi=SIGNAL)), ValueError, "both", "'psi'"),
]


@check(OPERATOR)
def test_operator(call, error, pieces):
    assert_raises(call, error, pieces)


# --- layers ---------------------------------------------------------------------------------------------------


def layer(group=None, channels=(4, 4), **options):
    return GroupSelfAttention(group or cyclic(4), *channels, **options)


def lifting(group=None, channels=(4, 4), **options):
    return LiftingSelfAttention(group or cyclic(4), *channels, **options)


def encoded(encoding, **options):
    return layer(encoding=encoding, **options)(zeros(6, 4, 4), lifted())


LAYERS = [
    (lambda: lifting()(zeros(6, 4), lifted(cyclic(8))), ValueError, "graph: ", "C8", "C4"),
    (lambda: lifting()(zeros(6, 3), lifted()), ValueError, "x: ", "points=6, 4", "(6, 3)"),
    (lambda: lifting()(zeros(5, 4), lifted()), ValueError, "x: ", "points=6, 4", "(5, 4)"),
    (lambda: lifting()(zeros(6, 4, 4), lifted()), ValueError, "x: ", "points=6, 4", "(6, 4, 4)"),
    (lambda: layer()(zeros(6, 4, 4), lifted(dihedral(2))), ValueError, "graph: ", "D2", "C4"),
    (lambda: layer()(zeros(6, 3, 4), lifted()), ValueError, "x: ", "(6, 4, 4)", "(6, 3, 4)"),
    (lambda: layer()(zeros(6, 4, 5), lifted()), ValueError, "x: ", "(6, 4, 4)", "(6, 4, 5)"),
    (lambda: layer()(zeros(5, 4, 4), lifted()), ValueError, "x: ", "(6, 4, 4)", "(5, 4, 4)"),
    (lambda: layer()(zeros(6, 4), lifted()), ValueError, "x: ", "(6, 4, 4)", "(6, 4)"),
    (lambda: layer(channels=(0, 4)), ValueError, "in_channels: ", "at least 1", "got 0"),
    (lambda: lifting(channels=(4, 0)), ValueError, "out_channels: ", "at least 1", "got 0"),
    (lambda: layer(heads=0), ValueError, "heads: ", "at least 1", "got 0"),
    (lambda: layer(channels=(4, 5), heads=2), ValueError, "head_channels: ", "2 heads", "5"),
    (lambda: layer(head_channels=2), ValueError, "channels: ", "at least 3", "got 2"),
    (lambda: GroupAttention(4, 4, scale=INF), ValueError, "scale: ", "finite", "got inf"),
    (lambda: layer(dropout=1.0), ValueError, "dropout: ", "[0, 1)", "got 1.0"),
    (lambda: lifting(dropout=-0.1), ValueError, "dropout: ", "[0, 1)", "got -0.1"),
    (lambda: lifting(dropout=NAN), ValueError, "dropout: ", "finite", "got nan"),
    (lambda: layer(pattern="pooled"), ValueError, "pattern: ", "'query_sum'", "got 'pooled'"),
    (lambda: layer(normalize="sum"), ValueError, "normalize: ", "'softmax'", "got 'sum'"),
    (lambda: layer(head_channels=0), ValueError, "head_channels: ", "at least 1", "got 0"),
    (lambda: layer(channels=(4, 4.0)), ValueError, "out_channels: ", "integer", "got 4.0"),
    (lambda: layer("C4"), TypeError, "group: ", "FiniteGroup", "'C4'"),
    (lambda: GroupLinear(None, 3, 5), TypeError, "group: ", "FiniteGroup", "None"),
    (lambda: FiberEncoding("C4", 4), TypeError, "group: ", "FiniteGroup", "'C4'"),
    (lambda: MLPEncoding("C4", 1), TypeError, "group: ", "FiniteGroup", "'C4'"),
    (lambda: RotaryEncoding("C4", 1, 4), ValueError, "dim: ", "integer", "'C4'"),
    (lambda: TableEncoding("C4", POINTS, 4), TypeError, "group: ", "FiniteGroup", "'C4'"),
    (lambda: TableEncoding(cyclic(4), POINTS, 6, tolerance=0.0), ValueError, "tolerance: ", "positive", "0.0"),
    (
        lambda: layer()(zeros(6, 4, 4).double(), lifted()),
        ValueError,
        "x: expected torch.float32 on cpu",
        "torch.float64 on cpu",
    ),
    (lambda: layer()(zeros(6, 4, 4).long(), lifted()), ValueError, "x: ", "torch.int64"),
    (lambda: layer()(None, lifted()), TypeError, "x: ", "tensor", "NoneType"),
    (
        lambda: lifting()(zeros(6, 4, device="meta"), lifted()),
        ValueError,
        "x: expected torch.float32 on cpu",
        "torch.float32 on meta",
    ),
    (
        lambda: CombinedScore(4, 4, 2)(lifted().to("meta"), zeros(6, 4, 4)),
        ValueError,
        "graph: expected a graph on cpu like x",
        "meta",
    ),
    (
        lambda: CombinedScore(4, 4, 2)(lifted(), zeros(6, 4)),
        ValueError,
        "x: ",
        "[points, fiber, channels] = (6, 4, 4)",
        "(6, 4)",
    ),
    (
        lambda: NetworkKernel(cyclic(4), 3, 2, lifting=True).convolve(zeros(6, 1, 4), lifted()),
        ValueError,
        "x: ",
        "3 channels",
        "(6, 1, 4)",
    ),
    (
        lambda: TableKernel(cyclic(4), 3, 2, POINTS).convolve(zeros(6, 4, 4), lifted()),
        ValueError,
        "x: ",
        "[points, fiber, channels] = (6, 4, 3)",
        "(6, 4, 4)",
    ),
    (
        lambda: EdgeNetwork(2, 3, cutoff=1.0)(lifted(pos=POINTS.double())),
        ValueError,
        "pos: expected torch.float32 on cpu",
        "torch.float64 on cpu",
    ),
    (
        lambda: EdgeNetwork(2, 3, cutoff=1.0)(lifted(), zeros(6, 3).double()),
        ValueError,
        "x: expected torch.float32 on cpu",
        "torch.float64 on cpu",
    ),
    (
        lambda: LiftingConvolution(3, 2)(zeros(6, 4, 3), lifted().to("meta")),
        ValueError,
        "graph: expected a graph on cpu like x",
        "meta",
    ),
    (lambda: EdgeNetwork(2, 3, cutoff=1.0).kernels(None, lifted()), TypeError, "maps: ", "linear maps", "None"),
    (
        lambda: EdgeNetwork(2, 0, cutoff=1.0, hidden=3).kernels([torch.nn.Linear(3, 2)], lifted()),
        ValueError,
        "maps: ",
        "3 channels without bias",
        "maps[0]",
    ),
    (lambda: Piece.rows(SIGNAL, None), TypeError, "found: ", "None"),
    (lambda: Piece.rows(SIGNAL[:2], pieces(lifted(), 3)), ValueError, "x: ", "points", "got (2, "),
    (lambda: fused_kernel(None), TypeError, "device: ", "None"),
    (
        lambda: GroupLinear(cyclic(4), 3, 5)(zeros(6, 4, 3).double()),
        ValueError,
        "x: expected torch.float32 on cpu",
        "torch.float64 on cpu",
    ),
    (
        lambda: layer(pattern="joint", encoding=RotaryEncoding(2, 1, 4)),
        ValueError,
        "encoding: RotaryEncoding",
        "'framewise'",
        "not with pattern 'joint'",
    ),
    (
        lambda: layer(encoding=RotaryEncoding(2, 1, 4)),
        ValueError,
        "encoding: RotaryEncoding",
        "'framewise'",
        "not with pattern 'query_sum'",
    ),
    (
        lambda: lifting(encoding=RotaryEncoding(2, 1, 4)),
        ValueError,
        "encoding: RotaryEncoding",
        "'framewise'",
        "not with pattern 'query_sum'",
    ),
    (
        lambda: layer(encoding=[CoordinateEncoding(2, 6), FiberEncoding(cyclic(4), 6)]),
        TypeError,
        "encoding: ",
        "each entry is a RelativeFunction",
        "got list of CoordinateEncoding, FiberEncoding",
    ),
    (
        lambda: layer(encoding=CoordinateEncoding(2, 4, cyclic(8))),
        ValueError,
        "encoding: CoordinateEncoding",
        "'C8'",
        "but this layer is for",
        "'C4'",
    ),
    (
        lambda: layer(encoding=MLPEncoding(dihedral(2), 1)),
        ValueError,
        "encoding: MLPEncoding",
        "'D2'",
        "but this layer is for",
        "'C4'",
    ),
    (
        lambda: lifting(encoding=CoordinateEncoding(3, 4)),
        ValueError,
        "encoding: CoordinateEncoding",
        "3 dimensions",
        "C4 acts on 2",
    ),
    (
        lambda: layer(encoding=[PositionalValues(2, 1, 4), CoordinateEncoding(2, 4, cyclic(8))]),
        ValueError,
        "encoding: SumOfTerms",
        "'C8'",
        "but this layer is for",
        "'C4'",
    ),
    (
        lambda: layer(encoding=[MLPEncoding(cyclic(4), 1, between_frames=False), PositionalValues(3, 1, 4)]),
        ValueError,
        "encoding: SumOfTerms",
        "3 dimensions",
        "C4 acts on 2",
    ),
    (
        lambda: lifting(encoding=TableEncoding(cyclic(8), POINTS, 4, lifting=True)),
        ValueError,
        "encoding: TableEncoding",
        "'C8'",
        "but this layer is for",
        "'C4'",
    ),
    (lambda: CoordinateEncoding(0, 4), ValueError, "dim: ", "at least 1", "got 0"),
    (lambda: encoded(CoordinateEncoding(2, 5, cyclic(4))), ValueError, "terms.positional_key: ", "1, 4)", "1, 5)"),
    (
        lambda: encoded(MLPEncoding(cyclic(4), 2), pattern="joint"),
        ValueError,
        "terms.displacement_bias: ",
        "4, 4, 1)",
        "4, 4, 2)",
    ),
    (
        lambda: encoded(MLPEncoding(cyclic(4), 1), pattern="framewise"),
        ValueError,
        "terms.displacement_bias: ",
        "key axis must be 1",
        "got 4",
    ),
    (lambda: CoordinateEncoding(2, 2, cyclic(4)), ValueError, "channels: ", "at least 3", "got 2"),
    (lambda: CoordinateEncoding(3, 2), ValueError, "channels: ", "at least 3", "got 2"),
    (lambda: RotaryEncoding(2, 1, 3), ValueError, "channels: ", "even", "got 3"),
    (lambda: RotaryEncoding(2, 1, 0), ValueError, "channels: ", "even", "got 0"),
    (lambda: FiberEncoding(cyclic(4), 4, zeros(4, 4)), ValueError, "table: ", "int64", "float32"),
    (lambda: FiberEncoding(cyclic(4), 4, integers(*[[0] * 3] * 3)), ValueError, "table: ", "0..3", "C4", "(3, 3)"),
    (lambda: FiberEncoding(cyclic(4), 4, torch.full((4, 4), 4)), ValueError, "table: ", "0..3", "C4"),
    (lambda: TableEncoding(cyclic(4), zeros(3, 3), 4), ValueError, "offsets: ", "[offsets, 2]", "(3, 3)"),
    (lambda: TableEncoding(cyclic(4), zeros(0, 2), 4), ValueError, "offsets: ", "at least one", "(0, 2)"),
    (
        lambda: TableEncoding(cyclic(4), torch.tensor([[NAN, 0.0]]), 4),
        ValueError,
        "offsets: ",
        "finite",
        "[[nan, 0.0]]",
    ),
    (lambda: encoded(TableEncoding(cyclic(4), zeros(1, 2), 4)), ValueError, "graph: displacement [", "1 rows"),
    (lambda: GroupLinear(cyclic(4), 3, 5)(zeros(6, 4, 4)), ValueError, "x: ", "C4", "(6, 4, 4)"),
    (lambda: GroupLinear(cyclic(4), 3, 5)(zeros(6, 5, 3)), ValueError, "x: ", "C4", "(6, 5, 3)"),
    (lambda: GroupLinear(cyclic(4), 3, 5)(zeros(3)), ValueError, "x: ", "C4", "[*, 4, 3]", "(3,)"),
    (lambda: CloudNorm(4)(zeros(6, 5), lifted()), ValueError, "x: ", "points=6, *, 4", "(6, 5)"),
    (lambda: CloudNorm(4)(zeros(5, 4), lifted()), ValueError, "x: ", "points=6, *, 4", "(5, 4)"),
    (lambda: CloudNorm(6)(zeros(6), lifted()), ValueError, "x: ", "points=6, *, 6", "(6,)"),
    (lambda: GroupLinear(cyclic(4), 0, 5), ValueError, "in_channels: ", "at least 1", "got 0"),
    (lambda: CloudNorm(0), ValueError, "channels: ", "at least 1", "got 0"),
    (lambda: PreNormBlock(torch.nn.Identity(), 2, 2, dropout=1.0), ValueError, "dropout: ", "[0, 1)", "got 1.0"),
    (lambda: lifted().keeping(zeros(2), lifted()), TypeError, "points: ", "int64", "float32"),
    (lambda: PreNormBlock(torch.nn.Identity(), 2, 1), ValueError, "out_channels: ", "2", "got 1"),
    (lambda: FiberPool("avg"), ValueError, "reduction: ", "'mean'", "got 'avg'"),
    (lambda: CloudPool("avg"), ValueError, "reduction: ", "'mean'", "got 'avg'"),
    (lambda: GridPool(2, "avg"), ValueError, "reduction: ", "'mean'", "got 'avg'"),
    (lambda: FiberPool()(zeros(4)), ValueError, "x: ", "[*, fiber, channels]", "(4,)"),
    (lambda: CloudPool()(zeros(6, 2), point_clouds(zeros(2, 2))), ValueError, "x: ", "2 points", "(6, 2)"),
    (lambda: GridPool().reduce(zeros(6, 2), integers(0, 0), 1), ValueError, "cell: ", "6 points", "(2,)"),
    (lambda: GridPool().centers(POINTS, integers(0, 0), 1), ValueError, "cell: ", "6 points", "(2,)"),
    (lambda: GridPool().centers(POINTS, integers(0, 0, 1, 1, 2, -1), 2), ValueError, "cell, num_cells: ", "below 2"),
    (lambda: GridPool(2.5), ValueError, "size: ", "integer", "got 2.5"),
    (lambda: GridPool(0), ValueError, "size: ", "at least 1", "got 0"),
    (lambda: GridPool(inexact="no"), ValueError, "inexact: ", "'refuse'", "got 'no'"),
    (
        lambda: GridPool(2).cells(IMAGES),
        ValueError,
        "2 x 2",
        "4 x 7 image",
        "breaks equivariance to rotations",
        "4 x 8 would be exact",
    ),
    (
        lambda: assert_equivariant(lambda x, p: p, cyclic(4), zeros(6, 4, 1), POINTS, output_field=False),
        AssertionError,
        "equivariance error ",
        "under C4",
        "exceeds 1e-05",
    ),
    (
        lambda: assert_equivariant(lambda x, p: x, cyclic(4), zeros(6, 4, 1).half(), POINTS.half()),
        ValueError,
        "tolerance: expected one for torch.float16",
        "torch.float64",
        "torch.float32",
    ),
    (
        lambda: assert_equivariant(lambda x, p: x, cyclic(4), zeros(6, 4, 1), POINTS, elements=[]),
        ValueError,
        "elements: expected indices",
        "got none",
    ),
    (lambda: LieSelfAttention(4, 0, heads=2), ValueError, "coordinates: ", "got 0"),
    (lambda: PreNormBlock(layer(), 0, 4), ValueError, "in_channels: ", "got 0"),
    (lambda: RelativePositionTable.of(torch.zeros(2, 2, device="meta")), ValueError, "offsets: ", "meta"),
]


@check(LAYERS)
def test_layers(call, error, pieces):
    assert_raises(call, error, pieces)


def test_inexact_pooling_warns_or_is_silent_if_asked():
    with pytest.warns(UserWarning, match="4 x 7 image, which breaks equivariance to rotations; 4 x 8 would be exact"):
        GridPool(2, inexact="warn").cells(IMAGES)
    GridPool(2, inexact="allow").cells(IMAGES)  # a warning would be an error here


# --- the network ----------------------------------------------------------------------------------------------


STAGES = ("blocks", "expansions", "crops", "pool_last", "inexact")
DROPOUTS = ("attention", "value", "input", "pool")
OPTIONS = ("length", "frame_table", "activation", "init_scale", "init")


def network(group=None, neighborhood=BALL, **options):
    """Return a small network; options are passed by name, whichever dataclass they belong to."""

    def taken(names):
        return {name: options.pop(name) for name in names if name in options}

    stages = Stages(**{"blocks": (1,), **taken(STAGES)})
    values = {"blocks": stages, "dropout": Dropouts(**taken(DROPOUTS)), "options": GSAOptions(**taken(OPTIONS))}
    options = {"in_channels": 1, "out_channels": 3, "channels": 8, "heads": 2, **values, **options}
    return GSANet(group or cyclic(4), neighborhood=neighborhood, **options)


def run(data, geometry_of=None, **options):
    net = network(**options)
    return net(data) if geometry_of is None else net(data, net.geometry(geometry_of))


def cloud(pos=POINTS, x=None):
    return Data(x=zeros(len(pos), 1) if x is None else x, pos=pos)


_PLANAR = ("group: expected a planar group such as cyclic(4), got T",)


def pcam_refusing():
    net = GSANet.pcam(trivial(), size=1)
    net.grid_pool.inexact = "refuse"
    return net


NETWORK = [
    (lambda: run(None), TypeError, "data: ", "Data or Batch", "got NoneType"),
    (lambda: run([POINTS]), TypeError, "data: ", "Data or Batch", "got list"),
    (lambda: run(POINTS.numpy()), TypeError, "data: ", "Data or Batch", "got ndarray"),
    (lambda: Preprocessed(network(), Constant())(None), TypeError, "data: ", "got NoneType"),
    (lambda: Preprocessed(network(), Constant())(POINTS), TypeError, "data: ", "got a tensor"),
    (
        lambda: run(Data(pos=POINTS), in_channels=2),
        ValueError,
        "data.x: ",
        "[points=6, 2]",
        "got None",
        "needs in_channels=1",
    ),
    (lambda: run(POINTS), TypeError, "data: ", "features x", "got Tensor"),
    (lambda: network("C4"), TypeError, "frames: ", "FiniteGroup", "'C4'"),
    (lambda: network(neighborhood=5), TypeError, "neighborhood: ", "got 5"),
    (lambda: network(out_channels=0), ValueError, "out_channels: ", "at least 1", "got 0"),
    (lambda: network(init_scale=-1), ValueError, "init_scale: ", "at least 0", "got -1"),
    (lambda: network(init_scale=INF), ValueError, "init_scale: ", "finite", "got inf"),
    (lambda: network(init="zero"), ValueError, "init: ", "('balanced', 'paper')", "got 'zero'"),
    (lambda: run(cloud(x=zeros(6, 2))), ValueError, "data.x: ", "[points=6, 1]", "(6, 2)"),
    (lambda: run(cloud(x=zeros(6))), ValueError, "data.x: ", "[points=6, 1]", "(6,)"),
    (lambda: run(cloud(x=integers(*[[1]] * 6))), ValueError, "x: ", "floating", "torch.int64"),
    (lambda: run(cloud(x=zeros(5, 1))), ValueError, "x: ", "points=6", "(5, 1)"),
    (lambda: run(cloud(spoiled(2, NAN))), ValueError, "pos: ", "finite", "nan", "point 2"),
    (lambda: run(cloud(zeros(6, 3))), ValueError, "points: ", "[*, 2]", "C4", "(6, 3)"),
    (lambda: run(cloud(), group=tetrahedral()), ValueError, "points: ", "[*, 3]", "T", "(6, 2)"),
    (lambda: run(cloud(), image(2, 2)), ValueError, "geometry: ", "6 points", "got one of 4"),
    (lambda: run(cloud(), crops=(1,)), ValueError, "data: cropping", "grid [clouds, 2]"),
    (lambda: run(cloud(), pool_last=True), ValueError, "data: pooling", "grid [clouds, 2]"),
    (lambda: run(image(4, 4), crops=(2,)), ValueError, "margin: ", "2 pixels", "[4, 4]"),
    (
        lambda: run(image(6, 5), blocks=(1, 1)),
        ValueError,
        "2 x 2",
        "6 x 5 image",
        "breaks equivariance to rotations",
        "6 x 6 would be exact",
        "inputs of 4 x 4 or 6 x 6 keep all sizes",
    ),
    (
        lambda: run(image(9, 8), blocks=(1, 1), crops=(1, 0)),
        ValueError,
        "7 x 6 image",
        "8 x 6 would be exact",
        "inputs of 8 x 8 or 10 x 10 keep all sizes exact",
    ),
    (
        lambda: pcam_refusing().geometry(image(96, 96)),
        ValueError,
        "7 x 7 image",
        "inputs of 88 x 88 or 104 x 104 keep all sizes exact",
    ),
    (
        lambda: run(image(4, 4), blocks=(1, 1), neighborhood=edge(0, 1)),
        ValueError,
        "neighborhood: Given",
        "cannot be scaled to the pixels after a pooling",
    ),
    (lambda: GSANet.rot_mnist(cyclic(4))(image(8, 8)), ValueError, "margin: ", "[2, 2]"),
    *(
        (lambda preset=preset: getattr(GSANet, preset)(tetrahedral()), ValueError, *_PLANAR)
        for preset in ("rot_mnist", "cifar10", "pcam")
    ),
    (lambda: network(dihedral(4), space=Euclidean(SE(2))), ValueError, "frames: ", "not an element of SO(2)"),
    (lambda: GSANet.rot_mnist(cyclic(4), size=4), ValueError, "size: ", "odd", "got 4"),
    (lambda: network(color=1), TypeError, "color"),
    (lambda: GSANet.cifar10(cyclic(4), color=1), TypeError, "color"),
    (lambda: network(in_channels=0), ValueError, "in_channels: ", "at least 1", "got 0"),
    (lambda: network(channels=1), ValueError, "channels: ", "at least 2", "got 1"),
    (lambda: network(channels=4), ValueError, "channels: ", "at least 3", "got 2"),
    (lambda: network(heads=0), ValueError, "heads: ", "at least 1", "got 0"),
    (lambda: network(blocks=()), ValueError, "blocks: ", "each stage", "got []"),
    (lambda: network(blocks=(1, -1)), ValueError, "blocks: ", "got [1, -1]"),
    (lambda: network(blocks=(1, 1), expansions=(2,)), ValueError, "expansions: ", "2 factors", "[2]"),
    (lambda: network(expansions=(0,)), ValueError, "expansions: ", "at least 1", "got [0]"),
    (lambda: network(crops=(1, 1)), ValueError, "crops: ", "1 margins", "got [1, 1]"),
    (lambda: network(crops=(-1,)), ValueError, "crops: ", "at least 0", "got [-1]"),
    (lambda: network(activation="tanh"), ValueError, "activation: ", "'silu'", "got 'tanh'"),
    (lambda: published_table(tetrahedral()), ValueError, "group: ", "C_n and D_n only", "got T"),
    (lambda: network(frame_table=integers(*[[0] * 3] * 3)), ValueError, "table: ", "C4", "(3, 3)"),
    (lambda: network(attention=1.0), ValueError, "attention dropout: ", "[0, 1)", "got 1.0"),
    (lambda: network(value=1.5), ValueError, "value dropout: ", "[0, 1)", "got 1.5"),
    (lambda: network(input=-1), ValueError, "input dropout: ", "[0, 1)", "got -1"),
    (lambda: network(pool=1), ValueError, "pool dropout: ", "[0, 1)", "got 1"),
    (lambda: network(inexact="no"), ValueError, "inexact: ", "'refuse'", "got 'no'"),
    (lambda: network(length=-1.0), ValueError, "length: ", "positive finite", "got -1.0"),
    (
        lambda: FiniteSE2Transformer(channels=4, layers=1)(Data(pos=POINTS), slots=0),
        ValueError,
        "slots: ",
        "at least 1",
        "got 0",
    ),
]


@check(NETWORK)
def test_network(call, error, pieces):
    assert_raises(call, error, pieces)


def test_sizes_that_a_message_advises_are_exact():
    net = pcam_refusing()
    for side in (88, 104):
        assert net.geometry(image(side, side)).clouds[-1].num_clouds == 1


def test_good_input_next_to_the_bad_is_taken():
    """Control: the calls of the tables are accepted with valid values."""
    assert point_clouds(POINTS, batch=integers(0, 0, 1, 1, 0, 1)).num_clouds == 2
    assert lifted(batch=integers(0, 0, 0, 2, 2, 2), ptr=integers(0, 3, 3, 6)).num_clouds == 3
    assert attend()[0].shape == SIGNAL.shape
    assert encoded(CoordinateEncoding(2, 4, cyclic(4))).shape == (6, 4, 4)
    assert run(cloud(), cloud()).shape == (1, 3)
    assert run(image(8, 6), blocks=(1, 1), crops=(1, 0)).shape == (1, 3)
    with torch.autocast("cpu"):
        assert layer()(zeros(6, 4, 4).bfloat16(), lifted()).shape == (6, 4, 4)
    assert lift(POINTS, SHEARED, AllPairs()).num_points == 6


def test_warnings_name_the_line_of_the_user(recwarn):
    cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    network = FramewiseTransformer(PrincipalFrames(), 1, 1, channels=4)
    network(Data(x=torch.ones(8, 1), pos=cube))
    assert [warning.filename for warning in recwarn] == [__file__]


def test_another_default_device_is_refused_before_anything_is_built():
    with torch.device("meta"):
        for build in (lambda: FiniteGroup("one", torch.eye(2)), lambda: GroupLinear(cyclic(4), 2, 3)):
            with pytest.raises(RuntimeError, match=r"expected the CPU as torch's default device, got meta; .*\.to\("):
                build()
