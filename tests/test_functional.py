"""Transforms of torch.func: derivatives of networks that search neighbors, and batching with vmap."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch_geometric.data import Data

from lieattn.geometry import AllPairs, PrincipalFrames, Radius, SampledFrames, ScaleFrames, pixel_positions
from lieattn.groups import SE, cyclic, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    AttentionOptions,
    AttentiveResNet,
    ConvolutionOptions,
    DirectionConvNet,
    EnergyForces,
    FramewiseTransformer,
    GSANet,
    HamiltonianDynamics,
    LieConvNet,
    LieTransformer,
    Lifting,
)
from lieattn.models.irreps import DistanceTransformer, SE3Transformer
from lieattn.nn import FieldBatchNorm, PointBatchNorm
from lieattn.nn.relative import _pair_scores
from lieattn.ops import _gated_sums, _pooled, backend, explain, group_attention
from lieattn.spaces import Euclidean
from lieattn.testing import randomize

T, BALL, SMALL = tetrahedral(), {"neighborhood": Radius(2.0, smooth=True)}, {"channels": 4, "layers": 1}
HALF, COMBINED = ConvolutionOptions(downsampling=0.5), AttentionOptions(kernel="combined")
MODELS = {
    "gsa": lambda: GSANet(T, 1, 1, channels=8, blocks=(1,), heads=2, **BALL),
    "scales": lambda: GSANet(ScaleFrames(cyclic(4)), 1, 1, channels=8, blocks=(1,), heads=2, **BALL),
    "lie": lambda: LieTransformer(1, 1, frames=T, heads=2, **BALL, **SMALL),
    "principal": lambda: LieTransformer(
        1, 1, frames=PrincipalFrames(), space=Euclidean(SE(3)), heads=2, **BALL, **SMALL
    ),
    "convolution": lambda: LieConvNet(1, 1, frames=T, convolution=HALF, **BALL, **SMALL),
    "framewise": lambda: FramewiseTransformer(T, 1, 1, **BALL, **SMALL),
    "directions": lambda: DirectionConvNet(T, 1, 1, **BALL, **SMALL),
    "distances": lambda: DistanceTransformer(1, 1, **BALL, **SMALL),
    "irreps": lambda: SE3Transformer(1, 1, **BALL, **SMALL),
}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def cloud(name):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    return Data(x=torch.rand(5, 1, **options), pos=torch.randn(5, 2 if name == "scales" else 3, **options))


def prepared(name):
    torch.manual_seed(0)
    network, data = randomize(MODELS[name]()).double().eval(), cloud(name)
    return network, data, lambda pos: network(Data(x=data.x, pos=pos)).square().sum()


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_are_those_of_autograd(name):
    _, data, energy = prepared(name)
    direction = torch.randn(data.pos.shape, dtype=torch.float64)
    pos = data.pos.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(energy(pos), pos, create_graph=True)
    (second,) = torch.autograd.grad((wanted * direction).sum(), pos)
    assert wanted.abs().max() > 1e-8
    torch.testing.assert_close(grad(energy)(data.pos), wanted.detach(), **EXACT)
    matrix = hessian(energy)(data.pos).flatten(0, 1).flatten(1)
    torch.testing.assert_close(matrix, matrix.T, **EXACT)
    torch.testing.assert_close(matrix @ direction.flatten(), second.flatten(), **EXACT)
    torch.testing.assert_close(jvp(grad(energy), (data.pos,), (direction,))[1], second, **EXACT)
    along = grad(lambda pos: jvp(energy, (pos,), (direction,))[1])  # reverse mode over forward mode
    torch.testing.assert_close(along(data.pos), second, **EXACT)


@pytest.mark.parametrize(("name", "gradients"), [*((name, False) for name in MODELS), ("lie", True)])
def test_forward_mode(name, gradients):
    """forward_ad does not use transforms of torch.func, and fused operators would drop its tangents."""
    network, data, _ = prepared(name)
    along = {key: torch.randn(data[key].shape, dtype=torch.float64) for key in ("x", "pos")}
    wanted = jvp(lambda x, pos: network(Data(x=x, pos=pos)), (data.x, data.pos), (along["x"], along["pos"]))[1]
    with torch.set_grad_enabled(gradients), forward_ad.dual_level():
        dual = Data(**{key: forward_ad.make_dual(data[key], along[key]) for key in along})
        found = forward_ad.unpack_dual(network(dual)).tangent
    torch.testing.assert_close(found, wanted.detach(), **EXACT)


RECOMPUTING = {
    "lie": lambda: LieTransformer(1, 1, frames=T, heads=2, **BALL, **SMALL).checkpoint_activations(),
    "pieces": lambda: LieTransformer(1, 1, frames=T, heads=2, lifting=Lifting(piece=2), **BALL, **SMALL),
    "combined": lambda: LieTransformer(1, 1, frames=T, heads=2, attention=COMBINED, **BALL, **SMALL),
}


@pytest.mark.parametrize("name", RECOMPUTING)
def test_networks_that_compute_activations_again(name, monkeypatch):
    """Within a transform, activations are kept, because they cannot be recomputed there."""
    monkeypatch.setattr(_pair_scores, "_CHUNK", 1)
    monkeypatch.setitem(MODELS, "recomputing", RECOMPUTING[name])
    _, data, energy = prepared("recomputing")
    pos = data.pos.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(energy(pos), pos)
    torch.testing.assert_close(grad(energy)(data.pos), wanted, **EXACT)
    torch.testing.assert_close(jacfwd(energy)(data.pos), wanted, **EXACT)


@pytest.mark.parametrize("attention", ["pooled", "gated"])
def test_operators_that_compute_activations_again(attention, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(_pooled._PORTION, "cpu", 1)
    monkeypatch.setattr(_gated_sums, "_AT_ONCE", 1)
    pooled = AffineSelfConvNet(cyclic(4), 1, 2, blocks=1, channels=4, heads=2)
    gated = AttentiveResNet(cyclic(4), 1, 2, blocks=1, channels=(2, 2, 2))
    network = randomize({"pooled": pooled, "gated": gated}[attention]).double().eval()
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(network(x).square().sum(), x)
    with backend("plain"):
        torch.testing.assert_close(grad(lambda x: network(x).square().sum())(x.detach()), wanted, **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_weights_and_features(name):
    """The geometry is used first inside a transform, then outside, where no tensor of the transform may remain."""
    network, data, _ = prepared(name)
    geometry = network.geometry(data)
    features = torch.stack([data.x, 2 * data.x])
    found = vmap(lambda x: network(Data(x=x, pos=data.pos), geometry))(features)
    slope = grad(lambda x: network(Data(x=x, pos=data.pos), geometry).sum())(data.x)
    assert slope.shape == data.x.shape
    for x, out in zip(features, found, strict=True):
        torch.testing.assert_close(out, network(Data(x=x, pos=data.pos)), **EXACT)
        torch.testing.assert_close(out, network(Data(x=x, pos=data.pos), geometry), **EXACT)
    ensemble = {name: torch.stack([weight, 1.1 * weight]) for name, weight in network.named_parameters()}
    for given in ((data, geometry), (data,)):
        each = vmap(functional_call, in_dims=(None, 0, None))(network, ensemble, given)
        for number, out in enumerate(each):
            one = {name: weights[number] for name, weights in ensemble.items()}
            torch.testing.assert_close(out, functional_call(network, one, (data,)), **EXACT)


def test_batches_of_features_with_random_frames():
    """Random frames are drawn outside of the transform, so all entries share them."""
    torch.manual_seed(0)
    network = randomize(LieTransformer(1, 1, frames=SampledFrames(2), heads=2, **BALL, **SMALL)).double()
    data = cloud("lie")
    features = torch.stack([data.x, 2 * data.x])
    for training in (False, True):
        network.train(training)
        torch.manual_seed(1)
        found = vmap(lambda x: network(Data(x=x, pos=data.pos)))(features)
        for x, out in zip(features, found, strict=True):
            torch.manual_seed(1)
            torch.testing.assert_close(out, network(Data(x=x, pos=data.pos)), **EXACT)


def test_batches_of_features_with_random_neighbors():
    """Random neighbors are the same for all entries, as with ``randomness="same"``; others would differ in number."""
    dropout = Lifting(neighbor_dropout=0.5)
    network = randomize(LieTransformer(1, 1, frames=T, lifting=dropout, heads=2, **BALL, **SMALL)).double().train()
    data = cloud("lie")
    features = torch.stack([data.x, 2 * data.x])

    def evaluate(x):
        return network(Data(x=x, pos=data.pos))

    torch.manual_seed(1)
    found = vmap(evaluate, randomness="same")(features)
    for x, out in zip(features, found, strict=True):
        torch.manual_seed(1)
        torch.testing.assert_close(out, evaluate(x), **EXACT)
    with pytest.raises(RuntimeError, match="neighbor_dropout: "):
        vmap(evaluate, randomness="different")(features)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(evaluate)(features)


def assert_in_batches(outputs, variable, by_vmap=True):
    """Check that gradients of all outputs in one call, in both ways of torch, equal those computed one by one."""
    unit = torch.eye(len(outputs), dtype=outputs.dtype)

    def pulled(direction):
        return torch.autograd.grad(outputs, variable, direction, retain_graph=True)[0]

    (batched,) = torch.autograd.grad(outputs, variable, unit, retain_graph=True, is_grads_batched=True)
    wanted = torch.stack([pulled(direction) for direction in unit])
    torch.testing.assert_close(batched, wanted, **EXACT)
    if by_vmap:
        torch.testing.assert_close(vmap(pulled)(unit), wanted, **EXACT)


slow_batches = pytest.mark.filterwarnings("ignore:There is a performance drop")  # one kernel call per gradient


@slow_batches
@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_batches(name):
    network, data, energy = prepared(name)
    pos = data.pos.clone().requires_grad_()
    point = torch.autograd.grad(energy(pos), pos, create_graph=True)[0][0]
    for outputs in (network(Data(x=data.x, pos=pos)).flatten(), point):
        assert_in_batches(outputs, pos, by_vmap=outputs is not point)


@slow_batches
@pytest.mark.parametrize("channels", [4, 12])
@pytest.mark.parametrize("clouds", [1, 2])
def test_gradients_in_batches_of_attention_over_whole_clouds(channels, clouds):
    """Tested with the kernel for few channels and with that of torch."""
    neighbors = AllPairs()(torch.randn(50, 2), torch.arange(50) // 40 if clouds == 2 else None)
    signals = [torch.randn(50, 1, 2, channels, dtype=torch.float64).requires_grad_() for _ in range(3)]
    outputs = group_attention(*signals, neighbors)[0][:2, 0, 0, 0]
    for signal in signals:
        assert_in_batches(outputs, signal)


def test_gradients_in_batches_of_attentive_convolutions():
    torch.manual_seed(0)
    network = AttentiveResNet(cyclic(4), 1, 2, blocks=1, channels=(2, 2, 2), attention="full")
    images = torch.rand(1, 1, 8, 8).double().requires_grad_()
    assert_in_batches(randomize(network).double().eval()(images).flatten(), images)


def test_batches_of_positions_are_refused():
    _, data, energy = prepared("framewise")
    with pytest.raises(RuntimeError, match="pos: "):
        vmap(energy)(torch.stack([data.pos, data.pos + 1]))
    graph = Radius(2.0)
    with pytest.raises(RuntimeError, match="pos: "):
        vmap(lambda pos: graph(pos).edge_index)(torch.stack([data.pos, data.pos]))


def test_rows_that_repeat_have_derivatives_of_their_own():
    """On a grid, repeated displacements are evaluated once, but only if nothing is differentiated."""
    network, _, _ = prepared("gsa")
    pos = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3)
    data = Data(x=torch.rand(8, 1, dtype=torch.float64), pos=pos)

    def energy(pos):
        return network(Data(x=data.x, pos=pos)).square().sum()

    moved = pos.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(energy(moved), moved)
    assert network.geometry(data).lifting.relative.num_rows < network.geometry(data).lifting.neighbors.num_edges
    torch.testing.assert_close(jacfwd(energy)(pos), wanted, **EXACT)
    torch.testing.assert_close(grad(energy)(pos), wanted, **EXACT)


def test_images():
    torch.manual_seed(0)
    image = randomize(AttentiveResNet(cyclic(4), 1, 2, blocks=1, channels=(2, 2, 2), attention="pose")).double().eval()
    x, pos = torch.rand(64, 1).double(), pixel_positions(8, 8, dtype=torch.float64)

    def scores(x):
        return image(Data(x=x, pos=pos, grid=torch.tensor([[8, 8]])))

    seen = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(scores(seen).sum(), seen)
    torch.testing.assert_close(grad(lambda x: scores(x).sum())(x), wanted, **EXACT)
    torch.testing.assert_close(vmap(scores)(torch.stack([x, 2 * x]))[1], scores(2 * x), **EXACT)


def test_forces_in_eval_mode_have_derivatives():
    """They were detached, so that a Hessian of the energies was zero, without a message."""
    network, data, _ = prepared("lie")
    model = EnergyForces(network).eval()

    def outputs(pos):
        return model(Data(x=data.x, pos=pos))

    wanted = hessian(lambda pos: network(Data(x=data.x, pos=pos)).sum())(data.pos)
    torch.testing.assert_close(hessian(lambda pos: outputs(pos).energy.sum())(data.pos), wanted, **EXACT)
    torch.testing.assert_close(-jacrev(lambda pos: outputs(pos).force)(data.pos), wanted, **EXACT)
    assert wanted.abs().max() > 1e-3
    assert not outputs(data.pos).force.requires_grad


TETRAHEDRON = [[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]
JUMPING = {  # positions, axes that jump, why
    "line": ([[0.0, 0.0, 0.0], [1.1, 0.0, 0.0], [-1.2, 0.0, 0.0]], "axes 2 to 3 .* all its points lie on the others"),
    "longer line": ([[x, x, 0.0] for x in (0.4, -0.4, 1.1, -1.3)], "axes 2 to 3 .* all its points lie on the others"),
    "one place": ([[0.5, 0.5, 0.0]] * 2, "axes 1 to 3 .* all its points lie on the others"),
    "spherical top": ([[0.0] * 3, *TETRAHEDRON], "axes 1 to 3 .* several of its points are equally far"),
    "symmetric top": ([[0.0, 0.0, 0.3], [1, 1, 0], [1, -1, 0], [-1, 1, 0], [-1, -1, 0]], "axes 2 to 3 .* several of"),
}


def with_jumping_axes(name, of):
    """Return a network and the positions of a rotated cloud at which its axes jump."""
    torch.manual_seed(0)
    frames = PrincipalFrames() if of == "cloud" else PrincipalFrames(of=of, cutoff=4.0)
    network = LieTransformer(1, 1, frames=frames, neighborhood=Radius(4.0, smooth=True), heads=2, **SMALL)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    pos = torch.tensor(JUMPING[name][0], dtype=torch.float64) @ turn
    return randomize(network).double().eval(), pos, torch.linspace(1, 2, len(pos), dtype=torch.float64)[:, None]


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
@pytest.mark.parametrize(("name", "of"), [*((name, "cloud") for name in JUMPING), ("line", "neighborhood")])
def test_second_derivatives_at_jumping_axes_are_refused(name, of):
    """They were 7 to 13 % wrong. The derivatives of forces by weights are right, so training goes on."""
    network, pos, x = with_jumping_axes(name, of)
    message = f"second derivatives cannot be computed here, because principal {JUMPING[name][1]}"
    parameters = dict(network.named_parameters())

    def energy(pos, own=parameters):
        return functional_call(network, own, (Data(x=x, pos=pos),)).sum()

    for transform in (hessian, lambda f: jacrev(jacrev(f))):
        with pytest.raises(ValueError, match=message):
            transform(energy)(pos)
    leaf, weights = pos.clone().requires_grad_(), list(parameters.values())
    (slope,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    push = torch.randn_like(pos)
    with pytest.raises(ValueError, match=message):
        torch.autograd.grad(slope, leaf, push, retain_graph=True)
    (slope * push).sum().backward(retain_graph=True)
    assert leaf.grad.isnan().any(dim=1).all() == (name in ("line", "longer line", "one place"))
    inside = grad(lambda own: (grad(energy)(pos, own) * push).sum())({k: w.detach() for k, w in parameters.items()})
    for own, wanted in zip(weights, inside.values(), strict=True):
        torch.testing.assert_close(torch.zeros_like(own) if own.grad is None else own.grad, wanted)
    step = [torch.randn_like(weight) for weight in weights]

    def of_step(size):
        own = {k: w + size * d for (k, w), d in zip(parameters.items(), step, strict=True)}
        return (grad(energy)(pos, own) * push).sum()

    wanted = (of_step(1e-5) - of_step(-1e-5)) / 2e-5
    along = sum((weight.grad * d).sum() for weight, d in zip(weights, step, strict=True) if weight.grad is not None)
    torch.testing.assert_close(along, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
def test_second_derivatives_along_a_line_exist():
    """Those of displacements along the line, and of other clouds of a batch, do not depend on where axes jump."""
    network, pos, x = with_jumping_axes("line", "cloud")
    both = {"x": torch.cat([x, x + 1]), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}
    pos = torch.cat([pos, torch.randn_like(pos)]).requires_grad_()
    (slope,) = torch.autograd.grad(network(Data(pos=pos, **both)).sum(), pos, create_graph=True)
    for push in (pos.detach()[:3] - pos.detach()[0], torch.zeros(3, 3).double()):
        push = torch.cat([push, torch.randn(3, 3).double()])
        (found,) = torch.autograd.grad(slope, pos, push, retain_graph=True)
        ends = [(pos.detach() + sign * 1e-5 * push).requires_grad_() for sign in (1, -1)]
        forces = [torch.autograd.grad(network(Data(pos=end, **both)).sum(), end)[0] for end in ends]
        torch.testing.assert_close(found, (forces[0] - forces[1]) / 2e-5, rtol=1e-6, atol=1e-6)


def test_forward_derivatives_of_dynamics_without_gradients():
    """torch.no_grad does not concern forward mode, in which forces were constant."""
    network, data, _ = prepared("lie")
    dynamics, tangent = HamiltonianDynamics(network).eval(), torch.randn_like(data.pos)

    def forces(pos):
        return dynamics.field(pos, torch.zeros_like(pos), torch.ones(len(pos)).double(), data.x)[1]

    wanted = jvp(forces, (data.pos,), (tangent,))[1]
    assert wanted.abs().max() > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(jvp(forces, (data.pos,), (tangent,))[1], wanted, **EXACT)


@pytest.mark.parametrize("stress", [False, True], ids=["forces", "forces and stress"])
def test_forces_are_differentiated_in_all_ways(stress):
    """Derivatives of forces and stresses by positions and by weights are those of autograd, also of several weights."""
    network, data, _ = prepared("lie")
    data.cell, data.pbc = 4 * torch.eye(3, dtype=torch.float64)[None], torch.ones(1, 3, dtype=torch.bool)
    model, tangent = EnergyForces(network, stress=stress).train(), torch.randn_like(data.pos)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def outputs(pos, own=weights):
        moved = data.clone()
        moved.pos = pos
        found = functional_call(model, own, (moved,))
        return torch.cat([found.force.flatten(), *([found.stress.flatten()] if stress else [])])

    wanted = torch.autograd.functional.jacobian(outputs, data.pos)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(jacrev(outputs)(data.pos), wanted, **EXACT)
    torch.testing.assert_close(jacfwd(outputs)(data.pos), wanted, **EXACT)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(outputs(forward_ad.make_dual(data.pos, tangent))).tangent
    torch.testing.assert_close(found, (wanted * tangent).flatten(1).sum(dim=1), **EXACT)

    def loss(own):
        return outputs(data.pos, own).square().sum()

    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    slopes = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(tuple(grad(loss)(weights).values()), slopes, **EXACT)
    several = {name: torch.stack([weight, 2 * weight]) for name, weight in weights.items()}
    each = vmap(lambda own: outputs(data.pos, own))(several)
    torch.testing.assert_close(each[0], outputs(data.pos), **EXACT)


@pytest.mark.parametrize("norm", [FieldBatchNorm, PointBatchNorm])
def test_second_derivatives_of_batch_normalization_in_training(norm):
    """Those of torch's function are wrong in all of these orders."""
    layer = randomize(norm(3)).double().train()
    x, direction, weight = torch.randn(3, 5, 2, 3, dtype=torch.float64)

    def energy(step):  # buffers that a transform has captured cannot be changed
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        return (weight * functional_call(layer, buffers, (x + step * direction,))).sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(energy(step), step, create_graph=True)
    (wanted,) = torch.autograd.grad(slope, step)
    assert wanted.abs() > 1e-3
    for first in (jacrev, jacfwd):
        for second in (jacrev, jacfwd):
            torch.testing.assert_close(second(first(energy))(step.detach()), wanted, **EXACT)


