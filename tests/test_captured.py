"""Captured training steps: the results of usual ones, replayed only where that is exact.

Without a GPU, a function replaces the capture by torch. Like a graph it has one memory for inputs, outputs and
gradients.
"""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

import lieattn
from lieattn.cli import main
from lieattn.geometry import FiniteFrames, Radius, SampledFrames, pixel_positions
from lieattn.groups import cyclic
from lieattn.models import AttentiveCNN, Captured, FramewiseTransformer, GSANet, Preprocessed, Rescaled
from lieattn.models._base import captured as _captured
from lieattn.testing import relative_error
from lieattn.train import PointSetRegressor, load_network
from lieattn_datasets import Standardize
from tests.cases import short_training
from tests.test_train import config, write
from tests.test_waiting import NAMES, prepared

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MAKERS = {
    "AttentiveCNN": lambda: AttentiveCNN(cyclic(4), channels=2, out_channels=3, attention="input"),
    "GSA-Net": lambda: GSANet(cyclic(4), 1, 3, channels=12, blocks=(1,), heads=2, neighborhood=Radius(1.5)),
}


class Pretended:
    """Replaces ``torch.cuda.make_graphed_callables`` on the CPU; counts captures and replays."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, body, inputs, allow_unused_input):
        self.captures += 1
        weights = [weight for weight in body.parameters() if weight.requires_grad]
        for _ in range(3):
            body(*inputs)  # as torch does before it captures
        memory, slopes = [], [torch.empty_like(weight) for weight in weights]

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *given):
                self.replays += 1
                for static, value in zip(inputs, given, strict=False):
                    static.copy_(value)
                with torch.enable_grad():
                    memory[:] = [body(*inputs)]
                return memory[0].detach()

            @staticmethod
            def backward(ctx, grad):
                grads = torch.autograd.grad(memory[0], weights, grad, allow_unused=True)
                for static, found in zip(slopes, grads, strict=True):
                    static.zero_() if found is None else static.copy_(found)
                return *[None] * len(inputs), *(static.detach() for static in slopes)

        return lambda *given: Replay.apply(*given, *weights)


@pytest.fixture
def pretended(monkeypatch):
    capture = Pretended()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(_captured, "_can_be_captured", lambda network: True)
    return capture


def images(seed, count=2, side=28, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    pos, grid = pixel_positions(side, side) + shift, torch.tensor([[side, side]])
    clouds = [
        Data(x=torch.randn(side**2, 1, generator=generator), pos=pos, grid=grid, y=torch.tensor([seed % 3]))
        for _ in range(count)
    ]
    return Batch.from_data_list(clouds)


def trained(network, batches):
    """Return the losses of steps of gradient descent, and the state at the end."""
    network.train()
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=1e-2), []
    torch.manual_seed(0)
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(batch), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name.removeprefix("network."): value.clone() for name, value in network.state_dict().items()}


def without_dropout(network):
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return network


def captured(name):
    return Captured(without_dropout(MAKERS[name]())).train()


@pytest.mark.parametrize("name", MAKERS)
def test_trains_as_usual(name, pretended):
    """Smaller last batches and one with moved pixels are among the batches."""
    side = 28 if name == "AttentiveCNN" else 6
    epoch = [images(seed, side=side) for seed in range(4)] + [images(4, count=1, side=side)]
    batches = [*epoch, images(5, side=side, shift=0.25), *epoch, images(6, count=1, side=side)]
    network = without_dropout(MAKERS[name]())
    losses, state = trained(copy.deepcopy(network), batches)
    found, other = trained(Captured(network), batches)
    assert found == pytest.approx(losses, rel=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-6)
    # The second batch is captured. Images that are moved as a whole are the same images, so that the second smaller
    # batch is the second one in a row that is not replayed.
    assert (pretended.captures, pretended.replays) == (2, 10 if name == "AttentiveCNN" else 8)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "around", [lambda net: Rescaled(net, {"y": 2.0}), lambda net: Preprocessed(net, Standardize(0.5, 2.0))]
)
def test_modules_around_networks_train_as_usual(around, name, pretended):
    """Their method ``geometry`` works only if the network has a geometry."""
    batches = [images(seed, side=28 if name == "AttentiveCNN" else 6) for seed in range(4)]
    network = around(without_dropout(MAKERS[name]()))
    losses, _ = trained(copy.deepcopy(network), batches)
    assert trained(Captured(network), batches)[0] == pytest.approx(losses, rel=1e-5)
    assert pretended.captures == 1


def test_images_in_another_precision_are_converted(pretended):
    epoch = [images(seed, side=28) for seed in range(3)]
    wide = [batch.clone().update({"x": batch.x.double(), "pos": batch.pos.double()}) for batch in epoch]
    network = without_dropout(MAKERS["AttentiveCNN"]())
    losses, _ = trained(copy.deepcopy(network), wide)
    assert trained(Captured(network), wide)[0] == pytest.approx(losses, rel=1e-5)
    assert pretended.captures == 1


def test_outputs_that_wait_for_their_gradients_stay(pretended):
    """A second step before the gradients of the first would overwrite what these need."""
    network = captured("AttentiveCNN")
    for seed in range(2):
        network(images(seed)).sum().backward()
    network.zero_grad()
    first = network(images(2))
    kept = first.clone()
    second = network(images(3))
    assert pretended.replays == 2
    torch.testing.assert_close(first, kept, rtol=0, atol=0)
    (first.square().sum() + second.square().sum()).backward()
    found = [weight.grad for weight in network.parameters()]
    network.zero_grad()
    sum(network.network(images(seed)).square().sum() for seed in (2, 3)).backward()
    for grad, weight in zip(found, network.parameters(), strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["accumulated", "set to zero", "set to none after the forward pass"])
def test_gradients_are_added_as_usual(pretended, way):
    """Graphs write gradients into memory of their own, which torch takes for the gradients of the weights."""
    usual = without_dropout(MAKERS["AttentiveCNN"]()).train()
    captured = Captured(copy.deepcopy(usual))
    for seed in range(5):
        for network in (usual, captured):
            if seed == 2:
                network.zero_grad()  # torch takes the memory of a graph if there are no gradients yet
            loss = network(images(seed)).square().sum()
            if way != "accumulated":
                network.zero_grad(set_to_none=way != "set to zero")
            loss.backward()
        for one, other in zip(usual.parameters(), captured.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert pretended.replays == 4


def test_outputs_that_were_dropped_do_not_hold_up_the_next_step(pretended):
    network = captured("AttentiveCNN")
    for seed in range(5):
        network(images(seed))
    assert pretended.replays == 4


def test_nothing_is_captured_in_evaluation(pretended):
    network = Captured(MAKERS["AttentiveCNN"]()).eval()
    for seed in range(3):
        network(images(seed))
    network.train()
    with torch.no_grad():
        for seed in range(3):
            network(images(seed))
    assert pretended.captures == 0


@pytest.mark.parametrize("change", ["moved", "frozen", "part in evaluation"])
def test_graphs_are_discarded_if_the_network_changes(change, pretended):
    network = captured("AttentiveCNN")
    for seed in range(2):
        network(images(seed)).sum().backward()
    if change == "moved":
        network.double().float()
    elif change == "frozen":
        network.network.layers[0].requires_grad_(False)
    else:
        network.network.norms[0].eval()
    network.zero_grad()
    network(images(2)).sum().backward()
    assert pretended.captures == 1  # computed as usual
    network(images(3)).sum().backward()
    assert pretended.captures == 2
    if change == "frozen":
        assert all(weight.grad is None for weight in network.network.layers[0].parameters())


def test_copies_and_files_have_no_graphs(pretended, tmp_path):
    network = Captured(MAKERS["AttentiveCNN"]()).train()
    for seed in range(2):
        network(images(seed))
    assert copy.deepcopy(network)._known.graphs == []
    assert network._known.graphs
    lieattn.save(network, tmp_path / "network.safetensors")
    loaded = lieattn.load(tmp_path / "network.safetensors")
    assert isinstance(loaded, Captured)
    torch.testing.assert_close(loaded.eval()(images(0)), network.eval()(images(0)))


def test_says_why_nothing_is_captured(pretended):
    network = Captured(FramewiseTransformer(cyclic(4), 1, 3, channels=4, layers=1)).train()

    def cloud(seed, points=5):
        batch = Batch.from_data_list([Data(x=torch.ones(points, 1), pos=torch.ones(points, 2), energy=torch.rand(1))])
        batch.y = torch.tensor([seed])
        return batch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(9):
            network(cloud(seed))
    with pytest.warns(UserWarning, match="batches differ in energy; name it in inputs, or in unread"):
        network(cloud(9))
    network = Captured(network.network, unread=("y", "energy")).train()
    for seed in range(3):
        network(cloud(seed))
    assert pretended.captures == 1


def test_inputs_with_gradients_are_computed_as_usual(pretended):
    network = captured("GSA-Net")
    for seed in range(3):
        network(images(seed, side=6))
    for name in ("x", "pos"):
        data = images(3, side=6)
        data[name].requires_grad_()
        network(data).sum().backward()
        assert data[name].grad.isfinite().all()
    assert pretended.replays == 2


def test_parts_in_evaluation_stay_there(pretended):
    network = captured("AttentiveCNN")
    network.network.norms[0].eval()
    before = network.network.norms[0].running_mean.clone()
    for seed in range(3):
        network(images(seed)).sum().backward()
    assert pretended.captures == 1
    assert not network.network.norms[0].training
    assert torch.equal(network.network.norms[0].running_mean, before)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_data_that_change_in_place_are_noticed(pretended, after):
    network = captured("GSA-Net")
    data = images(0, side=6)
    for _ in range(after):
        network(data)
    data.pos.mul_(1.25)
    torch.testing.assert_close(network(data), network.network(data))
    assert pretended.replays == after - 1


def test_values_that_are_no_tensors_are_compared(pretended):
    network = captured("GSA-Net")
    for wind in (1.0, 2.0, 2.0, 2.0, 3.0):
        data = images(0, side=6)
        data.wind = wind
        network(data)
    assert pretended.replays == 2


@pytest.mark.parametrize("shared", [True, False])
def test_given_geometry_is_compared(pretended, shared):
    network = captured("GSA-Net")
    first = network.network.geometry(images(0, side=6))
    for seed in range(3):
        data = images(seed, side=6)
        network(data, first if shared else network.network.geometry(data))
    assert (pretended.captures, pretended.replays) == (1, 2)
    data = images(3, side=6)
    far = GSANet(cyclic(4), 1, 3, channels=12, blocks=(1,), heads=2, neighborhood=Radius(2.5)).geometry(data)
    torch.testing.assert_close(network(data, far), network.network(data, far))
    assert pretended.replays == 2


def test_random_frames_are_not_frozen(pretended):
    frames = FiniteFrames(cyclic(4), SampledFrames(1, per="cloud"))
    network = Captured(FramewiseTransformer(frames, 1, 3, channels=4, layers=1)).train()
    data = Batch.from_data_list([Data(x=torch.randn(5, 1), pos=torch.randn(5, 2))])
    with pytest.warns(UserWarning, match="batches differ in geometry; .* or if its geometry is random"):
        outputs = [network(data).detach() for _ in range(10)]
    assert pretended.captures == 0
    assert not torch.equal(outputs[-1], outputs[-2])


def test_the_module_is_named_if_torch_cannot_capture(pretended, monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    network = Captured(MAKERS["AttentiveCNN"]()).train()
    network(images(0))
    with pytest.raises(RuntimeError, match="not permitted") as caught:
        network(images(1))
    assert caught.value.__notes__ == ["Captured: AttentiveCNN cannot be captured; use it without Captured"]


@short_training
@pytest.mark.parametrize("wanted", [True, False])
def test_training_by_configuration(pretended, monkeypatch, tmp_path, wanted):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    content = config(tmp_path, enable_checkpointing=True)
    group = content["model"]["init_args"]["network"]["init_args"]["group"]
    options = {"channels": 2, "out_channels": 2}
    network = {"class_path": "lieattn.models.AttentiveCNN", "init_args": {"group": group, **options}}
    content["model"]["init_args"]["network"] = network
    digits = {"class_path": f"{__name__}.NoisyImages"}
    content |= {"data": {"train": digits, "val": digits, "batch_size": 2}, "cuda_graphs": wanted}
    assert main(["fit", "--config", write(tmp_path / "run.yaml", content)]) == 0
    assert bool(pretended.replays) == wanted
    checkpoint = tmp_path / "checkpoints/last.ckpt"
    assert not any(".network." in name for name in torch.load(checkpoint, weights_only=True)["state_dict"])
    assert type(load_network(checkpoint)) is AttentiveCNN


class NoisyImages(torch.utils.data.Dataset):
    """Six images with labels."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        item = images(index, count=1)[0]
        item.y = item.y % 2
        return item


