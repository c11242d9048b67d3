"""Compiled and exported networks, and networks under autocast, give the numbers of plain execution."""

import shutil

import pytest
import torch
from torch_geometric.data import Batch, Data

from lieattn.geometry import AllPairs, PixelSquare, Radius, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.models import GSANet
from lieattn.nn import GroupSelfAttention
from lieattn.nn.relative import RotaryEncoding
from lieattn.ops import RelativeTerms, backend, group_attention
from lieattn.testing import randomize

compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor needs a C++ compiler: g++ or clang++",
)


def network():
    """A GSA-Net with one block, and a batch of images."""
    net = GSANet(cyclic(2), 1, 3, channels=6, blocks=(1,), heads=2, neighborhood=PixelSquare(3))
    pos, grid = pixel_positions(4, 4), torch.tensor([[4, 4]])
    clouds = [Data(x=torch.randn(len(pos), 1), pos=pos, grid=grid) for _ in range(2)]
    return randomize(net, spread=0.3), Batch.from_data_list(clouds)


def assert_same(found, wanted, tolerance=1e-5):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def outcomes(function, x, parameters):
    """Output, and gradients of parameters that have one."""
    out = function(x)
    grads = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
    return [out, *(torch.zeros(()) if grad is None else grad for grad in grads)]


@compiler
@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum", "whole clouds"])
def test_operator_through_inductor(pattern):
    pos = torch.randn(9, 2)
    neighbors = (AllPairs() if pattern == "whole clouds" else Radius(1.5))(pos, torch.arange(9) // 4)
    signals = [torch.randn(9, 3, 2, 4, requires_grad=True) for _ in range(3)]
    terms = RelativeTerms()
    if pattern != "whole clouds":
        terms = RelativeTerms(positional_key=torch.randn(neighbors.num_edges, 3, 1, 4, requires_grad=True))
    options = {"pattern": "framewise" if pattern == "whole clouds" else pattern, "terms": terms}

    def call(query):
        return torch.tanh(group_attention(query * 2, *signals[1:], neighbors, **options)[0])

    leaves = [*signals, *(t for t in vars(terms).values() if isinstance(t, torch.Tensor))]
    compiled = torch.compile(call, fullgraph=True)
    assert_same(outcomes(compiled, signals[0], leaves), outcomes(call, signals[0], leaves))


@compiler
def test_network_through_inductor():
    net, batch = network()
    geometry = net.geometry(batch)
    with torch.no_grad():
        compiled = torch.compile(net.eval(), fullgraph=True)
        assert_same([compiled(batch, geometry)], [net(batch, geometry)])
        batch.x = torch.randn_like(batch.x)
        assert_same([compiled(batch, geometry)], [net(batch, geometry)])


def test_export_of_a_network(tmp_path):
    """A network in eval mode, exported for one batch structure, saved and loaded."""
    net, batch = network()
    net.eval()
    geometry = net.geometry(batch)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(Data(x=x), geometry)

    exported = torch.export.export(Logits(), (batch.x,))
    torch.export.save(exported, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for x in (batch.x, torch.randn_like(batch.x)):
        batch.x = x
        assert_same([loaded(x)], [net(batch)])


@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_autocast_of_a_network(evaluation):
    net, batch = network()
    geometry = net.geometry(batch)
    with backend(evaluation):
        exact = net(batch, geometry)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = net(batch)
        assert rounded.isfinite().all()
        assert_same([rounded.float()], [exact], 0.1)
        rounded.float().square().sum().backward()
    assert all(
        p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in net.parameters() if p.grad is not None
    )


@pytest.mark.parametrize("pattern", ["joint", "framewise", "query_sum"])
@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_statistics_stay_in_single_precision(evaluation, pattern):
    """Signals in half precision give what single precision gives for the rounded signals, but for the last rounding."""
    pos = torch.randn(40, 2)
    neighbors = AllPairs()(pos)
    signals = [(5 * torch.randn(40, 3, 2, 4)).bfloat16() for _ in range(3)]
    terms = RelativeTerms(positional_key=torch.randn(neighbors.num_edges, 3, 1, 4))
    options = {"terms": terms, "pattern": pattern}
    with backend(evaluation):
        wide, _ = group_attention(*(signal.float() for signal in signals), neighbors, **options)
        with torch.autocast("cpu", torch.bfloat16):
            half, _ = group_attention(*signals, neighbors, **options)
    assert half.dtype == torch.bfloat16
    assert_same([half], [wide.bfloat16()], 2**-6)


@pytest.mark.parametrize("evaluation", ["plain", "auto"])
def test_positions_are_not_rounded_under_autocast(evaluation):
    """Far from the origin, positions in half precision would be off by whole turns."""
    group = cyclic(3)
    layer = GroupSelfAttention(
        group, 4, 6, heads=2, head_channels=4, pattern="framewise", encoding=RotaryEncoding(2, 2, 4)
    )
    x, pos = torch.randn(8, 3, 4), torch.randn(8, 2)
    outs = []
    with backend(evaluation), torch.autocast("cpu", torch.bfloat16):
        for shift in (0.0, 300.0):
            outs.append(layer(x, lift(pos + shift, group, AllPairs())).float())
        graph = lift(pos, group, Radius(2.0))
    assert graph.relative.positions.dtype == torch.float32
    assert_same(*[[out] for out in outs], 0.05)
