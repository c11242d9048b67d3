"""Attentive group convolution on point clouds: equal to grids, equivariant maps, and networks of others."""

import pytest
import torch

from lieattn.geometry import AllPairs, PixelSquare, Radius, lift, pixel_positions
from lieattn.groups import cyclic, tetrahedral, trivial
from lieattn.nn import (
    AttentiveGroupConvolution,
    GridAttentiveConvolution,
    GridAttentiveLifting,
    GridGroupConvolution,
    GridInputAttention,
    GridLiftingConvolution,
    GridPoseAttention,
    _attentive_convolution,
)
from lieattn.nn.relative import NetworkKernel, TableKernel
from lieattn.ops import _attentive_clouds, backend, tied_linear
from lieattn.testing import random_cloud, randomize, relative_error
from tests.cases import turns
from tests.test_group_convolution import every_lattice_group

KINDS = ("full", "channel", "spatial", "input", "pose")


def same_on_grids(group, kind, lifting):
    """Return a layer on point clouds, and a function that computes the same by the layers on grids."""
    kernel = TableKernel.square(group, 3, 2, 3, lifting=lifting)
    spatial = TableKernel.square(group, 2, 1 if kind == "input" else 2, 3, lifting=lifting)
    spatial = None if kind in ("channel", "pose") else spatial
    layer = randomize(AttentiveGroupConvolution(kernel, attention=kind, hidden=2, spatial=spatial)).double()
    if kind in ("full", "channel", "spatial"):
        made = GridAttentiveLifting if lifting else GridAttentiveConvolution
        grid = made(group, 3, 2, 3, pad=1, attention=kind, hidden=2, spatial_size=3).double()
        pairs = [(grid.weight, kernel.weight)]
        if kind != "spatial":
            pairs += [(getattr(grid.attention, part), getattr(layer.attention, part)) for part in ("first", "second")]
        if spatial is not None:
            pairs.append((grid.attention.spatial, spatial.weight))
        call = grid
    else:
        plain = (GridLiftingConvolution if lifting else GridGroupConvolution)(group, 3, 2, 3, pad=1).double()
        if kind == "input":
            gate = GridInputAttention(group, 3, hidden=2, spatial_size=3, lifting=lifting).double()
            pairs = [(getattr(gate.channel, part), getattr(layer.gate.channel, part)) for part in ("first", "second")]
            pairs.append((gate.spatial.weight, spatial.weight))
        else:
            gate = GridPoseAttention(group, 3, lifting=lifting).double()
            pairs = [(gate.weight, layer.gate.weight[:, 0].T)]
        pairs.append((plain.weight, kernel.weight))

        def call(x):
            return plain(gate(x))

    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.copy_(ours.reshape(theirs.shape))
    return layer, call


