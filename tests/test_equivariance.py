"""Every layer and every group: exact on random clouds, with all parameters randomized, and controls that fail."""

import pytest
import torch
from torch import nn

from lieattn.geometry import AllPairs, Nearest, PixelSquare, Radius, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.nn import (
    CloudNorm,
    CloudPool,
    FiberPool,
    GroupLinear,
    GroupSelfAttention,
    LiftingSelfAttention,
    MLPEncoding,
    PreNormBlock,
    RotaryEncoding,
    TableEncoding,
)
from lieattn.testing import assert_equivariant, equivariance_error, randomize
from tests.cases import SMALL_GROUPS

CHANNELS, HEADS, WIDTH = 3, 2, 8


pytestmark = pytest.mark.usefixtures("every_backend")


class Lift(nn.Module):
    """Lifting layer; features in, field out."""

    input_field = False

    def __init__(self, group, encoding=None, **options):
        super().__init__()
        encoding = encoding(group) if encoding else None
        self.layer = LiftingSelfAttention(
            group, CHANNELS, 5, heads=HEADS, head_channels=WIDTH, encoding=encoding, **options
        )

    def forward(self, x, graph):
        return self.layer(x, graph)


class Attention(nn.Module):
    """Group layer; field in, field out."""

    def __init__(self, group, encoding=None, **options):
        super().__init__()
        encoding = encoding(group) if encoding else None
        self.layer = GroupSelfAttention(
            group, CHANNELS, 5, heads=HEADS, head_channels=WIDTH, encoding=encoding, **options
        )

    def forward(self, x, graph):
        return self.layer(x, graph)


