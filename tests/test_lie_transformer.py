"""LieTransformer and LieConv: layers, models, guarantees, and errors for bad arguments."""

import math
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from torch_geometric.data import Data

from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Nearest,
    Radius,
    SampledFrames,
    ScaleFrames,
    farthest_points,
    lift,
    num_coordinates,
    point_clouds,
)
from lieattn.geometry import PrincipalFrames as Principal
from lieattn.groups import (
    SE,
    SO,
    E,
    RotationDilations,
    SemidirectProduct,
    Sim,
    Translations,
    cyclic,
    dihedral,
    full_tetrahedral,
    icosahedral,
    octahedral,
    trivial,
)
from lieattn.models import (
    AttentionOptions,
    ConvolutionOptions,
    FieldModel,
    FiniteSE2Transformer,
    LieConvNet,
    LieTransformer,
    Lifting,
    PairCoordinates,
    Readout,
    SortedDistances,
    image_points,
)
from lieattn.models.lie._network import SeenByFrames, SeenInCoordinates
from lieattn.models.published import PublishedCoordinates, published_kernel, published_qm9, published_springs
from lieattn.nn import (
    AttentiveConvolution,
    BlockNorm,
    FieldHead,
    GroupAttention,
    LieBottleneck,
    LieConvolution,
    LieSelfAttention,
    PointBatchNorm,
    VectorHead,
)
from lieattn.nn.relative import MLPEncoding, PerHeadMLP, RelativeFunction
from lieattn.ops import (
    Activation,
    Normalization,
    RelativeTerms,
    activation,
    backend,
    explain,
    group_attention,
    head_networks,
)
from lieattn.reps import Irreps, Vector
from lieattn.spaces import Euclidean, Orbits, PositionDirection, Sphere
from lieattn.testing import assert_conforms, randomize, relative_error
from tests.cases import each, of_edges, refuses

DOUBLE = torch.float64
KERNELS = {
    "sum": {},
    "content": {"kernel": "content", "normalize": "mean"},
    "location": {"kernel": "location", "normalize": "exp-mean"},
    "relative_position": {"kernel": "relative_position"},
    "product, network": {"kernel": "combined", "features": "product", "location": "network"},
    "linear, coordinates": {"kernel": "combined", "features": "linear", "normalize": "mean"},
    "mixed, network": {"kernel": "combined", "features": "mixed", "location": "network"},
}
SMALL = {"channels": 8, "layers": 2, "heads": 2}
COORDINATES = {"smooth": "smooth", "log": "log"}
COORDINATES |= {"published": PublishedCoordinates("log"), "grid": PublishedCoordinates("grid")}


def points_of(space, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, space.dim, generator=generator, dtype=DOUBLE)
    if isinstance(space, Sphere | PositionDirection):
        x[:, -3:] = x[:, -3:] / x[:, -3:].norm(dim=1, keepdim=True)
    return x


def network(space, frames, neighborhood=None, in_channels=3, lifting=(), attention=(), readout=(), **options):
    model = LieTransformer(
        in_channels,
        2,
        space=space,
        frames=frames,
        neighborhood=neighborhood or AllPairs(),
        lifting=Lifting(**{"local": 0, **dict(lifting)}),
        attention=AttentionOptions(**{"hidden": 5, **dict(attention)}),
        readout=Readout(**dict(readout)),
        **{**SMALL, **options},
    )
    return randomize(model.double(), spread=0.7)


def data_of(pos, seed=2, channels=3, batch=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(pos), channels, generator=generator, dtype=DOUBLE)
    return Data(pos=pos, x=x, batch=batch)


# --- the networks of the heads --------------------------------------------------------------------------------------


def literal(rows, weights, biases, name):
    """Evaluate the networks head by head."""
    act, found = activation("activation", name), []
    for head in range(len(weights[0])):
        y = rows
        for weight, bias in zip(weights, biases, strict=True):
            y = act(y @ weight[head] + bias[head])
        found.append(y)
    return torch.cat(found, dim=-1)


def literal_of(net, x):
    return literal(x, net.weights, net.biases, net.activation)


def assert_alike(found, wanted, leaves, tolerance):
    """Compare values, and gradients of a random combination of them."""
    assert relative_error(found, wanted) < tolerance
    cotangent = torch.randn_like(wanted)
    for mine, theirs in zip(
        *(torch.autograd.grad((out * cotangent).sum(), leaves) for out in (found, wanted)), strict=True
    ):
        assert relative_error(mine, theirs) < tolerance


def drawn(rows, heads, sizes, dtype=DOUBLE):
    """Return rows, and weights and biases of networks of these sizes."""
    weights = [torch.randn(heads, *size, dtype=dtype, requires_grad=True) for size in sizes]
    biases = [torch.randn(heads, size[1], dtype=dtype, requires_grad=True) for size in sizes]
    return torch.randn(rows, sizes[0][0], dtype=dtype, requires_grad=True), weights, biases


SIZES = [(3, 4, 1), (3, 5, 1), (1, 6, 5), (3, 6, 2), (3, 6, 16)]  # heads, hidden units, outputs
OF_HEADS = [
    (name, sizes) for name in get_args(Activation) for sizes in SIZES if sizes[2] == 1 or name in ("silu", "gelu")
]


@each("name, sizes", OF_HEADS)
@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_networks_of_heads_are_what_they_say(name, sizes, evaluation, threads, monkeypatch):
    monkeypatch.setattr("lieattn.ops._head_networks._BLOCK", {"cpu": 64 * 15})
    heads, hidden, outputs = sizes
    for dtype, tolerance in ((DOUBLE, 1e-12), (torch.float32, 1e-5)):
        rows, weights, biases = drawn(97, heads, ((4, hidden), (hidden, hidden), (hidden, outputs)), dtype)
        if hidden == 5:  # columns are contiguous in memory
            rows = rows.detach().mT.contiguous().mT.requires_grad_()
        with backend(evaluation):
            found = head_networks(rows, weights, biases, name)
        assert_alike(found, literal(rows, weights, biases, name), [rows, *weights, *biases], tolerance)


@pytest.mark.slow  # compiles kernels of its own; here vectors of both precisions have different lengths, too
def test_networks_of_heads_in_shorter_vectors(monkeypatch):
    """Vectors are as short as on a machine with AVX2."""
    net, x = randomize(PerHeadMLP(3, 4, 4, "silu")), torch.randn(97, 4, requires_grad=True)
    monkeypatch.setattr("lieattn.ops.kernels._head_networks.widest_lanes", lambda: 8)
    with backend("numba"):
        assert_alike(net.numbers(x), literal_of(net, x), [x, *net.parameters()], 1e-5)


@pytest.mark.parametrize("name", [name for name in get_args(Activation) if name != "relu"])
def test_networks_of_heads_can_be_differentiated_twice(name):
    rows, weights, biases = drawn(5, 2, ((3, 4), (4, 4), (4, 1)))

    def call(rows, *leaves):
        return head_networks(rows, leaves[:3], leaves[3:], name)

    assert torch.autograd.gradcheck(call, (rows, *weights, *biases), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (rows, *weights, *biases), fast_mode=True)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("name", get_args(Activation))
