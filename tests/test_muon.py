"""Muon for stacks of matrices, against its definition and torch's own optimizers."""

import copy

import pytest
import torch
from torch import nn

from lieattn.groups import tetrahedral
from lieattn.nn import GroupLinear
from lieattn.train import Muon
from lieattn.train._muon import orthogonalized


def trained(optimizer_of, model, steps=5):
    """Return parameters after some steps on fixed inputs."""
    torch.manual_seed(0)
    optimizer = optimizer_of(model.parameters())
    x = torch.randn(12, 12, 16)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("shape", [(1, 16, 16), (12, 8, 40), (3, 40, 8)])
def test_updates_have_the_singular_vectors_of_the_momentum(shape):
    matrices = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ orthogonalized(matrices) @ v.mT
    numbers = inner.diagonal(dim1=1, dim2=2)
    assert (inner - torch.diag_embed(numbers)).abs().max() < 1e-10
    assert 0.6 < numbers.min()
    assert numbers.max() < 1.3


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e3, 1e4])
def test_updates_in_half_precision(scale):
    matrices = (scale * torch.randn(2, 64, 64)).half()
    found, expected = orthogonalized(matrices), orthogonalized(matrices.float())
    assert found.dtype == torch.float16
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize("scales", [[3e38, 3e38], [1e-3, 1e20]])
def test_updates_do_not_depend_on_the_size_of_each_gradient(scales):
    matrices = torch.rand(2, 9, 12) - 0.5
    found = orthogonalized(torch.tensor(scales)[:, None, None] * matrices)
    torch.testing.assert_close(found, orthogonalized(matrices), rtol=1e-4, atol=1e-5)


def test_gradients_of_zero_change_nothing():
    assert torch.equal(orthogonalized(torch.zeros(2, 9, 12)), torch.zeros(2, 9, 12))


def test_matrices_are_trained_as_by_the_optimizer_of_torch():
    """The optimizer of torch computes in bfloat16."""

    def weights(optimizer_of):
        torch.manual_seed(1)
        return trained(optimizer_of, nn.Linear(16, 24, bias=False))

    (mine,) = weights(lambda p: Muon(p, lr=0.01, weight_decay=0.1))
    (theirs,) = weights(lambda p: torch.optim.Muon(p, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    (start,) = weights(lambda p: Muon(p, lr=0.0))
    assert (mine - theirs).abs().max() < 0.05 * (mine - start).abs().max()


def test_steps_are_those_of_the_definition():
    """With more matrices than rows and columns."""
    weight, average = nn.Parameter(torch.randn(40, 8, 12, dtype=torch.float64)), torch.zeros(40, 8, 12)
    optimizer, expected = Muon([weight], lr=0.1, weight_decay=0.3, momentum=0.8), weight.detach().clone()
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        average = 0.8 * average + 0.2 * weight.grad
        expected = 0.97 * expected - 0.2 * 0.1 * 12**0.5 * orthogonalized(0.2 * weight.grad + 0.8 * average)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_defaults_are_those_of_the_documentation():
    options = {"lr": 0.01, "weight_decay": 0.01, "momentum": 0.95, "betas": (0.9, 0.999), "eps": 1e-8, "smallest": 8}
    assert Muon([nn.Parameter(torch.ones(8, 8))]).defaults == options


def test_closures_compute_gradients():
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer, before = Muon([weight]), weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == pytest.approx(float(before.square().sum()))
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_small_gradients_of_what_is_no_matrix(eps):
    mine, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = Muon([mine], eps=eps), torch.optim.AdamW([theirs], lr=0.01, eps=eps)
    for step in range(3):
        mine.grad, theirs.grad = ((step + 1) * torch.tensor([1e-6, 1e-2, 1.0]) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_what_is_no_matrix_is_trained_as_by_adamw():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.vector, self.matrix = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(4, 16))

        def forward(self, x):
            return (x * self.vector) @ self.matrix.T

    mine = trained(lambda p: Muon(p, lr=0.02, weight_decay=0.1), Narrow())
    theirs = trained(lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1), Narrow())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_stacks_are_trained_slice_by_slice():
    group = tetrahedral()

    class Slices(nn.Module):
        """The kernel of a group-tied map as twelve parameters."""

        def __init__(self, layer):
            super().__init__()
            self.layer, self.group = layer, group
            self.parts = nn.ParameterList(layer.weight.detach().clone().unbind(0))
            self.layer.weight.requires_grad_(False)

        def forward(self, x):
            own = {"weight": torch.stack(list(self.parts))}
            return torch.func.functional_call(self.layer, own, (x,))

    layer = GroupLinear(group, 16, 8, bias=False)
    slices = Slices(GroupLinear(group, 16, 8, bias=False))
    with torch.no_grad():
        for part, matrix in zip(slices.parts, layer.weight, strict=True):
            part.copy_(matrix)
    (mine,) = trained(lambda p: Muon(p, lr=0.01), layer)
    theirs = trained(lambda p: Muon([part for part in p if part.requires_grad], lr=0.01), slices)
    torch.testing.assert_close(mine, torch.stack(theirs[-12:]), rtol=1e-5, atol=1e-6)


def test_training_goes_on_from_a_state_dict():
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    optimizer = Muon(model.parameters())
    step(model, optimizer)
    other = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    other.load_state_dict(model.state_dict())
    again = Muon(other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other, again)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_groups_have_their_own_rates_and_decays():
    weight, other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    optimizer = Muon([{"params": [weight], "lr": 0.0}, {"params": [other], "weight_decay": 0.0}], lr=0.1)
    before, grad = (weight.detach().clone(), other.detach().clone()), torch.randn(8, 8)
    weight.grad, other.grad = grad.clone(), grad.clone()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.equal(weight, before[0])
    update = (before[1] - other).detach() / (0.1 * 0.2 * 8**0.5)
    torch.testing.assert_close(update, orthogonalized(grad[None])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr: expected a number of at least 0, got -1"),
        ({"weight_decay": float("nan")}, "weight_decay: expected"),
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), got 1"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\]: expected a number in \[0, 1\), got 1.5"),
        ({"eps": 0.0}, "eps: expected a positive finite number"),
        ({"smallest": 0}, "smallest: expected a positive"),
        ({"lr": "fast"}, "lr: expected"),
        ({"betas": 0.9}, "betas: expected"),
    ],
)
def test_wrong_options_are_named(wrong, message):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Muon([nn.Parameter(torch.zeros(2))])
    group = {"params": [weight], **wrong}
    for call in (lambda: Muon([weight], **wrong), lambda: Muon([group]), lambda: optimizer.add_param_group(group)):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("weight", "grad", "message"),
    [
        (torch.ones(10, 8), torch.ones(10, 8).to_sparse(), "params: expected dense gradients"),
        (
            torch.ones(4).cfloat(),
            torch.ones(4).cfloat(),
            r"params: expected real parameters, got one of torch\.complex",
        ),
        (torch.ones(9, 9).cfloat(), torch.ones(9, 9).cfloat(), r"params: expected real parameters"),
    ],
    ids=["sparse", "complex vector", "complex matrix"],
)
def test_weights_that_are_not_dense_and_real_are_refused(weight, grad, message):
    parameter = nn.Parameter(weight)
    parameter.grad = grad
    with pytest.raises(ValueError, match=message):
        Muon([parameter]).step()


def test_closures_are_functions():
    with pytest.raises(TypeError, match="closure: expected a function or None, got a tensor"):
        Muon([nn.Parameter(torch.ones(9, 9))]).step(torch.ones(1))
