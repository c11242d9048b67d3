"""One table of layers, one of lifted clouds: every layer on every graph, with all parameters randomized."""

import pytest
import torch
from torch import nn

from lieattn.geometry import AllPairs, Nearest, PixelSquare, Radius, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.nn import (
    AffineSelfConvolution,
    AttentiveConvolution,
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
from lieattn.nn.relative import FourierFeatures, MLPEncoding, NetworkKernel, PerHeadMLP, RotaryEncoding, TableEncoding
from lieattn.testing import equivariance_error, randomize, relative_error
from tests.cases import SMALL_GROUPS
from tests.lifted_cases import LIFTED

CHANNELS, HEADS, WIDTH = 4, 2, 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

pytestmark = pytest.mark.usefixtures("every_backend")


class Made:
    """What layers are made from: a finite group or a space, and the number of coordinates of a relative element."""

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


def affine(layer):
    return lambda m: layer(m.group, CHANNELS, 4, FourierFeatures(hidden=6), channels=6, heads=HEADS)


def rotary(values):
    return lambda m: RotaryEncoding(m.dim, HEADS, WIDTH, values=values)


LAYERS = {
    "lifting": lifting(),
    "lifting, mlp": lifting(mlp(False)),
    "lifting, mlp values": lifting(mlp(False, WIDTH)),
    "lifting, mean": lifting(normalize="mean"),
    "query sum": gsa("query_sum"),
    "query sum, exp-mean": gsa("query_sum", normalize="exp-mean"),
    "joint": gsa("joint"),
    "joint, mlp": gsa("joint", mlp()),
    "joint, mlp values": gsa("joint", mlp(True, WIDTH)),
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
    "convolution": lambda m: GroupConvolution(NetworkKernel(m.group, CHANNELS, 3)),
    "convolution, separable": lambda m: GroupConvolution(NetworkKernel(m.group, CHANNELS, 3, form="separable")),
    "lifting, convolution": lambda m: GroupConvolution(
        NetworkKernel(m.group, CHANNELS, 3, lifting=True), reduction="mean"
    ),
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
    "framewise block": lambda m: FramewiseBlock(
        m.group, CHANNELS, heads=HEADS, encoding=RotaryEncoding(m.dim, HEADS, CHANNELS // HEADS, values=True)
    ),
    "pool over the fiber": lambda m: FiberPool("max"),
    "pool over clouds": lambda m: CloudPool("mean"),
    "invariant head": lambda m: InvariantHead(CHANNELS, 3),
}
POINTWISE = {"linear", "fiber norm", "point batch norm"}  # layer(x), which need no graph
OF_A_GROUP = {
    name
    for name in LAYERS
    if "mlp" in name or "affine" in name or "convolution" in name or "framewise" in name or name == "tied joint"
} - {"lie convolution", "attentive convolution", "framewise"} | {"joint, none", "linear"}
RELATE_FRAMES = {  # by a table of pairs, or by their index in the fiber: on the same frames over all points
    name
    for name in OF_A_GROUP
    if not name.startswith("lifting") and name not in ("linear", "framewise, mlp")
} | {"framewise, rotary", "framewise attention", "framewise block", "framewise"}
UNMEASURED = {"affine", "lifting, affine", "affine, simple", "affine, stand-alone"}


def call(name, layer, x, graph):
    return layer(x) if name in POINTWISE else layer(x, graph)


def fitting(name, case, graph):
    """Whether a layer can be made for this case."""
    return case.group is not None or name not in OF_A_GROUP


def prepared(name, case, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pos, batch = case.draw(generator, dtype)
    graph = case.lift(pos, batch)
    if name in OF_A_GROUP and case.group is None:
        pytest.skip("a layer of a finite group, and there is none")
    if name in RELATE_FRAMES and not graph.relative.tied:
        pytest.skip("relates frames by their index, which says nothing where every point has frames of its own")
    layer = randomize(LAYERS[name](Made(case, graph)).to(dtype), seed)
    lifts = name.startswith("lifting")
    shape = (len(pos), CHANNELS) if lifts else (graph.num_points, graph.fiber, CHANNELS)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return layer, x, pos, batch, graph


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", LIFTED.values(), ids=LIFTED)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_moves_along(name, case, dtype):
    layer, x, pos, batch, graph = prepared(name, case, dtype)
    lifts = name.startswith("lifting")
    with torch.no_grad():
        for moved, along, there in case.moves(pos, batch):
            assert moved.shape == pos.shape
            if along is None:
                # Frames may come in another order: features that are the same in all of them, and means over them.
                same = x if lifts else x[:, :1].expand_as(x)
                found, expected = (call(name, layer, same, g) for g in (there, graph))
                if found.ndim == 3:
                    found, expected = found.mean(dim=1), expected.mean(dim=1)
            else:
                expected = call(name, layer, x, graph)
                found = call(name, layer, x if lifts else along(x), there)
                expected = along(expected) if expected.ndim == 3 else expected
            error = relative_error(found, expected)
            assert error < TOLERANCE[dtype], f"{error:.1e}"
