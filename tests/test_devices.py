"""Networks on another device, with tensors that pretend to be there: none of their tensors stays on the CPU."""

import copy

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Constant

import lieattn
from lieattn._core import checks as _checks
from lieattn.certify import certify
from lieattn.geometry import PixelSquare, lift, pixel_positions
from lieattn.groups import cyclic
from lieattn.io import trained_cards
from lieattn.models import FramewiseTransformer, Preprocessed
from lieattn.nn import AffineSelfConvolution
from lieattn.nn.relative import RelativePositionTable
from lieattn.testing import randomize, relative_error
from tests.cases import some
from tests.elsewhere import DEVICE, Device, Elsewhere, moved
from tests.test_networks import Own
from tests.test_trained import item
from tests.test_waiting import NAMES, prepared

CARDS = trained_cards()


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Let the library take these tensors, although real ones on the meta device have no numbers."""
    monkeypatch.setattr(_checks.check_has_numbers, "__code__", (lambda argument, value: None).__code__)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with Device():
        yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def there(data):
    """Return a copy of data on the other device."""
    return data.to(DEVICE) if isinstance(data, torch.Tensor) else copy.copy(data).apply(lambda t: t.to(DEVICE))


def check_alike(network, data):
    """The network has the same output there, and gradients."""
    expected = network(data).detach()
    network = moved(copy.deepcopy(network))
    found = network(there(data))
    assert isinstance(found, Elsewhere)
    assert relative_error(found.here.detach(), expected) < 1e-4
    found.sum().backward()
    grads = [weight.grad for weight in network.parameters() if weight.grad is not None]
    assert grads
    assert all(isinstance(grad, Elsewhere) for grad in grads)


def test_operands_on_two_devices_are_refused():
    """Control: these tensors see what a GPU would see."""
    data = torch.ones(3).to(DEVICE)
    assert torch.equal((data + 1).to("cpu"), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="operands on two devices"):
        data + torch.ones(3)


def test_graphs_that_were_used_before_they_move():
    layer = AffineSelfConvolution(cyclic(4), 3, 8, RelativePositionTable.square(3, border="zero"))
    graph, x = lift(pixel_positions(4, 4), cyclic(4), PixelSquare(3)), torch.randn(16, 4, 3)
    expected = layer(x, graph).detach()
    found = moved(layer)(x.to(DEVICE), graph.to(DEVICE))
    assert relative_error(found.here.detach(), expected) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_networks(name):
    network, (data, *_) = prepared(name)
    check_alike(network, data)


@pytest.mark.parametrize("name", some(sorted(set(CARDS) - {"springs"}), ["rot-mnist-p4", "rot-mnist-r4", "qm9-homo-o"]))
def test_trained_networks(name):
    check_alike(lieattn.load(name), Batch.from_data_list([item(CARDS[name])] * 2))


@pytest.mark.parametrize("name", some(sorted(CARDS), ["rot-mnist-p4"]))
def test_certificates(name):
    measured, network = CARDS[name]["certificate"], moved(lieattn.load(name))
    tolerances = {getattr(torch, dtype): value for dtype, value in measured["tolerances"].items()}
    options = {"tolerances": tolerances, "rotations": 1, "elements": 4, "continuity": False}
    certificate = certify(network, item(CARDS[name]), **options)
    assert certificate.verdict == "kept", str(certificate)


@pytest.mark.parametrize("grid", [None, torch.tensor([[3, 2]])], ids=["points", "pixels"])
def test_certificates_of_data_on_another_device(grid):
    network = randomize(Own())  # has few operations, each of which is slow here
    network.symmetry = cyclic(4)
    pos = torch.randn(6, 2) if grid is None else pixel_positions(3, 2)
    clouds = [Data(pos=pos, x=torch.randn(6, 1)) for _ in range(2)]
    for cloud in clouds if grid is not None else ():
        cloud.grid = grid
    options = {"outputs": "invariant", "rotations": 1, "seed": 1}
    expected = certify(network, clouds, **options)
    assert ("raster" if grid is not None else "continuity") in {row.check for row in expected.rows}
    assert certify(network, [there(cloud) for cloud in clouds], **options).rows == expected.rows
    assert isinstance(there(clouds[0]).pos, Elsewhere)


def test_transforms_that_leave_features_on_the_cpu():
    network = Preprocessed(FramewiseTransformer(cyclic(4), 1, 3, channels=4), Constant(cat=False))
    check_alike(network, Data(pos=torch.randn(7, 2)))


def test_data_of_the_caller_stay_where_they_are():
    """Targets, for example, which the network does not need, although the transform returns the data themselves."""
    network = moved(Preprocessed(FramewiseTransformer(cyclic(4), 1, 3, channels=4), lambda data: data))
    data = there(Data(pos=torch.randn(7, 2), x=torch.ones(7, 1)))
    data.y = torch.zeros(1)
    network(data)
    assert not isinstance(data.y, Elsewhere)
