"""Bad input: an error has a class, and names the argument and the value. ``messages.txt`` has the wording.

A row of ``CASES`` is an entry point of ``tests/fuzz/_recipes.py``, whose other arguments are valid, or a function; the
class of the error; and bad values by argument. One argument has a list of values, each for a case of its own; several
are given together. Then follow, if they are not this argument and this value, what the message names and shows.
"""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, zeros
from torch_geometric.data import Batch, Data

from lieattn import transforms
from lieattn.geometry import (
    AllPairs,
    Given,
    Nearest,
    PrincipalFrames,
    Radius,
    ScaleFrames,
    lift,
    pieces,
    pixel_positions,
    point_clouds,
)
from lieattn.groups import (
    SE,
    SO,
    FiniteGroup,
    Sim,
    cyclic,
    dihedral,
    octahedral,
    pyritohedral,
    reflection,
    tetrahedral,
)
from lieattn.models import (
    DirectionConvNet,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    LieTransformer,
    Stages,
    published_table,
)
from lieattn.models.irreps import TensorFieldNetwork
from lieattn.nn import GridPool, GroupLinear, GroupSelfAttention
from lieattn.nn.relative import CoordinateEncoding, FiberEncoding, MLPEncoding, PositionalValues, RotaryEncoding
from lieattn.ops import RelativeTerms
from lieattn.reps import Pseudovector, SymmetricTensor, Vector
from lieattn.spaces import Euclidean, Sphere
from lieattn.testing import assert_equivariant, further_symmetries
from tests.cases import each
from tests.fuzz._recipes import ALIASES, C4, EDGES, GRAPH, POS, SIGNAL, entrance, gsa

MESSAGES = Path(__file__).with_name("messages.txt")
NAN, INF = math.nan, math.inf
CLOUDS = point_clouds(POS)
OFFSETS = {"coord": POS, "offset": torch.tensor([2, 6])}
MASK = torch.ones(1, 6, dtype=torch.bool)
PLACES = torch.cartesian_prod(torch.arange(2), torch.arange(3))
IMAGES = torch.tensor([[8, 8], [4, 7]])
SHEARED = C4.conjugate(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "sheared")
TURN = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)


def spoiled(point, value):
    pos = POS.clone()
    pos[point, 1] = value
    return pos


def image(*sides):
    return Data(x=zeros(math.prod(sides), 1), pos=pixel_positions(*sides), grid=torch.tensor([sides]))


def spinning(network, field=Pseudovector(), **options):  # noqa: B008
    """Build a network with an input field that it cannot see."""
    if network is not TensorFieldNetwork:
        options = {"frames": PrincipalFrames(), **options}
    return network(in_channels=1, out_channels=1, neighborhood=Radius(1.5), vector_inputs={"spin": field}, **options)


def cloud(pos=POS, x=None):
    return Data(x=zeros(len(pos), 4) if x is None else x, pos=pos)


def integers(*values, **options):
    return torch.tensor(values, dtype=torch.int64, **options)


def edge(source, target):
    return Given(integers([source], [target]))


def on_images(**stages):
    return gsa(blocks=Stages(**stages), in_channels=1, neighborhood=Radius(1.5))


def called(name, bad):
    """Call an entry point with valid arguments except for these."""
    found = entrance(name)
    return found.call({**found.arguments, **bad})


