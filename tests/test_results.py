"""Tables of results in the documentation are those of the records."""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
PEERS = EXAMPLES / "peers"


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


def printed(page, start):
    """Return the cells of the first table of a page whose head starts like this, without bold type."""
    tables = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), flags=re.MULTILINE)
    (table,) = [table for table in tables if table.startswith(start)]
    return [[cell.strip(" *") for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


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
TABLES = re.findall(r"(?:^\|.*\n)+", (DOCS / "records/peers.md").read_text(), flags=re.MULTILINE)


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
    record = json.loads((DOCS / "records" / "compare_nbody.json").read_text())
    runs = recorded(record["cells"])
    for model, error, rotated, steps, change in printed("results.md", "| model | error | rotated |"):
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
        runs[name] = recorded(json.loads((DOCS / "records" / f"compare_{name}.json").read_text())["cells"])
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


def results_of(script):
    """Return the results of a script in the records, run by run."""
    records = json.loads((EXAMPLES / "results.json").read_text())
    return [record["results"] for record in records if f" examples/{script}.py" in record["command"]]


def test_the_table_of_digits_is_that_of_the_records():
    """The table has medians over five seeds, and the largest change of a logit."""
    runs = results_of("rotated_digits")
    assert len(runs) == 5
    columns = ["upright", "group_angles", "45_degrees", "random_angles", "worst_angle"]
    expected = {}
    for name in runs[0]:
        own = [run[name] for run in runs]
        shares = [f"{100 * statistics.median(run[f'accuracy_{column}'] for run in own):.1f} %" for column in columns]
        change = max(run["equivariance_error"] for run in own)
        seconds = statistics.median(run["seconds_per_epoch"] for run in own)
        size = f"{own[0]['parameters']:,}"
        expected[name] = [name, size, *shares, f"{change:.1e}" if change else "0", f"{seconds:.1f}"]
    assert printed("results.md", "| network | parameters | upright |") == [*expected.values()]
    readme, (z2, _, c8, axes) = " ".join((EXAMPLES.parent / "README.md").read_text().split()), expected.values()
    assert f"{c8[4]} of the test digits correctly at multiples of 45 degrees, {c8[6]} at the worst angle" in readme
    assert f"{axes[6]} at every angle" in readme
    assert f"alone has {z2[2]} on upright digits and {z2[4]} at multiples of 45 degrees" in readme


def test_the_summary_of_peers_has_the_means_of_all_runs():
    rows = [line for table in TABLES for line in table.splitlines()]
    seeds = {  # the beginnings of the rows with the seeds of each mean, by the cells of the summary in their order
        "directions": [
            "directions, `mlp_ratio=2`",
            "directions, four layers, `mlp_ratio=2`",
            "directions, four layers, Muon",
            "directions Th, three layers",
        ],
        "PaiNN": [
            "PaiNN | Muon",
            "PaiNN | 0.008 | 0.669",
            "dipoles, D (`peers/dipoles_ten",
            "particles, straight lines",
        ],
    }
    for number, (_, *means, _) in enumerate(printed("results.md", "| task | `directions` |")):
        for starts, mean in zip(seeds.values(), means, strict=True):
            (row,) = [row for row in rows if row.strip("| ").startswith(starts[number])]
            numeric = [numbers(cell) for cell in row.split("|") if re.fullmatch(r"[\d., *]+", cell.strip())]
            found = max(numeric[:2], key=len) if len(numeric) > 2 else numeric[0]  # a rate may stand before the seeds
            assert is_rounded(statistics.mean(map(float, found)), numbers(mean)[0]), (row, mean)


@pytest.mark.parametrize(
    ("name", "head", "columns"),
    [
        ("ten_minutes", "| network | parameters | steps | accuracy |", {"parameters": 0, "steps": 0, "test": 2}),
        ("an_hour", "| network, an hour | steps | accuracy |", {"steps": 0, "test": 2}),
        ("upright_training", "| network | steps | rotated |", {"steps": 0, "test": 1, "validations": 1}),
        ("few_clothes", "| network | steps | rotated clothes |", {"steps": 0, "test": 1, "upright": 1}),
        ("ablations", "| variant | parameters | steps | accuracy |", {"parameters": 0, "steps": 0, "test": 2}),
        ("convolutions", "| blocks of 200 seconds |", {"parameters": 0, "steps": 0, "validations": 2, "test": 2}),
    ],
)
def test_comparisons_of_images_are_those_of_the_record(name, head, columns):
    """Steps are the least of the seeds; accuracies are those of all seeds, and the last ones of validations."""
    models = {}
    for cell in json.loads((DOCS / "records" / "images.json").read_text())[name]["cells"]:
        models.setdefault(cell["model"], []).append({**cell, "validations": cell["validations"][-1]})
    expected = []
    for cells in models.values():
        cells.sort(key=lambda cell: cell["seed"])
        least = {key: f"{min(cell[key] for cell in cells):,}" for key, digits in columns.items() if not digits}
        shares = {key: [f"{100 * cell[key]:.{columns[key]}f}" for cell in cells] for key in columns if columns[key]}
        expected.append([*least.values(), *(f"{', '.join(values)} %" for values in shares.values())])
    page = "records/trials.md" if name in ("ablations", "convolutions") else "images.md"
    assert sorted(row[1:] for row in printed(page, head)) == sorted(expected)


def test_choices_for_the_demo_are_those_of_their_record():
    expected = []
    for variant in json.loads((DOCS / "records" / "demo_choices.json").read_text())["variants"]:
        cells = [str(variant["batch_size"]), str(variant["epochs"]), f"{variant['slanted']:g}"]
        for column in ("upright", "22_degrees", "random_angles"):
            shares = [f"{100 * run[f'accuracy_{column}']:.1f}" for run in variant["runs"]]
            cells.append(f"{', '.join(shares)} %")
        expected.append(cells)
    assert printed("results.md", "| batch size | epochs | share of slanted digits |") == expected


def test_the_table_of_published_networks_is_that_of_the_records():
    expected = []
    for run in results_of("published_networks"):
        for name, one in run.items():
            digits = 2 if "CNN" in name else 1
            share = f"{100 * one['accuracy']:.{digits}f} %"
            expected.append([f"{one['parameters']:,}", share, f"{one['training_minutes']:.1f} min"])
            assert "p4" not in name or one["unchanged_by_quarter_turn"] == 1
    assert [cells[2:] for cells in printed("results.md", "| data | network | parameters |")] == expected


def test_the_accuracy_of_rotated_mnist_is_that_of_the_record():
    (run,) = results_of("rotated_mnist")
    page = (DOCS / "results.md").read_text()
    assert f"in {run['training_minutes']:.1f} minutes" in page
    assert f"It classifies {100 * run['accuracy']:.1f} % of 10,000" in " ".join(page.split())


def test_errors_of_forces_are_those_of_the_experiments():
    records = json.loads((EXAMPLES / "papers" / "results.json").read_text(encoding="utf-8"))
    runs = [record for record in records if record["experiment"] == "homogeneous/rmd17"]
    table = printed("results.md", "| molecule | ours |")
    assert len(table) == len(runs) == 4
    for (molecule, ours, cost, *_), run in zip(table, runs, strict=True):
        energy, force = run["figures"].values()
        assert next(iter(run["figures"])).startswith(molecule)
        assert all(is_rounded(value, text) for value, text in zip((energy, force), numbers(ours), strict=True))
        assert is_rounded(run["minutes"], numbers(cost)[0])


SMALL = [
    record
    for record in json.loads((EXAMPLES / "results.json").read_text())
    if re.search(r"configs/|tasks", record["command"])
]


def is_printed(value, cell):
    """Whether a number, perhaps in percent, is one of the rounded numbers of a cell."""
    for text in re.findall(r"\d[\d.]*(?:e-\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", cell)):
        digits, _, exponent = text.partition("e")
        scale = 10.0 ** int(exponent or 0)
        if is_rounded(value / scale, digits.rstrip(".")):
            return True
    return False


def test_small_trainings_are_those_of_the_tables():
    """Every configuration and every short task of examples/README.md has a record; some have one for each seed."""
    lines = re.findall(r"^\| `(\w+)(?:\.py)?`.*", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    tasks = {path.stem for path in (EXAMPLES / "tasks").glob("*.py")}
    recorded = {re.search(r"(\w+)\.(?:yaml|py)", record["command"])[1] for record in SMALL}
    assert recorded == tasks | {"qm9_homo", *lines[lines.index("qm9_homo") :]}


@pytest.mark.parametrize("record", SMALL, ids=lambda record: record["command"].split("/")[-1])
def test_results_of_small_trainings_are_printed(record):
    name = re.search(r"(\w+)\.(?:yaml|py)", record["command"])[1]
    page = (EXAMPLES / "README.md").read_text()
    (row,) = re.findall(rf"^\| `{name}(?:\.py)?`.*", page, flags=re.MULTILINE)
    assert all(is_printed(value, row) for value in record["results"].values()), record["results"]
    time = record["seconds"] if "seconds" in record else record["cpu_minutes"]
    assert any(cell.strip() == f"{time:.0f}" for cell in row.split("|"))


TURNED = ("accuracy_45_degrees", "accuracy_random_angles", "cpu")


@pytest.mark.parametrize(
    ("record", "head", "columns"),
    [
        ("gsa_pattern", "pattern", TURNED),
        ("attentive_net", "attention", TURNED),
        ("gsa_rotated_mnist", "rotated MNIST", ("accuracy", "cpu")),
    ],
)
def test_the_tables_of_patterns_are_those_of_their_records(record, head, columns):
    runs = json.loads((DOCS / "records" / f"{record}.json").read_text())["runs"]
    for pattern, epochs, *cells in printed("results.md", f"| {head} | epochs |"):
        own = [run for run in runs if f"`{run['form']}`" == pattern and run["epochs"] == float(epochs)]
        assert [run["seed"] for run in own] == [0, 1, 2]
        for name, cell in zip(columns, cells, strict=True):
            factor = 1 if name == "cpu" else 100
            assert has_mean([{"result": factor * run[name]} for run in own], cell)


def test_accuracies_of_upright_shapes_are_those_of_the_record():
    cells = json.loads((PEERS / "results/other_tasks.json").read_text())["tasks"]["shapes"]["cells"]
    found = [f"{100 * cell['metrics']['accuracy']:.1f}" for cell in cells]
    rows = printed("records/peers.md", "| network | rotated, seeds 0, 1, 2 |")
    assert sorted(row[3] for row in rows) == sorted(f"{', '.join(found[k : k + 3])} %" for k in range(0, 12, 3))


def test_the_table_of_attention_on_shapes_is_that_of_its_record():
    runs = json.loads((DOCS / "records" / "attentive_net.json").read_text())["shapes"]["runs"]
    lines = printed("results.md", "| solids | parameters | seconds |")
    assert {(network, int(seconds)) for network, _, seconds, *_ in lines} == {
        (run["model"], round(run["cpu"])) for run in runs
    }
    for network, parameters, seconds, *cells in lines:
        own = [run for run in runs if (run["model"], round(run["cpu"])) == (network, int(seconds))]
        assert [run["seed"] for run in own] == [0, 1, 2]
        assert all(run["parameters"] == int(numbers(parameters)[0]) for run in own)
        for name, cell in zip(("steps", "accuracy_upright", "accuracy_turned"), cells, strict=True):
            factor = 1 if name == "steps" else 100
            assert has_mean([{"result": factor * run[name]} for run in own], cell)


def test_the_table_of_flights_is_that_of_its_record():
    record = json.loads((DOCS / "records" / "flights.json").read_text())
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    rows = {name: [{"km": errors}] for name, errors in record["baselines"].items()}
    rows["`LieTransformer`"] = record["runs"]
    lines = printed("results.md", "| prediction | 15 minutes |")
    assert [line[0] for line in lines] == list(rows)
    for name, *cells in lines:
        for time, cell in enumerate(cells):
            assert has_mean([{"result": run["km"][time]} for run in rows[name]], cell)


def test_the_table_of_scans_is_that_of_its_record():
    runs = json.loads((DOCS / "records" / "scans.json").read_text())["runs"]
    for network, parameters, *cells in printed("results.md", "| scans | parameters | upright | rotated |"):
        own = [run for run in runs if run["model"] == network]
        assert [run["seed"] for run in own] == [0, 1, 2]
        assert all(run["parameters"] == int(numbers(parameters)[0]) for run in own)
        for name, cell in zip(("accuracy_upright", "accuracy_turned"), cells, strict=True):
            assert has_mean([{"result": 100 * run[name]} for run in own], cell)
