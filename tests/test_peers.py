"""Networks of other libraries in examples/peers: they are as invariant as stated, and they learn."""

import importlib
import importlib.util
import inspect
import itertools
import json
import re
import statistics
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
from lieattn_datasets import NBodySimulated

PEERS = Path(__file__).parent.parent / "examples" / "peers"
CONFIGS = PEERS.parent / "configs"
DOCS = PEERS.parent.parent / "docs"
PACKAGES = {"SchNet": "schnetpack", "PaiNN": "schnetpack", "EGNN": "egnn_pytorch", "NequIP": "nequip", "MACE": "mace"}
GEOMETRIC = ["GeometricSchNet", "DimeNet", "ViSNet"]
DIRECTED = ["PaiNN", "EGNN", "NequIP", "MACE", "ViSNet"]
COMPARED = {
    "homo": "compare_molecules",
    "u0": "compare_molecules",
    "dipoles": "compare_dipoles",
    "forces": "compare_forces",
    "ethanol": "compare_forces",
    "nbody": "compare_nbody",
    "shapes": "compare_shapes",
}

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(PEERS.parent)


def module():
    return importlib.import_module("peers")


def peer(name, **options):
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed: see examples/peers/README.md")
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


@pytest.mark.parametrize("name", [*PACKAGES, *GEOMETRIC])
def test_numbers_are_invariant_and_learned(name):
    clouds = molecules(6)
    network = peer(name, pool="sum", radius=2.5)
    certified(network, clouds, "invariant")
    batch = Batch.from_data_list(clouds)
    before, after = falls(network.train(), batch, torch.tensor([0.0, 1.0] * 3)[:, None])
    assert after < 0.8 * before


@pytest.mark.parametrize("name", [*PACKAGES, *GEOMETRIC])
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


@pytest.mark.parametrize("name", ["PointNet", "PointTransformer"])
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


def networks(settings, name):
    """Return classes and arguments of the peers of a comparison, including those inside EnergyForces."""
    model = settings.models[name]
    spec = model.network if "model" not in model.init_args else model.init_args["model"]
    return spec["class_path"], spec.get("init_args", {})


@pytest.mark.parametrize("name", COMPARED)
def test_comparison_files_fit_the_classes(name):
    base = [CONFIGS / "compare_base.yaml", CONFIGS / f"{COMPARED[name]}.yaml"]
    files = [*base, PEERS / f"{name}.yaml"]
    settings = read_settings(files)
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


def recorded(content):
    """Return the runs of a record with a test result, at any depth."""
    if isinstance(content, list):
        return [run for part in content for run in recorded(part)]
    if not isinstance(content, dict):
        return []
    if "model" in content and content.get("metrics"):
        metrics = content.get("rotated_metrics") or content["metrics"]
        return [{**content, "result": metrics.get("accuracy", metrics.get("error"))}]
    return [run for part in content.values() for run in recorded(part)]


def is_rounded(value, text):
    """Whether a printed number, perhaps in percent, is the rounded value."""
    unit = 10.0 ** -len(text.partition(".")[2])
    return any(abs(factor * value - float(text)) <= 0.5001 * unit for factor in (1, 100))


def numbers(cell):
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", cell))


def runs_of(cell, runs):
    """Return all choices of different runs of one model with the printed results."""
    found = []
    for model in dict.fromkeys(run["model"] for run in runs):
        own = [
            [run for run in runs if run["model"] == model and is_rounded(run["result"], one)] for one in numbers(cell)
        ]
        found += [some for some in itertools.product(*own) if len({id(run) for run in some}) == len(own)]
    return found


def has_mean(runs, cell):
    mean, *deviation = numbers(cell)
    results = [run["result"] for run in runs]
    return is_rounded(statistics.mean(results), mean) and all(
        is_rounded(statistics.stdev(results), one) for one in deviation
    )


def has_steps(runs, cell):
    printed, steps = [int(one) for one in numbers(cell)], [run["steps"] for run in runs]
    listed = [min(steps), max(steps)] if " to " in cell else steps
    return sorted(printed) == sorted(listed) or printed == [round(statistics.mean(steps))]


COLUMNS = {
    "mean": has_mean,
    "steps": has_steps,
    "parameters": lambda runs, cell: all(run["parameters"] == int(numbers(cell)[0]) for run in runs),
    "change": lambda runs, cell: f"{max(run['equivariance']['after']['rotations'] for run in runs):.0e}" == cell,
}
TABLES = re.findall(r"(?:^\|.*\n)+", (DOCS / "results.md").read_text().split("### Beside peers")[1], flags=re.MULTILINE)


