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
    GroupConvolution,
    GroupLinear,
    _attentive_convolution,
)
from lieattn.nn.relative import NetworkKernel, TableKernel
from lieattn.ops import _attentive_clouds, backend
from lieattn.testing import random_cloud, randomize, relative_error
from tests.cases import GROUPS, some, turns
from tests.test_group_convolution import every_lattice_group

QUICK = ("trivial2", "C4", "C8", "D4", "mirror3", "T")
every_group = pytest.mark.parametrize("group", some(GROUPS.values(), [GROUPS[name] for name in QUICK]), ids=GROUPS)
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


def relative_frames(group):
    """Return the indices ``[h, h̃]`` of h⁻¹ h̃, from products of matrices."""
    products = group.elements.mT[:, None] @ group.elements
    return (group.elements - products[:, :, None]).abs().sum((3, 4)).argmin(2)


def written_out(kernel, pos, near):
    """Return ψ_oc(h⁻¹(x_j - x_i), h⁻¹ h̃) ``[i, j, h, h̃, o, c]`` of a network within a radius of 1.5, 0 for others."""
    moved = torch.einsum("ijd,hde->ijhe", pos - pos[:, None], kernel.group.elements) / 1.5
    level = kernel.position(moved)[:, :, :, None]
    if not kernel.lifting:
        level = level + kernel.frame(kernel.group.elements.flatten(1))[relative_frames(kernel.group)]
    return torch.einsum("ijhkm,moc->ijhkoc", level.sin(), kernel.mix) * near[..., None, None, None, None]


