"""Networks on a GPU: the same outputs and gradients as on the CPU, the same guarantees, and steps in a CUDA graph."""

import pytest
import torch
from torch_geometric.data import Batch

import lieattn
from lieattn.certify import certify
from lieattn.io import trained_cards
from lieattn.ops import backend
from lieattn.testing import relative_error
from tests.test_trained import assert_predicts, item
from tests.test_waiting import NAMES, prepared, step_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CARDS = trained_cards()
every_trained_network = pytest.mark.parametrize("name", sorted(CARDS))


@pytest.fixture
def full_precision(monkeypatch):
    """Turn off TF32, which cuDNN uses for convolutions in float32 unless told otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@every_trained_network
def test_a_trained_network_predicts_what_its_card_says(name, full_precision):
    network = lieattn.load(name).to("cuda")
    assert_predicts(network, CARDS[name], Batch.from_data_list([item(CARDS[name])] * 2).to("cuda"))


@every_trained_network
def test_a_trained_network_keeps_what_it_promises(name):
    measured = CARDS[name]["certificate"]
    tolerances = {getattr(torch, dtype): value for dtype, value in measured["tolerances"].items()}
    options = {"tolerances": tolerances, "rotations": 1, "elements": 4, "continuity": False}
    certificate = certify(lieattn.load(name).to("cuda"), item(CARDS[name]), **options)
    assert certificate.verdict == "kept", str(certificate)


def results(name, device):
    """Return the output of a network and the gradients of its parameters."""
    network, given = prepared(name, device, torch.float64)
    out = network(*given)
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    factors = torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=device).view_as(out)
    grads = torch.autograd.grad((factors * out).sum(), weights, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_those_of_the_cpu(name):
    with backend("plain"):
        expected = results(name, "cpu")
    for found, wanted in zip(results(name, "cuda"), expected, strict=True):
        assert relative_error(found.cpu(), wanted) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_captured_in_a_cuda_graph(name):
    """Replaying the graph computes the step again, with new parameters."""
    step, network = step_of(name, "cuda")
    network.eval()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    weights = [weight for weight in network.parameters() if weight.grad is not None]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(1.25)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [weight.grad.clone() for weight in weights]
    step()
    for found, weight in zip(replayed, weights, strict=True):
        torch.testing.assert_close(found, weight.grad, rtol=1e-3, atol=1e-4)