@pytest.mark.parametrize("norm", [FieldBatchNorm, PointBatchNorm])
def test_running_statistics_in_forward_mode(norm):
    layer, other = norm(3).double(), norm(3).double()
    x, direction = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    other(x)
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(x, direction))
        assert all(forward_ad.unpack_dual(buffer).tangent is None for buffer in layer.buffers())
    for found, wanted in zip(layer.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


def test_what_is_chosen_inside_of_a_transform():
    x = torch.randn(10, 4, 2, 8)
    chosen = []
    grad(lambda y: [chosen.append(str(explain(y, y, y))), y.sum()][1])(x)
    assert chosen[0].startswith("plain (not ")
    assert "transforms of torch.func need plain PyTorch operations" in chosen[0]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's lerp_
@pytest.mark.parametrize("norm", [FieldBatchNorm, PointBatchNorm])
def test_vmap_over_batches_in_training_needs_statistics_for_each(norm):
    torch.manual_seed(0)
    x, layers = torch.randn(3, 10, 2, 4), [norm(4).double() for _ in range(3)]
    x = x.double()
    with pytest.raises(RuntimeError, match="x: "):
        vmap(layers[0])(x)
    assert not layers[0].running_mean.any()
    weights, statistics = stack_module_state(layers)
    found = vmap(lambda *state: functional_call(layers[0], state[:2], state[2:]))(weights, statistics, x)
    torch.testing.assert_close(found, torch.stack([layer(one) for layer, one in zip(layers, x, strict=True)]), **EXACT)
    for name in ("running_mean", "running_var"):
        wanted = torch.stack([getattr(layer, name) for layer in layers])
        torch.testing.assert_close(statistics[name], wanted, **EXACT)
    torch.testing.assert_close(vmap(layers[0].eval())(x)[1], layers[0](x[1]), **EXACT)