def test_gradients_of_networks_of_heads_that_are_differentiated(name, size):
    """They are the same, also where sums are 0 or so large that exponentials overflow."""
    net = randomize(PerHeadMLP(2, 3, 4, name).double())
    for bias in net.biases:
        torch.nn.init.zeros_(bias)
    x = size * torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    x.requires_grad_()
    leaves = [x, *net.parameters()]
    found, wanted = (
        torch.autograd.grad(out.square().sum() + out.sum(), leaves, create_graph=True)
        for out in (net.numbers(x), literal_of(net, x))
    )
    assert all(relative_error(mine, theirs) < 1e-12 for mine, theirs in zip(found, wanted, strict=True))
    first = torch.einsum("...k,hkm->...hm", x, net.weights[0]) + net.biases[0]
    assert relative_error(net.finish(first), literal_of(net, x)) < 1e-12
    if sum(grad.requires_grad for grad in found):
        (second,) = torch.autograd.grad(found[0].sum(), x, allow_unused=True, materialize_grads=True)
        assert second.isfinite().all()


def test_softplus_is_exact():
    u = torch.linspace(-50, 50, 201, dtype=DOUBLE)
    torch.testing.assert_close(activation("name", "softplus")(u), torch.logaddexp(u, 0 * u), rtol=1e-15, atol=0)


def test_gradients_of_networks_of_heads_in_half_precision_are_sums_in_single(monkeypatch):
    monkeypatch.setattr("lieattn.ops._head_networks._BLOCK", {"cpu": 1})  # 64 rows, whose sum 64 is added 600 times
    weights = [torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    biases = [torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    head_networks(torch.ones(64 * 600, 1, dtype=torch.bfloat16), weights, biases, "none").sum().backward()
    assert all(float(parameter.grad) == 64 * 600 for parameter in (*weights, *biases))


def test_networks_of_heads_without_rows():
    net = PerHeadMLP(2, 3)
    x = torch.zeros(0, 1, 1, 3, requires_grad=True)
    out = net.numbers(x)
    assert out.shape == (0, 1, 1, 2)
    out.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in net.parameters())


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, "weights, biases: expected", {"rows": torch.zeros(5, 2, dtype=DOUBLE)}),
        (ValueError, "weights, biases: expected", {"biases": drawn(5, 2, ((4, 1), (4, 4), (3, 4)))[2]}),
        (ValueError, "activation: expected one of", {"activation": "sine"}),
        (ValueError, "weights: expected", {"weights": []}),
        (ValueError, "weights: expected", {"weights": [torch.zeros(3, 4, dtype=DOUBLE)] * 3}),
        (TypeError, "weights: expected torch.float32 on cpu as in rows", {"rows": torch.zeros(100, 3)}),
        (TypeError, "weights: expected three tensors, got NoneType", {"weights": None}),
        (TypeError, "rows: expected floating tensors, got list", {"rows": [[1.0]]}),
    ],
)
def test_networks_of_heads_refuse_what_does_not_fit(error, message, changed):
    rows, weights, biases = drawn(5, 2, ((3, 4), (4, 4), (4, 1)))
    with pytest.raises(error, match=message):
        head_networks(**{"rows": rows, "weights": weights, "biases": biases, **changed})


@pytest.mark.parametrize("options", [{"kernel": "relative_position"}, {"features": "product"}, {"features": "mixed"}])
def test_scores_do_not_round_coordinates_under_autocast(options):
    """In half precision, coordinates of size 30 change by 0.1 at least."""
    layer = randomize(LieSelfAttention(4, 6, heads=2, **{"kernel": "combined", **options}))
    graph, x = lift(torch.randn(9, 2), cyclic(2), Radius(2.0)), torch.ones(9, 2, 4)

    def change():
        coordinates = graph.relative.coordinates
        places = (graph.relative.with_coordinates(coordinates + step) for step in (30.0, 30.03))
        low, high = (layer.score(graph.with_relative(one), x).displacement_bias for one in places)
        return (high - low).detach()

    expected = change()
    with torch.autocast("cpu", torch.bfloat16):
        found = change()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


# --- the names of the authors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["0231", "1131", "2331", "1201", "1239", "dot_product"])
def test_codes_that_fail_in_the_original_are_refused(kernel):
    with pytest.raises(ValueError, match="kernel: expected "):
        published_kernel(kernel)


# --- parameters -----------------------------------------------------------------------------------------------------


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_numbers_of_parameters_are_those_published():
    assert size(LieTransformer.springs()) == 841_641
    assert size(published_springs()) == 139_353
    assert size(LieTransformer.qm9(lifting=Lifting(PublishedCoordinates(), local=0))) == 10_021_169
    assert size(published_qm9()) == 101_819_921