CASES = [
    # groups
    ("groups.cyclic", ValueError, {"n": [0, -3, 4.0, True, "4"]}),
    ("groups.dihedral", ValueError, {"n": [0]}),
    ("groups.trivial", ValueError, {"dim": [0]}),
    ("groups.inversion", ValueError, {"dim": [0]}),
    ("groups.reflection", ValueError, {"dim": [0]}),
    ("groups.reflection", ValueError, {"axis": [2, (0, 0), (1, 0, 0), 1.5]}),
    ("groups.cyclic_about", ValueError, {"n": [0]}),
    ("groups.cyclic_about", ValueError, {"axis": [(0, 0, 0), (0, NAN, 0), (0, 1), "xyz"]}),
    ("groups.commuting_product", ValueError, {"first": C4, "second": octahedral()}, "first, second", "O on R^3"),
    ("groups.commuting_product", ValueError, {"first": C4, "second": reflection(2)}, "element 1 of C4", "mirror2"),
    ("groups.commuting_product", ValueError, {"first": C4, "second": cyclic(2)}, "'C4xC2'", "elements 0 and 6"),
    ("groups.commuting_product", TypeError, {"first": [None]}),
    ("groups.direct_product", TypeError, {"second": ["C2"]}),
    ("groups.SemidirectProduct", TypeError, {"stabilizer": ["C4"]}),
    ("groups.FiniteGroup", TypeError, {"elements": [[[[1.0]]]]}, "matrices of 'G'", "list"),
    ("groups.FiniteGroup.from_matrices", TypeError, {"matrices": [zeros(1, 2, 2) + 1j]}),
    (
        "groups.FiniteGroup.from_matrices",
        ValueError,
        {"matrices": [zeros(1, 0, 0), zeros(2, 2), zeros(0, 2, 2), zeros(1, 2, 3)]},
    ),
    ("groups.FiniteGroup.from_matrices", ValueError, {"matrices": [zeros(2, 2, 2) + NAN]}, "'G'", "element 0"),
    ("groups.FiniteGroup.from_matrices", ValueError, {"matrices": [zeros(1, 2, 2)]}, "'G'", "element 0"),
    ("groups.FiniteGroup.from_matrices", ValueError, {"matrices": [C4.elements[[0, 1, 2, 1]]]}, "'G'", "1 and 3"),
    ("groups.FiniteGroup.from_matrices", ValueError, {"matrices": [C4.elements[:2]]}, "'G'", "1.0e+00"),
    (
        "groups.FiniteGroup.from_matrices",
        ValueError,
        {"matrices": [cyclic(2).elements[1:], 2 * torch.eye(2)[None]]},
        "'G'",
        "elements[0]",
    ),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[0, 1, 2], [1, 1, 2]]]}, "'G'", "row 1"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[0, 2]]]}, "'G'", "row 0 is [0, 2]"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[0.0, 1.0]]]}, "'G'", "float32"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[False, True]]]}, "'G'", "torch.bool"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[]]}, "'G'", "(0,)"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[]]]}, "'G'", "(1, 0)"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[0, 1], [0]]]}, "'G'"),
    ("groups.FiniteGroup.from_permutations", ValueError, {"permutations": [[[0, 1, 2], [1, 2, 0]]]}, "'G'", "away"),
    ("groups.FiniteGroup.generate", ValueError, {"generators": TURN, "max_order": 50}, "'G'", "max_order=50"),
    ("groups.FiniteGroup.generate", ValueError, {"generators": [TURN + NAN]}, "generators of 'G'", "element 0"),
    ("groups.FiniteGroup.generate", ValueError, {"generators": [TURN[:0], TURN[0]]}),
    ("groups.FiniteGroup.conjugate", ValueError, {"by": [zeros(2, 2)]}, "by", "[0.0, 0.0]"),
    ("groups.FiniteGroup.conjugate", ValueError, {"by": [torch.eye(3)]}),
    ("groups.FiniteGroup.conjugate", ValueError, {"by": [TURN[0] + INF]}, "by", "finite"),
    ("groups.FiniteGroup.act", ValueError, {"g": [4, -1, True]}),
    ("groups.FiniteGroup.act", ValueError, {"g": [integers(1, 9)]}, "g", "[1, 9]"),
    ("groups.FiniteGroup.act", ValueError, {"g": [integers(0, -1)]}, "g", "[ 0, -1]"),
    ("groups.FiniteGroup.act", ValueError, {"points": [zeros(5, 3)]}),
    ("groups.FiniteGroup.act", TypeError, {"points": [integers(1, 2)]}),
    ("groups.FiniteGroup.translate", ValueError, {"g": [7]}),
    ("groups.FiniteGroup.translate", ValueError, {"f": [zeros(5, 3, 2), zeros(4)]}),
    ("groups.FiniteGroup.index", ValueError, {"matrices": [torch.eye(3)]}),
    ("groups.FiniteGroup.index", ValueError, {"matrices": [cyclic(8).elements]}, "matrices", "number 1"),
    ("groups.FiniteGroup.index", ValueError, {"tolerance": ["small"]}),
    ("groups.SemidirectProduct.element", ValueError, {"linear": [4]}),
    ("groups.SemidirectProduct.element", ValueError, {"translation": [zeros(3)]}),
    ("groups.SemidirectProduct.element", TypeError, {"translation": [integers(1, 2)]}),
    ("groups.SemidirectProduct.act", ValueError, {"points": [zeros(5, 3)]}),
    ("groups.SemidirectProduct.act", TypeError, {"points": [[1.0, 2.0]]}, "points", "list"),
    ("groups.SemidirectProduct.act", TypeError, {"g": ["turn"]}, "g", "str"),
    (
        "groups.SemidirectProduct.act",
        ValueError,
        {"g": torch.eye(3).expand(4, 3, 3), "points": zeros(5, 2)},
        "g, points",
        "(4,) and (5,)",
    ),
    ("groups.SemidirectProduct.act", ValueError, {"g": torch.eye(3).double(), "points": POS}, "g, points", "float64"),
    ("groups.SemidirectProduct.act_vectors", ValueError, {"vectors": [zeros(3)]}),
    ("groups.SemidirectProduct.inverse", ValueError, {"g": [2 * torch.eye(3)]}, "of C4", "1.0e+00 away"),
    ("groups.SO.check", ValueError, {"argument": "g", "g": torch.eye(3, device="meta")}, "g", "meta"),
    ("groups.SO.sample", TypeError, {"generator": [0]}, "generator", "int"),
    ("groups.SO.sample", ValueError, {"dtype": [torch.int64]}),
    ("groups.SO.sample", ValueError, {"device": ["attic"]}),
    (lambda: SO(3).sample(-2), ValueError, {}, "shape", "-2"),
    ("groups.Dilations.exp", ValueError, {"a": [torch.tensor([[1.0], [1000.0]])]}, "a", "1000.0"),
    ("groups.RotationDilations.exp", ValueError, {"a": [torch.tensor([-1000.0, 0.0])]}, "a", "1000.0"),
    # clouds and lifting
    ("geometry.lift", TypeError, {"points": [None]}, "points", "NoneType"),
    ("geometry.lift", TypeError, {"points": [[[0.0, 1.0]]]}, "points", "list"),
    ("geometry.lift", TypeError, {"points": [Data(x=POS)]}, "data.pos", "Data with x"),
    ("geometry.lift", TypeError, {"points": [integers(*[[1, 2]] * 3)]}),
    ("geometry.lift", ValueError, {"points": [zeros(3), zeros(1, 2, 3, 2), zeros(3, 0)]}),
    ("geometry.lift", ValueError, {"points": [spoiled(3, NAN)]}, "pos", "point 3"),
    ("geometry.lift", ValueError, {"points": [spoiled(4, INF), spoiled(4, -INF)]}, "pos", "point 4"),
    ("geometry.lift", ValueError, {"points": [Batch.from_data_list([cloud(), cloud(spoiled(2, NAN))])]}, "pos", "8"),
    ("geometry.lift", ValueError, {"points": spoiled(5, NAN)[None], "mask": MASK}, "pos", "point 5"),
    ("geometry.lift", ValueError, {"points": [POS.double() * 1e200]}, "pos", "point 0"),
    ("geometry.lift", ValueError, {"points": [POS * 1e20]}, "pos", "e+20"),
    ("geometry.lift", ValueError, {"length": [1e-20]}),
    ("geometry.lift", TypeError, {"length": ["1"]}, "length", "str"),
    ("geometry.lift", ValueError, {"length": [0, -1.5, NAN, INF]}),
    ("geometry.lift", TypeError, {"frames": ["C4"]}),
    ("geometry.lift", TypeError, {"frames": [cyclic]}, "frames", "the function cyclic itself: call it"),
    ("geometry.lift", ValueError, {"frames": [octahedral()]}, "points", "[points, 2]"),
    ("geometry.lift", ValueError, {"points": POS[None], "frames": octahedral()}, "points", "[points, 2]"),
    ("geometry.lift", ValueError, {"frames": [SHEARED]}, "neighborhood", "Radius(radius=1.5"),
    ("geometry.lift", ValueError, {"frames": SHEARED, "neighborhood": Nearest(2)}, "neighborhood", "Nearest(k=2"),
    ("geometry.lift", TypeError, {"neighborhood": [1.5, None, Radius]}),
    ("geometry.lift", ValueError, {"neighborhood": [edge(0, 6)]}, "edge_index", "0 to 6"),
    ("geometry.lift", ValueError, {"neighborhood": [edge(0, -1)]}, "edge_index", "0 to -1"),
    ("geometry.lift", ValueError, {"neighborhood": [Given(integers([0, 0], [5, 5]))]}, "edge_index", "0 to 5"),
    (
        "geometry.lift",
        ValueError,
        {"neighborhood": edge(0, 5), "batch": integers(0, 0, 0, 1, 1, 1)},
        "edge_index",
        "point 5",
    ),
    ("geometry.point_clouds", TypeError, {"batch": [[0] * 6]}, "batch", "list"),
    ("geometry.point_clouds", TypeError, {"batch": [zeros(6, dtype=torch.int32), zeros(6)]}),
    ("geometry.point_clouds", ValueError, {"batch": [integers([0] * 6), zeros(6, dtype=int, device="meta")]}),
    ("geometry.point_clouds", ValueError, {"batch": [integers(0, 0)]}, "batch", "got 2"),
    ("geometry.point_clouds", ValueError, {"batch": [integers(0, 0, -1, 0, 0, 0)]}, "batch", "batch[2] = -1"),
    ("geometry.point_clouds", TypeError, {"ptr": [torch.tensor([0.0, 6.0])]}),
    ("geometry.point_clouds", ValueError, {"ptr": [integers(0, 5)]}, "ptr", "0 to 5"),
    ("geometry.point_clouds", ValueError, {"ptr": [integers(1, 6)]}, "ptr", "1 to 6"),
    ("geometry.point_clouds", ValueError, {"ptr": [integers(0, 5, 2, 6)]}, "ptr", "5 before 2"),
    ("geometry.point_clouds", ValueError, {"ptr": [integers()]}, "ptr", "no entries"),
    ("geometry.point_clouds", ValueError, {"ptr": [integers(0, 6, device="meta")]}),
    (
        "geometry.point_clouds",
        ValueError,
        {"ptr": integers(0, 3, 6), "batch": integers(0, 0, 1, 1, 1, 1)},
        "batch, ptr",
        "batch[2] = 1",
    ),
    ("geometry.point_clouds", ValueError, {"mask": [MASK]}, "mask", "(6, 2)"),
    ("geometry.point_clouds", ValueError, {"points": POS[None], "mask": MASK[:, :5]}, "mask", "(1, 5)"),
    ("geometry.point_clouds", TypeError, {"points": POS[None], "mask": zeros(1, 6)}, "mask", "float32"),
    ("geometry.point_clouds", TypeError, {"points": POS[None], "mask": [[True] * 6]}, "mask", "list"),
    ("geometry.point_clouds", ValueError, {"points": POS[None], "mask": MASK.to("meta")}, "mask", "meta"),
    ("geometry.point_clouds", ValueError, {"points": CLOUDS, "grid": integers([2, 3])}, "grid", "PointClouds"),
    ("geometry.point_clouds", ValueError, {"points": POS[None], "batch": integers(*[0] * 6)}, "batch, ptr", "padded"),
    ("geometry.point_clouds", TypeError, {"grid": [[[2, 3]]]}, "grid", "list"),
    ("geometry.point_clouds", TypeError, {"grid": [torch.tensor([[2.0, 3.0]])]}),
    ("geometry.point_clouds", ValueError, {"grid": [integers(2, 3), integers([1, 2, 3]), integers([2, 3], [2, 3])]}),
    ("geometry.point_clouds", ValueError, {"grid": [integers([2, 3], device="meta")]}),
    ("geometry.point_clouds", ValueError, {"grid": [integers([2, 4])]}, "grid", "[2, 4]"),
    ("geometry.point_clouds", ValueError, {"grid": [integers([-2, -3])]}, "grid", "[-2, -3]"),
    ("geometry.point_clouds", ValueError, {"raster": integers([3, 3])}, "raster, pixel", "raster alone"),
    ("geometry.point_clouds", ValueError, {"pixel": PLACES}, "raster, pixel", "pixel alone"),
    (
        "geometry.point_clouds",
        ValueError,
        {"raster": integers([2, 3]), "pixel": PLACES, "grid": integers([2, 3])},
        "raster, pixel",
        "(1, 2)",
    ),
    ("geometry.point_clouds", ValueError, {"raster": integers([2, 0]), "pixel": PLACES}, "raster", "[2, 0]"),
    ("geometry.point_clouds", ValueError, {"raster": integers([2, 2]), "pixel": PLACES}, "pixel", "[0, 2]"),
    ("geometry.point_clouds", ValueError, {"raster": integers([2, 3]), "pixel": PLACES[:5]}, "raster, pixel", "(5, 2)"),
    ("geometry.point_clouds", ValueError, {"raster": integers([2, 3, 1]), "pixel": PLACES}, "raster, pixel", "(1, 3)"),
    ("geometry.point_clouds", TypeError, {"raster": integers([2, 3]), "pixel": PLACES.double()}, "pixel", "float64"),
    (
        "geometry.point_clouds",
        ValueError,
        {"batch": integers(1, 1, 0, 0, 1, 1), "grid": integers([1, 2], [2, 2])},
        "grid",
        "not sorted",
    ),
    ("geometry.flatten", ValueError, {"mask": [MASK[:, 1:]]}),
    ("geometry.unflatten", ValueError, {"mask": [MASK[:, 1:]]}, "flat", "got 6"),
    ("geometry.unflatten", ValueError, {"flat": [torch.tensor(1.0)]}, "flat", "got 0"),
    ("geometry.unflatten", TypeError, {"mask": [zeros(1, 6)]}),
    ("geometry.LiftedGraph.spread", TypeError, {"x": [None]}, "x", "NoneType"),
    ("geometry.LiftedGraph.astype", ValueError, {"dtype": [torch.int64]}),
    (lambda: pixel_positions(-1, 3), ValueError, {}, "height", "-1"),
    (lambda: pixel_positions(3, 3, dtype=torch.int64), ValueError, {}, "dtype", "torch.int64"),
    ("geometry.crop", ValueError, {"grid": [IMAGES[0]]}),
    ("geometry.crop", TypeError, {"grid": [IMAGES.float()]}),
    ("geometry.crop", ValueError, {"margin": [0.5, -1]}),
    ("geometry.crop", ValueError, {"grid": IMAGES, "margin": 2}, "margin", "image 1, [4, 7]"),
    ("geometry.pooling_cells", ValueError, {"grid": [IMAGES[0]]}),
    ("geometry.pooling_cells", ValueError, {"size": [0]}),
    ("geometry.Radius", ValueError, {"radius": [0, -1.0, NAN, INF]}),
    ("geometry.Radius", TypeError, {"radius": ["1"]}, "radius", "str"),
    ("geometry.Radius", TypeError, {"include_self": [1]}),
    ("geometry.PixelSquare", ValueError, {"size": [4, 0, -3, 3.0]}),
    ("geometry.PixelSquare", ValueError, {"spacing": [0]}),
    ("geometry.Nearest", ValueError, {"k": [0, 2.0]}),
    ("geometry.Nearest", ValueError, {"ties": ["some"]}),
    ("geometry.AllPairs", TypeError, {"include_self": [None]}),
    ("geometry.Given", TypeError, {"edge_index": [zeros(2, 3)]}),
    ("geometry.Given", ValueError, {"edge_index": [integers([0, 1], [1, 2], [2, 0])]}),
    (lambda: transforms.radius_graph(POS, -1.0), ValueError, {}, "r", "-1.0"),
    (lambda: transforms.radius_graph(POS, 1.0, flow="up"), ValueError, {}, "flow", "'up'"),
    (lambda: transforms.periodic_radius_graph(POS, 0.0, torch.eye(2)), ValueError, {}, "r", "0.0"),
    (lambda: transforms.periodic_radius_graph(POS, 1.0, torch.tensor(2.0)), ValueError, {}, "cell", "[]"),
    (lambda: transforms.knn_graph(POS, 0), ValueError, {}, "k", "0"),
    (lambda: transforms.knn_graph(POS / 0, 1, loop=True), ValueError, {}, "pos", "point 0"),
    (lambda: transforms.KNNGraph(2, ties="first"), ValueError, {}, "ties", "'first'"),
    (lambda: transforms.KNNGraph(2)(Data(pos=POS, cell=torch.eye(2)[None])), ValueError, {}, "data.cell", "KNNGraph"),
    (lambda: transforms.radius(POS[:, 0], POS[:, 0], 1.0), ValueError, {}, "x", "(6,)"),
    (lambda: transforms.radius(POS, POS.to("meta"), 1.0), ValueError, {}, "x, y", "meta"),
    (lambda: transforms.radius(POS, POS, 1.0, *[POS[:, 0]] * 2), TypeError, {}, "batch_x", "float32"),
    (lambda: transforms.FarthestPoints(2.0), ValueError, {}, "ratio", "2.0"),
    (lambda: transforms.Standardize(zeros(2), zeros(2)), ValueError, {}, "mean, std", "[0., 0.]"),
    (lambda: transforms.Standardize(zeros(2), POS[0].exp())(Data(x=POS.long())), TypeError, {}, "data.x", "int64"),
    (lambda: transforms.Standardize(zeros(2), POS[0].exp())(Data(x=POS[:, :1])), ValueError, {}, "data.x", "(6, 1)"),
    (lambda: transforms.from_offsets(OFFSETS | {"offset": torch.tensor([2, 5])}), ValueError, {}, "offset", "[2, 5]"),
    (lambda: transforms.from_offsets(OFFSETS | {"offset": torch.tensor([6, 4, 6])}), ValueError, {}, "offset", "[6, 4"),
    (lambda: transforms.from_offsets(OFFSETS | {"offset": POS[0]}), TypeError, {}, "offset", "float32"),
    (lambda: transforms.from_offsets(OFFSETS | {"label": torch.tensor([1, 0.5])}), ValueError, {}, "labels", "0.5"),
    (lambda: transforms.from_offsets({"pos": POS}), TypeError, {}, "coord", "NoneType"),
    (lambda: transforms.RadiusGraph(1.0)(Data()), TypeError, {}, "data.pos", "Data"),
    ("geometry.Piece.rows", TypeError, {"found": [None]}),
    ("geometry.Piece.rows", ValueError, {"x": SIGNAL[:2], "found": pieces(GRAPH, 3)}, "x", "(2, "),
    # the operator
    ("ops.group_attention", ValueError, {"pattern": ["all"]}),
    ("ops.group_attention", ValueError, {"normalize": ["sum"]}),
    ("ops.group_attention", ValueError, {"dropout": [1.0, -0.1, NAN]}),
    ("ops.group_attention", ValueError, {"key": [None]}, "query, key", "one"),
    ("ops.group_attention", ValueError, {"query": [SIGNAL[:5]]}),
    ("ops.group_attention", ValueError, {"key": [SIGNAL[:5]]}),
    ("ops.group_attention", ValueError, {"value": [SIGNAL[:5]]}),
    ("ops.group_attention", ValueError, {"value": [SIGNAL[:, :, :1]]}, "query", "got 2"),
    ("ops.group_attention", ValueError, {"key": [SIGNAL[..., :2], SIGNAL[:, :2]]}, "key", "got 2"),
    ("ops.group_attention", ValueError, {"query": [SIGNAL[:, :1]]}, "query", "got 1"),
    (
        "ops.group_attention",
        ValueError,
        dict.fromkeys(("query", "key", "value"), SIGNAL.to("meta")),
        "query",
        "meta",
    ),
    ("ops.group_attention", ValueError, {"terms": [RelativeTerms(row=integers(0, 1))]}, "terms.row", "(2,)"),
    ("ops.group_attention", ValueError, {"terms": [RelativeTerms(psi=zeros(3, 4, 1, 2, 3))]}, "terms.psi", "(3, 4"),
    (
        "ops.group_attention",
        ValueError,
        {"terms": [RelativeTerms(beta=zeros(EDGES, 4))]},
        "terms.beta",
        f"({EDGES}, 4)",
    ),
    ("ops.group_attention", ValueError, {"terms": [RelativeTerms(fiber_bias=zeros(8, 8, 2))]}, "terms", "(8, 8, 2)"),
    (
        "ops.group_attention",
        ValueError,
        {"query": None, "key": None, "terms": RelativeTerms(positional_key=zeros(EDGES, 4, 2, 3))},
        "terms.positional_key",
        "None",
    ),
    (
        "ops.group_attention",
        ValueError,
        {"terms": RelativeTerms(psi=zeros(EDGES, 4, 4, 2, 3)), "pattern": "framewise"},
        "terms.psi",
        "got 4",
    ),
    ("ops.RelativeTerms.plus", ValueError, {"other": [RelativeTerms(psi=SIGNAL)]}, "both", "'psi'"),
    ("ops.fused_kernel", TypeError, {"device": [None]}),
    ("ops.edge_units", ValueError, {"seen": [zeros(6, 2, 5), zeros(6, 2)]}),
    ("ops.edge_units", ValueError, {"shared": [zeros(5, 4)]}),
    ("ops.edge_units", ValueError, {"weight": [zeros(6, 1)]}),
    ("ops.edge_units", TypeError, {"weight": [[1.0]]}, "weight", "list"),
    ("ops.edge_units", ValueError, {"second": [(zeros(4, 4), zeros(3))]}, "second[1]", "(3,)"),
    ("ops.edge_units", TypeError, {"second": [zeros(4, 4)]}),
    ("ops.edge_kernels", ValueError, {"maps": [[zeros(2, 4), zeros(2, 5)]]}, "maps[1]", "(2, 5)"),
    ("ops.edge_kernels", TypeError, {"maps": [[]]}, "maps", "list"),
    ("ops.edge_messages", ValueError, {"units": [zeros(6, 2, 4)]}),
    ("ops.edge_messages", ValueError, {"x": [zeros(6, 4, 4), zeros(6, 4)]}),
    ("ops.edge_messages", TypeError, {"neighbors": [zeros(2, 7)]}),
    ("ops.edge_moments", ValueError, {"arrows": [zeros(6, 3)]}),
    ("ops.edge_moments", ValueError, {"functions": [zeros(7)]}),
    # layers
    ("nn.LiftingSelfAttention.forward", ValueError, {"graph": [lift(POS, cyclic(8), Radius(1.5))]}, "graph", "C8"),
    ("nn.LiftingSelfAttention.forward", ValueError, {"x": [zeros(6, 3), zeros(5, 4), zeros(6, 4, 4)]}),
    ("nn.LiftingSelfAttention.forward", ValueError, {"x": [zeros(6, 4, device="meta")]}),
    ("nn.GroupSelfAttention.forward", ValueError, {"graph": [lift(POS, dihedral(2), Radius(1.5))]}, "graph", "D2"),
    (
        "nn.GroupSelfAttention.forward",
        ValueError,
        {"x": [zeros(6, 3, 4), zeros(6, 4, 5), zeros(5, 4, 4), zeros(6, 4)]},
    ),
    ("nn.GroupSelfAttention.forward", ValueError, {"x": [zeros(6, 4, 4).double(), zeros(6, 4, 4).long()]}),
    ("nn.GroupSelfAttention.forward", TypeError, {"x": [None]}, "x", "NoneType"),
    ("nn.GroupSelfAttention", ValueError, {"out_channels": [5]}, "head_channels", "5"),
    (lambda: GroupSelfAttention(C4, 4, 4, head_channels=2), ValueError, {}, "channels", "2"),
    ("nn.GroupSelfAttention", ValueError, {"head_channels": [0]}),
    ("nn.GroupSelfAttention", ValueError, {"dropout": [1.0, -0.1, NAN]}),
    *(
        ("nn.GroupSelfAttention", ValueError, {"pattern": "query_sum", "encoding": encoding}, "encoding", found)
        for encoding, found in (
            (RotaryEncoding(2, 1, 4), "'query_sum'"),
            (CoordinateEncoding(2, 4, cyclic(8)), "'C8'"),
            (MLPEncoding(dihedral(2), 1), "'D2'"),
            ([PositionalValues(2, 1, 4), CoordinateEncoding(2, 4, cyclic(8))], "'C8'"),
            ([MLPEncoding(C4, 1, between_frames=False), PositionalValues(3, 1, 4)], "3 dimensions"),
        )
    ),
    ("nn.GroupSelfAttention", ValueError, {"encoding": [RotaryEncoding(2, 1, 4)]}, "encoding", "'joint'"),
    (
        "nn.GroupSelfAttention",
        ValueError,
        {"encoding": CoordinateEncoding(2, 4, C4, published_table(C4))},
        "encoding",
        "'joint'",
    ),
    (
        "nn.GroupSelfAttention",
        ValueError,
        {"encoding": CoordinateEncoding(2, 6, C4, absolute=True), "encoded": "features", "pattern": "query_sum"},
        "pattern",
        "'query_sum'",
    ),
    ("nn.GroupSelfAttention", TypeError, {"encoding": [[FiberEncoding(C4, 6)]]}, "encoding", "[FiberEncoding()]"),
    ("nn.GroupSelfAttention", ValueError, {"encoding": [MLPEncoding(C4, 3)]}, "terms.displacement_bias", "4, 4, 3)"),
    (
        "nn.GroupSelfAttention",
        ValueError,
        {"pattern": "framewise", "encoding": MLPEncoding(C4, 2)},
        "terms.displacement_bias",
        "got 4",
    ),
    (
        "nn.GroupSelfAttention",
        ValueError,
        {"pattern": "query_sum", "encoding": CoordinateEncoding(2, 5, C4)},
        "terms.positional_key",
        "5)",
    ),
    ("nn.LiftingSelfAttention", ValueError, {"encoding": [CoordinateEncoding(3, 4)]}, "encoding", "3 dimensions"),
    ("nn.GroupAttention", ValueError, {"scale": [INF]}),
    ("nn.GroupLinear.forward", ValueError, {"x": [zeros(6, 4, 3), zeros(6, 5, 4), zeros(4), zeros(6, 4, 4).double()]}),
    ("nn.relative.FiberEncoding", ValueError, {"table": [zeros(4, 4), integers(*[[0] * 3] * 3)]}),
    ("nn.relative.FiberEncoding", ValueError, {"table": [torch.full((4, 4), 4)]}, "table", "0..3"),
    ("nn.relative.RotaryEncoding", ValueError, {"channels": [3, 0]}),
    ("nn.relative.CoordinateEncoding", ValueError, {"group": C4, "channels": 2}, "channels", "2"),
    ("nn.relative.TableEncoding", ValueError, {"tolerance": [0.0]}),
    ("nn.relative.TableEncoding", ValueError, {"offsets": [zeros(3, 3), zeros(0, 2)]}),
    ("nn.relative.TableEncoding", ValueError, {"offsets": [torch.tensor([[NAN, 0.0]])]}, "offsets", "[[nan, 0.0]]"),
    ("nn.relative.TableEncoding", ValueError, {"offsets": [zeros(1, 2)]}, "graph", "1 rows"),
    ("nn.relative.RelativePositionTable.of", ValueError, {"offsets": [zeros(2, 2, device="meta")]}, "offsets", "meta"),
    ("nn.relative.CombinedScore.forward", ValueError, {"graph": [GRAPH.to("meta")]}, "graph", "meta"),
    ("nn.relative.CombinedScore.forward", ValueError, {"x": [zeros(6, 4)]}),
    ("nn.relative.NetworkKernel.convolve", ValueError, {"x": [zeros(6, 4, 3)]}),
    ("nn.relative.BumpKernel.convolve", ValueError, {"x": [zeros(6, 4, 3)]}),
    ("nn.relative.BumpKernel", ValueError, {"side": [1]}),
    ("nn.relative.BumpKernel", ValueError, {"out_channels": 3, "depthwise": True}, "depthwise", "4 and 3"),
    ("nn.relative.BumpKernel", ValueError, {"init_scale": [0.0]}),
    (
        "ops.attentive_sums",
        ValueError,
        {"x": zeros(6, 4, 3), "channel": (zeros(3, 4, 4, 2, 4), zeros(3, 4, 4, 2, 4))},
        "channel",
        "(3, 4, 4, 2, 4)",
    ),
    ("ops.attentive_sums", ValueError, {"terms": [RelativeTerms(psi=zeros(9, 4, 3))]}, "terms.psi", "(9, 4, 3)"),
    ("ops.attentive_sums", ValueError, {"mix": [zeros(4, 4, 3, 4)]}, "mix", "(4, 4, 3, 4)"),
    ("ops.attentive_sums", ValueError, {"spatial": [RelativeTerms(psi=zeros(9, 4, 4, 3, 1))]}, "spatial.psi", "1)"),
    ("nn.relative.TableKernel.convolve", ValueError, {"x": [zeros(16, 4, 3)]}),
    ("nn.relative.EdgeNetwork.forward", ValueError, {"graph": [GRAPH.astype(torch.float64)]}, "pos", "float64"),
    ("nn.relative.EdgeNetwork.forward", ValueError, {"x": [zeros(6, 4).double()]}),
    ("nn.relative.EdgeNetwork.kernels", TypeError, {"maps": [None]}),
    ("nn.relative.EdgeNetwork.kernels", ValueError, {"maps": [[torch.nn.Linear(16, 2)]]}, "maps", "maps[0]"),
    ("nn.LiftingConvolution.forward", ValueError, {"graph": [GRAPH.to("meta")]}, "graph", "meta"),
    ("nn.CloudNorm.forward", ValueError, {"x": [zeros(6, 5), zeros(5, 4), zeros(6)]}),
    ("nn.PreNormBlock", ValueError, {"dropout": [1.0]}),
    ("nn.PreNormBlock", ValueError, {"out_channels": [1]}),
    (lambda: GRAPH.keeping(zeros(2), GRAPH), TypeError, {}, "points", "torch.float32"),
    ("nn.FiberPool.forward", ValueError, {"x": [zeros(4)]}),
    ("nn.CloudPool.forward", ValueError, {"graph": [point_clouds(zeros(2, 2))]}, "x", "2 points"),
    ("nn.GridPool.reduce", ValueError, {"cell": [integers(0, 0)]}),
    ("nn.GridPool.centers", ValueError, {"cell": [integers(0, 0)]}),
    ("nn.GridPool.centers", ValueError, {"cell": [integers(0, 0, 1, 1, 3, -1)]}, "cell, num_cells", "3"),
    ("nn.GridPool.cells", ValueError, {"grid": [IMAGES]}, "4 x 7 image", "4 x 8 would be exact"),
    (
        lambda: assert_equivariant(lambda x, p: p, C4, zeros(6, 4, 1), POS, output_field=False),
        AssertionError,
        {},
        "under C4",
        "exceeds 1e-05",
    ),
    (
        lambda: assert_equivariant(lambda x, p: x, C4, zeros(6, 4, 1).half(), POS.half()),
        ValueError,
        {},
        "tolerance",
        "torch.float16",
    ),
    (lambda: further_symmetries(None, C4, zeros(6, 4, 1).half(), POS.half()), ValueError, {}, "tolerance", "float16"),
    (
        lambda: assert_equivariant(lambda x, p: x, C4, zeros(6, 4, 1), POS, elements=[]),
        ValueError,
        {},
        "elements",
        "none",
    ),
    # networks
    ("models.VectorEmbedding", ValueError, {"names": [{"spin": Pseudovector()}]}, "vector_inputs", "Pseudovector"),
    ("models.VectorEmbedding", TypeError, {"names": [{"spin": 3}]}, "vector_inputs", "3"),
    ("models.VectorEmbedding", ValueError, {"names": [{"spin": "up"}]}, "vector_inputs", "up"),
    ("models.VectorEmbedding.forward", ValueError, {"data": [Data(vel=zeros(6, 3))]}, "vel", "(6, 3)"),
    ("models.VectorEmbedding.forward", TypeError, {"data": [Data(vel=zeros(6, 2).int())]}, "vel", "torch.int32"),
    (lambda: spinning(LieTransformer, space=Euclidean(Sim(3))), ValueError, {}, "vector_inputs", "Pseudovector"),
    (
        lambda: spinning(LieTransformer, Vector(3), space=Sphere())(
            Data(
                pos=torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.6, 0.8]]),
                spin=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.6, 0.48, 0.64]]),
            )
        ),
        ValueError,
        {},
        "data.spin",
        "80.0% of the length",
    ),
    (lambda: spinning(DirectionConvNet, frames=pyritohedral()), ValueError, {}, "vector_inputs", "Pseudovector"),
    (
        lambda: spinning(DirectionConvNet, field=SymmetricTensor(2)),
        ValueError,
        {},
        "vector_inputs",
        "SymmetricTensor(2)",
    ),
    (lambda: spinning(TensorFieldNetwork, field=SymmetricTensor(3), degree=1), ValueError, {}, "degree", "0e+1x2e"),
    ("models.GSANet.forward", TypeError, {"data": [None, [POS], POS.numpy()]}, "data", "got"),
    ("models.GSANet.forward", TypeError, {"data": [POS]}, "data", "Tensor"),
    ("models.Preprocessed.forward", TypeError, {"data": [None]}, "data", "NoneType"),
    ("models.Preprocessed.forward", TypeError, {"data": [POS]}, "data", "a tensor"),
    ("models.GSANet.forward", ValueError, {"data": [Data(pos=POS)]}, "data.x", "None"),
    ("models.GSANet.forward", ValueError, {"data": [cloud(x=zeros(6, 2))]}, "data.x", "(6, 2)"),
    ("models.GSANet.forward", ValueError, {"data": [cloud(x=zeros(6))]}, "data.x", "(6,)"),
    ("models.GSANet.forward", ValueError, {"data": [cloud(x=zeros(6, 4).long())]}, "x", "torch.int64"),
    ("models.GSANet.forward", ValueError, {"data": [cloud(x=zeros(5, 4))]}, "x", "(5, 4)"),
    ("models.GSANet.forward", ValueError, {"data": [cloud(spoiled(2, NAN))]}, "pos", "point 2"),
    ("models.GSANet.forward", ValueError, {"data": [cloud(zeros(6, 3))]}, "points", "(6, 3)"),
    ("models.GSANet.forward", ValueError, {"geometry": [gsa().geometry(cloud(POS[:4]))]}, "geometry", "one of 4"),
    ("models.GSANet", TypeError, {"frames": [cyclic]}, "frames", "the function cyclic itself: call it"),
    ("models.GSANet", ValueError, {"channels": [1]}),
    ("models.GSANet", ValueError, {"channels": [4]}, "channels", "got 2"),
    ("models.GSANet", ValueError, {"frames": [tetrahedral()]}, "points", "(6, 2)"),
    ("models.GSANet", ValueError, {"frames": dihedral(4), "space": Euclidean(SE(2))}, "frames", "SO(2)"),
    ("models.Stages", ValueError, {"blocks": [()]}, "blocks", "[]"),
    ("models.Stages", ValueError, {"blocks": [(1, -1)]}, "blocks", "[1, -1]"),
    ("models.Stages", ValueError, {"expansions": [(2, 1)]}, "expansions", "[2, 1]"),
    ("models.Stages", ValueError, {"expansions": [(0,)]}, "expansions", "[0]"),
    ("models.Stages", ValueError, {"crops": [(1,)]}, "crops", "[1]"),
    ("models.Stages", ValueError, {"crops": [(-1,)]}, "crops", "[-1]"),
    ("models.GSANet", ValueError, {"blocks": [Stages((1,), crops=(1,))]}, "data", "grid [clouds, 2]"),
    ("models.GSANet", ValueError, {"blocks": [Stages((1,), pool_last=True)]}, "data", "grid [clouds, 2]"),
    ("models.Stages", ValueError, {"share": [0, 1.5]}),
    (lambda: Stages((1, 1), crops=(1, 0), share=0.5), ValueError, {}, "crops", "[1, 0]"),
    ("models.GSAOptions", ValueError, {"init_scale": [-1, INF]}),
    ("models.GSAOptions", ValueError, {"frame_table": [published_table(C4)]}, "pattern", "'joint'"),
    ("models.GSAOptions", ValueError, {"length": [-1.0]}),
    ("models.GSAOptions", ValueError, {"positions": ["absolute"]}, "values", "absolute"),
    (
        lambda: gsa(
            frames=ScaleFrames(C4), options=GSAOptions(values=False, positions="none"), neighborhood=Radius(1.0)
        ),
        ValueError,
        {},
        "positions",
        "'none'",
    ),
    ("models.GSANet", ValueError, {"options": [GSAOptions(frame_table=zeros(3, 3).long())]}, "table", "(3, 3)"),
    ("models.Dropouts", ValueError, {"attention": [1.0]}),
    ("models.Dropouts", ValueError, {"value": [1.5]}),
    ("models.Dropouts", ValueError, {"input": [-1]}),
    ("models.Dropouts", ValueError, {"pool": [1]}),
    (lambda: gsa(color=1), TypeError, {}, "color", "unexpected"),
    (lambda: GSANet.cifar10(C4, color=1), TypeError, {}, "color", "unexpected"),
    (lambda: on_images(blocks=(1,), crops=(2,))(image(4, 4)), ValueError, {}, "margin", "[4, 4]"),
    (lambda: on_images(blocks=(1, 1))(image(6, 5)), ValueError, {}, "6 x 5 image", "6 x 6 would"),
    (
        lambda: gsa(blocks=(1, 1), in_channels=1, neighborhood=edge(0, 1))(image(4, 4)),
        ValueError,
        {},
        "neighborhood",
        "Given",
    ),
    (lambda: GSANet.rot_mnist(C4)(image(8, 8)), ValueError, {}, "margin", "[2, 2]"),
    ("models.GSANet.rot_mnist", ValueError, {"group": [tetrahedral()]}, "blocks", "T in 3 dimensions"),
    ("models.GSANet.rot_mnist", ValueError, {"size": [4]}),
    ("models.published_table", ValueError, {"group": [tetrahedral()]}),
    ("models.FiniteSE2Transformer.forward", ValueError, {"slots": [0]}),
    ("models.ImageTransformer", ValueError, {"group": [SHEARED]}, "group", "sheared"),
    ("models.ImageTransformer", ValueError, {"channels": [(4, 4, 4)]}, "channels", "[4, 4, 4]"),
    ("models.ImageTransformer", ValueError, {"blocks": [(1, -1)]}, "blocks[1]", "-1"),
    ("models.ImageTransformer", ValueError, {"blocks": [()]}, "blocks", "()"),
    ("models.ImageTransformer", ValueError, {"heads": [3]}),
    ("models.ImageTransformer", ValueError, {"kind": "vector", "pool": "max"}, "pool", "maximum of vectors"),
    ("models.ImageTransformer.forward", ValueError, {"data": [cloud(x=zeros(6, 2))]}, "data.x", "(6, 2)"),
    ("models.ImageTransformer.forward", ValueError, {"data": [cloud(spoiled(2, NAN))]}, "pos", "point 2"),
    ("models.ImageOptions", ValueError, {"mlp_ratio": [0]}),
    ("models.ImageOptions", ValueError, {"dropout": [1.0]}),
    ("models.ImageOptions", ValueError, {"length": [0.0]}),
]


