"""A training step with prepared geometry never waits for a GPU: it reads no value, and no shape depends on one."""

import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch, Data

from lieattn.geometry import PrincipalFrames, Radius, pixel_positions, point_clouds
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import (
    AffineSelfConvNet,
    AttentiveCNN,
    DirectionConvNet,
    FieldModel,
    FramewiseTransformer,
    GSANet,
    LieConvNet,
    LieTransformer,
    Rescaled,
    Species,
)
from lieattn.models.irreps import DistanceTransformer
from lieattn.nn import RotationHead
from lieattn.ops import backend

NEAR = Radius(2.0)
NETWORKS = {
    "GSA-Net": lambda: GSANet(cyclic(4), 1, 3, channels=12, blocks=(1,), heads=2, neighborhood=Radius(1.5)),
    "LieTransformer": lambda: LieTransformer(
        Species(), 1, frames=tetrahedral(), channels=4, layers=1, heads=2, neighborhood=NEAR
    ),
    "LieConvNet": lambda: LieConvNet(2, 1, frames=PrincipalFrames(), channels=4, layers=1, neighborhood=NEAR),
    "principal frames": lambda: FramewiseTransformer(
        PrincipalFrames(), 2, 1, channels=4, layers=1, heads=2, neighborhood=NEAR, kind="vector", pool="none"
    ),
    "framewise": lambda: FramewiseTransformer(tetrahedral(), 2, 1, channels=4, layers=1, heads=2, neighborhood=NEAR),
    "LieTransformer with vectors": lambda: LieTransformer(
        2, 1, frames=PrincipalFrames(), channels=4, layers=1, heads=2, neighborhood=NEAR, vector_inputs=("vel",)
    ),
    "directions with vectors": lambda: DirectionConvNet(
        tetrahedral(), 2, 1, channels=4, layers=1, neighborhood=NEAR, vector_inputs=("vel",)
    ),
    "distances with vectors": lambda: DistanceTransformer(
        2, 1, channels=4, layers=1, heads=2, neighborhood=NEAR, vector_inputs=("vel",), kind="vector"
    ),
    "poses": lambda: FieldModel(
        FramewiseTransformer(tetrahedral(), 2, 1, channels=4, layers=1, heads=2, neighborhood=NEAR), RotationHead(4)
    ),
    "extensive": lambda: Rescaled(
        FramewiseTransformer(tetrahedral(), 2, 1, channels=4, layers=1, heads=2, neighborhood=NEAR, pool="sum"),
        {"energy": 2.0},
        {"energy": 1.0},
        extensive=["energy"],
    ),
    "AttentiveCNN": lambda: AttentiveCNN(cyclic(4), attention="full", channels=2),
    "AffineSelfConvNet": lambda: AffineSelfConvNet(cyclic(4), 1, channels=4, blocks=1),
}


class Waits(TorchDispatchMode):
    """Records calls that would wait for a GPU, and where the library makes them."""

    NUMBERS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        chosen = args[1] if name in ("index", "index_put_") else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in chosen)
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in self.NUMBERS or by_mask or counted:
            calls = [call for call in traceback.extract_stack() if "/lieattn/" in call.filename]
            self.found.append((name, *(f"{Path(call.filename).name}:{call.lineno}" for call in calls[-3:])))
        return func(*args, **(kwargs or {}))


def inputs_of(network, device="cpu", dtype=torch.float32):
    """Return a batch with prepared geometry, or images, which need none."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    if isinstance(network, (AttentiveCNN, AffineSelfConvNet)):
        side = 28 if isinstance(network, AttentiveCNN) else 4
        return (draw(2, 1, side, side).to(device),)
    if isinstance(network, GSANet):
        pos = pixel_positions(4, 4).to(dtype)
        clouds = [Data(x=draw(16, 1), pos=pos, grid=torch.tensor([[4, 4]])) for _ in range(2)]
    else:
        clouds = [Data(x=draw(n, 2), z=torch.full((n,), 6), pos=draw(n, 3), vel=draw(n, 3)) for n in (5, 4)]
    batch = Batch.from_data_list(clouds).to(device)
    return batch, network.geometry(batch)


def step_of(name, device="cpu"):
    """Return a training step on prepared geometry, and its network."""
    network = NETWORKS[name]().to(device)
    given = inputs_of(network, device)

    def step():
        network.zero_grad()
        network(*given).square().mean().backward()

    return step, network


@pytest.mark.parametrize("name", NETWORKS)
def test_no_step_looks_at_numbers(name, monkeypatch):
    with backend("plain"):
        step, _ = step_of(name)
        with Waits() as looking:
            step()
        monkeypatch.setattr("lieattn._core.checks._LOOKED_AT", ())  # as on a GPU
        step()
        with Waits() as waits:
            step()
    assert waits.found == []
    assert looking.found != []  # control: on CPUs, values are read


def test_points_are_counted_without_looking_at_numbers(monkeypatch):
    """Data that are no ``Batch`` need not have the row pointers ``ptr``."""
    network = NETWORKS["extensive"]()
    batch, geometry = inputs_of(network)
    data = Data(x=batch.x, pos=batch.pos, batch=batch.batch)
    with backend("plain"):
        expected = network(batch, geometry)
        monkeypatch.setattr("lieattn._core.checks._LOOKED_AT", ())  # as on a GPU
        network(data, geometry)
        with Waits() as waits:
            found = network(data, geometry)
    assert waits.found == []
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
def test_no_step_waits_for_a_gpu(name):
    step, _ = step_of(name, "cuda")
    step()  # compiles the kernels, and moves tables to the GPU
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unknown_species_are_seen_where_they_are_not_looked_at(monkeypatch):
    data = Data(z=torch.tensor([6, 35]), pos=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected charges among"):
        Species()(data, point_clouds(data))
    monkeypatch.setattr("lieattn._core.checks._LOOKED_AT", ())
    features = Species()(data, point_clouds(data))
    assert features[0].isfinite().all()
    assert features[1].isnan().all()