# --- clouds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "pool"), zip(get_args(BlockNorm), ["mean", "max", "sum", "mean", "max"], strict=True))
def test_small_empty_and_coincident_clouds_are_finite(norm, pool):
    space = Euclidean(SE(2))
    model = network(
        space, FiniteFrames(cyclic(3)), attention={"norm": norm}, readout={"pool": pool, "order": "point_first"}
    )
    pos = torch.zeros(4, 2, dtype=DOUBLE, requires_grad=True)
    data = Data(pos=pos, x=torch.randn(4, 3, dtype=DOUBLE), batch=torch.tensor([0, 2, 2, 2]))
    for mode in (True, False):
        model.train(mode)
        out = model(data)
        assert out.shape == (3, 2)
        out.sum().backward()
        assert torch.isfinite(out).all()
        assert torch.isfinite(pos.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    nothing = Data(pos=torch.zeros(0, 2, dtype=DOUBLE), x=torch.zeros(0, 3, dtype=DOUBLE))
    for mode in (True, False):
        assert torch.isfinite(model.train(mode)(nothing)).all()


# --- gradients with respect to positions ----------------------------------------------------------------------------


def special(kind, dim):
    """Return two points that coincide or are opposite to each other, among others in general position."""
    pos = points_of(Euclidean(Translations(dim)), 5)
    pos[1] = pos[0] if kind == "coincident" else -pos[0]
    return pos


PLACES = {f"{name}, SE({d})": (Euclidean(SE(d)), name) for d in (2, 3) for name in ("smooth", "log", "published")} | {
    space.name: (space, "smooth") for space in (Orbits(SO(2)), Orbits(RotationDilations(2)), Orbits(SO(3)))
}


@pytest.mark.parametrize("kind", ["coincident", "antipodal"])
@pytest.mark.parametrize("name", PLACES)
def test_gradients_at_coincident_and_antipodal_points(kind, name):
    space, coordinates = PLACES[name]
    pos = special(kind, space.dim).requires_grad_()
    per = "cloud" if kind == "coincident" and isinstance(space, Euclidean) else "point"
    frames = None if space.stabilizer is None else SampledFrames(2, per=per, design=False)
    lifting = {"coordinates": COORDINATES[coordinates], "bound": True}
    model = network(space, frames, layers=1, channels=4, lifting=lifting)
    x = torch.randn(5, 3, dtype=DOUBLE)
    assert torch.autograd.gradcheck(lambda pos: model(Data(pos=pos, x=x)), (pos,), atol=1e-6, rtol=1e-4, fast_mode=True)


# --- evaluation and training ----------------------------------------------------------------------------------------


def test_training_draws_anew_and_evaluation_does_not():
    space = Euclidean(SE(2))
    model = network(space, SampledFrames(2), lifting={"neighbor_dropout": 0.5})
    data = data_of(points_of(space, 10))
    graphs = [model.geometry(data) for _ in range(2)]
    assert torch.equal(graphs[0].relative.coordinates, graphs[1].relative.coordinates)
    assert graphs[0].neighbors.num_edges == 100
    model.train()
    torch.manual_seed(0)
    first, second = model.geometry(data), model.geometry(data)
    assert not torch.equal(first.elements, second.elements)
    assert not torch.equal(first.neighbors.source, second.neighbors.source)
    torch.manual_seed(0)
    again = model.geometry(data)
    assert torch.equal(first.relative.coordinates, again.relative.coordinates)
    assert torch.equal(first.neighbors.degree, torch.full((10,), 5))
    own = first.neighbors.source == first.neighbors.target
    assert int(own.sum()) == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_draws_from_a_generator_on_a_gpu():
    space = Euclidean(SE(2))
    model = network(space, SampledFrames(2), lifting={"neighbor_dropout": 0.5}).train()
    graph = model.geometry(data_of(points_of(space, 10)), generator=torch.Generator("cuda"))
    assert torch.equal(graph.neighbors.degree, torch.full((10,), 5))


def test_a_share_of_the_neighbors_has_their_coordinates():
    space = Euclidean(SE(2))
    model = network(space, FiniteFrames(cyclic(4)), lifting={"neighbor_dropout": 0.75}).train()
    data = data_of(points_of(space, 10))
    graph, again = (model.geometry(data, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert graph.neighbors.degree.tolist() == [3] * 10
    assert torch.equal(graph.neighbors.source, again.neighbors.source)
    whole = model.eval().geometry(data)
    edges = {(int(i), int(j)): e for e, (i, j) in enumerate(zip(*whole.neighbors.edge_index, strict=True))}
    rows = [edges[int(i), int(j)] for i, j in zip(*graph.neighbors.edge_index, strict=True)]
    assert torch.equal(of_edges(graph), of_edges(whole)[rows])


def test_convolutions_drop_neighbors_in_training_alone():
    model = convolutional(Euclidean(SE(2)), FiniteFrames(cyclic(4)), lifting=Lifting(neighbor_dropout=0.5))
    data = data_of(points_of(model.space, 10))
    for training, left in ((True, 5), (False, 10)):
        graphs = model.train(training).geometry(data).graphs
        assert [graph.neighbors.degree.tolist() for graph in graphs] == [[left] * 10] * 2


def test_neighbors_that_are_images_of_the_point_itself_are_left_out_like_others():
    options = {"neighborhood": Radius(3.0), "lifting": {"neighbor_dropout": 0.5}}
    model = network(Euclidean(SE(2)), FiniteFrames(cyclic(4)), **options)
    data = data_of(torch.rand(6, 2, dtype=DOUBLE))
    data.cell = 2.0 * torch.eye(2, dtype=DOUBLE)[None]
    whole = model.eval().geometry(data).neighbors
    kept = [model.train().geometry(data).neighbors for _ in range(20)]
    own, images = whole.is_loop, (whole.source == whole.target) & ~whole.is_loop
    assert images.sum() > own.sum() == 6
    assert all(int(neighbors.is_loop.sum()) == 6 for neighbors in kept)
    left = sum(int((one.source == one.target).sum()) - 6 for one in kept) / len(kept)
    assert 0.3 < left / int(images.sum()) < 0.7


def test_repeated_displacements_share_their_rows():
    """A grid shares rows; with gradients, every edge has its own row. Both give the same."""
    group = octahedral()
    pos = torch.cartesian_prod(*[torch.arange(3.0, dtype=DOUBLE)] * 3)[:12]
    graph, other = (lift(place, group, Radius(1.5)) for place in (pos, pos.clone().requires_grad_()))
    assert other.relative.row is None
    assert other.relative.num_rows == graph.neighbors.num_edges
    distinct = graph.neighbors.displacements(pos).unique(dim=0)
    assert graph.relative.num_rows == len(graph.relative.coordinates) == len(distinct) < graph.neighbors.num_edges / 4
    assert torch.equal(graph.relative.coordinates[graph.relative.row], other.relative.coordinates)
    x = torch.randn(12, group.order, 8, dtype=DOUBLE)
    for options in KERNELS.values():
        layer = randomize(LieSelfAttention(8, 12, heads=2, **options).double())
        assert relative_error(layer(x, graph), layer(x, other)) < 1e-10
    for layer in (LieConvolution(8, 4, 12), AttentiveConvolution(LieSelfAttention(8, 12, heads=2), 12)):
        layer = randomize(layer.double())
        assert relative_error(layer(x, graph), layer(x, other)) < 1e-10


def test_networks_share_rows_on_grids():
    """Values equal those computed edge by edge, also for the authors' coordinates, bounded ones and distances."""
    pos = torch.cartesian_prod(*[torch.arange(4.0, dtype=DOUBLE)] * 2)
    for coordinates, count in (("smooth", 6), ("log", 3), ("grid", 3)):
        lifting = {"coordinates": COORDINATES[coordinates], "bound": True, "radial": 2, "cutoff": 2.0}
        model = network(Euclidean(SE(2)), FiniteFrames(cyclic(4)), Radius(1.5), lifting=lifting)
        data = data_of(pos)
        graph, whole = model.geometry(data), model.geometry(Data(pos=pos.clone().requires_grad_()))
        assert graph.relative.coordinates.shape == (9, 4, 4, count + 2)
        assert len(whole.relative.coordinates) == graph.neighbors.num_edges == 100
        assert relative_error(of_edges(graph), of_edges(whole)) < 1e-12
        assert relative_error(model(data, graph), model(data, whole)) < 1e-10


def test_chunks_of_edges_do_not_change_a_kernel(monkeypatch):
    graph = lift(torch.randn(9, 2, dtype=DOUBLE), SampledFrames(2), AllPairs())
    x = torch.randn(9, 2, 8, dtype=DOUBLE, requires_grad=True)
    layer = randomize(LieSelfAttention(8, 6, heads=2, **KERNELS["mixed, network"]).double())
    results = []
    for chunk in (1 << 22, 2000):
        monkeypatch.setattr("lieattn.nn.relative._pair_scores._CHUNK", chunk)
        out = layer(x, graph)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    for mine, theirs in zip(*results, strict=True):
        assert relative_error(mine, theirs) < 1e-10


@pytest.mark.parametrize("normalize", ["softmax", "mean", "exp-mean", "none"])
@pytest.mark.parametrize("batch", [[0, 0, 0, 1, 1, 1], [0, 2, 2, 0, 2, 1, 2]], ids=["regular", "ragged"])
def test_whole_clouds_with_scores_of_pairs_are_dense(normalize, batch):
    neighbors = AllPairs()(torch.randn(len(batch), 3), torch.tensor(batch))
    for fiber, content, shared in ((1, True, False), (3, True, True), (2, False, False)):
        signals = [torch.randn(len(batch), fiber, 2, 4, dtype=DOUBLE, requires_grad=True) for _ in range(3)]
        if not content:
            signals = [None, None, signals[2]]
        index = torch.randint(3, (neighbors.num_edges,)) if shared else None
        rows = 3 if shared else neighbors.num_edges
        bias = torch.randn(rows, fiber, 1 if shared else fiber, 2, dtype=DOUBLE, requires_grad=True)
        options = {"terms": RelativeTerms(displacement_bias=bias, row=index), "normalize": normalize}
        results = []
        for name in ("plain", "dense"):
            with backend(name):
                assert explain(*signals, neighbors, **options).backend == name
                out, _ = group_attention(*signals, neighbors, **options)
                leaves = [leaf for leaf in (*signals, bias) if leaf is not None]
                first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
                second = torch.autograd.grad(sum(part.square().sum() for part in first), leaves)
                results.append([out, *first, *second])
        for mine, theirs in zip(*results, strict=True):
            assert relative_error(mine, theirs) < 1e-10


def test_literal_evaluation_of_the_benchmark_is_the_layer():
    from lieattn.bench import _literal as bench

    space = Euclidean(SE(3))
    pos = points_of(space, 12)
    batch = torch.arange(2).repeat_interleave(6)
    graph = lift(pos, SampledFrames(2, design=False), AllPairs(), batch=batch)
    logarithms = graph.with_relative(graph.relative.with_coordinates(PublishedCoordinates()(graph)))
    layer = randomize(LieSelfAttention(128, 6).double(), spread=0.2)
    x = torch.randn(12, 2, 128, dtype=DOUBLE)
    found = layer(x, logarithms)
    wanted = bench.dense_attention(
        x.reshape(2, 12, 128), graph.elements.reshape(2, 12, 4, 4), dict(layer.named_parameters())
    )
    assert relative_error(found, wanted.reshape(12, 2, 128)) < 1e-8


# --- convolutions and blocks ----------------------------------------------------------------------------------------


def graph_of(space, frames, count=8, seed=0, neighborhood=None):
    return lift(points_of(space, count, seed), frames, neighborhood or AllPairs(), space)


def test_convolution_is_the_sum_it_says():
    graph = graph_of(Euclidean(SE(3)), SampledFrames(2), neighborhood=Nearest(3))
    layer = randomize(LieConvolution(5, 4, 12, rank=3).double())
    x = torch.randn(8, 2, 5, dtype=DOUBLE)
    matrices = torch.einsum("eabr,ocr->eaboc", layer.kernel(graph).displacement_bias, layer.weight)
    terms = torch.einsum("eaboc,ebc->eao", matrices, x[graph.neighbors.source])
    total = torch.zeros(8, 2, 4, dtype=DOUBLE).index_add(0, graph.neighbors.target, terms)
    assert relative_error(layer(x, graph), total / 8 + layer.bias) < 1e-10


def test_convolution_of_points_without_neighbors_is_the_bias():
    graph = lift(torch.zeros(1, 2), cyclic(2), Radius(1.0, include_self=False))
    layer = randomize(LieConvolution(3, 4, graph.relative.num_coordinates))
    assert torch.equal(layer(torch.randn(1, 2, 3), graph), layer.bias.expand(1, 2, 4))


@pytest.mark.parametrize("normalize", get_args(Normalization))
@pytest.mark.parametrize(
    ("frames", "neighborhood"),
    [
        (SampledFrames(2), Nearest(3)),
        (FiniteFrames(cyclic(2)), Radius(2.0, smooth=True)),
        (ScaleFrames(cyclic(2)), Radius(1.5)),
    ],
    ids=["nearest", "smooth", "scales"],
)
def test_attentive_convolution_is_the_sum_it_says(frames, neighborhood, normalize):
    """Keys are weighed by measures and smooth neighborhoods, which a softmax contains and other weights do not."""
    graph = lift(points_of(Euclidean(SE(2)), 8), frames, neighborhood)
    attention = GroupAttention(8, 8, heads=2, normalize=normalize)
    layer = randomize(AttentiveConvolution(attention, graph.relative.num_coordinates, rank=3).double())
    x = torch.randn(graph.num_points, 2, 8, dtype=DOUBLE)
    kernel = layer.kernel(graph).displacement_bias.unflatten(-1, (2, 3))
    matrices = torch.einsum("eabhr,hrcd->eabhcd", kernel, layer.weight)
    value = attention.value(x).unflatten(-1, (2, 4))[graph.neighbors.source]
    factor = torch.ones(graph.neighbors.num_edges, dtype=DOUBLE)
    for log in (graph.log_measure, graph.relative.log_window):
        factor = factor if log is None or "exp" in normalize or normalize == "softmax" else factor * log.exp()
    terms = torch.einsum("e,eabh,eabhcd,ebhc->eahd", factor, attention.weights(x, graph), matrices, value)
    total = x.new_zeros(graph.num_points, 2, 2, 4).index_add(0, graph.neighbors.target, terms)
    assert relative_error(layer(x, graph), attention.output(total.flatten(-2))) < 1e-10


def test_attentive_convolution_drops_weights_in_training():
    attention = GroupAttention(3, 3, dropout=0.5)
    layer = randomize(AttentiveConvolution(attention, 6).double())
    graph = lift(10.0 * torch.arange(40, dtype=DOUBLE)[:, None].expand(-1, 2), trivial(2), Radius(1.0))
    x = torch.randn(40, 1, 3, dtype=DOUBLE)
    bias, full = attention.output.bias, layer.eval()(x, graph)
    torch.manual_seed(0)
    share = ((layer.train()(x, graph) - bias) / (full - bias)).detach()[:, 0, 0]  # one weight for each point, 0 or 2
    assert torch.allclose(share * (share - 2), torch.zeros_like(share), atol=1e-8)
    assert 0 < share.mean() < 2


class OfValues(RelativeFunction):
    """An encoding of values with one term, ``beta`` or ``rotary``."""

    def __init__(self, **terms):
        super().__init__()
        self.terms = terms

    def forward(self, graph, x=None):
        return RelativeTerms(**self.terms)


@pytest.mark.parametrize(
    "encoding",
    [
        MLPEncoding(cyclic(4), 2, value_channels=2),
        OfValues(beta=torch.zeros(1, 4, 1, 2, 2, dtype=DOUBLE)),
        OfValues(rotary=torch.zeros(5, 4, 2, 1, 2, dtype=DOUBLE), rotary_values=True),
    ],
)
def test_attentive_convolution_refuses_encodings_of_values(encoding):
    graph = lift(torch.randn(5, 2, dtype=DOUBLE), cyclic(4), Radius(2.0))
    attention = GroupAttention(4, 4, heads=2, encoding=encoding)
    layer = AttentiveConvolution(attention, graph.relative.num_coordinates).double()
    with pytest.raises(ValueError, match="attention: expected an encoding of scores only"):
        layer(torch.randn(5, 4, 4, dtype=DOUBLE), graph)


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_bottleneck_keeps_the_first_channels(norm):
    graph = graph_of(Euclidean(SE(2)), SampledFrames(2))
    layer = randomize(LieBottleneck(8, 12, 6, norm=norm).double())
    kind = {"batch": PointBatchNorm, "layer": torch.nn.LayerNorm, "none": torch.nn.Identity}[norm]
    assert all(isinstance(part, kind) for part in (layer.norm_in, layer.norm_down, layer.norm_up))
    x = torch.randn(8, 2, 8, dtype=DOUBLE)
    thinned = graph.keeping(torch.tensor([1, 4, 6]), graph)
    out = layer(x, thinned)
    assert out.shape == (3, 2, 12)
    with torch.no_grad():
        layer.up.weight.zero_()
        layer.up.bias.zero_()
    assert torch.equal(layer(x, graph)[..., :8], x)
    assert relative_error(out, layer(x, thinned)) > 1e-3


def test_batch_normalization_is_that_of_torch_where_variances_are_large():
    ours, theirs = PointBatchNorm(6).double(), torch.nn.BatchNorm1d(6, eps=1e-12).double()
    x = torch.randn(20, 3, 6, dtype=DOUBLE)
    assert relative_error(ours(x), theirs(x.flatten(0, 1)).view_as(x)) < 1e-10
    assert relative_error(ours.running_mean, theirs.running_mean) < 1e-12
    assert relative_error(ours.running_var, theirs.running_var) < 1e-12
    constant = torch.ones(4, 1, 6, dtype=DOUBLE)
    assert torch.equal(ours(constant), torch.zeros_like(constant))
    before = ours.running_mean.clone()
    ours(torch.zeros(0, 1, 6, dtype=DOUBLE))
    assert torch.equal(ours.running_mean, before)


# --- LieConv --------------------------------------------------------------------------------------------------------


def convolutional(space, frames, neighborhood=None, convolution=(), **options):
    options = {"channels": 8, "layers": 2, "lifting": Lifting(local=0), **options}
    convolution = ConvolutionOptions(**{"rank": 3, "hidden": 5, **dict(convolution)})
    neighborhood = neighborhood or AllPairs()
    model = LieConvNet(3, 2, space=space, frames=frames, neighborhood=neighborhood, convolution=convolution, **options)
    return randomize(model.double(), spread=0.7)


def test_convolutional_network_thins_out_and_widens():
    convolution = {"downsampling": 1 / 8}
    model = convolutional(Euclidean(SE(2)), FiniteFrames(cyclic(4)), Radius(1.0), convolution, layers=3)
    data = data_of(points_of(model.space, 64))
    geometry = model.geometry(data)
    assert [graph.num_points for graph in geometry.graphs] == [64, 32, 16]
    assert geometry.last.num_points == 8
    assert [block.up.out_features for block in model.blocks] == [round(8 * 2 ** (k / 2)) for k in (1, 2, 3)]
    reach = [graph.neighbors.displacements(graph.pos).norm(dim=1).max() for graph in geometry.graphs]
    assert all(distance <= 2 ** (k / 2) for k, distance in enumerate(reach))
    assert reach[2] > math.sqrt(2)
    assert "subsampling depends on the order of points" in model.guarantee
    options = {**convolution, "attention": AttentionOptions(), "heads": 1}
    model = convolutional(PositionDirection(), Principal(), Radius(1.0), options, channels=16, layers=3)
    assert [block.up.in_features for block in model.blocks] == [5, 8, 11]
    data = data_of(points_of(model.space, 64))
    geometry = model.geometry(data)
    assert torch.equal(geometry.graphs[0].kept.points, farthest_points(data.pos[:, :3], fraction=0.5).sort().values)
    reach = [graph.neighbors.displacements(graph.pos)[:, :3].norm(dim=1).max() for graph in geometry.graphs]
    assert all(distance <= 2 ** (k / 3) for k, distance in enumerate(reach))


def test_convolutional_network_on_rotated_images():
    images = torch.rand(2, 1, 9, 9, dtype=DOUBLE)
    x, pos, batch = image_points(images, radius=4.5)
    options = {"out_channels": 3, "frames": FiniteFrames(cyclic(4)), "channels": 8, "layers": 2}
    model = LieConvNet.images(convolution=ConvolutionOptions(), **options)
    model = randomize(model.double())
    expected = model(Data(x=x, pos=pos, batch=batch))
    assert expected.shape == (2, 3)
    x, turned, _ = image_points(images.rot90(1, (2, 3)), radius=4.5)
    assert torch.equal(turned, pos)
    assert relative_error(model(Data(x=x, pos=pos, batch=batch)), expected) < 1e-10
    shuffled = model(Data(x=x.flip(0), pos=pos, batch=batch))
    assert relative_error(shuffled, expected) > 1e-6
    smaller = LieConvNet.images(**options).double().eval()
    assert smaller.share == pytest.approx(math.sqrt(0.1))
    assert smaller(Data(x=x, pos=pos, batch=batch)).shape == (2, 3)


def test_images_become_points_to_the_right_and_up():
    x, pos, batch = image_points(torch.arange(6.0).reshape(1, 1, 2, 3), radius=None)
    assert x[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert pos[0].tolist() == [-1, 0.5]
    assert pos[5].tolist() == [1, -0.5]
    assert batch.tolist() == [0] * 6
    assert image_points(torch.ones(1, 1, 3, 3), radius=1.0)[1].tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="images: expected"):
        image_points(torch.zeros(2, 3))


def test_convolutional_network_on_molecules():
    assert size(LieConvNet.qm9()) == 21_314_593
    assert LieConvNet.qm9(channels=8, layers=1, frames=Principal()).symmetry.name == "SE(3)"
    model = LieConvNet.qm9(channels=8, layers=2)
    assert model(Data(z=torch.tensor([6, 1, 8]), pos=torch.randn(3, 3))).shape == (1, 1)


# --- the finite SE(2) variant ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "seeds"), [("constant", 2), ("pairwise_distances", 2), ("centroidal", 0)])
def test_contents_and_seeds_of_finite_se2(content, seeds):
    options = {"channels": 8, "layers": 2, "heads": 2, "content": content, "seeds": seeds, "normalize": "mean"}
    model = randomize(FiniteSE2Transformer(4, 3, **options).double())
    clouds = [Data(pos=torch.randn(size, 2, dtype=DOUBLE)) for size in (3, 5)]
    assert model(clouds[0]).shape == ((1, 2, 3) if seeds else (1, 3))
    assert not assert_conforms(model, clouds, ["equivariance", "batches", "degenerate"])


def test_distances_of_finite_se2_reach_beyond_the_neighborhood():
    options = {"channels": 4, "layers": 1, "heads": 2, "neighborhood": Radius(1.0)}
    model = randomize(FiniteSE2Transformer(4, **options).double())
    pos = torch.tensor([[0, 0], [0.5, 0], [5, 0], [0, 0], [0, 0.7]], dtype=DOUBLE, requires_grad=True)
    batch = torch.tensor([0, 0, 0, 1, 1])
    found = model(Data(pos=pos, batch=batch))
    assert relative_error(model(Data(pos=pos[3:])), found[1:]) < 1e-12
    (slope,) = torch.autograd.grad(found[0].sum(), pos, create_graph=True)
    assert slope[2].abs().max() > 1e-6
    (second,) = torch.autograd.grad(slope.square().sum(), pos)
    assert torch.isfinite(second).all()
    with pytest.raises(ValueError, match=r"data\.pos: 5 powers of distances"):
        model.float()(Data(pos=1e14 * pos.detach()))


def test_finite_se2_sees_displacements_in_the_units_of_the_data():
    """The length of a neighborhood divides nothing, so one around the whole cloud gives the network without it."""
    options = {"channels": 4, "layers": 1, "heads": 2}
    model = randomize(FiniteSE2Transformer(4, **options).double())
    other = FiniteSE2Transformer(4, neighborhood=Radius(20.0), **options).double()
    other.load_state_dict(dict(model.state_dict()))
    data = Data(pos=torch.randn(7, 2, dtype=DOUBLE))
    torch.testing.assert_close(other(data), model(data), rtol=0, atol=1e-12)


def test_finite_se2_starts_as_its_options_say():
    torch.manual_seed(0)
    model = FiniteSE2Transformer(channels=16, heads=2, hidden=64, seeds=32)
    layer = model.layers[0]
    assert layer.location1.shape == (2, 64, 3)
    for part, largest in (
        (layer.location1, 3**-0.5),
        (layer.location_bias1, 3**-0.5),
        (layer.location2, 1 / 8),
        (layer.location_bias2, 1 / 8),
    ):
        assert float(part.detach().abs().max()) <= largest
    for part, largest in ((layer.location1, 3**-0.5), (layer.location_bias1, 3**-0.5), (layer.location2, 1 / 8)):
        assert float(part.detach().min()) < -0.9 * largest
        assert float(part.detach().max()) > 0.9 * largest
    assert float(model.seeds.detach().std()) == pytest.approx(1 / 4, rel=0.1)


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_molecules_enter_by_their_charges():
    assert LieTransformer.qm9(**SMALL).frames == SampledFrames(1)
    model = LieTransformer.qm9(**SMALL, frames=Principal())
    z = torch.tensor([6, 1, 8, 1, 9])
    pos = torch.randn(5, 3)
    assert model(Data(z=z, pos=pos)).shape == (1, 1)
    features = model.point_features(Data(z=z), model.geometry(Data(z=z, pos=pos)))
    assert features.shape == (5, 15)
    assert features[1].tolist()[:6] == pytest.approx([1, 1 / 9, 1 / 81, 0, 0, 0])
    assert features[4].tolist()[12:] == [1, 1, 1]
    without_fluorine = model.point_features(Data(z=z[:4]), model.geometry(Data(z=z[:4], pos=pos[:4])))
    assert torch.equal(without_fluorine, features[:4])
    with pytest.raises(ValueError, match="charges among \\[1, 6, 7, 8, 9\\], got 17 for atom 2"):
        model(Data(z=torch.tensor([6, 1, 17, 1, 9]), pos=pos))
    with pytest.raises(TypeError, match="int64 nuclear charges"):
        model(Data(z=z.float(), pos=pos))


def test_constellations_enter_by_their_distances():
    model = LieTransformer.constellation(1, **SMALL)
    assert model.frames == SampledFrames(4)
    pos = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [5.0, 5.0]], requires_grad=True)
    data = Data(pos=pos, batch=torch.tensor([0, 0, 0, 1]))
    features = model.point_features(data, model.geometry(data))
    assert features.shape == (4, 16)
    assert features[0].tolist() == [5, 1] + [0] * 14
    assert features[3].tolist() == [0] * 16
    out = model(data)
    assert out.shape == (2, 8)
    out.sum().backward()
    assert torch.isfinite(pos.grad).all()
    with pytest.raises(ValueError, match="clouds of at most 17 points, got 18"):
        model(Data(pos=torch.randn(18, 2)))
    with pytest.raises(ValueError, match=r"data\.cell: SortedDistances do not see periodic images"):
        SortedDistances(3)(Data(), point_clouds(torch.randn(3, 2), cell=9 * torch.eye(2)))


def test_distances_of_many_small_clouds_need_little_memory():
    """Distances of all pairs of points in the batch would take terabytes."""
    batch = torch.arange(500_000).repeat_interleave(2)
    clouds = point_clouds(torch.tensor([[0.0], [2.0]]).repeat(500_000, 1), batch=batch)
    found = SortedDistances(2)(Data(), clouds)
    assert found[:4].tolist() == [[2, 0]] * 4
    assert found.shape == (len(batch), 2)


def test_springs_enter_by_mass_and_stiffness():
    for model in (LieTransformer.springs(**SMALL), published_springs(**SMALL)):
        model = randomize(model.double())
        data = data_of(torch.randn(6, 2, dtype=DOUBLE), channels=2)
        expected = model(data)
        assert relative_error(model(Data(pos=data.pos + 1, x=data.x)), expected) < 1e-10
        assert model.blocks[0].attention.normalize == "mean"


# --- coordinates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubled(PairCoordinates):
    more: int = 0

    def count(self, space):
        return num_coordinates(space) + self.more

    def __call__(self, graph):
        found = graph.relative.coordinates
        return found @ (2 * torch.eye(found.shape[-1], dtype=found.dtype))


def test_other_coordinates_are_computed_from_smooth_ones_in_units_in_full_precision():
    model = network(Euclidean(SE(3)), Principal(), Radius(2.5), lifting={"coordinates": Doubled()}).float()
    data = data_of(points_of(model.space, 6))
    data = Data(x=data.x.float(), pos=data.pos.float())
    expected = 2 * lift(data.pos, Principal(), Radius(2.5), model.space, length=1.0).relative.coordinates
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = model.geometry(data).relative.coordinates
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("space", "frames", "group"),
    [
        (Euclidean(SE(3)), Principal(), "SE(3)"),
        (Euclidean(SE(3)), Principal(of="neighborhood"), "R^3"),
        (Euclidean(SE(3)), SampledFrames(2), "R^3"),
        (Euclidean(SE(3)), FiniteFrames(octahedral()), "R^3 x| O"),
        (Sphere(), Principal(), "no group"),
    ],
    ids=["cloud", "neighborhoods", "sampled", "finite", "sphere"],
)
def test_logarithms_promise_what_half_turns_leave(space, frames, group):
    model = network(space, frames, Radius(1.0, smooth=True), lifting={"coordinates": "log"})
    assert model.symmetry.name == group
    assert ("except at half turns" in model.guarantee) == (group in ("R^3", "no group"))
    assert "logarithms jump at half turns: use coordinates='smooth'" in model.jumps


