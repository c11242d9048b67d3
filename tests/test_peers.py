"""Networks of other libraries in examples/peers: they are as invariant as stated, and they learn."""

import importlib
import importlib.util
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch_geometric.data import Batch, Data

from lieattn.certify import certify
from lieattn.compare import read_settings
from lieattn.geometry import Neighbors, Radius
from lieattn.groups import O
from lieattn.models import EnergyForces
from lieattn_datasets import NBodySimulated, image_to_data

PEERS = Path(__file__).parent.parent / "examples" / "peers"
CONFIGS = PEERS.parent / "configs"
PACKAGES = {"SchNet": "schnetpack", "PaiNN": "schnetpack", "EGNN": "egnn_pytorch", "NequIP": "nequip", "MACE": "mace"}
OF_MOLECULES = [*PACKAGES, "GeometricSchNet", "DimeNet", "ViSNet"]
PACKAGES |= {"SteerableCNN": "escnn"}
DIRECTED = ["PaiNN", "EGNN", "NequIP", "MACE", "ViSNet"]
COMPARED = {
    "homo": "compare_molecules",
    "u0": "compare_molecules",
    "dipoles": "compare_dipoles",
    "forces": "compare_forces",
    "ethanol": "compare_forces",
    "nbody": "compare_nbody",
    "shapes": "compare_shapes",
    "images": None,  # complete without other files
}

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(PEERS.parent)


def module():
    return importlib.import_module("peers")


def skip_without_package(name):
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed: see examples/peers/README.md")


def peer(name, **options):
    skip_without_package(name)
    torch.manual_seed(0)
    if name == "DimeNet":
        options["angles"] = 2  # deriving its formulas takes seconds
    return getattr(module(), name)(8, **options)


def molecules(count, seed=0):
    """Return molecules with atoms at random places, at least 0.9 apart."""
    generator, found = torch.Generator().manual_seed(seed), []
    grid = 1.4 * torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    for number in range(count):
        chosen = torch.randperm(27, generator=generator)[: 5 + number % 3]
        pos = grid[chosen] + 0.25 * torch.rand(len(chosen), 3, generator=generator)
        z = torch.tensor([1, 6, 7, 8])[torch.randint(4, (len(chosen),), generator=generator)]
        vel = torch.randn(len(chosen), 3, generator=generator)
        found.append(Data(z=z, pos=pos, vel=vel, x=(z - 4.0)[:, None]))
    return found


