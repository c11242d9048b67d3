"""Triton kernels of networks of heads and attentive convolution, against their definitions, with all gradients.

As in ``test_triton.py`` they run in Triton's interpreter, are compiled, and run on a GPU if there is one.
"""

import pytest
import torch
import torch.nn.functional as F

from lieattn.ops import attentive_convolution, backend, head_networks
from lieattn.ops._gated_sums import Window
from tests.cases import some
from tests.test_attentive_convolution import near_limits
from tests.test_triton import Compilation, close, compiled, interpreted, on_gpu

pytest.importorskip("triton")
from lieattn.ops.kernels.triton import _attentive, _head_networks

DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=on_gpu)]


def networks(rows=65, inputs=5, hidden=7, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    weights = [draw(2, *shape) for shape in ((inputs, hidden), (hidden, hidden), (hidden, 1))]
    return draw(rows, inputs), weights, [draw(2, size) for size in (hidden, hidden, 1)]


def with_gaps(tensor):
    """Return a tensor whose numbers have others between them in memory."""
    return torch.stack([tensor, torch.ones_like(tensor)], dim=-1)[..., 0]


def literal_networks(rows, weights, biases):
    x = rows
    for weight, bias in zip(weights, biases, strict=True):
        x = F.silu(x @ weight + bias[:, None])
    return x[..., 0].T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_networks_of_heads(dtype, tolerance, device, monkeypatch):
    """Programs sum the gradients over two tiles of rows each, and the last one has a single tile."""
    monkeypatch.setattr("lieattn.ops.kernels.triton._head_networks._MOST_PARTS", 3)
    rows, weights, biases = networks(rows=150, dtype=dtype, device=device)
    leaves = [rows, *weights, *biases]
    with backend("triton"):
        out = head_networks(with_gaps(rows), weights, biases)
        pulled = with_gaps(out.detach())
        found = torch.autograd.grad(out, leaves, pulled)
    expected = literal_networks(
        *(t.double() if torch.is_tensor(t) else [w.double() for w in t] for t in (rows, weights, biases))
    )
    wanted = torch.autograd.grad(expected.square().sum() / 2, leaves)
    close(out.detach(), expected.detach(), tolerance)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        close(one, other, tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_of_networks_of_heads(device):
    def penalty(evaluate, name):
        rows, weights, biases = networks(device=device)
        with backend(name):
            out = evaluate(rows, weights, biases)
            (slope,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
            return torch.autograd.grad(slope.square().sum(), [rows, *weights, *biases[:2]])

    wanted = penalty(literal_networks, "plain")
    for found, expected in zip(penalty(head_networks, "triton"), wanted, strict=True):
        close(found, expected, 1e-11)


def attentive(channel=True, spatial=True, dtype=torch.float64, device="cpu", **window):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    x, kernels = draw(2, 2, 2, 5, 4), draw(1, 2, 2, 2, 3, 3)
    matrices = (draw(1, 2, 2, 2, 2), draw(1, 2, 2, 2, 2)) if channel else None
    maps = draw(1, 2, 2, 2, 3, 3) if spatial else None
    with torch.no_grad():  # responses of the first image to the first kernels are negative, and some of the second 0
        x[0].abs_().neg_()
        x[1, ..., :3] = 0
        kernels[:, 0].abs_()
    leaves = [x, kernels, *(matrices or ()), *([maps] if spatial else [])]
    out, _ = attentive_convolution(x, kernels, channel=matrices, spatial=maps, measure=0.5, **window)
    return out, leaves


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pad": 2, "dilation": 2}, id="full attention"),
        pytest.param({"spatial": False, "pad": 1}, id="channels", marks=pytest.mark.slow),
        pytest.param({"channel": False, "spatial_dilation": 2}, id="space", marks=pytest.mark.slow),
    ],
)
def test_attentive_convolution(options, device, monkeypatch):
    """The 20 positions of responses, and more of pixels, are divided into blocks of 16."""
    monkeypatch.setattr("lieattn.ops.kernels.triton._attentive._POSITIONS", 16)
    monkeypatch.setattr("lieattn.ops.kernels.triton._attentive._ENTRIES", 16)
    weight = torch.linspace(-1, 2, 7, dtype=torch.float64, device=device)
    results = []
    for name in ("triton", "plain"):
        with backend(name):
            out, leaves = attentive(device=device, **options)
            factors = weight.repeat(-(-out.numel() // 7))[: out.numel()].view_as(out)
            results.append([out.detach(), *torch.autograd.grad((factors * out).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        close(found, expected, 1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_attentive_convolution_in_parts_twice_differentiable_and_in_float32(device, monkeypatch):
    monkeypatch.setattr("lieattn.ops._gated_sums._AT_ONCE", 1)
    results = []
    for name, dtype in (("triton", torch.float32), ("plain", torch.float64)):
        with backend(name):
            out, leaves = attentive(dtype=dtype, device=device)
            (slope,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
            results.append([out.detach(), *torch.autograd.grad(slope.square().sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        close(found, expected, 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", ["both are 1", pytest.param("spatial", marks=pytest.mark.slow)])
def test_attentive_convolution_loses_no_digits_where_attention_is_close_to_0_or_1(limit, device):
    found = near_limits("full", limit, "triton", torch.float32, device)
    for single, double in zip(found, near_limits("full", limit, "plain", torch.float64), strict=True):
        assert (single.cpu() - double).abs().max() <= 1e-5 * double.abs().max()


@compiled
@pytest.mark.parametrize("architecture", some([80, 90], [90]))
def test_networks_compile_for_a_gpu_that_is_not_here(architecture, monkeypatch, tmp_path):
    built = Compilation([_head_networks], architecture, monkeypatch, tmp_path)
    rows, weights, biases = (t.detach() if torch.is_tensor(t) else [w.detach().float() for w in t] for t in networks())
    parameters = [part for layer in zip(weights, biases, strict=True) for part in layer]
    out = _head_networks.run_forward(rows.float(), parameters)
    _head_networks.run_backward(out, rows.float(), parameters, True)
    assert set(built.machine_code) == {"forward", "backward_rows", "backward_parameters"}


@compiled
@pytest.mark.parametrize("architecture", some([80, 90], [80]))
def test_attentive_convolution_compiles_for_a_gpu_that_is_not_here(architecture, monkeypatch, tmp_path):
    built = Compilation([_attentive], architecture, monkeypatch, tmp_path)
    x, kernel = torch.zeros(1, 2, 3, 6, 5, requires_grad=True), torch.zeros(4, 2, 3, 9, requires_grad=True)
    _attentive._statistics(x, kernel, Window(3))
    levels = torch.zeros(1, 4, 2, 3, requires_grad=True)
    sum(_attentive._ChannelSums.apply(Window(3), True, x, kernel, levels)).sum().backward()
    assert set(built.machine_code) == {"largest_places", "channel_sums", "pixel_gradients", "tap_products"}