def test_tasks_name_what_they_read_themselves(pretended):
    pos = torch.randn(5, 2)
    network = FramewiseTransformer(cyclic(4), 1, 1, channels=4, layers=1, vector_inputs=("vel",))
    task = PointSetRegressor(network, targets={"energy": 1.0, "gap": 1.0}).capture().train()
    for seed in range(3):
        torch.manual_seed(seed)
        wide = {"energy": torch.rand(1), "energy_weight": torch.rand(1), "gap_mask": torch.rand(1) < 0.5}
        batch = Batch.from_data_list([Data(x=torch.randn(5, 1), vel=torch.randn(5, 2), pos=pos, **wide)])
        task.outputs_of(batch).sum().backward()
    assert pretended.replays == 2
    assert set(task.state_dict()) == set(PointSetRegressor(network, targets=task.targets).state_dict())
    task.eval().outputs_of(batch)
    assert pretended.replays == 2
    other = copy.deepcopy(task).train()
    other.outputs_of(batch)
    assert other._captured[0].network is other.network


def test_targets_may_be_inputs_as_well(pretended):
    network = FramewiseTransformer(cyclic(4), 1, 1, channels=4, layers=1, vector_inputs=("vel",), kind="vector")
    task = PointSetRegressor(network, targets="vel", shift=[]).capture().train()
    pos = torch.randn(5, 2)
    for _ in range(3):
        batch = Batch.from_data_list([Data(x=torch.ones(5, 1), vel=torch.randn(5, 2), pos=pos)])
        torch.testing.assert_close(task.outputs_of(batch), network(batch))
    assert pretended.replays == 2


