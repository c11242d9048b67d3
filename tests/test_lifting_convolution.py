"""The lifting convolution and the functions of the distance: definition, equivariance, degenerate neighborhoods."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lieattn.geometry import AllPairs, GivenFrames, Neighbors, Radius, lift
from lieattn.groups import SO, FiniteGroup, tetrahedral, trivial
from lieattn.nn import FrameMessages, LiftingConvolution
from lieattn.nn.relative import AngleFeatures, EdgeNetwork
from lieattn.ops import bessel_functions, smooth_lengths, smooth_window
from lieattn.testing import TOLERANCE, randomize, relative_error
from tests.cases import GROUPS, each, turns

DOUBLE = torch.float64
CUTOFF = 1.7
every_group = each("group", GROUPS)


class Lifting(torch.nn.Module):
    """A module that computes signals of the edges, and the field or messages from them."""

    def __init__(self, dim, in_channels=2, in_vectors=1):
        super().__init__()
        self.edges = EdgeNetwork(dim, in_channels, cutoff=CUTOFF, in_vectors=in_vectors, basis=3, hidden=5)
        self.lift, self.messages = LiftingConvolution(5, 4), FrameMessages(5, 4)

    def forward(self, graph, x=None, v=None):
        return self.lift(self.edges(replace(graph, vectors=v), x).psi, graph)


def layer(dim, *, dtype=DOUBLE, **options):
    return randomize(Lifting(dim, **options).to(dtype))


def inputs(points, dim, dtype=DOUBLE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(points, n, generator=generator, dtype=DOUBLE).to(dtype) for n in (dim, 2, dim))


def seen(pos, frames, neighborhood=None, clouds=2):
    """Lift points with alternating clouds to a group, or to frames ``[fiber, dim, dim]``, shared or per point."""
    if not isinstance(frames, FiniteGroup):
        frames = GivenFrames(frames if frames.ndim == 4 else frames.expand(len(pos), -1, -1, -1))
    return lift(pos, frames, neighborhood or AllPairs(), batch=torch.arange(len(pos)) % clouds)


def literal(conv, pos, frames, x, v, field=None):
    """Return the lifted field, or the messages of a field, by loops over points, frames and neighbors."""
    silu, edges = torch.nn.functional.silu, conv.edges
    fields = []
    for i in range(len(pos)):
        total, weight = torch.zeros(len(frames), 4, dtype=pos.dtype), 0.0
        for j in range(i % 2, len(pos), 2):
            if j == i:
                continue
            edge = pos[j] - pos[i]
            r = edge.norm() / CUTOFF
            if r >= 1:
                continue
            w = (1 - r**2) ** 4
            radial = torch.stack([2**0.5 * torch.sin(n * torch.pi * r) / (torch.pi * r) for n in (1, 2, 3)])
            e = edge / (edge.square().sum() + 0.01 * CUTOFF**2).sqrt()
            invariants = edges.radial(radial) + edges.own(x[i]) + edges.other(x[j])
            for a, frame in enumerate(frames):
                around = torch.cat([frame.inverse() @ arrow for arrow in (e, v[i], v[j])])
                signal = w * silu(edges.hidden(silu(invariants + edges.arrows(around))))
                if field is None:
                    total[a] += conv.lift.output(signal)
                else:
                    total[a] += conv.messages.kernel(signal) * field[j, a]
            weight += w
        fields.append(total / (1 + weight) ** 0.5)
    return torch.stack(fields)


def test_it_is_what_it_says():
    conv, group = layer(3), tetrahedral()
    pos, x, v = inputs(9, 3)
    found = conv(seen(pos, group), x, v[:, None])
    torch.testing.assert_close(found, literal(conv, pos, group.elements, x, v), atol=1e-12, rtol=1e-12)
    assert found.abs().max() > 1e-2


def messages(conv, field, graph, x, v):
    return conv.messages(field, replace(graph, terms=conv.edges(replace(graph, vectors=v[:, None]), x)))


def test_messages_are_what_they_say():
    conv, group = layer(3), tetrahedral()
    pos, x, v = inputs(9, 3)
    field = torch.randn(9, 12, 4, dtype=DOUBLE)
    found = messages(conv, field, seen(pos, group), x, v)
    expected = literal(conv, pos, group.elements, x, v, field)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert found.abs().max() > 1e-2


def test_messages_need_the_same_frames_over_all_points():
    conv, (pos, x, v) = layer(3), inputs(6, 3)
    frames = SO(3).sample(6, 2, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    with pytest.raises(ValueError, match="graph: messages within frames need the same frames"):
        messages(conv, torch.zeros(6, 2, 4, dtype=DOUBLE), seen(pos, frames), x, v)


@every_group
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=str)
def test_finite_groups_translate_the_field(group, dtype):
    if group.order > 24 and dtype == torch.float32:
        return  # large groups are tested in float64
    conv = layer(group.dim, dtype=dtype)
    pos, x, v = inputs(7, group.dim, dtype)
    expected = conv(seen(pos, group), x, v[:, None])
    for h in turns(group):
        moved = group.act(h, pos) + 0.7
        found = conv(seen(moved, group), x, group.act(h, v)[:, None])
        assert relative_error(found, group.translate(h, expected)) < TOLERANCE[dtype]


def test_every_point_may_have_frames_of_its_own():
    conv = layer(3)
    pos, x, v = inputs(6, 3)
    frames = SO(3).sample(6, 2, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    found = conv(seen(pos, frames), x, v[:, None])
    for i in range(6):
        alone = conv(seen(pos, frames[i]), x, v[:, None])[i]
        torch.testing.assert_close(found[i], alone, atol=1e-12, rtol=1e-12)


def test_nothing_beside_positions_is_needed():
    conv = layer(2, in_channels=0, in_vectors=0)
    found = conv(seen(inputs(6, 2)[0], GROUPS["C4"]))
    assert found.shape == (6, 4, 4)
    assert found.abs().max() > 1e-2


def test_fields_are_continuous_at_the_cutoff_and_where_points_coincide():
    conv = layer(3)
    x, v = torch.randn(2, 2, dtype=DOUBLE), torch.randn(2, 1, 3, dtype=DOUBLE)
    for length in (0.0, CUTOFF):
        outs = []
        for shift in (-1e-7, 0.0, 1e-7):
            pos = torch.tensor([[0.0, 0, 0], [length + shift, 0, 0]], dtype=DOUBLE)
            outs.append(conv(seen(pos, tetrahedral(), clouds=1), x, v))
        assert relative_error(outs[0], outs[1]) < 1e-5
        assert relative_error(outs[2], outs[1]) < 1e-5


def test_loops_are_edges_to_oneself_but_not_to_images():
    edges = torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert Neighbors.from_edge_index(edges, num_points=2).is_loop.tolist() == [True, False, True]
    pos, cell = torch.tensor([[0.2, 0.2]]), torch.eye(2)
    neighbors = Radius(1.1)(pos, torch.zeros(1, dtype=torch.int64), cell=cell[None])
    assert neighbors.num_edges == 5
    assert int(neighbors.is_loop.sum()) == 1


def test_initial_weights_preserve_the_size_of_signals_and_amplify_sparse_features():
    network = EdgeNetwork(3, 100, cutoff=1.0, in_vectors=20, in_edges=100, hidden=200)
    factors = {network.own: 2.0, network.other: 2.0, network.arrows: 1.0, network.hidden: math.sqrt(2)}
    factors[network.pairs] = 1.0
    factors[FrameMessages(200, 100).kernel] = 2.0
    for linear, factor in factors.items():
        expected = factor * math.sqrt(2 / linear.in_features)
        assert float(linear.weight.detach().std()) == pytest.approx(expected, rel=0.05)
    angles = AngleFeatures(3, 100, 100, cutoff=1.0, basis=16)
    assert float(angles.other.weight.detach().std()) == pytest.approx(1.0, rel=0.05)
    assert float(angles.radial.weight.detach().std()) == pytest.approx(0.25, rel=0.05)


def test_bessel_functions_are_orthogonal_on_the_ball():
    r = (torch.arange(20000, dtype=DOUBLE) + 0.5) / 20000
    basis = bessel_functions(r, 4)
    gram = torch.einsum("rm,rn,r->mn", basis, basis, r**2) / len(r) * torch.pi**2
    torch.testing.assert_close(gram, torch.eye(4, dtype=DOUBLE), atol=1e-6, rtol=0)
    assert bessel_functions(torch.ones(1, dtype=DOUBLE), 4).abs().max() < 1e-12
    expected = 2**0.5 * torch.arange(1, 5, dtype=DOUBLE)
    torch.testing.assert_close(bessel_functions(torch.zeros((), dtype=DOUBLE), 4), expected)
    torch.testing.assert_close(bessel_functions(r**2, 4, squared=True), basis)
    torch.testing.assert_close(smooth_window(r**2, squared=True), smooth_window(r))


@pytest.mark.parametrize(
    ("dtype", "tolerances"), [(torch.float32, (1e-7, 1e-6, 1e-5)), (DOUBLE, (1e-15, 1e-15, 2e-15))], ids=str
)
def test_derivatives_of_functions_of_the_distance_are_precise_near_0(dtype, tolerances):
    """Values, first and second derivatives by a vector, against those of Taylor series in float64."""
    count, lengths = 5, torch.cat([torch.zeros(1, dtype=DOUBLE), torch.logspace(-25, -1, 49, dtype=DOUBLE)])
    order = torch.arange(1, count + 1, dtype=DOUBLE)

    def series(square):
        terms = [
            (-((torch.pi * order) ** 2) * square[..., None]) ** k / float(math.factorial(2 * k + 1)) for k in range(12)
        ]
        window = (1 - square)[..., None] ** 4
        return torch.cat([2**0.5 * order * sum(terms), window], dim=-1)

    def found(square):
        functions = bessel_functions(square, count, squared=True)
        return torch.cat([functions, smooth_window(square, squared=True)[..., None]], dim=-1)

    for number in range(count + 1):
        parts = []
        for function, kind in ((found, dtype), (series, DOUBLE)):
            vectors = torch.stack([0.6 * lengths, -0.8 * lengths], dim=1).to(kind).requires_grad_()
            value = function(vectors.square().sum(dim=1))[:, number]
            (slope,) = torch.autograd.grad(value.sum(), vectors, create_graph=True)
            rows = [torch.autograd.grad(slope[:, k].sum(), vectors, retain_graph=True)[0] for k in range(2)]
            parts.append([value.double(), slope.double(), torch.stack(rows, dim=1).double()])
        size = float(parts[1][2].abs().max())
        for one, other, tolerance in zip(*parts, tolerances, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance * size)


def test_derivatives_of_functions_of_the_distance_are_those_of_their_steps():
    """Derivatives of one order as a function, against derivatives of all steps, which transforms take."""
    square = torch.linspace(0.02, 1.1, 12, dtype=DOUBLE, requires_grad=True)
    for function in (
        lambda x: bessel_functions(x, 3, squared=True).sum(-1),
        lambda x: smooth_window(x, 3, squared=True),
    ):
        mine, theirs = function, function
        for tolerance in (1e-12, 1e-11, 1e-9):
            mine = partial(lambda f, x: torch.autograd.grad(f(x).sum(), x, create_graph=True)[0], mine)
            theirs = torch.func.grad(lambda x, f=theirs: f(x).sum())
            assert relative_error(mine(square), theirs(square.detach())) < tolerance


def test_window_and_lengths():
    x = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=DOUBLE)
    torch.testing.assert_close(smooth_window(x), torch.tensor([1, 0.75**4, 0, 0], dtype=DOUBLE))
    vectors = torch.tensor([[0.0, 0], [3, 4]], dtype=DOUBLE, requires_grad=True)
    lengths = smooth_lengths(vectors)
    assert lengths.tolist() == [0, 5]
    (gradient,) = torch.autograd.grad(lengths.sum(), vectors)
    torch.testing.assert_close(gradient, torch.tensor([[0, 0], [0.6, 0.8]], dtype=DOUBLE))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_angle_features_are_their_definition(dim):
    pos, x, _ = inputs(7, dim)
    graph = seen(pos, trivial(dim))
    angles = randomize(AngleFeatures(dim, 2, 2, cutoff=CUTOFF, basis=3, window=2).to(DOUBLE))
    points, edges = angles(x, graph)
    neighbors, arrows = graph.neighbors, torch.zeros(7, 7, dim, dtype=DOUBLE)
    functions, windows = torch.zeros(7, 7, 2, 2, dtype=DOUBLE), torch.zeros(7, 7, dtype=DOUBLE)
    for i, j in neighbors.edge_index.flip(0).T.tolist():
        edge = (graph.pos[j] - graph.pos[i]) / CUTOFF
        arrows[i, j] = edge / (edge.norm() ** 2 + 0.01).sqrt()
        if i == j or edge.norm() >= 1:
            continue
        windows[i, j] = (1 - edge.norm() ** 2) ** 2
        radial = angles.radial(bessel_functions(edge.norm(), 3))
        functions[i, j] = (windows[i, j] * radial * angles.other(x[j])).unflatten(0, (2, 2))
    functions = functions / (1 + windows.sum(dim=1)).sqrt()[:, None, None, None]
    upper, expected = torch.triu_indices(2, 2), []
    for degree, f in zip((1, 2), functions.unbind(2), strict=True):
        product = products(degree, arrows[:, :, None], arrows[:, None])
        expected.append(torch.einsum("ijk,ijm,iml->ikl", f, product, f)[:, upper[0], upper[1]])
    torch.testing.assert_close(points, torch.cat(expected, dim=1), atol=1e-10, rtol=1e-10)
    expected = []
    for degree, f in zip((1, 2), functions.unbind(2), strict=True):
        for end in (neighbors.target, neighbors.source):
            product = products(degree, arrows[neighbors.target, neighbors.source][:, None], arrows[end])
            expected.append(torch.einsum("ej,ejk->ek", product, f[end]))
    torch.testing.assert_close(edges, torch.cat(expected, dim=1), atol=1e-10, rtol=1e-10)
    other = dim % 3 + 1
    with pytest.raises(ValueError, match=f"graph: expected points with {dim} coordinates, got {other}"):
        angles(x, seen(inputs(7, other)[0], trivial(other)))


def products(degree, e, other):
    """Return the products P_1 or P_2, which is 0 on a line."""
    cosine, dim = (e * other).sum(dim=-1), e.shape[-1]
    squares = e.square().sum(dim=-1) * other.square().sum(dim=-1)
    return cosine if degree == 1 else (dim * cosine**2 - squares) / max(1, dim - 1)


def test_edges_have_features_and_windows_of_any_power():
    edges = randomize(EdgeNetwork(3, 2, cutoff=CUTOFF, in_edges=2, window=2, basis=3, hidden=5).to(DOUBLE))
    pos, x, _ = inputs(6, 3)
    graph = seen(pos, tetrahedral(), Radius(CUTOFF))
    given = torch.randn(graph.neighbors.num_edges, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    graph, other = (replace(graph, edge_features=features) for features in (given, given + 1))
    expected = edges(graph, x).psi
    assert relative_error(edges(other, x).psi, expected) > 1e-3
    steep = EdgeNetwork(3, 2, cutoff=CUTOFF, in_edges=2, basis=3, hidden=5).to(DOUBLE)
    steep.load_state_dict(edges.state_dict())
    length = graph.neighbors.displacements(pos).norm(dim=1) / CUTOFF
    windows = [smooth_window(length, power) * ~graph.neighbors.is_loop for power in (2, 4)]
    target = graph.neighbors.target
    shares = [w / (1 + torch.zeros(6, dtype=DOUBLE).index_add(0, target, w)).sqrt()[target] for w in windows]
    found = steep(graph, x).psi.flatten(1) * shares[0][:, None]
    torch.testing.assert_close(found, expected.flatten(1) * shares[1][:, None], atol=1e-10, rtol=1e-10)
    kernel = torch.nn.Linear(5, 4, bias=False, dtype=DOUBLE)
    torch.testing.assert_close(edges.kernels([kernel], graph, x)[0], kernel(expected)[:, :, 0, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (5, 3)}, r"x: expected \(5, 2\), got \(5, 3\)"),
        ({"pos": (5, 2)}, r"pos: expected \(5, 3\), got \(5, 2\)"),
        ({"vectors": (5, 3)}, r"graph.vectors: expected \(5, 1, 3\), got \(5, 3\)"),
    ],
    ids=str,
)
def test_bad_inputs_are_named(change, message):
    shapes = {"pos": (5, 3), "x": (5, 2), "vectors": (5, 1, 3)} | change
    given = {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in shapes.items()}
    graph = seen(given["pos"], GROUPS["C3"] if given["pos"].shape[1] == 2 else tetrahedral())
    with pytest.raises(ValueError, match=message):
        layer(3)(graph, given["x"], given["vectors"])