def test_jumps_of_cutoffs_and_logarithms_are_those_that_matter():
    assert not Lifting(PublishedCoordinates("log")).continuous

    def jumps(**lifting):
        return network(Euclidean(Translations(3)), None, Radius(1.0, smooth=True), lifting=lifting).jumps

    assert jumps(coordinates="log") == jumps(cutoff=2.0) == jumps(cutoff=0.5, local=4) == ()
    for options in ({"local": 4}, {"radial": 2}):
        assert [text[:38] for text in jumps(cutoff=2.0, **options)] == ["the cutoff 2 is larger than the radius"]


def test_functions_of_the_distance_vanish_at_their_cutoff():
    model = network(Euclidean(SE(2)), Principal(), Radius(2.5), lifting={"radial": 3, "cutoff": 1.25})
    relative = model.geometry(data_of(points_of(model.space, 12))).relative
    distance = relative.displacements().norm(dim=1)
    seen = relative.coordinates[:, 0, 0, -3:].abs().amax(dim=1) > 0
    assert torch.equal(seen[distance > 0], (distance < 1.25)[distance > 0])
    assert 0 < int(seen.sum()) < len(seen)


def test_vectors_enter_at_points_with_directions():
    model = network(PositionDirection(), Principal(), vector_inputs=("vel",))
    data = data_of(points_of(model.space, 9))
    data.vel = torch.randn(9, 3, dtype=DOUBLE)
    expected = model(data)
    data.vel = data.vel.flip(0)
    assert relative_error(model(data), expected) > 1e-6