class Pointwise(nn.Module):
    """A layer that needs the clouds or nothing."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x, graph):
        return self.call(x, graph) if isinstance(self.call, CloudNorm) else self.call(x)


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        attention = GroupSelfAttention(group, CHANNELS, 4, heads=HEADS, head_channels=WIDTH)
        self.block = PreNormBlock(attention, CHANNELS, 4)

    def forward(self, x, graph):
        return self.block(x, graph)


class Pooled(nn.Module):
    """Invariant read-out: over the fiber, then over each cloud."""

    output_field = False

    def __init__(self, reduction):
        super().__init__()
        self.fiber, self.cloud = FiberPool(reduction), CloudPool(reduction)

    def forward(self, x, graph):
        return self.cloud(self.fiber(x), graph.batch, graph.num_clouds)


def mlp(between_frames=True, values=None):
    return lambda group: MLPEncoding(group, HEADS, between_frames=between_frames, value_channels=values)


LAYERS = {
    "lifting": Lift,
    "lifting, mlp": lambda g: Lift(g, mlp(False)),
    "lifting, mlp values": lambda g: Lift(g, mlp(False, WIDTH)),
    "lifting, mean": lambda g: Lift(g, normalize="mean"),
    "query sum": Attention,
    "query sum, exp-mean": lambda g: Attention(g, normalize="exp-mean"),
    "joint": lambda g: Attention(g, pattern="joint"),
    "joint, mlp": lambda g: Attention(g, mlp(), pattern="joint"),
    "joint, mlp values": lambda g: Attention(g, mlp(True, WIDTH), pattern="joint"),
    "joint, none": lambda g: Attention(g, mlp(), pattern="joint", normalize="none"),
    "framewise": lambda g: Attention(g, pattern="framewise"),
    "framewise, mlp": lambda g: Attention(g, mlp(False, WIDTH), pattern="framewise"),
    "framewise, rotary": lambda g: Attention(g, lambda group: RotaryEncoding(group, HEADS, WIDTH), pattern="framewise"),
    "linear": lambda g: Pointwise(GroupLinear(g, CHANNELS, 5)),
    "cloud norm": lambda g: Pointwise(CloudNorm(CHANNELS)),
    "layer norm": lambda g: Pointwise(nn.LayerNorm(CHANNELS)),
    "block": Block,
    "pool max": lambda g: Pooled("max"),
    "pool mean": lambda g: Pooled("mean"),
    "pool sum": lambda g: Pooled("sum"),
}
NEIGHBORHOODS = {"radius": Radius(1.6), "nearest": Nearest(4), "all": AllPairs()}


def case(build, group, dtype, points=12, seed=0):
    """A randomized layer, its input on two clouds, and ``call(x, pos)``."""
    layer = randomize(build(group).to(dtype), seed)
    generator = torch.Generator().manual_seed(seed)
    batch = torch.arange(points) % 2
    pos = torch.randn(points, group.dim, generator=generator, dtype=torch.float64).to(dtype)
    shape = (points, group.order, CHANNELS) if getattr(layer, "input_field", True) else (points, CHANNELS)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return layer, x, pos, batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("group", SMALL_GROUPS.values(), ids=SMALL_GROUPS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_commutes_with_group(name, group, dtype):
    layer, x, pos, batch = case(LAYERS[name], group, dtype)
    with torch.no_grad():
        assert_equivariant(
            lambda x, pos: layer(x, lift(pos, group, Radius(1.6), batch=batch)),
            group,
            x,
            pos,
            input_field=getattr(layer, "input_field", True),
            output_field=getattr(layer, "output_field", True),
        )


@pytest.mark.parametrize("neighborhood", NEIGHBORHOODS.values(), ids=NEIGHBORHOODS)
@pytest.mark.parametrize("name", ["lifting", "query sum", "joint, mlp values"])
def test_neighborhoods_turn_along(name, neighborhood):
    group = SMALL_GROUPS["D3"]
    layer, x, pos, batch = case(LAYERS[name], group, torch.float64)
    with torch.no_grad():
        assert_equivariant(
            lambda x, pos: layer(x, lift(pos, group, neighborhood, batch=batch)),
            group,
            x,
            pos,
            input_field=getattr(layer, "input_field", True),
        )


@pytest.mark.parametrize("name", LAYERS)
def test_points_may_be_permuted(name):
    group = SMALL_GROUPS["D3"]
    layer, x, pos, batch = case(LAYERS[name], group, torch.float64)
    order = torch.randperm(len(pos))
    out = layer(x, lift(pos, group, Radius(1.6), batch=batch))
    moved = layer(x[order], lift(pos[order], group, Radius(1.6), batch=batch[order]))
    expected = out[order] if getattr(layer, "output_field", True) else out
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_two_clouds_equal_each_alone(name):
    group = SMALL_GROUPS["D3"]
    layer, x, pos, batch = case(LAYERS[name], group, torch.float64)
    out = layer(x, lift(pos, group, Radius(1.6), batch=batch))
    for cloud in range(2):
        mine = batch == cloud
        alone = layer(x[mine], lift(pos[mine], group, Radius(1.6)))
        together = out[mine] if getattr(layer, "output_field", True) else out[cloud : cloud + 1]
        torch.testing.assert_close(alone, together, rtol=1e-12, atol=1e-12)


# On images: a table over displacements, and pixel squares.


def image_case(group, dtype=torch.float64):
    offsets = pixel_positions(5, 5, dtype=torch.float64)
    layers = {
        "lifting": LiftingSelfAttention(
            group, CHANNELS, 5, heads=HEADS, head_channels=6, encoding=TableEncoding(group, offsets, 6, lifting=True)
        ),
        "query sum": GroupSelfAttention(
            group, CHANNELS, 5, heads=HEADS, head_channels=6, encoding=TableEncoding(group, offsets, 6)
        ),
        "joint": GroupSelfAttention(
            group,
            CHANNELS,
            5,
            heads=HEADS,
            head_channels=6,
            encoding=TableEncoding(group, offsets, 6),
            pattern="joint",
        ),
    }
    return {name: randomize(layer.to(dtype)) for name, layer in layers.items()}, pixel_positions(6, 6, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ["lifting", "query sum", "joint"])
@pytest.mark.parametrize("group", ["C3", "C4", "C8", "D1", "D3", "D4"])
def test_tables_on_images(group, name, dtype):
    """Balls on a grid: exact for every group, although h⁻¹ of a displacement may lie off the grid."""
    group = SMALL_GROUPS[group]
    layers, pos = image_case(group, dtype)
    x = torch.randn(len(pos), *(() if name == "lifting" else (group.order,)), CHANNELS, dtype=dtype)
    with torch.no_grad():
        assert_equivariant(
            lambda x, pos: layers[name](x, lift(pos, group, Radius(2.1))),
            group,
            x,
            pos,
            input_field=name != "lifting",
        )


@pytest.mark.parametrize("group", ["C4", "D1", "D4"])
@pytest.mark.parametrize("name", ["lifting", "query sum"])
def test_pixel_squares_are_exact_for_quarter_turns(name, group):
    """Turning the array of pixels, not its coordinates: what a user of images does."""
    group = SMALL_GROUPS[group]
    layers, pos = image_case(group)
    layer = layers[name]
    fiber = () if name == "lifting" else (group.order,)
    x = torch.randn(len(pos), *fiber, CHANNELS, dtype=pos.dtype)
    graph = lift(pos, group, PixelSquare(3))
    out = layer(x, graph)
    for h in range(group.order):
        # The pixel that comes to each place, found from the coordinates.
        came_from = torch.cdist(pos, group.act(h, pos)).argmin(dim=1)
        turned = x[came_from] if name == "lifting" else group.translate(h, x[came_from])
        expected = group.translate(h, out[came_from])
        torch.testing.assert_close(layer(turned, graph), expected, rtol=1e-10, atol=1e-10)


def test_pixel_squares_do_not_turn_by_45_degrees():
    group = SMALL_GROUPS["C8"]
    pos = image_case(group)[1]
    layer = randomize(LiftingSelfAttention(group, CHANNELS, 5, heads=HEADS, head_channels=6).double())
    x = torch.randn(len(pos), CHANNELS, dtype=pos.dtype)
    error = equivariance_error(
        lambda x, pos: layer(x, lift(pos, group, PixelSquare(3))), group, x, pos, input_field=False
    )
    assert error > 1e-2


# Controls: a test that cannot fail proves nothing.

SEES_POSITIONS = [name for name in LAYERS if name.startswith(("lifting", "query", "joint", "framewise", "block"))]


@pytest.mark.parametrize("name", SEES_POSITIONS)
def test_layers_see_rotations_outside_the_group(name):
    group, finer = cyclic(4), cyclic(8)
    layer, x, pos, batch = case(LAYERS[name], group, torch.float64)

    def call(pos):
        return layer(x, lift(pos, group, Radius(1.6), batch=batch))

    assert (call(finer.act(1, pos)) - call(pos)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["query sum", "joint, mlp", "linear", "block"])
def test_wrong_side_of_the_group_fails(name):
    """With h g⁻¹ for g⁻¹ h abelian groups still pass, and a non-abelian one must not."""
    for group, passes in ((SMALL_GROUPS["C4"], True), (SMALL_GROUPS["D3"], False)):
        layer, x, pos, batch = case(LAYERS[name], group, torch.float64)
        wrong = group.cayley[torch.arange(group.order)[:, None], group.inverse_index]  # g h⁻¹
        matrices = group.elements[wrong].flatten(-2)
        for module in layer.modules():
            for buffer, value in (("relative", wrong), ("table", wrong), ("matrices", matrices)):
                if buffer in dict(module.named_buffers(recurse=False)):
                    setattr(module, buffer, value)
        error = equivariance_error(
            lambda x, pos, layer=layer, group=group, batch=batch: layer(x, lift(pos, group, Radius(1.6), batch=batch)),
            group,
            x,
            pos,
        )
        assert (error < 1e-10) == passes, f"{group.name}: {error:.1e}"