def test_arguments():
    network = MAKERS["AttentiveCNN"]()
    with pytest.raises(ValueError, match=r"inputs: expected names of attributes, at least one .* got \(\)"):
        Captured(network, inputs=())
    with pytest.raises(ValueError, match=r"none that is in unread, got \('x', 'y'\)"):
        Captured(network, inputs=("x", "y"))
    captured = Captured(network)
    assert captured.symmetry.group is network.group
    assert Rescaled(captured, {"y": torch.ones(())}, {"y": torch.zeros(())}).kind == network.kind


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in NAMES])
def test_steps_on_a_gpu_are_the_usual_ones(name):
    network, given = prepared(name, "cuda")
    network, captured = without_dropout(network).train(), Captured(copy.deepcopy(network)).train()
    for number in range(4):
        data = given[0] * (1 + number) if isinstance(given[0], torch.Tensor) else given[0].clone()
        if not isinstance(data, torch.Tensor) and "x" in data:
            data.x = data.x * (1 + number)
        grads = []
        for module in (network, captured):
            module.zero_grad()
            module(data, *given[1:]).square().mean().backward()
            grads.append([weight.grad for weight in module.parameters() if weight.grad is not None])
        for one, other in zip(*grads, strict=True):
            assert relative_error(one, other) < 1e-3
    assert len(captured._known.graphs) == 1
    for buffer, other in zip(network.buffers(), captured.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_replay_on_a_gpu_drops_other_weights():
    network = without_dropout(MAKERS["GSA-Net"]())
    for module in network.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.5
    captured, data = Captured(network).cuda().train(), images(0, side=6).cuda()
    outputs = []
    for _ in range(4):
        outputs.append(captured(data).detach())
    assert captured._known.graphs
    assert not torch.equal(outputs[-1], outputs[-2])