SHEARED = SemidirectProduct(dihedral(3).conjugate(torch.tensor([[1.0, 0.7], [0.0, 2.0]], dtype=DOUBLE), "sheared D3"))


@pytest.mark.parametrize(
    ("group", "local"),
    [(E(3), SeenByFrames), (SemidirectProduct(octahedral()), SeenByFrames), (SHEARED, SeenInCoordinates)],
    ids=["E(3)", "finite", "sheared"],
)
def test_distances_are_seen_where_motions_are_rigid(group, local):
    frames = Principal() if group is not SHEARED and group.name == "E(3)" else FiniteFrames(group.stabilizer)
    model = network(Euclidean(group), frames, lifting={"local": 4, "cutoff": 1.0})
    assert isinstance(model.local, local)
    sphere = LieTransformer(1, 1, space=Sphere(), frames=Principal(), neighborhood=Radius(1.0), **SMALL)
    assert float(sphere.local.convolution.weight.detach().std()) == pytest.approx(2 / 4, rel=0.2)
    assert not network(Euclidean(SE(3)), SampledFrames(2, per="cloud")).sees_order


# --- what is refused ------------------------------------------------------------------------------------------------

SE3 = Euclidean(SE(3))
REFUSED = {
    "heads: expected a divisor of 8 channels, got 3": lambda: LieSelfAttention(8, 3, heads=3),
    "normalize: expected": lambda: LieSelfAttention(8, 3, normalize="none"),
    "feature_channels: expected an even number": lambda: LieSelfAttention(
        8, 3, kernel="combined", features="linear", feature_channels=3
    ),
    "feature_channels: expected None with 'product'": lambda: LieSelfAttention(
        8, 3, kernel="combined", features="product", feature_channels=4
    ),
    "out_channels: expected at least 8": lambda: LieBottleneck(8, 4, 3),
    "convention: 'quaternion' is for": lambda: network(
        Euclidean(SE(2)), Principal(), lifting={"coordinates": PublishedCoordinates("quaternion")}
    ),
    "convention: 'grid' is for": lambda: network(
        SE3, Principal(), lifting={"coordinates": PublishedCoordinates("grid")}
    ),
    "convention: expected one of": lambda: PublishedCoordinates("exp"),
    "length: expected None": lambda: Lifting(PublishedCoordinates(), length=2.0),
    "cutoff: expected a positive finite length": lambda: Lifting(cutoff=-1.0),
    "repetitions: expected an integer of at least 1": lambda: LieTransformer.constellation(0),
    "graph: expected a LiftedGraph": lambda: network(SE3, Principal()).point_features(Data(), None),
    "graph: expected 13 coordinates of a relative element, got 12": lambda: network(
        SE3, Principal(), lifting={"coordinates": Doubled(1)}
    )(data_of(points_of(SE3, 3))),
    "coordinates: .* has no logarithms": lambda: network(None, octahedral(), lifting={"coordinates": "log"}),
    "coordinates: .*PrincipalFrames.* include reflections": lambda: network(
        Euclidean(E(3)), Principal(), lifting={"coordinates": "log"}
    ),
    "coordinates: .*SampledFrames.* include reflections": lambda: network(
        Euclidean(E(2)), SampledFrames(2), lifting={"coordinates": "log"}
    ),
    "coordinates: .*FiniteFrames.* include reflections": lambda: network(
        Euclidean(E(3)), FiniteFrames(full_tetrahedral()), lifting={"coordinates": "log"}
    ),
    "convention: .* has no logarithms": lambda: network(
        None, octahedral(), lifting={"coordinates": PublishedCoordinates()}
    ),
    "frames: expected frames": lambda: network(SE3, None),
    "frames: .* is not an element of O": lambda: network(
        Euclidean(SemidirectProduct(octahedral())), FiniteFrames(icosahedral())
    ),
    "downsampling: expected a share": lambda: ConvolutionOptions(downsampling=0.0),
    "pool: .none. needs downsampling=1": lambda: convolutional(
        SE3, Principal(), convolution={"downsampling": 0.5}, readout=Readout(pool="none")
    ),
    "widening: expected an exponent": lambda: ConvolutionOptions(widening=-1.0),
    "seeds: expected an integer of at least 0": lambda: FiniteSE2Transformer(seeds=-1),
    "heads: expected a divisor of 64 channels, got 5": lambda: FiniteSE2Transformer(heads=5),
    "normalize: expected one of .'softmax', 'mean'.": lambda: FiniteSE2Transformer(normalize="none"),
    "graph: expected 5 coordinates of a relative element": lambda: LieSelfAttention(8, 5, heads=2).double()(
        torch.randn(8, 2, 8, dtype=DOUBLE), graph_of(SE3, SampledFrames(2))
    ),
    "coordinates: expected .9, 1, 1, k.": lambda: graph_of(
        Euclidean(Translations(3)), None, 3
    ).relative.with_coordinates(torch.zeros(3, 1, 1, 2)),
}