def falls(network, batch, target, steps=20):
    """Return the first and the last loss of a short training."""
    optimizer, losses = torch.optim.Adam(network.parameters(), lr=0.01), []
    for _ in range(steps):
        loss = (network(batch) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def certified(network, clouds, outputs, inputs=None):
    """Check errors under O(3) and reordered points. Some of the libraries divide by zero if points coincide."""
    options = {"inputs": inputs or {"pos": "vector"}, "outputs": outputs, "continuity": False}
    certificate = certify(network.eval(), clouds, O(3), dtypes=[torch.float32], elements=4, **options)
    rows = [row for row in certificate.rows if "degenerate" not in row.check]
    assert {row.check.split()[0] for row in rows} >= {"element", "permutation"}
    assert all(row.relative < 1e-4 for row in rows), str(certificate)


@pytest.mark.parametrize("name", OF_MOLECULES)
def test_numbers_are_invariant_and_learned(name):
    clouds = molecules(6)
    network = peer(name, pool="sum", radius=2.5)
    certified(network, clouds, "invariant")
    batch = Batch.from_data_list(clouds)
    before, after = falls(network.train(), batch, torch.tensor([0.0, 1.0] * 3)[:, None])
    assert after < 0.8 * before


@pytest.mark.parametrize("name", OF_MOLECULES)
def test_forces_are_gradients(name):
    network = EnergyForces(peer(name, pool="sum", radius=2.5)).eval()  # in float32, as some packages require
    cloud = molecules(1)[0]
    force = network(cloud).force
    step = 1e-2 * force / force.norm()
    ends = [network(Data(z=cloud.z, x=cloud.x, pos=cloud.pos + sign * step)).energy for sign in (1, -1)]
    assert torch.allclose(ends[0] - ends[1], -2 * (force * step).sum(), rtol=0.03)


@pytest.mark.parametrize("name", DIRECTED)
@pytest.mark.parametrize("pool", ["none", "sum"])
def test_vectors_turn_along_and_are_learned(name, pool):
    clouds = molecules(6)
    network = peer(name, kind="vector", pool=pool, radius=2.5)
    certified(network, clouds, "vector")
    batch = Batch.from_data_list(clouds)
    center = torch.cat([(cloud.pos - cloud.pos.mean(0)) * (cloud.z - 4.0)[:, None] for cloud in clouds])
    target = center / center.std()
    if pool == "sum":
        target = torch.zeros(6, 3).index_add(0, batch.batch, center) / center.std()
    before, after = falls(network.train(), batch, target, steps=60 if name in ("NequIP", "MACE") else 20)
    assert after < 0.9 * before


@pytest.mark.parametrize("name", ["PaiNN", "EGNN", "NequIP"])
def test_velocities_are_read(name):
    transform = module().BesideStraightLines()
    systems = [transform(system) for system in NBodySimulated("train", 4)]
    network = peer(name, kind="vector", pool="none", radius=10.0, vector_inputs=["vel"])
    certified(network, systems, "vector", {"pos": "vector", "vel": "vector"})
    batch = Batch.from_data_list(systems)
    with torch.no_grad():
        found = network(batch)
        batch.vel = 2 * batch.vel
        assert not torch.allclose(network(batch), found, rtol=1e-2)


@pytest.mark.parametrize("name", ["GeometricSchNet", "DimeNet", "ViSNet"])
def test_what_a_peer_does_not_take_is_refused(name):
    with pytest.raises(ValueError, match="vector_inputs"):
        peer(name, vector_inputs=["vel"])
    if name not in DIRECTED:
        with pytest.raises(ValueError, match="kind"):
            peer(name, kind="vector", pool="none")


def test_pairs_of_edges_are_all_there():
    lists = Radius(2.5, include_self=False)(torch.cat([cloud.pos for cloud in molecules(2)]))
    edges = list(zip(lists.source.tolist(), lists.target.tolist(), strict=True))
    numbers = itertools.product(range(len(edges)), repeat=2)
    expected = {(a, b) for a, b in numbers if edges[a][1] == edges[b][0] and edges[a][0] != edges[b][1]}
    first, second = module().edge_pairs(lists)
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == expected
    assert len(first) == len(expected) > 0
    alone = module().edge_pairs(Neighbors.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 3))
    assert all(len(part) == 0 for part in alone)


def test_what_is_left_beside_straight_lines():
    system = NBodySimulated("train", 1)[0]
    left = module().BesideStraightLines()(system)
    assert torch.allclose(left.y + system.pos + system.vel, system.y, atol=1e-6)
    assert system.y is not left.y


def solids(count):
    """Return points on spheres and on cubes, alternating."""
    generator, found = torch.Generator().manual_seed(0), []
    for number in range(count):
        direction = torch.randn(32, 3, generator=generator)
        size = direction.norm(dim=1) if number % 2 else direction.abs().amax(dim=1)
        normal = direction / direction.norm(dim=1, keepdim=True)
        found.append(Data(x=torch.ones(32, 1), pos=direction / size[:, None], normal=normal, y=number % 2))
    return found


@pytest.mark.parametrize("name", ["DGCNN", "PointNet", "PointTransformer"])
def test_networks_of_shapes_learn_and_do_not_see_the_order(name):
    clouds = solids(8)
    torch.manual_seed(0)
    network = getattr(module(), name)(1, 2, 8, vector_inputs=["normal"])
    cloud = clouds[0]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    moved = Data(x=cloud.x[order], pos=cloud.pos[order], normal=cloud.normal[order])
    with torch.no_grad():
        network.eval()
        assert torch.allclose(network(cloud), network(moved), atol=1e-5)
        turned = Data(x=cloud.x, pos=cloud.pos.roll(1, 1), normal=cloud.normal.roll(1, 1))
        assert not torch.allclose(network(cloud), network(turned), rtol=1e-3, atol=1e-4)  # it states no guarantee
    target = torch.eye(2)[[cloud.y for cloud in clouds]]
    before, after = falls(network.train(), Batch.from_data_list(clouds), target)
    assert after < 0.8 * before