def cases_of(row):
    """Yield the cases of a row: the call, the class of the error, and what the message names and shows."""
    entry, error, bad, *said = row
    argument, values = next(iter(bad.items()), ("", None))
    for value in values if (alone := len(bad) == 1 and isinstance(values, list)) else [values]:
        given = {argument: value} if alone else bad
        call = functools.partial(called, entry, given) if isinstance(entry, str) else entry
        name, *shown = said or [argument]
        yield call, error, name, shown or traces(value)


def traces(value):
    """Return texts of which a message has one if it shows a value."""
    if isinstance(value, Tensor):
        return [str(tuple(value.shape)), str(value.dtype).removeprefix("torch."), f"on {value.device}"]
    return [getattr(value, "name", None) or repr(value)]


ROWS = [case for row in CASES for case in cases_of(row)]


@functools.cache
def raised(number):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ROWS[number][0]()
    return caught.value


@each("number", {f"{name}-{shown[0]} of row {number}": number for number, (_, _, name, shown) in enumerate(ROWS)})
def test_errors_name_the_argument_and_show_the_value(number):
    _, error, name, shown = ROWS[number]
    message = str(raised(number))
    assert type(raised(number)) is error
    names = (name, *ALIASES.get(name, ()))
    assert any(re.search(rf"(?<![a-zA-Z_]){re.escape(one)}(?![a-zA-Z_])", message) for one in names), message
    assert any(text in message for text in shown), (shown, message)


