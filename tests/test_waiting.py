"""A training step with prepared geometry never waits for a GPU: it reads no value, and no shape depends on one."""

import copy
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch, Data

from lieattn.geometry import Radius, point_clouds
from lieattn.groups import tetrahedral
from lieattn.models import LieTransformer, Species
from lieattn.ops import backend
from lieattn.testing import randomize
from tests.test_networks import made, molecules

NAMES = (
    "gsa_images lie_conv framewise_principal_vector framewise lie_vectors directions distances_vector field_rotation "
    "rescaled attentive_cnn affine species"
).split()


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


def prepared(name, device="cpu", dtype=torch.float32):
    """Return a network, and a batch with prepared geometry or images, which need none."""
    if name == "species":
        options = {"channels": 4, "layers": 1, "heads": 2, "neighborhood": Radius(2.0)}
        network, clouds = randomize(LieTransformer(Species(), 1, frames=tetrahedral(), **options)), molecules()
    else:
        network, clouds = copy.deepcopy(made(name))
    network = network.to(device, dtype)
    if isinstance(clouds, torch.Tensor):
        return network, (clouds.to(device, dtype),)
    batch = Batch.from_data_list(clouds).to(device)
    batch.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
    return network, (batch, network.geometry(batch))


def step_of(name, device="cpu"):
    """Return a training step on prepared geometry, and its network."""
    network, given = prepared(name, device)
    network.train()

    def step():
        network.zero_grad()
        network(*given).square().mean().backward()

    return step, network


@pytest.mark.parametrize("name", NAMES)
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
    network, (batch, geometry) = prepared("rescaled")
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
@pytest.mark.parametrize("name", NAMES)
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