@pytest.mark.parametrize(
    "table",
    [table for table in TABLES if "seeds 0, 1, 2" in table.splitlines()[0]],
    ids=lambda table: table.splitlines()[0][:40],
)
def test_tables_of_results_are_those_of_the_records(table):
    """Results of seeds are found in the records, and means, steps, parameters and changes are those of these runs."""
    runs = [run for path in (PEERS / "results").glob("*.json") for run in recorded(json.loads(path.read_text()))]
    runs = [run for run in runs if run["result"] is not None]
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    rows = [row for row in rows if "the same with" not in row[1]]  # runs of two models
    checked = 0
    for row in rows:
        chosen = None
        for name, cell in zip(header, [re.sub(r"[*ᵃᵇᶜ]", "", cell) for cell in row], strict=True):
            kind = re.split(r"[ ,]", name)[0]
            if "seeds" in name or name.startswith(("N-body", "ethanol", "10 minutes")):
                chosen = runs_of(cell, runs) if numbers(cell) else None
                assert chosen != [], (row[0], name, cell)
            elif kind in COLUMNS and chosen is not None and "(" not in name and numbers(cell):
                chosen = [some for some in chosen if COLUMNS[kind](some, cell)]
                assert chosen, (row[0], name, cell)
                checked += 1
    assert checked >= len(rows)


def test_the_table_of_particles_is_that_of_its_record():
    record = json.loads((DOCS / "compare_nbody.json").read_text())
    runs = recorded(record["cells"])
    (table,) = [table for table in TABLES if table.startswith("| model | error | rotated |")]
    for line in table.splitlines()[2:]:
        model, error, rotated, steps, change = [cell.strip(" *") for cell in line[1:-1].split("|")]
        own = [run for run in runs if run["model"] == model]
        assert has_mean([{"result": run["metrics"]["error"]} for run in own], error)
        assert has_mean(own, rotated)
        assert has_steps(own, steps)
        assert COLUMNS["change"](own, change)


AGAINST_IRREPS = ("forces", "molecules", "dipoles", "shapes", "shapes_so3")


def against_irreps():
    """Return rows of the comparison with irreps, written from its records: results, steps and change of each model."""
    runs = {}
    for name in AGAINST_IRREPS:
        runs[name] = recorded(json.loads((DOCS / f"compare_{name}.json").read_text())["cells"])
    rows = {}
    for model in dict.fromkeys(run["model"] for run in runs["forces"]):
        own = {name: [run for run in runs[name] if run["model"] == model] for name in AGAINST_IRREPS}
        assert all(sorted(run["seed"] for run in some) == [0, 1, 2] for some in own.values())
        results = []
        for (name, some), digits in zip(own.items(), (2, 0, 3, 1, 1), strict=True):
            values = [(100 if name.startswith("shapes") else 1) * run["result"] for run in some]
            unit = " %" if name.startswith("shapes") else ""
            results.append(f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}{unit}")
        steps = [statistics.mean(run["steps"] for run in own[name]) for name in ("forces", "molecules", "shapes")]
        change = max(run["equivariance"]["after"]["rotations"] for run in own["forces"])
        rows[model] = [*results, ", ".join(f"{number:.0f}" for number in steps), f"{change:.0e}"]
    return rows


def printed(page, start):
    """Return the cells of the first table of a page whose head starts like this, without bold type."""
    tables = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), flags=re.MULTILINE)
    (table,) = [table for table in tables if table.startswith(start)]
    return [[cell.strip(" *") for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


def test_the_tables_against_irreps_are_those_of_the_records():
    rows = against_irreps()
    lines = printed("results.md", "| model | forces, kcal/(mol Å) | HOMO, meV | dipole, D | shapes, z/SO(3) | shapes,")
    assert {model: cells for model, *cells in lines} == rows
    chosen = {
        "`FramewiseTransformer`, `PrincipalFrames()`": "framewise exact frames",
        "`FramewiseTransformer`, `octahedral()`": "framewise O",
        "`FramewiseTransformer`, `icosahedral()`": "framewise I",
        "`LieTransformer`, `PrincipalFrames()`": "joint exact frames",
        "`LieTransformer`, `tetrahedral()`": "joint T",
        "`irreps.TensorFieldNetwork`": "tensor field network",
        "`irreps.SE3Transformer`": "SE(3)-Transformer",
        "`irreps.DistanceTransformer`": "distances",
    }
    lines = printed(
        "which_model.md", "| model | forces, kcal/(mol Å) | HOMO, meV | dipole, D | shapes, z/SO(3) | steps"
    )
    assert [line[0] for line in lines] == list(chosen)
    first = int(rows["framewise exact frames"][5].split(", ")[1])
    for model, forces, homo, dipole, shapes, steps, time, change in lines:
        row = rows[chosen[model]]
        means = [cell.split(" ± ")[0] for cell in row[:4]]
        assert [forces, homo, dipole, shapes.removesuffix(" %"), steps, change] == [*means, *row[5:]]
        assert is_rounded(first / int(row[5].split(", ")[1]), time)
