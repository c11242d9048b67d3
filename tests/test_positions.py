"""Positional encodings and equivariance: GSA-Nets, Propositions 4.1 and 4.2, and Definition 4.3."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.certify import certify
from lieattn.geometry import AllPairs, PrincipalFrames, Radius, lift
from lieattn.groups import cyclic, dihedral, tetrahedral, trivial
from lieattn.models import GSANet, GSAOptions
from lieattn.nn import GroupConvolution, GroupSelfAttention, LiftingSelfAttention
from lieattn.nn.relative import CoordinateEncoding, NetworkKernel
from lieattn.testing import TOLERANCE, equivariance_error, further_symmetries, random_cloud, randomize, relative_error

F64 = torch.float64
POSITIONS = ("relative", "absolute", "none")
CHANGED = 1e-3


def clouds(dim=2, dtype=F64, points=7):
    generator = torch.Generator().manual_seed(0)
    return [
        Data(
            x=torch.randn(points, 2, generator=generator, dtype=F64).to(dtype),
            pos=torch.randn(points, dim, generator=generator, dtype=F64).to(dtype),
        )
        for _ in range(3)
    ]


def network(positions, frames=None, neighborhood=None, dtype=F64):
    torch.manual_seed(0)
    near = AllPairs() if neighborhood is None else neighborhood
    options = GSAOptions(positions=positions, values=False)
    made = GSANet(frames or cyclic(4), 2, 3, neighborhood=near, channels=8, blocks=(1,), heads=2, options=options)
    return randomize(made).to(dtype).eval()


def changes(model, change, dtype=F64):
    """Return the change of the outputs when the clouds are changed."""
    data = clouds(dtype=dtype)
    changed = [Data(**{"x": cloud.x, "pos": cloud.pos, **change(cloud)}) for cloud in data]
    return relative_error(*(model(Batch.from_data_list(batch)) for batch in (changed, data)))


CHANGES = {
    "features permuted": lambda cloud: {"x": cloud.x.roll(1, 0)},
    "points moved at random": lambda cloud: {"pos": cloud.pos.flip(1) ** 3},
    "translated": lambda cloud: {"pos": cloud.pos + 1.5},
    "turned in the group": lambda cloud: {"pos": cloud.pos @ cyclic(4).elements[1].T.to(cloud.pos)},
    "turned outside of it": lambda cloud: {"pos": cloud.pos @ cyclic(8).elements[1].T.to(cloud.pos)},
}
KEPT = {
    "relative": {"translated", "turned in the group"},
    "absolute": {"turned in the group"},
    "none": set(CHANGES),
}


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("positions", POSITIONS)
def test_what_leaves_the_outputs_alone(positions, dtype):
    """Relative positions leave invariance to exactly the group, absolute ones to less, none to all permutations."""
    model = network(positions, dtype=dtype)
    errors = {name: changes(model, change, dtype) for name, change in CHANGES.items()}
    assert {name for name, error in errors.items() if error < TOLERANCE[dtype]} == KEPT[positions]
    assert all(error > CHANGED for name, error in errors.items() if name not in KEPT[positions])


@pytest.mark.parametrize(
    ("positions", "frames", "group"),
    [*((positions, cyclic(4), "C4") for positions in POSITIONS), ("absolute", PrincipalFrames(), "SO(3)")],
)
def test_certificates_know_what_is_promised(positions, frames, group):
    """Elements outside of the group change the outputs, unless there are no positions."""
    model = network(positions, frames)
    dim = 2 if group == "C4" else 3
    certificate = certify(
        model, clouds(dim), elements=2, rotations=2, continuity=group == "C4" and positions == "none", dtypes=(F64,)
    )
    assert certificate.passed, certificate
    assert certificate.unique is (positions != "none")
    if positions == "absolute":
        assert model.symmetry.name == f"{group} about the origin"
        assert not model.symmetry.translations
        encodings = [part for part in model.modules() if isinstance(part, CoordinateEncoding)]
        assert [encoding.absolute for encoding in encodings] == [True, True]


@pytest.mark.parametrize("pattern", ["joint", "query_sum"])
def test_guarantees_say_whether_layers_are_unique(pattern):
    """Only of what was measured: with relative positions and the usual table, on a finite group."""
    options, near = GSAOptions(pattern=pattern), {"neighborhood": AllPairs(), "channels": 8, "heads": 2}
    model = randomize(GSANet(cyclic(4), 2, 3, options=options, **near)).to(F64)
    layer, x, pos = model.blocks[0].attention, torch.randn(5, 4, 8, dtype=F64), torch.randn(5, 2, dtype=F64)
    unique = not further_symmetries(lambda x, p: layer(x, lift(p, cyclic(4), AllPairs())), cyclic(4), x, pos)
    assert f"fields are {'' if unique else 'not '}uniquely equivariant" in model.guarantee
    assert unique is (pattern == "joint")
    other = replace(options, positions="none", values=False)
    for made in (GSANet(PrincipalFrames(), options=options, **near), GSANet(cyclic(4), options=other, **near)):
        assert "uniquely" not in made.guarantee


@pytest.mark.parametrize("group", [cyclic(4), dihedral(3)], ids=lambda group: group.name)
def test_layers_without_encodings_see_sets(group):
    """Proposition 4.1: permuting the points of a whole cloud permutes the outputs, of lifted fields too."""
    pos, order = torch.randn(6, 2, dtype=F64), torch.randperm(6)
    graph = lift(pos, group, AllPairs())
    for encoding, kept in (([], True), (None, False)):
        lifting = randomize(LiftingSelfAttention(group, 3, 8, heads=2, encoding=encoding)).double()
        attention = randomize(GroupSelfAttention(group, 8, 8, heads=2, encoding=encoding)).double()
        x = torch.randn(6, 3, dtype=F64)
        out, permuted = (attention(lifting(features, graph), graph) for features in (x, x[order]))
        assert (relative_error(permuted, out[order]) < TOLERANCE[F64]) is kept


SHEARED = dihedral(3).conjugate(torch.tensor([[1.0, 0.7], [0.0, 2.0]], dtype=F64), "sheared D3")


@pytest.mark.parametrize("group", [cyclic(4), SHEARED], ids=lambda group: group.name)
def test_absolute_encodings_see_keys_in_the_frames(group):
    """The encoding is ρ(h⁻¹ x_j / length), the same for all targets, also if matrices are not orthogonal."""
    encoding = randomize(CoordinateEncoding(2, 6, absolute=True)).double()
    graph = lift(torch.randn(5, 2, dtype=F64), group, AllPairs(), length=1.5)
    terms = encoding(graph)
    seen = torch.einsum("aij,pj->pai", torch.linalg.inv(group.elements), graph.pos) / 1.5
    expected = torch.cat([net(c) for net, c in zip(encoding.axes, seen.unbind(-1), strict=True)], dim=-1)
    torch.testing.assert_close(terms.positional_key[terms.row][:, :, 0], expected[graph.neighbors.source])


def to_output_frame(group):
    """Table of h⁻¹ m for output, query and key frames (h, g, m)."""
    return group.relative_index[:, None].expand(*[group.order] * 3).contiguous()


OF_SPACE = pytest.param(tetrahedral(), marks=pytest.mark.slow)  # with 132 pairs of motions
FORMS = {
    "query sum": lambda group, **sizes: GroupSelfAttention(group, 6, 8, **sizes),
    "query sum to the output": lambda group, **sizes: GroupSelfAttention(
        group, 6, 8, encoding=CoordinateEncoding(group.dim, 4, group, to_output_frame(group)), **sizes
    ),
    "joint": lambda group, **sizes: GroupSelfAttention(group, 6, 8, pattern="joint", **sizes),
    "convolution": lambda group, **sizes: GroupConvolution(NetworkKernel(group, 6, 8)),
}


@pytest.mark.parametrize("group", [cyclic(3), dihedral(3), OF_SPACE], ids=lambda group: group.name)
@pytest.mark.parametrize("form", FORMS)
def test_the_query_sum_of_the_paper_is_not_uniquely_equivariant(form, group):
    """It commutes with every pair of motions of fibers and points, and is constant on the fiber of a point alone."""
    torch.manual_seed(0)
    layer = randomize(FORMS[form](group, heads=2, head_channels=4)).to(F64)
    pos, _ = random_cloud(group, 7)
    x = torch.randn(7, group.order, 6, dtype=F64)

    def call(x, pos):
        return layer(x, lift(pos, group, Radius(1.5)))

    alone = call(x[:1], pos[:1])
    if form == "query sum":
        assert len(further_symmetries(call, group, x, pos)) == group.order * (group.order - 1)
        assert relative_error(alone, alone[:, :1].expand_as(alone)) < TOLERANCE[F64]
    else:
        assert further_symmetries(call, group, x, pos) == []
        assert relative_error(alone, alone[:, :1].expand_as(alone)) > CHANGED


@pytest.mark.parametrize("group", [cyclic(4), cyclic(8), dihedral(1), dihedral(3)], ids=lambda group: group.name)
def test_tables_of_relative_frames_are_equivariant(group):
    """Eq. 16 of GSA-Nets as printed, with h⁻¹ g⁻¹ m, is not."""
    printed = group.relative_index[:, group.relative_index]
    pos, x = random_cloud(group, 6)[0], torch.randn(6, group.order, 6, dtype=F64)
    for table in (group.relative_index, to_output_frame(group), printed):
        kept = table is not printed
        assert GSAOptions(frame_table=table, pattern="query_sum").equivariant(group) is kept
        encoding = CoordinateEncoding(2, 4, group, table)
        layer = randomize(GroupSelfAttention(group, 6, 8, heads=2, head_channels=4, encoding=encoding)).to(F64)
        error = equivariance_error(lambda x, p, f=layer: f(x, lift(p, group, AllPairs())), group, x, pos)
        assert error < TOLERANCE[F64] if kept else error > 1e-2


@pytest.mark.parametrize("lifts", [True, False])
def test_encoded_features_are_the_printed_equations(lifts):
    """Eqs. 14 and 16: the key map of a head acts on f + ρ, so that its bias is added once."""
    group, made = cyclic(4), LiftingSelfAttention if lifts else GroupSelfAttention
    layer = randomize(made(group, 6, 8, heads=2, head_channels=4, encoded="features")).to(F64)
    graph = lift(torch.randn(5, 2, dtype=F64), group, Radius(1.5))
    x = torch.randn(5, *(() if lifts else (4,)), 6, dtype=F64)
    terms, near = layer.terms(x, graph), graph.neighbors
    codes = layer.encoding(graph)
    rho = codes.positional_key[slice(None) if codes.row is None else codes.row][:, :, 0]  # [edges, h, 6]
    field = x[:, None] if lifts else x
    pairs = 0 if lifts else codes.fiber_key[None, None, :, :, 0]  # [1, 1, g, m, 6]
    keys = layer.key(field[near.source][:, None, None] + rho[:, :, None, None] + pairs).unflatten(-1, (2, 4))
    query = layer.query(field)[near.target].unflatten(-1, (2, 4))
    score = torch.einsum("eqnd,eoqmnd->eoqmn", query, keys) / math.sqrt(6)
    weights = torch.zeros_like(score)
    for point in range(5):
        own = near.target == point
        part = score[own].movedim(0, 2)  # [o, q, edges, m, heads]
        weights[own] = part.flatten(2, 3).softmax(2).view_as(part).movedim(2, 0)
    value = layer.value(field)[near.source].unflatten(-1, (2, 4))
    summed = near.sum_to_targets(torch.einsum("eoqmn,emnd->eond", weights, value))
    torch.testing.assert_close(layer(x, graph), layer.output(summed.flatten(2)), rtol=1e-10, atol=1e-10)
    assert terms.positional_key.shape[2:] == (2, 4)


@pytest.mark.parametrize("pattern", ["lifting", "joint", "framewise"])
@pytest.mark.parametrize("group", [trivial(2), cyclic(4), dihedral(3)], ids=lambda group: group.name)
def test_absolute_encodings_of_queries_and_keys_are_the_printed_equations(group, pattern):
    """Eqs. 4 and 10, in each frame: ⟨q(f(i) + ρ(h⁻¹ x_i)), k(f(j) + ρ(h⁻¹ x_j))⟩. Keys alone give other scores."""
    lifts, order = pattern == "lifting", group.order
    encoding = CoordinateEncoding(2, 6, None if lifts else group, absolute=True)
    options = {"heads": 2, "head_channels": 4, "encoding": encoding, "encoded": "features"}
    made = LiftingSelfAttention if lifts else partial(GroupSelfAttention, pattern=pattern)
    layer = randomize(made(group, 6, 8, **options)).to(F64)
    graph = lift(torch.randn(5, 2, dtype=F64), group, AllPairs(), length=1.5)
    x = torch.randn(5, *(() if lifts else (order,)), 6, dtype=F64)
    field = x[:, None].expand(-1, order, -1) if lifts else x
    rho, pairs = layer.encoding(graph).positional_key[:, :, 0], torch.zeros(order, order, 6, dtype=F64)
    if not lifts:
        pairs = layer.encoding(graph).fiber_key[:, :, 0]
    query = layer.query(field + rho).unflatten(-1, (2, 4))  # [i, h]
    keys = layer.key(field[:, None] + rho[:, :, None] + pairs).unflatten(-1, (2, 4))  # [j, h, m]
    if pattern != "joint":
        keys = keys.diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2)[:, :, None]
    score = torch.einsum("ihed,jhmed->ihjme", query, keys) / math.sqrt(6)
    weights = score.flatten(2, 3).softmax(2).view_as(score)
    value = layer.value(field).unflatten(-1, (2, 4))
    summed = torch.einsum("ihjme,jmed->ihed" if pattern == "joint" else "ihjme,jhed->ihed", weights, value)
    expected = layer.output(summed.flatten(2))
    torch.testing.assert_close(layer(x, graph), expected, rtol=1e-10, atol=1e-10)
    alone = torch.einsum("ihed,jhmed->ihjme", layer.query(field).unflatten(-1, (2, 4)), keys) / math.sqrt(6)
    assert relative_error(alone, score) > 0.1

    def call(x, pos):
        return layer(x, lift(pos - pos.mean(0), group, AllPairs()))

    assert equivariance_error(call, group, x, graph.pos, input_field=not lifts) < TOLERANCE[F64]