@pytest.mark.parametrize("lifting", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@every_lattice_group
def test_clouds_and_grids_give_the_same(group, kind, lifting):
    layer, on_grid = same_on_grids(group, kind, lifting)
    sides = (4, 5) if group.dim == 2 else (3, 2, 3)
    x = torch.randn(2, 3, *(() if lifting else (group.order,)), *sides, dtype=torch.float64)
    graph = lift(pixel_positions(*sides, dtype=torch.float64).expand(2, -1, -1), group, PixelSquare(3))
    points = x.flatten(-group.dim).movedim(-1, 1).flatten(0, 1)
    with torch.no_grad():
        found = layer(points if lifting else points.mT, graph)
        wanted = on_grid(x).flatten(-group.dim).movedim(-1, 1).flatten(0, 1).mT
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group", [cyclic(8), tetrahedral()], ids=lambda group: group.name)
def test_full_attention_is_that_of_the_formulas(group):
    """Eqs. 14 to 19 written out for irregular points, with α subtracted."""
    layer = randomize(AttentiveGroupConvolution(NetworkKernel(group, 2, 3, hidden=4), measure=0.7)).double()
    batch, matrices = torch.tensor([0, 0, 0, 0, 1, 1, 1]), group.elements.double()
    pos = torch.randn(7, group.dim, dtype=torch.float64)
    x = torch.randn(7, group.order, 2, dtype=torch.float64)
    near = (torch.cdist(pos, pos) <= 1.5) & (batch[:, None] == batch)

    def psi(kernel, h, relative):
        moved = (pos - pos[:, None]) @ matrices[h] / 1.5  # rows of h⁻¹(x_j - x_i)
        level = kernel.position(moved)[:, :, None] + kernel.frame(kernel.matrices.double())[relative]
        return torch.einsum("ijkm,moc->ijkoc", level.sin(), kernel.mix) * near[..., None, None, None]

    wanted = []
    for h in range(group.order):
        products = matrices[h].T @ matrices  # h⁻¹ h̃
        relative = (matrices - products[:, None]).abs().sum((2, 3)).argmin(1)
        t = torch.einsum("ijkoc,jkc->ikoc", psi(layer.kernel, h, relative), x)
        first, second = layer.attention.first[..., relative], layer.attention.second[..., relative]
        channel = torch.empty_like(t)
        for own in (batch == 0, batch == 1):
            hidden = [torch.einsum("onck,koc->kon", first, found).relu() for found in (t[own].mean(0), t[own].amax(0))]
            channel[own] = torch.einsum("ocnk,kon->koc", second, sum(hidden)).sigmoid()
        statistics = torch.stack([(channel * t).mean(-1), (channel * t).amax(-1)], dim=-1)
        level = torch.einsum("ijkoc,jkoc->iko", psi(layer.attention.spatial, h, relative), statistics)
        wanted.append(0.7 * ((1 - level.sigmoid()[..., None] * channel) * t).sum((1, 3)))
    with backend("plain"):
        found = layer(x, lift(pos, group, Radius(1.5), batch=batch))
    assert relative_error(found, torch.stack(wanted, dim=1)) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [cyclic(8), cyclic(12), tetrahedral()], ids=lambda group: group.name)
def test_maps_on_clouds_move_along(group, kind):
    """Theorem 1, with points that are missing from a raster and in no raster; the maps of clouds are for frames h̃."""
    kernel = NetworkKernel(group, 2, 2, hidden=4)
    layer = randomize(AttentiveGroupConvolution(kernel, attention=kind)).double()
    pos, batch = random_cloud(group, 9, clouds=2)
    x = torch.randn(9, group.order, 2, dtype=torch.float64)
    out, maps = layer.attend(x, lift(pos, group, Radius(1.5), batch=batch), return_maps=True)
    for h in turns(group):
        graph = lift(group.act(h, pos), group, Radius(1.5), batch=batch)
        moved, seen = layer.attend(group.translate(h, x), graph, return_maps=True)
        assert relative_error(moved, group.translate(h, out)) < 1e-10
        permutation = group.permutation(h)
        for part in ("channel", "spatial"):
            before, behind = getattr(maps, part), getattr(seen, part)
            if before is not None:
                wanted = before[:, permutation] if before.ndim == 3 else before[:, permutation][:, :, permutation]
                assert relative_error(behind, wanted) < 1e-10


def test_attention_may_see_more_than_the_kernel():
    """The kernel sees the neighbors of a local graph, spatial attention all; without spatial attention nothing else."""
    group, pos = cyclic(4), torch.randn(12, 2, dtype=torch.float64)
    wide, near = lift(pos, group, Radius(2.0)), lift(pos, group, Radius(1.0), length=2.0)
    x = torch.randn(12, 4, 2, dtype=torch.float64)
    for kind in ("channel", "spatial"):
        layer = randomize(AttentiveGroupConvolution(NetworkKernel(group, 2, 3), attention=kind)).double()
        found = layer(x, wide.carrying(local=near))
        assert (relative_error(found, layer(x, near)) < 1e-12) == (kind == "channel")
        assert relative_error(found, layer(x, wide)) > 1e-3


SIZES = {"of equal sizes": (8, 8, 8), "ragged, of one point, empty": (7, 1, 0, 7, 5), "unsorted": None}