@pytest.mark.parametrize("name", ["SmallCNN", "PlainViT", "SteerableCNN"])
def test_networks_of_rasters_learn_and_only_steerable_ones_are_invariant(name):
    """Crosses and squares of 8 x 8 pixels, at several places."""
    skip_without_package(name)
    images = torch.zeros(12, 8, 8)
    for number in range(0, 12, 2):
        row, column = 1 + number % 5, 1 + number // 3
        images[number, row, column - 1 : column + 2] = images[number, row - 1 : row + 2, column] = 1.0
        images[number + 1, row - 1 : row + 1, column - 1 : column + 1] = 1.0
    classes = torch.arange(12) % 2
    batch = Batch.from_data_list([image_to_data(image) for image in images])
    torch.manual_seed(0)
    network = getattr(module(), name)(1, 2, 8, **({"patch": 2, "side": 8, "layers": 2} if name == "PlainViT" else {}))
    assert torch.equal(module().raster(batch)[:, 0], images)
    state = set(network.state_dict())
    before, after = falls(network, batch, torch.eye(2)[classes])
    assert after < 0.8 * before
    turned = Batch.from_data_list([image_to_data(image.rot90()) for image in images])
    with torch.no_grad():
        invariant = torch.allclose(network.eval()(batch), network(turned), rtol=1e-3, atol=1e-3)
    assert invariant == (name == "SteerableCNN")
    assert set(network.state_dict()) == state  # in evaluation as in training


def networks(settings, name):
    """Return classes and arguments of the peers of a comparison, including those inside EnergyForces."""
    model = settings.models[name]
    spec = model.network if "model" not in model.init_args else model.init_args["model"]
    return spec["class_path"], spec.get("init_args", {})


@pytest.mark.parametrize("name", COMPARED)
def test_comparison_files_fit_the_classes(name):
    base = [CONFIGS / "compare_base.yaml", CONFIGS / f"{COMPARED[name]}.yaml"] if COMPARED[name] else []
    settings = read_settings([*base, PEERS / f"{name}.yaml"])
    own = yaml.safe_load((PEERS / f"{name}.yaml").read_text())["models"]
    found = 0
    for model in own:
        path, arguments = networks(settings, model)
        package, _, kind = path.rpartition(".")
        if package == "peers":
            inspect.signature(getattr(module(), kind)).bind(**arguments)
            found += 1
    assert found >= 2
    assert settings.budget.clock == "processor"


@pytest.mark.parametrize(
    "overlay", [*PEERS.glob("*_muon.yaml"), *PEERS.glob("*_ten_minutes.yaml")], ids=lambda p: p.stem
)
def test_overlays_change_models_or_add_some(overlay):
    name = overlay.stem.removesuffix("_muon").removesuffix("_ten_minutes")
    base = [CONFIGS / "compare_base.yaml", CONFIGS / f"{COMPARED[name]}.yaml", PEERS / f"{name}.yaml"]
    changed = yaml.safe_load(overlay.read_text())["models"]
    assert {name for name, model in changed.items() if "class_path" not in model} <= read_settings(base).models.keys()
    settings = read_settings([*base, overlay])
    for model in changed:
        assert {settings.models[model].optimizer["class_path"]} <= {"lieattn.train.Muon", "torch.optim.AdamW"}
        networks(settings, model)


@pytest.mark.slow
def test_the_search_of_rates_runs_as_its_comment_says(tmp_path):
    """Runs in a separate process, whose path has the folder of the script but not that of the adapters."""
    for name in ("peers", "configs"):
        (tmp_path / name).symlink_to(PEERS.parent / name)
    files = ["configs/compare_base.yaml", "configs/compare_shapes.yaml", "peers/shapes.yaml"]
    options = ["--models", "PointNet (PyG)", "--rates", "0.004", "--seconds", "0.05", "--data.batch_size", "8"]
    command = [sys.executable, "peers/search.py", "--config", *files, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("PointNet (PyG) 0.004: ")