test_bad_arguments_are_named = pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")(
    refuses(*((call, message) for message, call in REFUSED.items()), error=(ValueError, TypeError))
)


def test_squashed_coordinates_are_bounded():
    space = Euclidean(Translations(2))
    model = network(space, None, lifting={"bound": True})
    pos = torch.tensor([[0.0, 0.0], [1e6, 0.0]], dtype=DOUBLE)
    pairs = model.geometry(Data(pos=pos)).relative.coordinates
    assert pairs.norm(dim=-1).max() == pytest.approx(1.0, abs=1e-9)
    relative = lift(1e-3 * pos / 1e6, None, AllPairs()).relative
    torch.testing.assert_close(relative.bounded(0.5).coordinates, 2 * relative.coordinates, rtol=1e-2, atol=0)
    torch.testing.assert_close(relative.bounded().coordinates, relative.coordinates / 7, rtol=1e-2, atol=0)
    assert math.isfinite(float(pairs.sum()))


def test_networks_on_scales():
    """Features and vectors enter all scales in the same way; the guarantee is that of the group."""
    frames = ScaleFrames(cyclic(4), levels=2)
    model = network(None, frames, Radius(1.0), vector_inputs=("vel",), lifting={"local": 4}, readout={"pool": "max"})
    data = data_of(points_of(Euclidean(SE(2)), 10))
    data.vel = points_of(Euclidean(SE(2)), 10, seed=5)
    assert model.num_coordinates == 7
    assert model.symmetry.group == cyclic(4)
    assert not assert_conforms(model, [data, data.subgraph(torch.arange(7))], ["equivariance"])
    assert relative_error(model(Data(pos=data.pos, vel=data.vel.flip(0), x=data.x)), model(data)) > 1e-3


