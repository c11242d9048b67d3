"""Every layer of one table on every lifted cloud of another, with all parameters randomized."""

import copy
import math
import os
from functools import cache

import pytest
import torch

from lieattn.geometry import AllPairs, Nearest, PixelSquare, Radius, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.nn import (
    AffineSelfConvolution,
    AttentiveConvolution,
    AttentiveGroupConvolution,
    CloudNorm,
    CloudPool,
    FiberNorm,
    FiberPool,
    FramewiseAttention,
    FramewiseBlock,
    GroupAttention,
    GroupConvolution,
    GroupLinear,
    GroupSelfAttention,
    GroupSqueezeExcite,
    InvariantHead,
    LieBlock,
    LieBottleneck,
    LieConvolution,
    LieSelfAttention,
    LiftingAffineSelfConvolution,
    LiftingSelfAttention,
    PointBatchNorm,
    PreNormBlock,
    SimpleAffineSelfConvolution,
    StandAloneSelfAttention,
)
from lieattn.nn.relative import (
    BumpKernel,
    FourierFeatures,
    MLPEncoding,
    NetworkKernel,
    PerHeadMLP,
    RelativePositionTable,
    RotaryEncoding,
    TableEncoding,
)
from lieattn.ops import backend
from lieattn.testing import assert_equivariant, equivariance_error, random_cloud, randomize, relative_error
from tests.cases import SMALL_GROUPS, each, turns
from tests.conftest import BACKENDS
from tests.lifted_cases import LIFTED

CHANNELS, HEADS, WIDTH = 4, 2, 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Made:
    """Arguments of the layers: a finite group or a space, and the number of coordinates of a relative element."""

    def __init__(self, case, graph):
        self.made_for, self.group = case.made_for, case.group
        self.dim, self.coordinates = case.space.group.dim, graph.relative.num_coordinates


def gsa(pattern, encoding=None, **options):
    def build(m):
        own = None if encoding is None else encoding(m)
        return GroupSelfAttention(
            m.made_for, CHANNELS, 5, heads=HEADS, head_channels=WIDTH, pattern=pattern, encoding=own, **options
        )

    return build


def lifting(encoding=None, **options):
    def build(m):
        own = None if encoding is None else encoding(m)
        return LiftingSelfAttention(m.made_for, CHANNELS, 5, heads=HEADS, head_channels=WIDTH, encoding=own, **options)

    return build


def mlp(between_frames=True, values=None):
    return lambda m: MLPEncoding(m.group, HEADS, between_frames=between_frames, value_channels=values)


def lie(kernel="sum", **options):
    return lambda m: LieSelfAttention(CHANNELS, m.coordinates, heads=HEADS, kernel=kernel, hidden=5, **options)


def affine(layer, **options):
    return lambda m: layer(m.group, CHANNELS, 4, FourierFeatures(hidden=6), channels=6, heads=HEADS, **options)


def rotary(values):
    return lambda m: RotaryEncoding(m.dim, HEADS, WIDTH, values=values)


def attentive(kind, lifts):
    return lambda m: AttentiveGroupConvolution(
        NetworkKernel(m.group, CHANNELS, 2, lifting=lifts, hidden=5), attention=kind
    )