def test_wording(pytestconfig):
    """After a change of words: ``pytest tests/test_errors.py --write-messages``, and read the difference."""
    lines = [f"{type(raised(n)).__name__}: {' '.join(str(raised(n)).split())}" for n in range(len(ROWS))]
    if pytestconfig.getoption("--write-messages"):
        MESSAGES.write_text("\n".join(lines) + "\n")
    assert MESSAGES.read_text().splitlines() == lines


def test_inexact_pooling_warns_or_is_silent_if_asked():
    with pytest.warns(UserWarning, match="4 x 7 image"):
        GridPool(2, inexact="warn").cells(IMAGES)
    GridPool(2, inexact="allow").cells(IMAGES)  # a warning would be an error here


@each("entry", sorted({row[0] for row in CASES if isinstance(row[0], str)}))
def test_calls_are_accepted_without_the_bad_values(entry):
    called(entry, {})


def test_good_input_next_to_the_bad_is_taken():
    """Control: the calls of the table are accepted with valid values."""
    assert point_clouds(POS, batch=integers(0, 0, 1, 1, 0, 1)).num_clouds == 2
    assert lift(POS, C4, Radius(1.5), batch=integers(0, 0, 0, 2, 2, 2), ptr=integers(0, 3, 3, 6)).num_clouds == 3
    assert on_images(blocks=(1, 1), crops=(1, 0))(image(8, 6)).shape == (1, 3)
    with torch.autocast("cpu"):
        assert called("nn.GroupSelfAttention.forward", {"x": zeros(6, 4, 4).bfloat16()}).shape == (6, 4, 4)
    assert lift(POS, SHEARED, AllPairs()).num_points == 6


def test_warnings_name_the_line_of_the_user(recwarn):
    cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    network = FramewiseTransformer(PrincipalFrames(), 1, 1, channels=4)
    network(Data(x=torch.ones(8, 1), pos=cube))
    assert [warning.filename for warning in recwarn] == [__file__]


def test_another_default_device_is_refused_before_anything_is_built():
    with torch.device("meta"):
        for build in (lambda: FiniteGroup("one", torch.eye(2)), lambda: GroupLinear(C4, 2, 3)):
            with pytest.raises(RuntimeError, match=r"got meta"):
                build()