# --- constant features ----------------------------------------------------------------------------------------------

SEES = {
    "SE3 principal": (LieTransformer, {"frames": Principal(), "neighborhood": Radius(2.5)}, 3),
    "SE3 principal, no length": (LieTransformer, {"frames": Principal(), "neighborhood": AllPairs()}, 3),
    "O": (LieTransformer, {"frames": octahedral(), "neighborhood": Nearest(4)}, 3),
    "C4": (LieTransformer, {"frames": cyclic(4), "neighborhood": Radius(2.5)}, 2),
    "translations": (LieTransformer, {"neighborhood": Radius(2.5)}, 3),
    "sphere": (LieTransformer, {"frames": Principal(), "neighborhood": Radius(1.0), "space": Sphere()}, 3),
    "Sim3": (LieTransformer, {"frames": Principal(), "neighborhood": AllPairs(), "space": Euclidean(Sim(3))}, 3),
    "convolution": (LieConvNet, {"frames": Principal(), "neighborhood": Radius(2.5)}, 3),
    "convolution, sphere": (LieConvNet, {"frames": Principal(), "neighborhood": Radius(1.0), "space": Sphere()}, 3),
}


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
@pytest.mark.parametrize("name", SEES)
def test_networks_see_geometry_where_features_are_constant(name):
    """With their initial weights, outputs of random clouds differ."""
    model, options, dim = SEES[name]
    torch.manual_seed(0)
    network = model(1, 1, channels=32, layers=2, **options)
    pos = torch.randn(6 * 12, dim)
    if isinstance(options.get("space"), Sphere):
        pos = pos / pos.norm(dim=1, keepdim=True)
    data = Data(pos=pos, x=torch.ones(len(pos), 1), batch=torch.arange(6).repeat_interleave(12))
    assert network.eval()(data).std() > 1e-3