LAYERS = {
    "lifting": lifting(),
    "lifting, mlp": lifting(mlp(False)),
    "lifting, mlp values": lifting(mlp(False, WIDTH)),
    "lifting, mean": lifting(normalize="mean"),
    "query sum": gsa("query_sum"),
    "query sum, encoded features": gsa("query_sum", encoded="features"),
    "query sum, exp-mean": gsa("query_sum", normalize="exp-mean"),
    "joint": gsa("joint"),
    "joint, mlp": gsa("joint", mlp()),
    "joint, mlp values": gsa("joint", mlp(True, WIDTH)),
    "joint, mlp values, mean": gsa("joint", mlp(True, WIDTH), normalize="mean"),
    "joint, none": gsa("joint", mlp(), normalize="none"),
    "framewise": gsa("framewise"),
    "framewise, mlp": gsa("framewise", mlp(False, WIDTH)),
    "framewise, rotary": gsa("framewise", rotary(False)),
    "tied joint": lambda m: GroupAttention(
        CHANNELS, 4, heads=HEADS, group=m.group, encoding=PerHeadMLP(HEADS, m.coordinates, 5)
    ),
    "framewise attention": lambda m: FramewiseAttention(
        m.group, CHANNELS, heads=HEADS, encoding=RotaryEncoding(m.dim, HEADS, CHANNELS // HEADS, values=True)
    ),
    "lie, sum": lie(),
    "lie, mean": lie(normalize="mean"),
    "lie, content": lie("content"),
    "lie, location": lie("location"),
    "lie, relative position": lie("relative_position"),
    "lie, combined": lie("combined", location="network"),
    "lie, product": lie("combined", features="product"),
    "affine": affine(AffineSelfConvolution),
    "lifting, affine": affine(LiftingAffineSelfConvolution),
    "affine, simple": affine(SimpleAffineSelfConvolution),
    "affine, stand-alone": affine(StandAloneSelfAttention),
    "affine, mean": affine(AffineSelfConvolution, normalize="mean"),
    "affine, full psi": affine(AffineSelfConvolution, full_psi=True),
    "affine, pairs": affine(StandAloneSelfAttention, pairwise=True),
    "affine, full": affine(AffineSelfConvolution, full_psi=True, pairwise=True),
    "convolution": lambda m: GroupConvolution(NetworkKernel(m.group, CHANNELS, 3)),
    "convolution, separable": lambda m: GroupConvolution(NetworkKernel(m.group, CHANNELS, 3, form="separable")),
    "convolution, window": lambda m: GroupConvolution(NetworkKernel(m.group, CHANNELS, 3, window=True)),
    "convolution, separable with a window": lambda m: GroupConvolution(
        NetworkKernel(m.group, CHANNELS, 3, form="separable", window=True), reduction="mean"
    ),
    "lifting, convolution": lambda m: GroupConvolution(
        NetworkKernel(m.group, CHANNELS, 3, lifting=True), reduction="mean"
    ),
    "convolution, bumps": lambda m: GroupConvolution(BumpKernel(m.group, CHANNELS, 3, side=3), reduction="mean"),
    "convolution, depthwise": lambda m: GroupConvolution(BumpKernel(m.group, CHANNELS, CHANNELS, depthwise=True)),
    "lifting, convolution, bumps": lambda m: GroupConvolution(BumpKernel(m.group, CHANNELS, 3, lifting=True, side=3)),
    "lifting, convolution, full attention": attentive("full", True),
    **{f"convolution, {kind} attention": attentive(kind, False) for kind in ("full", "input", "pose")},
    "lie convolution": lambda m: LieConvolution(CHANNELS, 3, m.coordinates, rank=3),
    "attentive convolution": lambda m: AttentiveConvolution(lie()(m), m.coordinates, rank=2),
    "linear": lambda m: GroupLinear(m.group, CHANNELS, 5),
    "cloud norm": lambda m: CloudNorm(CHANNELS),
    "fiber norm": lambda m: FiberNorm(CHANNELS),
    "point batch norm": lambda m: PointBatchNorm(CHANNELS),
    "squeeze and excite": lambda m: GroupSqueezeExcite(CHANNELS, 2),
    "pre-norm block": lambda m: PreNormBlock(gsa("query_sum")(m), CHANNELS, 5),
    "lie block": lambda m: LieBlock(lie()(m), CHANNELS),
    "lie bottleneck": lambda m: LieBottleneck(CHANNELS, 6, m.coordinates, widths=(2, 3)),
    "lie bottleneck, attentive": lambda m: LieBottleneck(CHANNELS, 6, m.coordinates, attention=lie()(m), rank=2),
    "framewise block": lambda m: FramewiseBlock(
        m.group, CHANNELS, heads=HEADS, encoding=RotaryEncoding(m.dim, HEADS, CHANNELS // HEADS, values=True)
    ),
    "pool over the fiber": lambda m: FiberPool("max"),
    "pool over clouds": lambda m: CloudPool("mean"),
    "invariant head": lambda m: InvariantHead(CHANNELS, 3),
}
POINTWISE = {"linear", "fiber norm", "point batch norm"}  # layer(x), without a graph
OF_A_GROUP = {
    name
    for name in LAYERS
    if "mlp" in name or "affine" in name or "convolution" in name or "framewise" in name or name == "tied joint"
} - {"lie convolution", "attentive convolution", "framewise"} | {"joint, none", "linear"}
RELATE_FRAMES = {  # by a table of pairs, or by fiber index: for frames that all points share
    name for name in OF_A_GROUP if not name.startswith("lifting") and name not in ("linear", "framewise, mlp")
} | {"framewise, rotary", "framewise attention", "framewise block", "framewise"}


def call(name, layer, x, graph):
    return layer(x) if name in POINTWISE else layer(x, graph)


def fits(name, case):
    """Return whether a layer supports a case: it may need a finite group, or frames that all points share."""
    return (name not in OF_A_GROUP or case.group is not None) and (name not in RELATE_FRAMES or case.tied)


SOME = ("D3", "C3 on scales", "SE(3), posed D2", "SE(3), principal", "R^2")
# Layers that differ from others of their class in one option: without being asked for, they run on a few cases only.
VARIANTS = {
    *("lifting, mlp", "lifting, mean", "query sum, encoded features", "query sum, exp-mean", "joint, none"),
    *("joint, mlp", "joint, mlp values, mean", "framewise, mlp", "lie, mean", "lie, location"),
    *("lie, relative position", "affine, mean", "affine, full psi", "affine, pairs", "affine, full"),
    *("convolution, window", "convolution, separable", "convolution, input attention", "convolution, pose attention"),
}


def fitting(name):
    """Return the cases that fit a layer, by name. Those of variants of other layers are few, unless slow tests run."""
    every = name not in VARIANTS or "LIEATTN_SLOW" in os.environ
    return {kind: case for kind, case in LIFTED.items() if fits(name, case) and (every or kind in SOME)}


def some_fitting(name):
    return [kind for kind in SOME if fits(name, LIFTED[kind])]


every_layer = pytest.mark.parametrize("name", LAYERS)


@cache
def clouds_of(case, dtype):
    """Return points, batch and graph of a case. Like the graphs below, they are shared by all layers of this file."""
    pos, batch = case.draw(torch.Generator().manual_seed(0), dtype)
    return pos, batch, case.lift(pos, batch)


@cache
def moves_of(case, dtype):
    """Return the transformations of the clouds of a case."""
    return list(case.moves(*clouds_of(case, dtype)[:2]))


@cache
def graphs_alone(case):
    """Return the graph of each of the two clouds of a case."""
    pos, batch, _ = clouds_of(case, torch.float64)
    parts = [pos[batch == cloud] for cloud in range(2)]
    return [case.lift(part, torch.zeros(len(part), dtype=torch.int64)) for part in parts]


def prepared(name, case, dtype):
    pos, batch, graph = clouds_of(case, dtype)
    # Tied maps sum over the fiber. With larger weights, scores would reach thousands, which float32 rounds by 1e-4.
    terms = graph.fiber * (CHANNELS if "full" in name else 1)
    spread = 0.5 if dtype == torch.float64 else min(0.5, 2 / terms**0.5)
    layer = randomize(LAYERS[name](Made(case, graph)).to(dtype), spread=spread)
    lifts = name.startswith("lifting")
    shape = (len(pos), CHANNELS) if lifts else (graph.num_points, graph.fiber, CHANNELS)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return layer, x, pos, batch, graph


@every_layer
@each("case", fitting)
def test_layer_moves_along(name, case):
    """In float64; some cases also in float32 and with every backend that differs from the plain one, by its bits."""
    every = case in THOROUGH
    for dtype, evaluations in ((torch.float64, BACKENDS if every else ("auto",)), (torch.float32, ("auto",) * every)):
        layer, x, _, _, graph = prepared(name, case, dtype)
        moves = moves_of(case, dtype)
        if moves[0][1] is None and not name.startswith("lifting"):
            # The order of frames may change, so features are equal in all frames, and outputs are averaged over them.
            x = x[:, :1].expand_as(x)
        done = []
        for evaluation in evaluations:
            with torch.no_grad(), backend(evaluation):
                out = call(name, layer, x, graph)
                if not any(torch.equal(out, other) for other in done):
                    for move in moves:
                        error = error_of_a_move(name, layer, x, out, move)
                        assert error < TOLERANCE[dtype], f"{dtype}, {evaluation}: {error:.1e}"
            done.append(out)


THOROUGH = [LIFTED[c] for c in SOME]


def error_of_a_move(name, layer, x, out, move):
    _, along, there = move
    lifts, reordered = name.startswith("lifting"), along is None
    found = call(name, layer, x if lifts or reordered else along(x), there)
    expected = along(out) if out.ndim == 3 and not reordered else out
    if reordered and out.ndim == 3:
        found, expected = found.mean(dim=1), expected.mean(dim=1)
    return relative_error(found, expected)


# --- what else a layer keeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighborhood", [Nearest(4), AllPairs()], ids=["nearest", "all"])
@pytest.mark.parametrize("name", ["lifting", "query sum", "joint, mlp values", "lie, sum", "framewise, rotary"])
def test_neighborhoods_turn_along(name, neighborhood):
    case = LIFTED["D3"]
    layer, x, pos, batch, _ = prepared(name, case, torch.float64)
    with torch.no_grad():
        assert_equivariant(
            lambda x, pos: layer(x, lift(pos, case.group, neighborhood, batch=batch)),
            case.group,
            x,
            pos,
            input_field=not name.startswith("lifting"),
        )


@every_layer
@each("case", some_fitting)
def test_points_may_be_permuted(name, case):
    layer, x, pos, batch, graph = prepared(name, LIFTED[case], torch.float64)
    order = torch.randperm(len(pos))
    nodes = (order[:, None] * graph.levels + torch.arange(graph.levels)).flatten()
    out = call(name, layer, x, graph)
    moved = call(name, layer, x[order if len(x) == len(pos) else nodes], LIFTED[case].lift(pos[order], batch[order]))
    expected = out[nodes] if len(out) == graph.num_points else out
    torch.testing.assert_close(moved, expected, rtol=1e-11, atol=1e-11)


@every_layer
@each("case", some_fitting)
def test_two_clouds_equal_each_alone(name, case):
    layer, x, pos, batch, graph = prepared(name, LIFTED[case], torch.float64)
    out = call(name, layer, x, graph)
    for cloud, own in enumerate(graphs_alone(LIFTED[case])):
        mine = batch == cloud
        nodes = mine.repeat_interleave(graph.levels)
        alone = call(name, layer, x[mine if len(x) == len(pos) else nodes], own)
        together = out[nodes] if len(out) == graph.num_points else out[cloud : cloud + 1]
        torch.testing.assert_close(alone, together, rtol=1e-11, atol=1e-11)


def dropouts(layer):
    """Return the parts of a layer that drop values or weights."""
    return [part for part in layer.modules() if isinstance(part, GroupAttention | torch.nn.Dropout)]


def drop(part, share):
    setattr(part, "p" if isinstance(part, torch.nn.Dropout) else "dropout", share)


@pytest.mark.parametrize("name", ["lifting", "query sum", "lie, sum", "affine", "pre-norm block", "framewise block"])
def test_dropout_is_for_training_alone(name):
    layer, x, _, _, graph = prepared(name, LIFTED["D3"], torch.float64)
    expected = call(name, layer, x, graph)
    assert torch.equal(call(name, layer.train(), x, graph), expected)
    for part in dropouts(layer):
        drop(part, 0.5)
        assert torch.equal(call(name, layer.eval(), x, graph), expected)
        drawn = [call(name, layer.train(), x, graph) for _ in range(2)]
        assert all(relative_error(one, other) > 1e-3 for one, other in zip(drawn, (*drawn[1:], expected), strict=True))
        drop(part, 0.0)


def test_both_branches_of_a_framewise_block_drop_values():
    graph = LIFTED["D3"].lift(*LIFTED["D3"].draw(torch.Generator().manual_seed(0), torch.float64))
    block = FramewiseBlock(LIFTED["D3"].group, 4, dropout=0.5).double()
    assert block.attention.dropout == 0.5
    block.attention.dropout = 0.0
    x = torch.randn(graph.num_points, graph.fiber, 4, dtype=torch.float64)
    for name in ("attention.output", "linear2"):
        silent = copy.deepcopy(block)
        for parameter in silent.get_submodule(name).parameters():
            torch.nn.init.zeros_(parameter)
        assert relative_error(silent(x, graph), silent(x, graph)) > 1e-3


def test_blocks_pass_their_options_on():
    attention = GroupAttention(4, 6)
    block = LieBlock(attention, 4, eps=0.5)
    assert block.norm_attention.eps == block.norm_mlp.eps == 0.5
    for convolution, widths in (({}, (2, 3)), ({"attention": attention}, (4, 6))):
        bottleneck = LieBottleneck(8, 12, 6, activation="relu", **convolution)
        assert (bottleneck.down.out_features, bottleneck.up.in_features) == widths
        assert bottleneck.convolution.kernel.activation == "relu"


@cache
def degenerate_graphs(case):
    """Return points at one place, at two places, and none, all with gradients, and their graphs."""
    pos, _, _ = clouds_of(case, torch.float32)
    clouds = pos[:1].expand(4, -1), torch.cat([pos[:2], pos[:1]]), pos[:0]
    clouds = [some.clone().requires_grad_() for some in clouds]
    return [(some, case.lift(some, torch.zeros(len(some), dtype=torch.int64))) for some in clouds]


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
@every_layer
@each("case", some_fitting)
def test_layers_and_their_gradients_are_finite_on_degenerate_clouds(name, case):
    layer, *_, graph = prepared(name, LIFTED[case], torch.float32)
    for pos, own in degenerate_graphs(LIFTED[case]):
        lifts = name.startswith("lifting")
        shape = (len(pos), CHANNELS) if lifts else (own.num_points, graph.fiber, CHANNELS)
        x = torch.randn(shape, requires_grad=True)
        out = call(name, layer, x, own)
        assert torch.isfinite(out).all()
        leaves = x, pos, *layer.parameters()
        gradients = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, retain_graph=True)
        assert gradients[0] is not None
        assert all(gradient is None or torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("name", sorted(RELATE_FRAMES - {"framewise"}))
def test_layers_that_relate_frames_refuse_frames_of_each_point(name):
    """Principal axes of neighborhoods differ between points, so no fiber index relates frames of two points."""
    case = LIFTED["SE(2), principal of neighborhoods"]
    pos, batch = case.draw(torch.Generator().manual_seed(0), torch.float32)
    graph = case.lift(pos, batch)
    made = Made(LIFTED["C4 in SE(2)"], graph)
    made.group, made.made_for = cyclic(2), cyclic(2)
    with pytest.raises(ValueError, match="graph: "):
        LAYERS[name](made)(torch.randn(len(pos), graph.fiber, CHANNELS), graph)


def test_a_table_of_offsets_refuses_clouds_where_nothing_repeats():
    group = cyclic(4)
    offsets = pixel_positions(3, 3, dtype=torch.float64)
    layer = GroupSelfAttention(group, 4, 4, head_channels=6, encoding=TableEncoding(group, offsets, 6))
    with pytest.raises(ValueError, match=r"graph: displacement .* is not among the 9 rows of the table"):
        layer(torch.randn(7, 4, 4), lift(torch.randn(7, 2), group, Radius(2.0)))


# --- on images: a table over displacements, and pixel squares --------------------------------------------------------


def encoded(group, name, **options):
    """Return a layer whose encoding is a table over the displacements of a square of 5 x 5 pixels."""
    kind, lifts = (LiftingSelfAttention, {"lifting": True}) if name == "lifting" else (GroupSelfAttention, {})
    encoding = TableEncoding(group, pixel_positions(5, 5, dtype=torch.float64), 6, **lifts)
    return kind(group, CHANNELS, 5, encoding=encoding, heads=HEADS, head_channels=6, **options)


def of_ball(kind):
    """Return the constructor of an affine layer with tables over the displacements of a ball."""
    offsets = pixel_positions(5, 5, dtype=torch.float64)
    table = RelativePositionTable.of(offsets[offsets.norm(dim=1) < 2.1])
    return lambda group: kind(group, CHANNELS, 4, table, channels=6, heads=HEADS)


IMAGE_LAYERS = {
    "lifting": lambda group: encoded(group, "lifting"),
    "query sum": lambda group: encoded(group, "query sum"),
    "joint": lambda group: encoded(group, "joint", pattern="joint"),
    "affine": of_ball(AffineSelfConvolution),
    "affine, simple": of_ball(SimpleAffineSelfConvolution),
    "affine, stand-alone": of_ball(StandAloneSelfAttention),
    "lifting, affine": of_ball(LiftingAffineSelfConvolution),
}


@pytest.mark.parametrize("name", IMAGE_LAYERS)
@pytest.mark.parametrize("group", ["C4", "C8", "D3"])
def test_tables_on_images(group, name):
    """With balls on a grid, layers are exact for every group, although h⁻¹ of a displacement may lie off the grid."""
    group = SMALL_GROUPS[group]
    layer, pos = randomize(IMAGE_LAYERS[name](group).double()), pixel_positions(6, 6, dtype=torch.float64)
    lifts = name.startswith("lifting")
    x = torch.randn(len(pos), *(() if lifts else (group.order,)), CHANNELS, dtype=torch.float64)
    with torch.no_grad():
        assert_equivariant(
            lambda x, pos: layer(x, lift(pos, group, Radius(2.1))),
            group,
            x,
            pos,
            input_field=not lifts,
            elements=turns(group),
        )


@pytest.mark.parametrize("group", ["C4", "D1", "D4"])
@pytest.mark.parametrize("name", ["lifting", "query sum"])
def test_pixel_squares_are_exact_for_quarter_turns(name, group):
    """Rotate the array of pixels instead of the coordinates, as users of images do."""
    group = SMALL_GROUPS[group]
    layer, pos = randomize(IMAGE_LAYERS[name](group).double()), pixel_positions(6, 6, dtype=torch.float64)
    fiber = () if name == "lifting" else (group.order,)
    x = torch.randn(len(pos), *fiber, CHANNELS, dtype=pos.dtype)
    graph = lift(pos, group, PixelSquare(3))
    out = layer(x, graph)
    for h in turns(group):
        # The pixel that moves to each place, found from the coordinates.
        came_from = torch.cdist(pos, group.act(h, pos)).argmin(dim=1)
        turned = x[came_from] if name == "lifting" else group.translate(h, x[came_from])
        expected = group.translate(h, out[came_from])
        torch.testing.assert_close(layer(turned, graph), expected, rtol=1e-10, atol=1e-10)


def test_pixel_squares_do_not_turn_by_45_degrees():
    group = SMALL_GROUPS["C8"]
    pos = pixel_positions(6, 6, dtype=torch.float64)
    layer = randomize(LiftingSelfAttention(group, CHANNELS, 5, heads=HEADS, head_channels=6).double())
    x = torch.randn(len(pos), CHANNELS, dtype=pos.dtype)
    error = equivariance_error(
        lambda x, pos: layer(x, lift(pos, group, PixelSquare(3))), group, x, pos, input_field=False
    )
    assert error > 1e-2


# --- controls: a test that cannot fail proves nothing ----------------------------------------------------------------

BLIND = {"lie, content", "squeeze and excite", "cloud norm"} | POINTWISE
SEES_POSITIONS = [name for name in LAYERS if name not in BLIND and not name.startswith(("pool", "invariant"))]


@pytest.mark.parametrize("name", SEES_POSITIONS)
def test_layers_see_rotations_outside_the_group(name):
    case, finer = LIFTED["C4"], cyclic(8)
    layer, x, pos, batch, graph = prepared(name, case, torch.float64)
    moved = call(name, layer, x, case.lift(finer.act(1, pos), batch))
    assert (moved - call(name, layer, x, graph)).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["query sum", "joint, mlp", "linear", "pre-norm block"])
def test_wrong_side_of_the_group_fails(name):
    """Control: with h g⁻¹ instead of g⁻¹ h, abelian groups still pass, and non-abelian groups fail."""
    for case, passes in ((LIFTED["C4"], True), (LIFTED["D3"], False)):
        group = case.group
        layer, x, pos, batch, _ = prepared(name, case, torch.float64)
        wrong = group.cayley[torch.arange(group.order)[:, None], group.inverse_index]  # g h⁻¹
        matrices = group.elements[wrong].flatten(-2)
        for module in layer.modules():
            for buffer, value in (("relative", wrong), ("table", wrong), ("matrices", matrices)):
                if buffer in dict(module.named_buffers(recurse=False)):
                    setattr(module, buffer, value)
        error = equivariance_error(
            lambda x, pos, layer=layer, case=case, batch=batch: call(name, layer, x, case.lift(pos, batch)),
            group,
            x,
            pos,
        )
        assert (error < 1e-10) == passes, f"{group.name}: {error:.1e}"


def test_outputs_of_which_only_one_is_empty_differ():
    some, none = torch.ones(2), torch.ones(0)
    assert relative_error(none, none) == 0
    assert relative_error(some, none) == relative_error(none, some) == math.inf


def test_errors_are_relative_to_what_is_expected():
    found, expected = torch.tensor([8.0, 1.0]), torch.tensor([4.0, 2.0])
    assert relative_error(found, expected) == 1.0
    assert relative_error(found / 8, expected / 8) == 0.5  # small outputs count as being of size 1
    assert relative_error(found / 8, expected / 8, floor=0.1) == 1.0
    assert relative_error(found, expected * math.nan) == relative_error(found / 0, expected) == math.inf


def test_errors_are_those_of_the_worst_element_and_of_shifts():
    x, pos = torch.ones(3, 4, 1, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

    def of_an_axis(x, pos):
        arrow = pos - pos.mean(dim=0)
        return x * arrow[:, None, :1].square()  # the same after half a turn

    def of_the_place(x, pos):
        return x * pos.mean()

    call = {"group": cyclic(4), "x": x, "pos": pos}
    assert equivariance_error(of_an_axis, **call, elements=[0, 2]) < 1e-14
    assert equivariance_error(of_an_axis, **call, elements=[1, 0]) > 1e-3
    assert equivariance_error(of_the_place, **call, elements=[0]) > 1e-3


def test_random_parameters_and_clouds():
    layer = torch.nn.Linear(100, 100).train()
    assert randomize(layer) is layer
    assert not layer.training
    assert float(layer.weight.detach().std()) == pytest.approx(0.5, rel=0.05)
    assert float(randomize(layer, spread=2.0).bias.detach().std()) == pytest.approx(2.0, rel=0.2)
    for points, clouds in ((5, 5), (2, 4), (30, 3)):
        pos, batch = random_cloud(cyclic(4), points, clouds=clouds)
        assert (pos.shape, pos.dtype) == ((points, 2), torch.float64)
        assert batch[:clouds].tolist() == list(range(min(points, clouds)))  # no cloud is empty if points are enough
        assert int(batch.max()) < clouds
