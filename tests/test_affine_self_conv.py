"""Affine Self Convolution: equivariance on clouds and grids, special cases, and the networks of the paper."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from lieattn.geometry import AllPairs, PixelSquare, Radius, Raster, SampledFrames, lift, pixel_positions, point_clouds
from lieattn.groups import cyclic, dihedral, octahedral, reflection, tetrahedral, trivial
from lieattn.models import AffineSelfConvNet, BottleneckBlock
from lieattn.nn import (
    AffineSelfConvolution,
    FieldBatchNorm,
    GroupAttention,
    GroupSqueezeExcite,
    LiftingAffineSelfConvolution,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
    act_on_grid,
    from_grid,
    to_grid,
)
from lieattn.nn.relative import FourierFeatures, RelativeFunction, RelativePositionTable
from lieattn.ops import RelativeTerms, group_attention
from lieattn.testing import assert_equivariant, randomize
from tests.cases import SMALL_GROUPS, each, refuses, turns

CHANNELS, WIDTH, HEADS = 3, 6, 2
SMOOTH = FourierFeatures(hidden=5)
KINDS = {
    "affine": AffineSelfConvolution,
    "simple": SimpleAffineSelfConvolution,
    "stand-alone": StandAloneSelfAttention,
    "lifting": LiftingAffineSelfConvolution,
}
VARIANTS = {
    **KINDS,
    "full": partial(AffineSelfConvolution, full_psi=True),
    "pairwise": partial(StandAloneSelfAttention, pairwise=True),
    "full and pairwise": partial(SimpleAffineSelfConvolution, full_psi=True, pairwise=True),
}


def layer_of(kind, group, positions=SMOOTH, **options):
    layer = VARIANTS[kind](group, CHANNELS, 4, positions, **{"channels": WIDTH, "heads": HEADS, **options})
    return randomize(layer.double(), spread=0.2 if layer.full_psi else 0.5)


def field(kind, group, points):
    shape = (points, CHANNELS) if kind == "lifting" else (points, group.order, CHANNELS)
    return torch.randn(*shape, dtype=torch.float64)


# --- on clouds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VARIANTS)
def test_gradients_of_positions_twice(kind):
    group = cyclic(3)
    layer, x = layer_of(kind, group), field(kind, group, 4)
    pos = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def call(pos, x):
        return layer(x, lift(pos, group, AllPairs()))

    assert torch.autograd.gradcheck(call, (pos, x.requires_grad_()), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (pos, x), fast_mode=True)


def test_hidden_units_of_squeeze_excite():
    found = {channels: GroupSqueezeExcite(channels).squeeze.out_features for channels in (8, 16, 40)}
    assert found == {8: 1, 16: 1, 40: 2}


# --- on grids -------------------------------------------------------------------------------------------------


def turned(group, h, x, rows, columns):
    """Return the field whose pixel array is transformed by h, as in rotating an image."""
    return from_grid(act_on_grid(group, h, to_grid(x, torch.tensor([[rows, columns]]))))


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize(("size", "border"), [(3, "zero"), (5, "mask")])
@pytest.mark.parametrize("kind", KINDS)
@each("group", ["C4", "D1", "D4"])
def test_turned_arrays(group, kind, size, border):
    group, sides, double = SMALL_GROUPS[group], (5, 4), torch.float64
    layer = layer_of(kind, group, RelativePositionTable.square(size, border=border))
    x = field(kind, group, sides[0] * sides[1])
    upright, across = (lift(pixel_positions(*s, dtype=double), group, PixelSquare(size)) for s in (sides, sides[::-1]))
    with torch.no_grad():
        out = layer(x, upright)
        for h in turns(group):
            graph = upright if bool(group.elements[h, 0, 0]) else across
            found, wanted = layer(turned(group, h, x, *sides), graph), turned(group, h, out, *sides)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("group", [tetrahedral(), octahedral(), reflection(3)], ids=lambda g: g.name)
@pytest.mark.parametrize("border", ["zero", "mask"])
def test_voxels(group, border):
    steps = torch.arange(3, dtype=torch.float64) - 1
    pos = torch.cartesian_prod(steps, steps, steps)
    layer = layer_of("affine", group, RelativePositionTable.square(3, dim=3, border=border), channels=4)
    x = field("affine", group, len(pos))
    with torch.no_grad():
        call = lambda x, pos: layer(x, lift(pos, group, PixelSquare(3)))  # noqa: E731
        assert_equivariant(call, group, x, pos, elements=turns(group))


def test_a_zero_border_may_be_wider_than_the_image():
    graph = lift(pixel_positions(1, 2), cyclic(4), PixelSquare(5))
    table = RelativePositionTable.square(5, border="zero")
    edges = table.edges(graph)
    assert edges.neighbors.degree.tolist() == [25, 25, 0]
    assert table.edges(graph) is edges, "found once"


def test_zero_border_is_a_ring_of_points_with_zero_embeddings():
    group, table = cyclic(4), RelativePositionTable.square(3, border="zero")
    layer = layer_of("affine", group, table)
    with torch.no_grad():
        for linear in (layer.key, layer.value):
            linear.bias.zero_()  # so that a zero field has zero embeddings
    x = field("affine", group, 12)
    out = layer(x, lift(pixel_positions(3, 4, dtype=torch.float64), group, PixelSquare(3)))
    padded = F.pad(to_grid(x, torch.tensor([[3, 4]])), (1, 1, 1, 1))
    around = layer(from_grid(padded), lift(pixel_positions(5, 6, dtype=torch.float64), group, PixelSquare(3)))
    inner = to_grid(around, torch.tensor([[5, 6]]))[..., 1:-1, 1:-1]
    torch.testing.assert_close(from_grid(inner), out, rtol=1e-12, atol=1e-12)


def test_image_batches_of_different_sizes():
    group = cyclic(4)
    layer = layer_of("affine", group, RelativePositionTable.square(3, border="zero"))
    sizes = [(2, 3), (4, 4), (1, 1)]
    graphs = [lift(pixel_positions(*size, dtype=torch.float64), group, PixelSquare(3)) for size in sizes]
    xs = [field("affine", group, graph.num_points) for graph in graphs]
    apart = torch.cat([layer(x, graph) for x, graph in zip(xs, graphs, strict=True)])
    grid, ptr = torch.tensor(sizes), torch.tensor([0, 6, 22, 23])
    images = point_clouds(torch.cat([graph.pos for graph in graphs]), ptr=ptr, grid=grid)
    together = layer(torch.cat(xs), lift(images, group, PixelSquare(3)))
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


# --- full matrices and pairwise scores ------------------------------------------------------------------------


def literal(layer, x, group, sides, *, full, pairwise):
    """Evaluate the layer by loops over points, frames, offsets and frames, with one affine map per pair of elements."""
    places = [(right, sides[0] - 1 - row) for row in range(sides[0]) for right in range(sides[1])]
    offsets = torch.tensor(layer.positions.offsets, dtype=torch.float64)
    out = x.new_zeros(len(x), group.order, layer.channels)
    embedded = layer.query(x), layer.key(x), layer.value(x)

    def affine(psi, beta, f, h, m, offset):
        """Return one term of A(h, x; y), with psi and beta evaluated at h⁻¹m and h⁻¹(y - x)."""
        seen = group.elements[group.inverse_index[h]] @ offset
        row = int((offsets - seen).norm(dim=1).argmin())
        factor = psi[group.relative_index[h, m], row]
        return factor @ f if full else factor * f, beta[row]

    for i, h in product(range(len(x)), range(group.order)):
        query = layer.query_map.beta
        for m in range(group.order):
            factor = layer.query_map.psi[group.relative_index[h, m]]
            query = query + (factor @ embedded[0][i, m] if full else factor * embedded[0][i, m])
        keys, values = [], []
        for offset in offsets:
            there = (places[i][0] + int(offset[0]), places[i][1] + int(offset[1]))
            if there not in places and layer.positions.border == "mask":
                continue
            for signal, map_of, found in ((1, layer.key_map, keys), (2, layer.value_map, values)):
                terms = [
                    affine(map_of.psi, map_of.beta, f, h, m, offset)
                    for m in range(group.order)
                    for f in [embedded[signal][places.index(there), m] if there in places else torch.zeros_like(query)]
                ]
                if pairwise:
                    found += [product + beta for product, beta in terms]
                else:
                    found.append(sum(product for product, _ in terms) + terms[0][1])
        query, keys, values = (t.unflatten(-1, (HEADS, -1)) for t in (query, torch.stack(keys), torch.stack(values)))
        alpha = ((query * keys).sum(-1) / layer.channels).softmax(0)
        out[i, h] = (alpha[..., None] * values).sum(0).flatten()
    return layer.output(out)


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize(
    ("full", "pairwise", "border", "group"),
    [*((*kind, "mask", "C4") for kind in product([False, True], repeat=2)), (False, False, "zero", "D4")],
)
def test_layers_are_their_formula(full, pairwise, border, group):
    group, sides = SMALL_GROUPS[group], (2, 3)
    layer = layer_of("affine", group, RelativePositionTable.square(3, border=border), full_psi=full, pairwise=pairwise)
    x, graph = field("affine", group, 6), lift(pixel_positions(*sides, dtype=torch.float64), group, PixelSquare(3))
    with torch.no_grad():
        wanted = literal(layer, x, group, sides, full=full, pairwise=pairwise)
        torch.testing.assert_close(layer(x, graph), wanted, rtol=1e-11, atol=1e-11)


def test_full_matrices_start_with_the_variance_of_factors():
    for positions in (RelativePositionTable.square(5), FourierFeatures()):
        for full in (False, True):
            layer = AffineSelfConvolution(cyclic(4), 4, 64, positions, full_psi=full)
            psi, _ = layer.value_map.center()
            moved = psi @ torch.randn(64, 999) if full else psi[..., None] * torch.randn(64, 999)
            assert abs(float(moved.detach().std()) - 1) < 0.3


# --- what it reduces to ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["C4", "D4"])
def test_without_scores_and_beta_it_is_a_depth_wise_convolution(group):
    """All weights are equal, 1/9 of a window, and Σ_y Σ_m ψ_c(h⁻¹m, h⁻¹(y - x)) V_c(m, y) remains."""
    group = SMALL_GROUPS[group]
    layer = layer_of("affine", group, RelativePositionTable.square(3, border="zero"))
    x, pos = field("affine", group, 12), pixel_positions(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for part in (layer.query_map.psi, layer.query_map.beta, layer.value_map.beta):
            part.zero_()
        value, offsets = layer.value(x), torch.tensor(layer.positions.offsets, dtype=torch.float64)
        wanted = torch.zeros(12, group.order, WIDTH, dtype=torch.float64)
        for i, h, j in product(range(12), range(group.order), range(12)):
            away = (offsets - group.elements[group.inverse_index[h]] @ (pos[j] - pos[i])).norm(dim=1)
            if away.min() < 1e-9:
                psi = layer.value_map.psi[group.relative_index[h], int(away.argmin())]
                wanted[i, h] += (psi * value[j]).sum(0) / 9
        found = layer(x, lift(pos, group, PixelSquare(3)))
    torch.testing.assert_close(found, layer.output(wanted), rtol=1e-11, atol=1e-11)


def test_with_factors_of_one_and_without_beta_it_is_attention():
    """On the plane, that of torch."""
    layer = layer_of("affine", trivial(2), RelativePositionTable.square(3, border="mask"))
    x, graph = (
        field("affine", trivial(2), 12),
        lift(pixel_positions(3, 4, dtype=torch.float64), trivial(2), PixelSquare(3)),
    )
    near = torch.zeros(12, 12, dtype=torch.bool)
    near[graph.neighbors.target, graph.neighbors.source] = True
    with torch.no_grad():
        for part in (layer.query_map, layer.key_map, layer.value_map):
            part.psi.fill_(1)
            part.beta.zero_()
        heads = (
            map_of(x)[:, 0].unflatten(1, (HEADS, -1)).transpose(0, 1)
            for map_of in (layer.query, layer.key, layer.value)
        )
        attended = F.scaled_dot_product_attention(*heads, attn_mask=near, scale=1 / WIDTH)
        wanted = layer.output(attended.transpose(0, 1).flatten(1)[:, None])
        found = layer(x, graph)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


class Factors(RelativeFunction):
    """Factors of values, or summands of scores, that depend on the distance."""

    patterns = ("pooled", "joint")

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, graph, x=None):
        distance = graph.relative.positions.norm(dim=-1)[:, :, None, None]
        table = distance if self.name == "displacement_bias" else 1 + distance[..., None]
        return RelativeTerms(**{self.name: table}, row=graph.relative.row)


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("pattern", ["pooled", "joint"])
def test_encodings_of_a_users_own_are_summed_in_every_pattern_that_they_share(pattern):
    graph = lift(pixel_positions(3, 3, dtype=torch.float64), cyclic(4), PixelSquare(3))
    parts = [Factors("displacement_bias"), Factors("psi")]
    layer = GroupAttention(4, 4, heads=2, encoding=parts, pattern=pattern).double()
    x = torch.randn(9, 4, 4, dtype=torch.float64)
    terms = parts[0](graph).plus(parts[1](graph))
    torch.testing.assert_close(layer(x, graph), layer(x, replace(graph, terms=terms)))


@pytest.mark.parametrize("positions", [SMOOTH, RelativePositionTable.square(3)], ids=["waves", "table"])
@pytest.mark.parametrize("pixels", [20, 3])
def test_affine_maps_and_keys_are_encodings_of_images(positions, pixels):
    """Three pixels of a square have nine edges, as many as the table has rows, but in another order."""
    group = cyclic(4)
    pos = pixel_positions(4, 5, dtype=torch.float64) if pixels == 20 else pixel_positions(2, 2, dtype=torch.float64)[:3]
    graph, x = lift(pos, group, PixelSquare(3)), field("affine", group, pixels)
    affine, keys = positions.affine_map(group, 8, heads=2), positions.axis_keys(group, 2, 4)
    for pattern, encoding in (("pooled", affine), ("joint", affine), ("pooled", keys), ("pooled", [affine, keys])):
        layer = GroupAttention(x.shape[-1], 8, heads=2, pattern=pattern, encoding=encoding).double()
        if positions == SMOOTH:  # each edge has its own row
            terms = layer.encoding(graph.at(pos.clone().requires_grad_()))
        else:
            steps = graph.neighbors.displacements(pos).tolist()
            index = torch.tensor([positions.offsets.index(tuple(step)) for step in steps])
            tables = {name: table[index] for name, table in layer.encoding(graph).tables().items()}
            terms = RelativeTerms(**tables)
        torch.testing.assert_close(layer(x, graph), layer(x, replace(graph, terms=terms)), rtol=1e-12, atol=1e-12)


def test_tables_have_a_row_for_each_place_and_a_value_for_each_coordinate():
    """Places of a fine grid are far apart, and those of turned grids equal up to rounding."""
    assert len(RelativePositionTable.square(3, spacing=1e-4).affine_map(cyclic(4), 1).turned) == 9
    keys = RelativePositionTable.square(3).axis_keys(cyclic(8), 1, 2)
    assert [len(axis) for axis in keys.axes] == [7, 7]  # 0, and 1, sqrt(2) and sqrt(1/2) of both signs


@pytest.mark.parametrize("kind", ["affine", "simple"])
def test_a_table_is_a_network_at_its_offsets(kind):
    group, table = dihedral(4), RelativePositionTable.square(3)
    smooth, layer = layer_of(kind, group), layer_of(kind, group, table)
    graph = lift(pixel_positions(4, 4, dtype=torch.float64), group, PixelSquare(3))
    state = smooth.state_dict()
    for name in ("key_map", "value_map", "affine_map"):
        waves = state.get(f"{name}.waves.frequencies")
        if waves is not None:
            offsets = torch.tensor(table.offsets, dtype=torch.float64) / graph.length
            waves = math.sqrt(2) * (offsets @ waves.mT + state.pop(f"{name}.waves.phases")).cos()
            del state[f"{name}.waves.frequencies"]
            state[f"{name}.psi"] = torch.einsum("om,fcm->foc", waves, state[f"{name}.psi"])
            state[f"{name}.beta"] = waves @ state[f"{name}.beta"].mT
    layer.load_state_dict(state, strict=True)
    x = field(kind, group, 16)
    torch.testing.assert_close(layer(x, graph), smooth(x, graph), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("positions", [RelativePositionTable.square(5), FourierFeatures()], ids=["table", "network"])
def test_psi_and_beta_start_with_unit_variance(positions):
    group = cyclic(4)
    graph = lift(pixel_positions(8, 8), group, PixelSquare(5))
    psi, beta = positions.affine_map(group, 200).tables(graph)
    for table in (psi, beta):
        assert abs(float(table.detach().var()) - 1) < 0.1
        assert abs(float(table.detach().mean())) < 0.1


# --- networks -------------------------------------------------------------------------------------------------

Z2, P4 = trivial(2), cyclic(4)
SIZES = {
    "ResNet29": (Z2, {"layer": "convolution"}, 313_114, 336_244),
    "ResNet29 SE": (Z2, {"layer": "convolution", "squeeze_excite": True}, 346_798, None),
    "p4 ResNet29": (P4, {"layer": "convolution"}, 309_138, 320_748),
    "p4 ResNet29 SE": (P4, {"layer": "convolution", "squeeze_excite": True}, 342_234, 353_844),
    "SASA": (Z2, {"layer": "stand-alone"}, 235_162, None),
    "Simple ASC": (Z2, {"layer": "simple"}, 217_354, 240_484),
    "ASC": (Z2, {"layer": "affine"}, 267_754, 290_884),
    "ASC SE": (Z2, {"layer": "affine", "squeeze_excite": True}, 301_438, None),
    "p4 ASC": (P4, {"layer": "affine"}, 271_842, 283_452),
    "ResNet83 ASC": (Z2, {"layer": "affine", "blocks": 9}, 733_450, None),
    "p4 ResNet83 ASC": (P4, {"layer": "affine", "blocks": 9}, 749_634, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_are_those_of_the_paper(name):
    group, options, *expected = SIZES[name]
    for classes, count in zip((10, 100), expected, strict=True):
        if count is not None:
            network = AffineSelfConvNet(group, out_channels=classes, **options)
            assert sum(p.numel() for p in network.parameters()) == count


WINDOW = RelativePositionTable.square(3, border="zero")
TALL = RelativePositionTable((*WINDOW.offsets, (0.0, -2.0), (0.0, 2.0)), border="zero")


def network(group, **options):
    attention = {} if options.get("layer") == "convolution" else {"heads": 2, "window": WINDOW}
    options = {"channels": 4, "blocks": 1, **attention, **options}
    model = randomize(AffineSelfConvNet(group, 2, 3, **options).double(), spread=0.7)
    for module in model.modules():
        if isinstance(module, FieldBatchNorm):  # not the identity in eval mode
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


@torch.no_grad()
def change(model, group, rows=8, columns=12):
    """Return the largest relative change of the logits under all transformations of the image."""
    images = torch.randn(2, 2, rows, columns, dtype=torch.float64)
    wanted = model(images)
    moved = [model(act_on_grid(group, h, images)) for h in turns(group)]
    return max(float((m - wanted).abs().max()) for m in moved) / float(wanted.abs().max().clamp(min=1))


@pytest.mark.parametrize(("axis", "exact"), [((1.0, -1.0), False), ((1.0, 1.0), True)], ids=["exchange", "transpose"])
def test_strides_break_reflections_that_reverse_rows(axis, exact):
    group = reflection(2, axis=axis)
    model = network(group, layer="convolution", downsampling="strided")
    assert (change(model, group) < 1e-10) == exact
    assert model.symmetry.group == (group if exact else trivial(2))


@pytest.mark.parametrize("positions", [SMOOTH, RelativePositionTable.square(3)], ids=["waves", "table"])
def test_narrow_heads_share_the_coordinates(positions):
    """Heads of one channel use the first and the second coordinate alternately."""
    group = cyclic(4)
    keys = randomize(positions.axis_keys(group, 4, 1))
    graph = lift(pixel_positions(3, 3), group, PixelSquare(3))
    seen = graph.relative.positions[:, group.identity_index].round()
    table = keys(graph).positional_key[:, group.identity_index]
    assert table.shape[1:] == (4, 1)
    for head in range(4):
        for value in (-1, 0, 1):
            same = table[seen[:, head % 2] == value, head]
            torch.testing.assert_close(same, same[:1].expand_as(same))
    assert len(table[:, 0].unique()) == len(table[:, 1].unique()) == 3


def test_networks_train_after_inference():
    """Tensors cached for a batch size in inference mode can be used in training."""
    model = AffineSelfConvNet(
        cyclic(4), 2, 3, channels=8, blocks=1, squeeze_excite=True, window=RelativePositionTable.square(5)
    )
    images = torch.randn(3, 2, 4, 12)
    with torch.inference_mode():
        model(images)
    model(images).sum().backward()
    graph = lift(pixel_positions(4, 4), cyclic(4), PixelSquare(3))
    layer, x = (
        AffineSelfConvolution(cyclic(4), 2, 4, RelativePositionTable.square(3, border="zero")),
        torch.randn(16, 4, 2),
    )
    with torch.inference_mode():
        layer(x, graph)
    layer(x, graph).sum().backward()


def test_blocks_start_as_their_shortcut():
    model = AffineSelfConvNet(cyclic(4), channels=8, blocks=2)
    block = model.blocks[1].eval()
    x = torch.randn(2 * 16, 4, 32).relu()
    with torch.no_grad():
        assert torch.equal(block(x, Raster(2, (4, 4)))[0], x)
    for name, parameter in model.named_parameters():
        if name.endswith(("query_map.psi", "key_map.psi", "key_map.beta", "value_map.psi")) and parameter.numel() > 200:
            assert abs(float(parameter.detach().std()) - 1) < 0.3, name
    weight = AffineSelfConvNet(cyclic(4), layer="convolution", channels=16).blocks[0].layer.convolution.weight
    assert abs(float(weight.detach().std()) / math.sqrt(2 / (16 * 4 * 9)) - 1) < 0.1


# --- errors ---------------------------------------------------------------------------------------------------


def asc(group=P4, positions=SMOOTH, **options):
    return AffineSelfConvolution(group, 3, 4, positions, **options)


CONVOLUTION = {"layer": "convolution"}
ERRORS = {
    "heads": (lambda: asc(heads=3), "heads: 3 heads do not divide 4 channels"),
    "border of an encoding": (
        lambda: GroupAttention(3, 4, pattern="pooled", encoding=WINDOW.affine_map(P4, 4)),
        "encoding: border 'zero' needs edges to points that do not exist; use border='mask'",
    ),
    "table without a group": (
        lambda: RelativePositionTable.square(3).edges(lift(torch.randn(5, 3), SampledFrames(2), AllPairs())),
        "graph: tables need the frames of a finite group, got a graph on R",
    ),
    "even window": (lambda: RelativePositionTable.square(4), "size: expected an odd number"),
    "offsets": (lambda: RelativePositionTable(((0.0,), (0.0, 1.0))), "offsets: expected at least one finite"),
    "window that turns away": (
        lambda: asc(cyclic(8), WINDOW),
        "border: 'zero' needs distinct offsets that C8 maps to each other",
    ),
    "no center": (
        lambda: SimpleAffineSelfConvolution(P4, 3, 4, RelativePositionTable(((1.0, 0.0),))),
        "offsets: expected displacement 0 among them",
    ),
    "no psi": (lambda: StandAloneSelfAttention(P4, 3, 4, SMOOTH, full_psi=True), "full_psi: expected False"),
    "narrow heads": (
        lambda: StandAloneSelfAttention(P4, 3, 1, SMOOTH),
        "channels: 2 coordinates need at least 2 channels over all heads, got 1",
    ),
    "graph of an encoding": (
        lambda: GroupAttention(*(4, 4), pattern="pooled", encoding=RelativePositionTable.square(3).affine_map(P4, 4))(
            torch.randn(16, 2, 4), lift(pixel_positions(4, 4), cyclic(2), PixelSquare(3))
        ),
        "graph: is lifted to C2, but this encoding is for C4",
    ),
    **{
        f"{name} of a convolution": (
            partial(AffineSelfConvNet, P4, **CONVOLUTION, **{name: value}),
            f"{name}: expected None for layer 'convolution', which has no attention, got",
        )
        for name, value in (("window", WINDOW), ("heads", 2), ("scale", 0.5))
    },
    "odd sides": (
        lambda: AffineSelfConvNet(P4, **CONVOLUTION)(torch.randn(1, 3, 6, 8)),
        "data: a 2 x 2 pooling needs even sides, got 3 x 4",
    ),
    "projection": (
        lambda: BottleneckBlock(P4, 3, 2, 4, torch.nn.Identity(), size=3, projection=False),
        "projection: expected True, .* 3 input and 4 output channels",
    ),
    "window with gaps": (
        lambda: AffineSelfConvNet(P4, window=RelativePositionTable.square(3, spacing=2.0)),
        r"window: expected all 5 x 5 pixels, as in RelativePositionTable.square\(5\), got 9 offsets without some",
    ),
    "smooth neighborhoods": (
        lambda: asc(P4, WINDOW)(torch.randn(36, 4, 3), lift(pixel_positions(6, 6), P4, Radius(1.5, smooth=True))),
        "graph: the weights of smooth neighborhoods differ between edges, .* one row for each edge, not a table",
    ),
    "tall window": (
        lambda: asc(cyclic(2), TALL)(torch.randn(36, 2, 3), lift(pixel_positions(6, 6), cyclic(2), PixelSquare(3))),
        r"graph: its neighborhoods lack the points at the offset \[0.0, -2.0\] of the window, which border 'zero'",
    ),
    "group of space": (lambda: AffineSelfConvNet(tetrahedral()), "group: expected a planar group"),
}


test_errors_name_the_argument = refuses(*ERRORS.values())


def operands(fiber=4, **tables):
    pos = torch.randn(5, 2)
    neighbors = AllPairs()(pos)
    signals = [torch.randn(5, fiber, 2, 3) for _ in range(3)]
    draw = {name: torch.randn(neighbors.num_edges, *shape) for name, shape in tables.items()}
    return signals, neighbors, RelativeTerms(**draw)


@pytest.mark.parametrize(
    ("pattern", "tables", "message"),
    [
        ("pooled", {"beta": (4, 4, 2, 3)}, "terms.beta: pattern 'pooled' adds it once for each neighbor"),
        (
            "pooled",
            {"psi": (3, 4, 2, 3)},
            "query: expected the same number of output frames everywhere, but query has 4",
        ),
        ("framewise", {"key_psi": (4, 4, 2, 3)}, "terms.key_psi: with pattern 'framewise' the key axis must be 1"),
        ("query_sum", {"key_psi": (4, 4, 2, 3)}, "terms.key_psi: pattern 'query_sum' does not support factors of keys"),
    ],
)
def test_the_operator_refuses_what_a_pattern_does_not_mean(pattern, tables, message):
    signals, neighbors, terms = operands(**tables)
    with pytest.raises(ValueError, match=message):
        group_attention(*signals, neighbors, pattern=pattern, terms=terms)


@pytest.mark.parametrize("name", ["fiber_key", "fiber_bias"])
def test_pooled_frames_have_no_pairs(name):
    signals, neighbors, _ = operands()
    table = torch.randn(4, 4, 2, *([3] if name == "fiber_key" else []))
    with pytest.raises(ValueError, match=rf"terms\.{name}: pattern 'pooled' has one score"):
        group_attention(*signals, neighbors, pattern="pooled", terms=RelativeTerms(**{name: table}))
    terms = RelativeTerms(key_psi=torch.randn(neighbors.num_edges, 4, 4, 2, 3))
    with pytest.raises(ValueError, match=r"terms\.key_psi: needs a query"):
        group_attention(None, None, signals[2], neighbors, pattern="pooled", terms=terms)


def test_graphs_of_blocks_are_kept_for_few_rasters():
    graphs = network(P4).graphs
    for images in range(1, 8):
        graph = graphs(Raster(images, (2, 3)), torch.device("cpu"))
        assert graphs(Raster(images, (2, 3)), graph.device) is graph
    assert len(graphs.known) <= 4


def test_heads_of_stand_alone_attention_have_both_coordinates():
    for layer, heads in (("affine", 8), ("stand-alone", 4)):
        assert AffineSelfConvNet(cyclic(4), layer=layer, blocks=1, channels=8).blocks[0].layer.heads == heads


def test_networks_have_the_given_scale_of_scores():
    net = AffineSelfConvNet(cyclic(4), blocks=1, channels=8, scale=0.3)
    assert [block.layer.scale for block in net.blocks] == [0.3] * 3


def test_initial_linear_maps_count_frames():
    weight = AffineSelfConvNet(cyclic(4), blocks=1).blocks[2].linear2.weight.detach()
    order, _, fan = weight.shape
    assert float(weight.std()) == pytest.approx((2 / (order * fan)) ** 0.5, rel=0.05)