def ragged(group, sizes):
    """Return a graph with two kinds of neighbors, on clouds of these sizes or whose points are mixed."""
    batch = torch.arange(24) % 3 if sizes is None else torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pos = torch.randn(len(batch), group.dim, dtype=torch.float64)
    given = {"batch": batch} if sizes is None else {"ptr": torch.tensor([0, *sizes]).cumsum(0)}
    near = lift(pos, group, Radius(1.0), length=1.5, **given)
    return lift(pos, group, Radius(1.5), **given).carrying(local=near)


@pytest.mark.parametrize("lifting", [False, True])
@pytest.mark.parametrize("kind", ["full", "channel", "spatial"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("group", [cyclic(8), tetrahedral()], ids=lambda group: group.name)
def test_kernels_on_clouds_agree_with_plain_maths(group, sizes, kind, lifting, monkeypatch):
    """Means over two kinds of neighbors; with ψ of all outputs, in factors, and in parts that are recomputed."""
    graph = ragged(group, sizes)
    kernel = NetworkKernel(group, 3, 5, hidden=4, lifting=lifting)
    layer = randomize(AttentiveGroupConvolution(kernel, attention=kind, reduction="mean")).double()
    x = torch.randn(len(graph.pos), *([] if lifting else [group.order]), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(graph.pos), group.order, 5, dtype=torch.float64)
    calls, made = [], _attentive_clouds._kernels

    def evaluated(factors, at_once=_attentive_convolution._AT_ONCE):
        monkeypatch.setattr(_attentive_convolution, "_AT_ONCE", at_once)
        monkeypatch.setattr(_attentive_convolution, "_in_factors", lambda local, points: factors)
        out = layer(x, graph)
        return out.detach(), *torch.autograd.grad((out * weight).sum(), (x, *layer.parameters()))

    with backend("plain"):
        wanted = evaluated(False)
    monkeypatch.setattr(_attentive_clouds, "_kernels", lambda *given: calls.append(given) or made(*given))
    for given in ((False,), (False, 1), (True,), (True, 1)):
        for ours, theirs in zip(evaluated(*given), wanted, strict=True):
            assert relative_error(ours, theirs) < 1e-12
    assert bool(calls) == (sizes is not None)


@pytest.mark.parametrize("factors", [False, True])
def test_clouds_of_a_batch_do_not_see_each_other(factors, monkeypatch):
    """The kernel gives each cloud of a ragged batch what it gives the cloud alone, gradients included."""
    monkeypatch.setattr(_attentive_convolution, "_in_factors", lambda local, points: factors)
    group, sizes = cyclic(4), SIZES["ragged, of one point, empty"]
    layer = randomize(AttentiveGroupConvolution(NetworkKernel(group, 2, 3))).double()
    pos, x = torch.randn(sum(sizes), 2, dtype=torch.float64), torch.randn(sum(sizes), 4, 2, dtype=torch.float64)

    def evaluated(pos, x, ptr):
        x = x.clone().requires_grad_()
        out = layer(x, lift(pos, group, Radius(1.5), ptr=torch.tensor(ptr)))
        return out, torch.autograd.grad(out.sin().sum(), x)[0]

    together = evaluated(pos, x, [0, *torch.tensor(sizes).cumsum(0).tolist()])
    for number, size in enumerate(sizes):
        own = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
        if size == 0:
            continue
        for ours, alone in zip(together, evaluated(pos[own], x[own], [0, size]), strict=True):
            torch.testing.assert_close(ours[own], alone, rtol=1e-12, atol=1e-12)


def test_derivatives_on_clouds_are_right_to_second_order():
    group = cyclic(3)
    layer = randomize(AttentiveGroupConvolution(NetworkKernel(group, 2, 2, hidden=3, window=True))).double()
    pos = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(x, pos):
        return layer(x, lift(pos, group, AllPairs(), length=4.0))

    torch.autograd.gradcheck(call, (x, pos))
    torch.autograd.gradgradcheck(call, (x, pos), fast_mode=True)


def test_networks_of_others_are_special_cases():
    """SE-Net, BAM and CBAM as attention to the responses t = f of the identity (Eq. 14); the layer passes 1 - A."""
    group, channels = trivial(2), 3
    graph = lift(torch.randn(9, 2, dtype=torch.float64), group, Radius(1.5))
    x = torch.randn(9, channels, dtype=torch.float64)
    first, second = torch.randn(2, channels, dtype=torch.float64), torch.randn(channels, 2, dtype=torch.float64)
    kernel = TableKernel(group, channels, channels, torch.zeros(1, 2)).double()
    with torch.no_grad():
        kernel.weight.copy_(torch.eye(channels)[..., None, None])

    def shared(found):
        return (found @ first.T).relu() @ second.T

    def spatial(f, near):
        statistics = torch.stack([f.mean(-1), f.amax(-1)], dim=-1)
        return near.sum_to_targets(statistics[near.source].sum(-1))[:, None]

    def cbam(f, near):
        channel = (shared(f.mean(0)) + shared(f.amax(0))).sigmoid()
        return channel * spatial(channel * f, near).sigmoid()

    gates = {
        "SE-Net": lambda f, near: shared(f.mean(0)).sigmoid().expand_as(f),
        "BAM": lambda f, near: (shared(f.mean(0)) + spatial(f, near)).sigmoid(),
        "CBAM": cbam,
    }
    itself = graph.subset(torch.arange(9), Radius(1e-9))  # each point sees itself, so that responses are ψ f
    for name, gate in gates.items():

        def operator(t, graph, gate=gate):
            f = t.diagonal(dim1=3, dim2=4)[:, 0, 0]
            return (1 - gate(f, graph.neighbors))[:, None, None, :, None]

        layer = AttentiveGroupConvolution(kernel, attention=operator, measure=1.0)
        found = layer(x[:, None], graph.carrying(local=itself))[:, 0]
        torch.testing.assert_close(found, gate(x, graph.neighbors) * x, rtol=1e-12, atol=1e-12, msg=name)


def test_co_attention_is_a_special_case():
    """Co-attention to the frames of f as attention to the responses t = f of the identity (Eq. 14)."""
    group = cyclic(4)
    graph = lift(torch.randn(7, 2, dtype=torch.float64), group, Radius(1e-9))  # each point sees itself
    kernel = TableKernel(group, 3, 3, torch.zeros(1, 2)).double()
    with torch.no_grad():
        kernel.weight.zero_()[:, :, 0, 0] = torch.eye(3)
    layer = randomize(AttentiveGroupConvolution(kernel, attention="pose", measure=1.0).double())
    with torch.no_grad():
        kernel.weight.zero_()[:, :, 0, 0] = torch.eye(3)

    def operator(t, graph):
        f = t.diagonal(dim1=1, dim2=2).diagonal(dim1=1, dim2=2).to(layer.gate.weight)
        return tied_linear(f, layer.gate.weight, group.relative_index).sigmoid().mT[..., None, None]

    x = torch.randn(7, 4, 3, dtype=torch.float64)
    found = AttentiveGroupConvolution(kernel, attention=operator, measure=1.0)(x, graph)
    torch.testing.assert_close(found, layer(x, graph), rtol=1e-12, atol=1e-12)
    assert relative_error(found, x) > 1e-2


def test_operators_on_clouds_must_move_along():
    class Seen(torch.nn.Module):
        def __init__(self, frame):
            super().__init__()
            self.frame, self.weight = frame, torch.nn.Parameter(torch.ones(()))

        def forward(self, responses, graph):
            seen = responses if self.frame is None else responses[:, :1]
            return (self.weight * seen).tanh().mean(-1, keepdim=True)

    kernel = NetworkKernel(cyclic(4), 2, 3)
    AttentiveGroupConvolution(kernel, attention=Seen(None))
    with pytest.raises(ValueError, match="attention: expected maps that move with the group"):
        AttentiveGroupConvolution(kernel, attention=Seen(0))
    with pytest.raises(ValueError, match="spatial: expected a kernel for C4 with 2 input and 3 output channels"):
        AttentiveGroupConvolution(kernel, spatial=NetworkKernel(cyclic(4), 2, 1))