def irregular(group):
    """Return two clouds of seven points, who is near to whom, and a field with two channels."""
    pos, batch = torch.randn(7, group.dim, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    near = (torch.cdist(pos, pos) <= 1.5) & (batch[:, None] == batch)
    return pos, batch, near, torch.randn(7, group.order, 2, dtype=torch.float64)


@pytest.mark.parametrize("group", [cyclic(8), tetrahedral()], ids=lambda group: group.name)
def test_full_attention_is_that_of_the_formulas(group):
    """Eqs. 14 to 19 written out for irregular points, with α subtracted."""
    layer = randomize(AttentiveGroupConvolution(NetworkKernel(group, 2, 3, hidden=4), measure=0.7)).double()
    pos, batch, near, x = irregular(group)
    psi, wide = written_out(layer.kernel, pos, near), written_out(layer.attention.spatial, pos, near)
    wanted = []
    for h, relative in enumerate(relative_frames(group)):
        t = torch.einsum("ijkoc,jkc->ikoc", psi[:, :, h], x)
        first, second = layer.attention.first[..., relative], layer.attention.second[..., relative]
        channel = torch.empty_like(t)
        for own in (batch == 0, batch == 1):
            hidden = [torch.einsum("onck,koc->kon", first, found).relu() for found in (t[own].mean(0), t[own].amax(0))]
            channel[own] = torch.einsum("ocnk,kon->koc", second, sum(hidden)).sigmoid()
        statistics = torch.stack([(channel * t).mean(-1), (channel * t).amax(-1)], dim=-1)
        level = torch.einsum("ijkoc,jkoc->iko", wide[:, :, h], statistics)
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
def test_kernels_on_clouds_agree_with_plain_torch(sizes, kind, lifting, monkeypatch):
    """Means over two kinds of neighbors; with ψ of all outputs, in factors, and in parts that are recomputed."""
    group = tetrahedral()
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


class Gate(torch.nn.Module):
    """Attention of another network to u = Σ t, the result of a convolution, as an operator on the responses t."""

    def __init__(self, group, name):
        super().__init__()
        self.name, self.first, self.second = name, GroupLinear(group, 3, 2), GroupLinear(group, 2, 3)
        self.reduce, self.level = GroupLinear(group, 3, 2), GroupLinear(group, 3, 1)
        self.spatial = GroupConvolution(NetworkKernel(group, 2, 1, hidden=4), measure=1.0)

    def forward(self, t, graph):
        return 1 - self.gate(t.sum((2, 4)), graph)[:, :, None, :, None]  # the layer passes 1 - A

    def gate(self, u, graph):
        def shared(found):
            return self.second(self.first(found).relu())[graph.batch]

        if self.name == "SE-Net":
            return shared(graph.mean(u)).sigmoid()
        if self.name == "BAM":
            return 1 + (shared(graph.mean(u)) + self.spatial(self.reduce(u).relu(), graph)).sigmoid()
        if self.name == "CBAM":
            channel = (shared(graph.mean(u)) + shared(graph.max(u))).sigmoid()
            seen = torch.stack([(channel * u).mean(-1), (channel * u).amax(-1)], dim=-1)
            return channel * self.spatial(seen, graph).sigmoid()
        return self.level(u).softmax(dim=1)  # co-attention


def gate_written_out(made, group, u, clouds, near):
    """Return the gates of the same networks by their formulas over H, ``[points, h, channels]``.

    With W(h⁻¹ h̃) for the matrices of squeeze and excite, and sums over neighbors for convolutions with windows, of
    which BAM has two; without batch norm. H = 1 gives the published ones.
    """
    relative = relative_frames(group)

    def tied(linear, x):
        return torch.einsum("hkoc,...kc->...ho", linear.weight[relative], x) + linear.bias

    def shared(statistic):
        return torch.stack([tied(made.second, tied(made.first, statistic(u[own])).relu()) for own in clouds])

    def convolved(x):
        return torch.einsum("ijhkoc,jkc->iho", written_out(made.spatial.kernel, *near), x)

    of_points = torch.stack(clouds).long().argmax(0)
    squeezed = shared(lambda x: x.sum(0) / len(x))[of_points]
    if made.name == "SE-Net":
        return squeezed.sigmoid()
    if made.name == "BAM":
        return 1 + (squeezed + convolved(tied(made.reduce, u).relu())).sigmoid()  # u + M(u) u
    if made.name == "CBAM":
        channel = (squeezed + shared(lambda x: x.amax(0))[of_points]).sigmoid()
        attended = channel * u
        return channel * convolved(torch.stack([attended.mean(2), attended.amax(2)], dim=2)).sigmoid()
    level = tied(made.level, u).exp()
    return level / level.sum(1, keepdim=True)


@pytest.mark.parametrize("name", ["SE-Net", "BAM", "CBAM", "co-attention"])
@every_group
def test_networks_of_others_are_special_cases(group, name):
    """A convolution followed by their gates is one attentive convolution (Eq. 14), for lifting and on the group."""
    pos, batch, near, x = irregular(group)
    clouds, graph = [batch == 0, batch == 1], lift(pos, group, Radius(1.5), batch=batch)
    for lifting in (True, False):
        kernel = NetworkKernel(group, 2, 3, hidden=4, lifting=lifting)
        layer = AttentiveGroupConvolution(kernel, attention=Gate(group, name), measure=0.7)
        layer = randomize(layer.double())
        signal = x[:, :1] if lifting else x
        convolved = torch.einsum("ijhkoc,jkc->iho", written_out(kernel, pos, near), signal)
        wanted = 0.7 * convolved * gate_written_out(layer.attention, group, convolved, clouds, (pos, near))
        found = layer(signal[:, 0] if lifting else signal, graph)
        assert relative_error(found, wanted) < 1e-10
        one = name == "co-attention" and group.order == 1  # the softmax over a single frame
        assert one or relative_error(found, 0.7 * convolved) > 1e-2


@pytest.mark.parametrize("group", [cyclic(8), tetrahedral()], ids=lambda group: group.name)
def test_operators_on_responses_do_not_weigh_neighbors(group):
    """The limit of Eq. 14 here: responses are sums over neighbors, which co-attention to the input tells apart."""
    kernel = NetworkKernel(group, 3, 3, hidden=4)
    layers = {name: AttentiveGroupConvolution(kernel, attention=name) for name in ("pose", Gate(group, "co-attention"))}
    graph = lift(torch.randn(2, group.dim, dtype=torch.float64), group, AllPairs(), length=4.0)
    x = torch.randn(2, group.order, 3, dtype=torch.float64)
    for name, layer in layers.items():
        randomize(layer.double())
        with torch.no_grad():
            kernel.position.weight.zero_()  # ψ does not depend on the displacement
        same = relative_error(layer(x, graph), layer(x.flip(0) * 0.5 + x * 0.5, graph)) < 1e-12
        assert same == (name != "pose")


@every_group
def test_attention_to_the_input_is_that_of_the_formulas(group):
    """Eq. 20 and co-attention before a convolution: the layer passes (1 - α) f, as the authors' code."""
    pos, batch, near, x = irregular(group)
    graph, relative = lift(pos, group, Radius(1.5), batch=batch), relative_frames(group)
    kernel = NetworkKernel(group, 2, 3, hidden=4)
    layers = {kind: AttentiveGroupConvolution(kernel, attention=kind, measure=0.7) for kind in ("input", "pose")}
    for kind, layer in layers.items():
        gate = randomize(layer.double()).gate
        if kind == "pose":
            attention = (0.7 * torch.einsum("hkoc,jkc->jho", gate.weight[relative], x)).sigmoid()
        else:
            channel = torch.empty_like(x)
            for own in (batch == 0, batch == 1):
                first, second = gate.channel.first[..., relative], gate.channel.second[..., relative]
                hidden = [torch.einsum("nchk,kc->hn", first, f).relu() for f in (x[own].mean(0), x[own].amax(0))]
                channel[own] = torch.einsum("cnhk,kn->hc", second, sum(hidden)).sigmoid()
            seen = torch.stack([(channel * x).mean(-1), (channel * x).amax(-1)], dim=-1)
            psi = written_out(gate.spatial.kernel, pos, near)
            attention = channel * (0.7 * torch.einsum("ijhkoc,jkc->iho", psi, seen)).sigmoid()
        wanted = 0.7 * torch.einsum("ijhkoc,jkc->iho", written_out(kernel, pos, near), (1 - attention) * x)
        assert relative_error(layer(x, graph), wanted) < 1e-10


def test_operators_on_clouds_must_move_along():
    class Seen(torch.nn.Module):
        def __init__(self, frame):
            super().__init__()
            self.frame, self.weight = frame, torch.nn.Parameter(torch.ones(()))

        def forward(self, responses, graph):
            seen = responses[:, :1] if self.frame == 0 else responses
            level = (self.weight * seen).tanh().mean(-1, keepdim=True)
            return level * graph.pos.norm(dim=1).view(-1, 1, 1, 1, 1) if self.frame == "origin" else level

    kernel = NetworkKernel(cyclic(4), 2, 3)
    AttentiveGroupConvolution(kernel, attention=Seen(None))
    for kernel_of, seen in ((kernel, 0), (kernel, "origin"), (NetworkKernel(trivial(2), 2, 3), "origin")):
        with pytest.raises(ValueError, match="attention: expected maps that move with the group"):
            AttentiveGroupConvolution(kernel_of, attention=Seen(seen))
    with pytest.raises(ValueError, match="spatial: expected a kernel for C4 with 2 input and 3 output channels"):
        AttentiveGroupConvolution(kernel, spatial=NetworkKernel(cyclic(4), 2, 1))