def test_scores_alone_do_not_see_geometry_where_features_are_constant():
    """Control: with geometry in the scores alone, a softmax averages equal values."""
    network = LieTransformer(
        1, 1, frames=Principal(), neighborhood=Radius(2.5), channels=32, layers=2, lifting=Lifting(local=0)
    )
    data = Data(pos=torch.randn(72, 3), x=torch.ones(72, 1), batch=torch.arange(6).repeat_interleave(12))
    assert network.eval()(data).std() < 1e-6


@pytest.mark.parametrize("convention", ["log", "quaternion"])
def test_published_coordinates_of_half_turns_do_not_depend_on_rounding(convention):
    """The icosahedral group has half turns about many different axes."""
    group, pos = icosahedral(), torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    chart, space = PublishedCoordinates(convention), Euclidean(SE(3))
    expected = chart(lift(pos, group, AllPairs(), space))
    for h in range(1, group.order, 7):
        found = chart(lift(group.act(h, pos), group, AllPairs(), space))
        order = group.permutation(int(group.inverse_index[h]))
        assert (found[:, order][:, :, order] - expected).abs().max() < 1e-12


def test_vectors_on_the_sphere_are_tangent():
    """Those of points: outputs after all layers, and inputs. Axes of the cloud and fields of type 1o are in space."""
    network = randomize(
        LieTransformer(
            1,
            1,
            space=Sphere(),
            frames=Principal("neighborhood"),
            neighborhood=Radius(1.5),
            channels=8,
            layers=1,
            heads=2,
            vector_inputs={"wind": Vector(3), "sun": Vector(3), "gust": "1o", "winds": 2 * Vector(3)},
            readout=Readout(kind="vector", pool="none"),
        ).double()
    )
    pos = torch.nn.functional.normalize(torch.randn(9, 3, dtype=torch.float64), dim=1)
    wind, gust = torch.randn(2, 9, 3, dtype=torch.float64)
    wind, sun = torch.linalg.cross(wind, pos), torch.randn(1, 3, dtype=torch.float64)
    cloud = Data(x=torch.rand(9, 1), pos=pos, wind=wind, sun=sun, gust=gust, winds=torch.cat([wind, -wind], dim=1))
    out = network(cloud)
    assert out.norm() > 1e-3
    assert (out * pos).sum(1).abs().max() < 1e-14 * out.abs().max()
    for rep, normal in ((Vector(3), False), (2 * Vector(3), False), (Irreps("1o"), True)):
        share = (FieldModel(network, FieldHead(8, rep)).double().eval()(cloud)[:, -3:] * pos).sum(1)
        assert (share.abs().max() > 1e-3) == normal
    turn = SO(3).draw((), torch.Generator().manual_seed(0)).double()
    fields = {name: cloud[name] @ turn.T for name in ("pos", "wind", "sun", "gust")}
    fields["winds"] = (cloud.winds.unflatten(1, (2, 3)) @ turn.T).flatten(1)
    torch.testing.assert_close(network(Data(x=cloud.x, **fields)), out @ turn.T, atol=1e-10, rtol=0)
    for name in ("sun", "gust"):
        assert (network(cloud.clone().update({name: 2 * cloud[name]})) - out).norm() > 1e-3
    network(cloud.clone().update({"wind": wind + 5e-4 * wind.norm(dim=1).max() * pos}))
    with pytest.raises(ValueError, match=r"data\.wind: expected vectors that are tangent to S\^2 .* 70\.7% of"):
        network(cloud.clone().update({"wind": wind + wind.norm(dim=1, keepdim=True) * pos}))
    with pytest.raises(ValueError, match=r"data\.winds: expected vectors that are tangent to S\^2"):
        network(cloud.clone().update({"winds": torch.cat([wind, wind + pos], dim=1)}))
    model = FieldModel(network, VectorHead(8), start={"gust": 2.0}).double()
    with pytest.raises(ValueError, match=r"data\.gust: expected vectors that are tangent to S\^2"):
        model(cloud)
    model(cloud.clone().update({"gust": wind}))
