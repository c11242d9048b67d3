"""Attentive group convolution: layers, fast evaluation, attention maps, networks, published weights, pictures."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from lieattn.bench import _literal as bench
from lieattn.groups import cyclic, cyclic_about, dihedral, octahedral, trivial
from lieattn.models import (
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseNet,
    AttentiveResidualBlock,
    AttentiveResNet,
    published_accuracy,
    published_attentive_cnn,
    published_inputs,
)
from lieattn.nn import (
    FieldBatchNorm,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridPoseAttention,
    act_on_grid,
)
from lieattn.ops import AttentionMaps, attentive_convolution, backend, convolution_responses, residual_branch
from lieattn.testing import randomize
from lieattn.viz import attention_picture, attention_under_group
from tests.cases import refuses, some, turns
from tests.parity import attentive_gconv as parity
from tests.test_group_convolution import LATTICE_GROUPS, every_lattice_group, grid_error

KINDS = ("full", "channel", "spatial")
every_kind = pytest.mark.parametrize("kind", KINDS)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


# --- the operator ---------------------------------------------------------------------------------------------


def operands(group, *, images=2, channels=3, outputs=2, fiber=None, side=7, size=3, hidden=2, spatial=3, dtype):
    dim = group.dim
    fiber = group.order if fiber is None else fiber
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    order = group.order
    return {
        "x": draw(images, channels, fiber, *[side] * dim),
        "kernels": draw(outputs, order, channels, fiber, *[size] * dim),
        "first": draw(outputs, order, fiber, hidden, channels),
        "second": draw(outputs, order, fiber, channels, hidden),
        "spatial": draw(outputs, order, fiber, 2, *[spatial] * dim),
    }


def evaluate(tensors, kind, way, **options):
    channel = None if kind == "spatial" else (tensors["first"], tensors["second"])
    spatial = None if kind == "channel" else tensors["spatial"]
    with backend(way):
        return attentive_convolution(tensors["x"], tensors["kernels"], channel=channel, spatial=spatial, **options)[0]


def with_gradients(tensors, kind, way, used=None, **options):
    """Return the output, and gradients of a combination of its numbers for all tensors or those that are used."""
    out = evaluate(tensors, kind, way, **options)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out)
    return [out, *torch.autograd.grad((out * cotangent).sum(), list(tensors.values()) if used is None else used)]


def assert_close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= TOLERANCE[theirs.dtype] * max(1, theirs.abs().max())


def written_out(tensors, kind, measure, dilation):
    """Evaluate the formulas of the paper, response by response."""
    x, kernels, first, second, spatial = (tensor.detach() for tensor in tensors.values())
    images, channels, fiber = x.shape[:3]
    outputs, order = kernels.shape[:2]
    size, side, dim = kernels.shape[-1], spatial.shape[-1], x.ndim - 3
    rows = x.shape[-1] - size + 1
    out = x.new_zeros(images, outputs, order, *[rows] * dim)

    def window(step, scale=1):
        return tuple(slice(scale * place, scale * place + rows) for place in step)

    for b, o, h, g in itertools.product(range(images), range(outputs), range(order), range(fiber)):
        t = x.new_zeros(channels, *out.shape[3:])
        for c, step in itertools.product(range(channels), itertools.product(range(size), repeat=dim)):
            t[c] += kernels[(o, h, c, g, *step)] * x[(b, c, g, *window(step))]
        alpha_c = x.new_ones(channels)
        if kind != "spatial":
            level = 0
            for statistic in (t.flatten(1).mean(dim=1), t.flatten(1).amax(dim=1)):
                level = level + second[o, h, g] @ torch.relu(first[o, h, g] @ statistic)
            alpha_c = torch.sigmoid(level)
        alpha_c = alpha_c.view(-1, *[1] * dim)
        alpha_x = x.new_ones(out.shape[3:])
        if kind != "channel":
            border = dilation * (side // 2)
            weighted = alpha_c * t
            planes = nn.functional.pad(torch.stack([weighted.mean(0), weighted.amax(0)]), (border, border) * dim)
            level = x.new_zeros(out.shape[3:])
            for q, step in itertools.product(range(2), itertools.product(range(side), repeat=dim)):
                level += spatial[(o, h, g, q, *step)] * planes[(q, *window(step, dilation))]
            alpha_x = torch.sigmoid(level)
        out[b, o, h] += measure * ((1 - alpha_x * alpha_c) * t).sum(0)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", ["plain", "auto"])
@every_kind
def test_operator_computes_the_formulas_of_the_paper(kind, way, dtype):
    C4 = cyclic(4)
    for group, sizes, dilation in (
        (C4, {}, 1),
        (C4, {"spatial": 5}, 2),
        (C4, {"fiber": 1, "channels": 1, "hidden": 1, "size": 2}, 1),
        (cyclic_about(2), {"images": 1, "side": 4, "size": 2, "outputs": 1}, 2),
    ):
        tensors = operands(group, dtype=dtype, **sizes)
        found = evaluate(tensors, kind, way, measure=0.7, spatial_dilation=dilation).detach()
        expected = written_out(tensors, kind, 0.7, dilation)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"size": 4, "side": 4, "spatial": 7},
        {"fiber": 1, "channels": 1, "hidden": 1, "spatial": 7},
        {"size": 1, "channels": 5, "side": 5, "images": 3},
        {"side": 21, "images": 1, "outputs": 1},
        {"side": 8, "size": 1, "pad": 0},
    ],
    ids=str,
)
@every_kind
def test_fast_gradients_are_those_of_plain_torch(kind, sizes, dtype):
    pad = sizes.get("pad", 1)
    tensors = operands(dihedral(2), dtype=dtype, **{name: size for name, size in sizes.items() if name != "pad"})
    used = [t for name, t in tensors.items() if not (kind == "spatial" and name in ("first", "second"))]
    used = [t for t in used if not (kind == "channel" and t is tensors["spatial"])]
    assert_close(*(with_gradients(tensors, kind, way, used, pad=pad) for way in ("auto", "plain")))


def near_limits(kind, limit, way, dtype, device="cpu"):
    """Return output and gradients if all levels of attention are large, except that those of ``limit`` are negative."""
    tensors = operands(cyclic(2), images=1, channels=6, hidden=4, side=5, dtype=torch.float64)
    scales, unused = {"second": 4.0, "spatial": 5.0}, {"spatial": ("first", "second"), "channel": ("spatial",)}
    for name, tensor in tensors.items():
        sign = -1.0 if name == limit else 1.0
        tensor = sign * scales.get(name, 1.0) * tensor.detach().abs()
        tensors[name] = tensor.to(device, dtype).requires_grad_()
    used = [tensor for name, tensor in tensors.items() if name not in unused.get(kind, ())]
    out = evaluate(tensors, kind, "plain" if way == "maps" else way, return_maps=way == "maps")
    return [out, *torch.autograd.grad(out.square().sum(), used)]


@pytest.mark.parametrize("way", ["plain", "auto", "maps"])
@pytest.mark.parametrize("limit", ["both are 1", "second", "spatial"])
@every_kind
def test_no_digits_are_lost_where_attention_is_close_to_0_or_1(kind, limit, way):
    """Close to 1, the difference of all responses and those removed would consist of rounding errors."""
    single, double = (near_limits(kind, limit, way, dtype) for dtype in (torch.float32, torch.float64))
    for found, expected in zip(single, double, strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_equal_maxima_share_gradients_as_in_torch():
    """In the background of an image all responses are 0, and one of the channels receives the gradient."""
    tensors = operands(cyclic(4), side=10, dtype=torch.float64)
    with torch.no_grad():
        tensors["x"].relu_()
        tensors["x"][..., :7] = 0
    assert_close(*(with_gradients(tensors, "full", way) for way in ("auto", "plain")))


def test_derivatives_are_right_to_second_order():
    tensors = operands(cyclic(2), images=1, channels=2, outputs=1, side=4, size=2, hidden=1, dtype=torch.float64)

    def call(*given):
        return evaluate(dict(zip(tensors, given, strict=True)), "full", "auto")

    assert torch.autograd.gradcheck(call, tuple(tensors.values()))
    assert torch.autograd.gradgradcheck(call, tuple(tensors.values()), fast_mode=True)


def test_parts_and_threads_change_nothing(monkeypatch):
    tensors = operands(cyclic(4), images=3, outputs=3, dtype=torch.float64)
    expected = with_gradients(tensors, "full", "plain")
    monkeypatch.setattr("lieattn.ops._gated_sums._AT_ONCE", 1)
    assert_close(with_gradients(tensors, "full", "plain"), expected)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(tensors, "full", "plain"), expected[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_close(with_gradients(tensors, "full", "auto"), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("widest", some([4, 8, 16], [8]))
def test_vectors_of_any_length_give_the_same(widest, monkeypatch):
    """Vector lanes are outputs: all or half of the lanes, several blocks, and a last block that is not full."""
    monkeypatch.setattr("lieattn.ops.kernels._attentive.widest_lanes", lambda: widest)
    tensors = operands(cyclic(4), outputs=5, dtype=torch.float32)
    assert_close(*(with_gradients(tensors, "full", way) for way in ("auto", "plain")))


def test_half_precision_computes_in_single():
    tensors = operands(cyclic(4), dtype=torch.float32)
    narrow = {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    found, expected = evaluate(narrow, "full", "auto"), evaluate(wide, "full", "auto")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_responses_and_residual_branch_give_the_output():
    tensors = operands(cyclic(4), dtype=torch.float64)
    channel = (tensors["first"], tensors["second"])
    out, maps = attentive_convolution(
        tensors["x"], tensors["kernels"], channel=channel, spatial=tensors["spatial"], measure=0.3, return_maps=True
    )
    t = convolution_responses(tensors["x"], tensors["kernels"])
    torch.testing.assert_close(residual_branch(t, maps, 0.3), out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(maps.removed + maps.passed, torch.ones_like(maps.removed))
    with pytest.raises(ValueError, match="expected channel or spatial attention, got neither"):
        _ = AttentionMaps().removed


def test_operator_names_what_does_not_fit():
    tensors = operands(cyclic(4), dtype=torch.float64)
    x, kernels, first, second, spatial = tensors.values()
    for arguments, message in (
        ((x[:, 0], kernels, None, None), r"x: expected \[batch, 3, 4, rows, columns\]"),
        ((x, kernels[0], None, None), "kernels: expected"),
        ((x, kernels, (second, first), None), "channel: expected W1"),
        ((x, kernels, (first, first), None), "channel: expected W2"),
        ((x, kernels, None, spatial[..., :2, :2]), "spatial: expected .* odd side"),
        ((x, kernels, None, spatial.sum()), "spatial: expected .* odd side"),
        ((x[..., :2], kernels, None, None), "kernels: expected a window of 1 to 2 pixels"),
        ((x, kernels.to("meta"), None, None), "kernels: expected a tensor on cpu like x, got one on meta"),
        ((x, kernels, first, None), "channel: expected the tensors W1 and W2"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attentive_convolution(arguments[0], arguments[1], channel=arguments[2], spatial=arguments[3])


def test_no_images():
    tensors = operands(cyclic(4), images=0, dtype=torch.float64)
    out = evaluate(tensors, "full", "numba")
    assert out.shape == (0, 2, 4, 5, 5)
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in tensors.values())


# --- layers on grids ------------------------------------------------------------------------------------------


def grid_layers(group, kind):
    """Return layers for planes and for fields with 3 channels, by name."""
    options = {"attention": kind, "hidden": 2, "spatial_size": 3}
    gates = {"attention": kind, "hidden": 2, "spatial_size": 5, "spatial_dilation": 2}
    lifting = {
        "lifting": GridAttentiveLifting(group, 3, 2, 3, pad=1, **options),
        "input of a lifting": GridInputAttention(group, 3, lifting=True, **gates),
        "poses of a lifting": GridPoseAttention(group, 3, lifting=True),
    }
    layers = {
        "group": GridAttentiveConvolution(group, 3, 2, 2, spatial_dilation=2, **options),
        "input": GridInputAttention(group, 3, **gates),
        "poses": GridPoseAttention(group, 3),
    }
    return [{name: randomize(layer).double() for name, layer in made.items()} for made in (lifting, layers)]


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("every_backend", ["plain", "numba"], indirect=True)
@every_kind
@pytest.mark.parametrize("name", ["Z2", "C4", "rows", "diagonal", "D4", "O"])
def test_grid_layers_and_their_maps_commute_with_the_group(name, kind):
    """Theorem 1: A[L_g f](g1, g2) = A[f](g⁻¹ g1, g⁻¹ g2), for the attention maps and for the output."""
    group = LATTICE_GROUPS[name]
    lifting, layers = grid_layers(group, kind)
    sides = (6, 7) if group.dim == 2 else (3, 4, 3)
    planes = torch.randn(2, 3, *sides, dtype=torch.float64)
    field = torch.randn(2, 3, group.order, *sides, dtype=torch.float64)
    for x, made in ((planes, lifting), (field, layers)):
        for name, layer in made.items():
            assert grid_error(layer, group, x) < 1e-10, name
            check_theorem(layer, group, x)


def check_theorem(layer, group, x):
    maps = layer.attend(x, return_maps=True)[1]
    for h in turns(group):
        moved = layer.attend(act_on_grid(group, h, x), return_maps=True)[1]
        for part in ("channel", "spatial"):
            before, behind = getattr(maps, part), getattr(moved, part)
            if before is not None:
                torch.testing.assert_close(behind, move_map(group, h, before), rtol=1e-10, atol=1e-10)


def move_map(group, h, found):
    """Map A(g1, g2) to A(h⁻¹ g1, h⁻¹ g2): permute output and input poses together, and move the pixels."""
    if found.ndim == 5 + group.dim:
        permutation = group.permutation(h)
        found = found[:, :, permutation]
        found = found if found.shape[4] == 1 else found[:, :, :, :, permutation]
        planes = act_on_grid(group, h, found.flatten(1, 4))
        return planes.unflatten(1, found.shape[1:5])
    return act_on_grid(group, h, found)


class Contrast(nn.Module):
    """A user-defined operator: keeps responses that exceed the mean over positions, more so if other frames do not."""

    def __init__(self, dim):
        super().__init__()
        self.positions = tuple(range(-dim, 0))
        self.slope, self.among = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, responses):
        level = self.slope * (responses - responses.mean(dim=self.positions, keepdim=True))
        return torch.sigmoid(level + self.among * responses.amax(dim=(2, 4), keepdim=True))


@every_lattice_group
def test_an_operator_of_a_user_moves_along(group):
    sides = (6, 7) if group.dim == 2 else (3, 3, 4)
    options = {"attention": Contrast(group.dim), "pad": 1}
    lifting = randomize(GridAttentiveLifting(group, 3, 2, 3, **options)).double()
    layer = randomize(GridAttentiveConvolution(group, 3, 1, 3, **options)).double()
    assert {"attention.slope", "attention.among"} < set(layer.state_dict())
    planes, field = (torch.randn(2, 3, *fiber, *sides, dtype=torch.float64) for fiber in ((), (group.order,)))
    for x, made in ((planes, lifting), (field, layer)):
        assert grid_error(made, group, x) < 1e-10
        check_theorem(made, group, x)
    with torch.no_grad():
        out, maps = layer.attend(field, return_maps=True)
        torch.testing.assert_close(residual_branch(layer.responses(field), maps, layer.measure), out)


def _untied(responses):
    """Return one weight per input frame, independent of the output frame, which breaks the equivariance."""
    return torch.sigmoid(responses) * torch.arange(4.0)[:, None, None]


@pytest.mark.parametrize(
    ("operator", "error", "message"),
    [
        (lambda t: t.cumsum(-1), ValueError, "element h = 1 of C4 they differ by"),
        (_untied, ValueError, "element h = 1 of C4 they differ by"),
        (torch.rand_like, ValueError, "element h = 0 of C4"),
        (lambda t: t[..., :2], ValueError, "attention: its maps, responses: expected leading axes that broadcast"),
        (lambda t: t.argmax(-1), TypeError, "attention: its maps: expected a floating tensor"),
        (3, TypeError, "attention: expected one of .* or a function, got 3"),
    ],
)
def test_operators_that_break_the_symmetry_are_refused(operator, error, message):
    with pytest.raises(error, match=message):
        GridAttentiveConvolution(cyclic(4), 3, 2, 3, attention=operator)


def test_maps_of_zero_leave_the_dilated_convolution():
    options = {"dilation": 2, "pad": 1}
    layer = GridAttentiveConvolution(P4, 2, 2, 3, attention=torch.zeros_like, **options).double()
    plain = GridGroupConvolution(P4, 2, 2, 3, measure=layer.measure, **options).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))


def test_parameters_at_zero_hide_nothing():
    """The condition is measured with random parameters, because the initial ones could hide a violation."""

    class Directed(nn.Conv2d):
        def forward(self, responses):
            return super().forward(responses.flatten(0, 4)[:, None])[:, 0].view_as(responses)

    operator = Directed(1, 1, 3, padding=1)
    nn.init.zeros_(operator.weight)
    with pytest.raises(ValueError, match="attention: expected maps that move with the group"):
        GridAttentiveConvolution(cyclic(4), 2, 2, 3, attention=operator)


def test_the_condition_is_measured_on_a_copy_without_dropout():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.dropout = nn.Parameter(torch.tensor(0.25)), nn.Dropout(0.5)

        def forward(self, responses):
            return self.dropout(torch.sigmoid(self.scale * responses))

    operator = Scaled()
    GridAttentiveConvolution(cyclic(4), 2, 2, 3, attention=operator)
    assert operator.training
    assert torch.equal(operator.scale.detach(), torch.tensor(0.25))


def test_cyclic_weights_are_exact_on_rotations_and_not_with_mirrors():
    """The form of the authors equals that of the library on p4, and is not equivariant on p4m."""
    for group, exact in ((cyclic(4), True), (dihedral(4), False)):
        layer = GridAttentiveConvolution(group, 3, 2, 3, hidden=2, channel_action="cyclic")
        layer = randomize(layer, spread=1.5).double()
        x = torch.randn(1, 3, group.order, 6, 6, dtype=torch.float64)
        error = grid_error(layer, group, x)
        assert error < 1e-10 if exact else error > 1e-2
        other = GridAttentiveConvolution(group, 3, 2, 3, hidden=2).double()
        other.load_state_dict({name: weight.clone() for name, weight in layer.state_dict().items()})
        difference = float((other(x) - layer(x)).detach().abs().max())
        assert difference < 1e-10 if exact else difference > 1e-2


def test_attention_to_poses_close_to_one_keeps_its_digits():
    gate = GridPoseAttention(cyclic(4), 1)
    torch.nn.init.constant_(gate.weight, 1.0)
    x = torch.full((1, 1, 4, 2, 2), 5.0)  # levels of 20, whose sigmoid is 1 in float32
    exact = copy.deepcopy(gate).double()(x.double())
    torch.testing.assert_close(gate(x).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("attention", ["full", "channel", "spatial"])
@pytest.mark.parametrize("lifting", [True, False])
def test_attention_to_the_input_close_to_one_keeps_its_digits(attention, lifting):
    gate = GridInputAttention(cyclic(4), 2, attention=attention, lifting=lifting, spatial_size=1, measure=1.0)
    for parameter in gate.parameters():
        torch.nn.init.constant_(parameter, 1 / parameter[0].numel())  # sums are means
    x = torch.full((1, 2, *(() if lifting else (4,)), 2, 2), 12.0)
    double = copy.deepcopy(gate).double()
    found, exact = gate(x), double(x.double())
    assert 1e-12 < exact.abs().max() < 1e-3
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=0)
    slopes = (torch.autograd.grad(out.sum(), part.parameters()) for out, part in ((found, gate), (exact, double)))
    for single, wide in zip(*slopes, strict=True):
        torch.testing.assert_close(single.double(), wide, rtol=1e-4, atol=0)


def test_gates_of_planes_use_the_measure_and_all_channels():
    poses = randomize(GridPoseAttention(cyclic(4), 3, lifting=True, measure=0.4)).double()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    level = 0.4 * torch.einsum("c,bcxy->bxy", poses.weight, x)
    torch.testing.assert_close(poses(x), (1 - torch.sigmoid(level))[:, None] * x, rtol=1e-10, atol=1e-10)
    gate = randomize(GridInputAttention(cyclic(4), 3, attention="spatial", lifting=True, measure=0.4)).double()
    plain = GridInputAttention(cyclic(4), 3, attention="spatial", lifting=True).double()
    plain.spatial.weight.data = 0.4 * gate.spatial.weight.data
    torch.testing.assert_close(gate(x), plain(x), rtol=1e-10, atol=1e-10)
    assert GridInputAttention(cyclic(4), 6, lifting=True).channel.first.shape == (6, 6)
    assert GridInputAttention(cyclic(4), 6).channel.first.shape == (3, 6, 4)
    assert GridAttentiveLifting(cyclic(4), 6, 2, 3).attention.first.shape == (2, 6, 6)
    assert GridAttentiveConvolution(cyclic(4), 6, 2, 3).attention.first.shape == (2, 3, 6, 4)


def test_spatial_kernels_of_layers_are_dilated():
    layers = [
        randomize(GridAttentiveConvolution(cyclic(4), 2, 2, 3, spatial_size=3, spatial_dilation=dilation))
        for dilation in (1, 2)
    ]
    x = torch.randn(1, 2, 4, 6, 6)
    assert torch.equal(layers[0].attention.spatial, layers[1].attention.spatial)
    assert (layers[0](x) - layers[1](x)).detach().abs().max() > 1e-3


def test_initial_weights_are_scaled():
    layer = GridAttentiveConvolution(cyclic(4), 8, 16, 3, spatial_size=5, init_scale=0.1)
    poses, gates = [], []
    for scale in (1.0, 0.1):
        torch.manual_seed(0)
        poses.append(GridPoseAttention(cyclic(4), 64, init_scale=scale).weight)
        gates.append(GridInputAttention(cyclic(4), 8, attention="spatial", init_scale=scale).spatial.weight)
    bounds = [(layer.attention.spatial, 0.1 / 50**0.5), (poses[0], 1 / 8)]
    bounds += [(weight, weight[0].numel() ** -0.5) for weight in (layer.attention.first, layer.attention.second)]
    for weight, bound in bounds:
        assert 0.9 * bound < weight.abs().max() <= bound
    for whole, scaled in (poses, gates):
        torch.testing.assert_close(scaled, 0.1 * whole)


test_layer_errors_name_the_argument = refuses(
    (lambda: GridAttentiveConvolution(cyclic(4), 1, 1, 3, spatial_size=4), "spatial_size: expected an odd number"),
    (lambda: GridInputAttention(cyclic(8), 1), "group: expected a group of the plane"),
    (lambda: GridInputAttention(cyclic(4), 1, spatial_size=2), "spatial_size: expected an odd number"),
    (lambda: GridInputAttention(cyclic(4), 2)(torch.randn(1, 1, 4, 5, 5)), "x: expected a field on C4"),
    (lambda: GridPoseAttention(cyclic(4), 2, lifting=True)(torch.randn(1, 1, 5, 5)), "x: expected planes"),
)


# --- networks -------------------------------------------------------------------------------------------------

Z2, P4, P4M = trivial(2), cyclic(4), dihedral(4)
COUNTS = {
    "z2cnn": (lambda: AttentiveCNN(Z2, channels=20), 21_620),
    "p4cnn": (lambda: AttentiveCNN(P4), 24_610),
    "alpha": (lambda: AttentiveCNN(P4, attention="full"), 73_130),
    "alpha_CH": (lambda: AttentiveCNN(P4, attention="channel"), 48_630),
    "alpha_SP": (lambda: AttentiveCNN(P4, attention="spatial"), 49_110),
    "alpha_F": (lambda: AttentiveCNN(P4, attention="input"), 29_462),
    "alpha_RH": (lambda: AttentiveCNN(P4, attention="pose"), 24_851),
    "BIG11": (lambda: AttentiveCNN(P4, channels=11), 29_051),
    "BIG15": (lambda: AttentiveCNN(P4, channels=15), 50_415),
    "BIG19": (lambda: AttentiveCNN(P4, channels=19), 77_539),
    "all-CNN Z2": (lambda: AttentiveAllCNN(Z2), 1_370_996),
    "all-CNN p4": (lambda: AttentiveAllCNN(P4), 1_370_372),
    "all-CNN alpha_F-p4": (lambda: AttentiveAllCNN(P4, attention="input"), 1_400_120),
    "all-CNN p4m": (lambda: AttentiveAllCNN(P4M), 1_219_252),
    "all-CNN alpha_F-p4m": (lambda: AttentiveAllCNN(P4M, attention="input"), 1_249_192),
    "ResNet44 Z2": (lambda: AttentiveResNet(Z2), 2_636_064),
    "ResNet44 p4m": (lambda: AttentiveResNet(P4M), 2_621_683),
    "ResNet44 alpha_F-p4m": (lambda: AttentiveResNet(P4M, attention="input"), 2_693_911),
    "DenseNet Z2": (lambda: AttentiveDenseNet(Z2), 130_598),
    "DenseNet p4": (lambda: AttentiveDenseNet(P4), 129_649),
    "DenseNet p4m": (lambda: AttentiveDenseNet(P4M), 124_209),
    "DenseNet alpha_F-p4": (lambda: AttentiveDenseNet(P4, attention="input"), 140_453),
    "DenseNet alpha_F-p4m": (lambda: AttentiveDenseNet(P4M, attention="input"), 141_221),
}


@pytest.mark.parametrize("name", COUNTS)
def test_networks_have_the_published_number_of_parameters(name):
    build, count = COUNTS[name]
    assert sum(parameter.numel() for parameter in build().parameters()) == count


def settled(network, channels, side):
    """Randomize in float64 and set the running statistics from random images, so that no relu is zero everywhere."""
    network = randomize(network.double())
    generator = torch.Generator().manual_seed(1)
    norms = [module for module in network.modules() if isinstance(module, FieldBatchNorm)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 1.5, generator=generator)
            norm.momentum = None  # average over all batches
    sides = [side] * network.group.dim
    images = torch.randn(4, channels, *sides, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        network.train().features(images)
    for norm in norms:
        norm.running_mean += 0.1 * torch.randn(norm.running_mean.shape, dtype=torch.float64, generator=generator)
    return network.eval()


@pytest.mark.parametrize("kind", ["none", "full", "input"])
@pytest.mark.parametrize(
    ("build", "options"),
    [(AttentiveAllCNN, {"channels": 2}), (AttentiveResNet, {"channels": (2, 2, 3), "blocks": 1})],
    ids=["all-CNN", "ResNet"],
)
def test_strides_break_what_poolings_keep_on_even_sides(build, options, kind):
    pooled, network = (build(P4, attention=kind, downsampling=way, **options) for way in ("pooled", "strided"))
    network = settled(network, 3, 8)
    shapes, expected = ({k: v.shape for k, v in one.state_dict().items()} for one in (network, pooled))
    assert shapes == expected
    assert "strided downsampling of even sides breaks equivariance to C4" in network.guarantee
    assert network.symmetry.group.order == 1
    for side, exact in ((8, False), (9, True)):
        images = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            changes = (network(images.rot90(1, (-2, -1))) - network(images)).abs().max()
        assert (changes < 1e-10) == exact


def test_initial_kernels_of_planar_networks_are_normal():
    network = AttentiveCNN(Z2, channels=20)
    for layer in network.layers[1:-1]:
        weight = layer.weight.detach()
        assert float(weight.std()) == pytest.approx((20 * 9) ** -0.5, rel=0.1)
        assert weight.abs().max() > 2.5 * weight.std()


def test_all_cnn_goes_down_in_layers_3_and_6():
    strided = AttentiveAllCNN(P4, channels=1, downsampling="strided")
    assert [layer.stride for layer in strided.layers] == [1, 1, 2, 1, 1, 2, 1, 1, 1]
    pooled, outputs, pooling = AttentiveAllCNN(P4, channels=1), [], []
    for number in (2, 5):
        pooled.layers[number].register_forward_hook(lambda *found: outputs.append(found[2]))
    pooled.pool.register_forward_hook(lambda *found: pooling.append(found[1][0]))
    pooled(torch.randn(1, 3, 8, 8))
    for response, seen in zip(outputs, pooling, strict=True):  # maxima are taken before normalization and relu
        assert torch.equal(response, seen)


@pytest.mark.parametrize("build", [AttentiveCNN, AttentiveAllCNN])
def test_vectors_are_added_to_the_first_responses_only(build):
    network = build(P4, 1, channels=2, vector_inputs=("wind",))
    nn.init.zeros_(network.layers[1].weight)
    fields = network.fields(torch.randn(1, 1, 28, 28), torch.randn(1, 2, 4, 28, 28))
    assert fields[0].abs().max() > 0
    assert (fields[1] == 0).all()


def test_layers_have_dropout_where_documented():
    for network, side, places in (
        (AttentiveCNN(P4, channels=1), 28, {"dropout": [26, 10, 8, 6, 4]}),
        (AttentiveAllCNN(P4, channels=1), 8, {"input_dropout": [8], "dropout": [4, 2]}),
    ):
        found = {name: [] for name in places}
        for name in places:
            part = getattr(network, name)
            part.register_forward_hook(lambda _, inputs, __, sides=found[name]: sides.append(inputs[0].shape[-1]))
        network(torch.randn(1, network.in_channels, side, side))
        assert found == places


@pytest.mark.parametrize("kind", ["full", "input", "pose"])
def test_networks_return_the_maps_of_all_layers(kind):
    found = AttentiveResNet(P4, channels=(1, 1, 1), blocks=1, attention=kind).attention_maps(torch.randn(1, 3, 8, 8))
    assert len(found) == 10  # lifting, two in each block, two shortcuts, and head


test_other_sizes_are_refused_where_they_are_not_exact = refuses(
    (lambda: AttentiveCNN(P4, channels=2)(torch.randn(1, 1, 32, 32)), "data: expected images of 28 x 28 pixels"),
    (lambda: AttentiveCNN(P4, channels=2)(torch.randn(1, 3, 28, 28)), "data: expected floating images with 1 channels"),
    (lambda: AttentiveResNet(P4, channels=(1, 2)), "channels: expected the widths of three stages"),
)


def test_block_without_shortcut_keeps_its_input():
    block = randomize(AttentiveResidualBlock(P4M, 2, 2, attention="input").double())
    assert isinstance(block.shortcut, nn.Identity)
    with torch.no_grad():
        block.layer2[1].weight.zero_()
        x = torch.randn(1, 2, 8, 4, 4, dtype=torch.float64)
        torch.testing.assert_close(block(x), x)


# --- published weights ----------------------------------------------------------------------------------------


def as_published(network, group_name, kind):
    """Return arrays of a network whose group elements are in the order of the authors."""
    arrays = {"group": np.array(group_name)}
    attention = {"none": "none", "input": "input", "pose": "rh"}.get(kind, "full")
    names = {"weight": "kernel", "first": "W1", "second": "W2", "spatial": "psi_X"}
    for number, layer in enumerate(network.layers, start=1):
        arrays[f"conv{number}.attention"] = np.array(attention)
        for name, parameter in layer.named_parameters():
            last = "psi_X" if name == "gate.spatial.weight" else names[name.split(".")[-1]]
            last = "w_H" if name == "gate.weight" else last
            arrays[f"conv{number}.{last}"] = parameter.detach().numpy()
    for number, norm in enumerate(network.norms, start=1):
        arrays |= {f"bn{number}.gamma": norm.weight.detach().numpy(), f"bn{number}.beta": norm.bias.detach().numpy()}
        arrays |= {f"bn{number}.mean": norm.running_mean.numpy(), f"bn{number}.var": norm.running_var.numpy()}
    return arrays


@pytest.mark.parametrize("kind", ["none", "full", "channel", "spatial", "input", "pose"])
@pytest.mark.parametrize("name", ["p4", "p4m"])
def test_weights_of_other_numberings_load(name, kind):
    """The authors order mirrored poses differently."""
    theirs = settled(AttentiveCNN(parity.group_named(name), channels=4, attention=kind, spatial_size=3), 1, 28)
    arrays = as_published(theirs, name, kind)
    ours = published_attentive_cnn(arrays).double()
    assert ours.group in (P4, P4M)
    assert ours.attention == kind
    images = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


def test_other_published_weights_are_refused():
    arrays = as_published(AttentiveCNN(P4), "p4", "none")
    without = {key: value for key, value in arrays.items() if key != "bn3.var"}
    for changed, message in (
        (without, r"array 'bn3\.var' is missing"),
        (arrays | {"conv2.kernel": np.zeros((1, 1))}, r"conv2\.kernel has shape"),
        (arrays | {"group": np.array("p6")}, "expected group"),
    ):
        with pytest.raises(ValueError, match=f"weights: {message}"):
            published_attentive_cnn(changed)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_published_weights_in_another_format_are_refused(tmp_path, content):
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights: expected an .npz file with arrays, got '.*weights.npz'"):
        published_attentive_cnn(path)
    np.save(tmp_path / "weights.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"weights: expected an .npz file with arrays"):
        published_attentive_cnn(tmp_path / "weights.npy")


def test_published_networks_want_transposed_images(goldens):
    path = goldens / "trained_rotmnist_p4cnn.npz"
    network = published_attentive_cnn(path)
    with np.load(path) as archive:
        stored, labels = archive["x"], archive["label"]
    images = torch.from_numpy(stored[:, 0] * 0.30119 + 0.13246).mT.float()
    torch.testing.assert_close(published_inputs(images).double(), torch.from_numpy(stored), rtol=1e-4, atol=1e-4)
    assert published_accuracy(network, images.clamp(0, 1), labels, batch_size=4) == 1.0
    as_bytes = (255 * images).round().clamp(0, 255).to(torch.uint8)
    assert published_accuracy(network, as_bytes, labels) == 1.0
    flipped = images.flip(1).numpy()[:, ::-1], labels[::-1].copy()[::-1]  # with negative strides
    assert published_accuracy(network, *flipped) == 1.0
    with pytest.raises(ValueError, match="labels: expected one for each of 6 images"):
        published_accuracy(network, images, labels[:3])
    with pytest.raises(ValueError, match="images: expected"):
        published_inputs(images[0])


@pytest.mark.parametrize(
    ("images", "found"),
    [
        (torch.full((1, 4, 4), 200.0), r"floating values in \[0, 1\], got values from 200 to 200"),
        ((torch.rand(1, 4, 4) - 0.5) / 0.3, r"floating values in \[0, 1\], got values from -"),
        (torch.full((1, 4, 4), 300), "whole numbers up to 255, got values from 300 to 300"),
        (torch.ones(1, 4, 4, dtype=torch.bool), "uint8 or floating values, got bool"),
    ],
    ids=["bytes", "standardized", "integers", "bool"],
)
def test_images_of_published_networks_are_in_range(images, found):
    with pytest.raises(ValueError, match=f"images: expected {found}"):
        published_inputs(images)
    assert published_inputs(torch.zeros(0, 4, 4)).shape == (0, 1, 4, 4)


@pytest.fixture
def goldens(pytestconfig):
    return pytestconfig.rootpath / "tests" / "goldens" / "attentive_gconv"


# --- pictures and benchmark -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["input", "pose"])
def test_attention_is_drawn_under_the_group(kind):
    network = settled(AttentiveCNN(P4, channels=2, attention=kind, spatial_size=3), 1, 28)
    image = torch.rand(1, 28, 28, dtype=torch.float64)
    figure = attention_under_group(network, image)
    assert len(figure.axes) == 9  # plus the color bar
    assert sum(len(part.U) for part in figure.axes[4].collections) == 28**2  # one pose per pixel
    assert [axes.get_title() for axes in figure.axes[:4]] == [f"rotated by {angle}°" for angle in (0, 90, 180, 270)]
    assert float(figure.get_suptitle().split()[-1]) < 1e-10
    picture = attention_picture(network, image[None])
    torch.testing.assert_close(attention_picture(network, image[None].float()), picture, rtol=1e-3, atol=1e-5)
    assert picture.shape == (1, 4, 28, 28)
    without = attention_picture(network, image[None], planar=False)
    assert (without >= picture).all()
    maps = [layer.spatial for layer in network.attention_maps(image[None]).values()]
    maps = [one if one.ndim == 4 else one[:, 0] for one in maps]
    sizes = {"size": (28, 28), "mode": "bilinear", "align_corners": True}
    maps = [nn.functional.interpolate(one, **sizes) for one in maps]
    torch.testing.assert_close(picture, math.prod(maps))
    torch.testing.assert_close(without, math.prod(maps[1:]))
    torch.testing.assert_close(attention_picture(network, image[None], passed=True), math.prod(1 - one for one in maps))
    lengths = sum(np.hypot(part.U, part.V).sum() for part in figure.axes[4].collections)
    assert lengths == pytest.approx(float((picture.amax(dim=1) - picture.mean(dim=1)).sum()))
    up, left = figure.axes[4].collections[:2]  # of the identity, and of a quarter turn
    assert (up.V >= 0).all()
    assert (left.U <= 0).all()
    np.testing.assert_allclose(np.concatenate([up.U, left.V]), 0, atol=1e-15)
    assert not network.training
    with pytest.raises(ValueError, match="image: expected one square image"):
        attention_under_group(network, image[:, :5])
    with pytest.raises(ValueError, match="network: expected a network for images, got the group O in space"):
        attention_picture(AttentiveResNet(octahedral(), 1, attention="pose", blocks=1), image[None])
    with pytest.raises(ValueError, match="network: expected attention 'input' or 'pose'"):
        attention_picture(AttentiveCNN(P4, channels=2), image[None])


def test_the_benchmark_compares_like_with_like():
    layer = randomize(GridAttentiveConvolution(cyclic(4), 3, 2, 3, hidden=2, spatial_size=5)).double()
    x = torch.randn(2, 3, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(bench.LiteralLayer(layer)(x), layer(x), rtol=1e-10, atol=1e-10)
    network = settled(AttentiveCNN(P4, channels=2, attention="full", spatial_size=3), 1, 28)
    images = torch.randn(1, 1, 28, 28, dtype=torch.float64)
    expected = network(images)
    torch.testing.assert_close(bench.literal_attentive(network)(images), expected, rtol=1e-10, atol=1e-10)
