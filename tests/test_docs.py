"""The code of the documentation runs as printed, from the first line of a page to the last."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import lieattn
from lieattn.certify import certify
from lieattn.cli import main
from tests.cases import each

ROOT = Path(__file__).parent.parent
COMPARING = ROOT / "docs" / "comparing.md"
LINKED = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "datasets/README.md")
    ),
]
# The page on your own group runs in tests/lie_cases.py, and its spaces are tested like all others.
RUN_ELSEWHERE = {COMPARING, ROOT / "docs" / "your_own_group.md"}
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [page for page in LINKED if "```python\n" in page.read_text() and page not in RUN_ELSEWHERE]


def write_parts(folder):
    """Write mugs and tables of 40 points in the format of ShapeNetPart."""
    from torch_geometric.datasets import ShapeNet

    generator, lists = np.random.default_rng(0), {split: [] for split in ("train", "val", "test")}
    for category, number in ShapeNet.category_ids.items():
        (folder / number).mkdir(parents=True)
        for split in lists if category in ("Mug", "Table") else ():
            normal = generator.normal(size=(40, 3))
            normal /= np.linalg.norm(normal, axis=1, keepdims=True)
            part = np.take(ShapeNet.seg_classes[category], (normal[:, 1] > 0).astype(int))
            np.savetxt(folder / number / f"{split}.txt", np.column_stack([normal, normal, part]), fmt="%.6f")
            lists[split].append(f"shape_data/{number}/{split}")
    (folder / "train_test_split").mkdir()
    for split, names in lists.items():
        (folder / "train_test_split" / f"shuffled_{split}_file_list.json").write_text(json.dumps(names))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    if page.name == "questions.md":
        write_parts(tmp_path / "shapenet" / "raw")
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    if page.name == "questions.md":
        check_parts(namespace)


def check_parts(page):
    """Compare the intersection over union of a page with that by hand, and its network with turned shapes."""
    mug, table = page["test"]
    assert mug.category.tolist() == [11]
    assert (mug.x[:, 11] == 1).all()
    assert torch.equal(mug.normal, mug.pos)
    assert certify(page["segmentation"].model, [mug, table], continuity=False).passed
    # One of the parts is predicted everywhere, and two of the three of a table have points.
    logits = torch.zeros(40, 50)
    logits[:, [0, 36, 47]] = torch.tensor([9.0, 1.0, 1.0])
    shares = (mug.y == 36).float().mean() / 2, ((table.y == 47).float().mean() + 1) / 3
    task = torch.nn.Module()
    task.forward = lambda batch: logits
    assert page["instance_miou"](task, [mug, table]).item() == pytest.approx(sum(shares).item() / 2)


@pytest.mark.slow
def test_the_comparison_of_a_page_runs(tmp_path, monkeypatch, capsys):
    """The configuration and the modules of the page are written to files and run."""
    monkeypatch.chdir(tmp_path)
    text = COMPARING.read_text()
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        Path(re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
    (content,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    Path("shapes.yaml").write_text(content)
    try:
        assert main(["compare", "--config", "shapes.yaml"]) == 0
    finally:
        sys.modules.pop("my_models", None)
    report = json.loads(Path("runs/shapes/comparison.json").read_text())
    counts = {cell["model"]: cell["parameters"] for cell in report["cells"]}
    assert counts.keys() == {"point net", "exact frames"}
    assert all(abs(count - 3000) <= 150 for count in counts.values())


@pytest.mark.filterwarnings("ignore::Warning")  # one says which row of the table is left out
def test_files_of_a_user_by_the_commands_of_a_page(tmp_path, monkeypatch):
    """The commands run as printed, on a folder of images of 16 bits and on a table of SMILES with a broken row."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 65536, (30, 6, 6), dtype=np.uint16)
    for number, image in enumerate(pixels):
        Path("pictures", "abc"[number % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(f"pictures/{'abc'[number % 3]}/{number}.png")
    rows = [f"{'C' * (number + 1)}{end},{number}" for number in range(6) for end in ("O", "N", "C=O", "")]
    Path("mols.csv").write_text("\n".join(["smiles,logS", *rows, "C1CC,0"]))
    text = (ROOT / "docs" / "questions.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^    lieattn (fit --model Point.*)", text, flags=re.MULTILINE)
    assert len(commands) == 2
    quiet = ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    for command in commands:
        assert main([*command.split(), *quiet]) == 0
    for run in ("pictures", "molecules"):
        checkpoint = f"runs/{run}/checkpoints/best.ckpt"
        for command in ("validate", "predict"):
            assert main([command, "--ckpt_path", checkpoint, "--trainer.enable_progress_bar", "false"]) == 0
        assert Path(f"runs/{run}/csv/version_1/metrics.csv").exists()  # those of the validation stand with the run
    for table, columns in (
        ("pictures/predictions", {"file", "true_class", "predicted_class"}),
        ("molecules/predictions_y", {"name", "true_y_0", "y_0"}),
    ):
        assert columns <= {*Path(f"runs/{table}.csv").read_text().split("\n")[0].split(",")}


def cells(notebook, kind):
    found = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")  # small molecules are nearly symmetric
@each("notebook", NOTEBOOKS)
def test_notebook_runs(notebook, tmp_path, monkeypatch):
    """Training loops are reduced to two steps here; the build of the site runs notebooks unchanged."""
    from matplotlib import pyplot as plt

    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    namespace = {"__name__": notebook.stem}
    for code in cells(notebook, "code"):
        code = re.sub(r"^( *for (?:_|step) in range)\(\d+\):$", r"\1(2):", code, flags=re.MULTILINE)
        exec(compile(code, str(notebook), "exec"), namespace)
    plt.close("all")


@each("notebook", NOTEBOOKS)
def test_notebooks_are_stored_without_outputs(notebook):
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_words_that_users_search_for_are_on_the_pages():
    words = "class imbalance, uncertainty, weights & biases, mlflow, optuna, hugging face, raw weights, confusion"
    text = " ".join(" ".join(page.read_text().lower().split()) for page in LINKED)
    assert [word for word in words.split(", ") if word not in text] == []


@each("page", [*LINKED, *NOTEBOOKS])
def test_links_of_a_page_lead_somewhere(page):
    text = page.read_text() if page.suffix == ".md" else "\n".join(cells(page, "markdown"))
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        if not target.startswith("http"):
            name, _, heading = target.partition("#")
            assert (page.parent / name).exists(), target
            if heading:
                headings = re.findall(
                    r"^#+ (.*)$", (page.parent / name if name else page).read_text(), flags=re.MULTILINE
                )
                assert heading in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings], target


def test_the_rows_of_fidelity_name_what_exists():
    """Each row has tests; classes are public, and folders exist."""
    lines = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "fidelity.md").read_text(), flags=re.MULTILINE)
    rows = [row for line in lines if (row := re.split(r" (?<!\\)\| ", line))[0] not in ("statement", "---")]
    packages = ("models", "nn", "nn.relative", "geometry", "groups", "ops", "testing", "certify", "models.published")
    public = [importlib.import_module(f"lieattn.{name}") for name in packages]
    assert len(rows) > 35
    for statement, here, tests, deviation in rows:
        assert deviation, statement
        for name in tests.split(", "):
            file, test = name.split("::")
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name
        for name in re.findall(r"`([A-Z]\w+)", here):
            assert any(hasattr(package, name) for package in public), name
        for name in re.findall(r"`(examples/\w+/\w+)", here):
            assert (ROOT / name).is_dir(), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_of_the_package_has_no_links_into_the_repository():
    """As in the build (``make dist``), links become paths, because they would lead nowhere on a package index."""
    text = (ROOT / "README.md").read_text()
    for substitution in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    assert all(target.startswith("https:") for target in re.findall(r"\]\(([^)]+)\)", text))
    assert "`docs/performance.md`" in text
    assert "ten minutes (`docs/start.md`)" in text


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## \[(.*)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in headings[1:])
    assert headings[1] == (citation["version"], str(citation["date-released"]))
    assert PROJECT["project"]["version"] == citation["version"] == lieattn.__version__


def test_the_recipe_for_conda_is_that_of_the_project():
    recipe, project = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text()), PROJECT["project"]
    assert recipe["context"] == {
        "version": project["version"],
        "python_min": project["requires-python"].removeprefix(">="),
    }
    names = {"torch": "pytorch", "torch-geometric": "pytorch_geometric"}  # those that have another name there

    def of_conda(requirements):
        parts = (re.fullmatch(r"([\w-]+)(>=.*)", text).groups() for text in requirements)
        return [f"{names.get(name, name)} {version}" for name, version in parts]

    assert recipe["requirements"]["run"] == ["python >=${{ python_min }}", *of_conda(project["dependencies"])]
    host = ["python ${{ python_min }}.*", "pip", *of_conda(PROJECT["build-system"]["requires"])]
    assert recipe["requirements"]["host"] == host
    assert recipe["build"]["noarch"] == "python"
    scripts = [f"{name} = {place}" for name, place in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (project["description"], project["license"])
    packages = [path.rpartition("/")[2] for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    assert recipe["tests"][0]["python"]["imports"] == packages


def of_the_site(name, *needed):
    """Return a module that makes the pages of the site."""
    for package in needed:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_badges_of_notebooks_lead_to_the_repository():
    module = of_the_site("hooks", "mkdocs", "nbconvert")
    file = SimpleNamespace(src_uri="notebooks/images.md")

    def page(repository):
        config = SimpleNamespace(repo_url=repository)
        return module.on_page_markdown("text", SimpleNamespace(file=file), config, [])

    assert page("") == page("https://git.example.org/group/lieattn") == "text"
    for repository in ("https://github.com/group/lieattn", "https://github.com/group/lieattn.git"):
        colab, binder = re.findall(r"\)\]\((https://[^)]*)\)", page(repository))
        assert colab.endswith("/github/group/lieattn/blob/main/examples/notebooks/images.ipynb")
        assert binder.endswith("/gh/group/lieattn/main?labpath=examples/notebooks/images.ipynb")
    for source in module.NOTEBOOKS.values():
        assert (ROOT / source).is_file()


def test_docstrings_for_the_pages_of_the_api():
    """Formulas become MathML, shared texts belong to each argument, and names become links."""
    module = of_the_site("docstrings", "griffe", "latex2mathml")
    formulas = 0
    for path in (ROOT / "lieattn").rglob("*.py"):
        source = path.read_text()
        found = module.with_mathml(source)
        assert "math::" not in found, path
        assert ":math:" not in found, path
        formulas += source.count(".. math::")
    assert formulas > 30
    text = "Text.\n\n.. math::\n    a_i = b\n\nParameters\n----------\nq, k\n    Both.\n\nv\n    One.\n"
    assert "<msub><mi>a</mi><mi>i</mi></msub>" in module.with_mathml(text)
    parts = "base, first\n    The ratio,\n    above 1; and the start.\n"
    assert module.separated(parts) == "base\n    The ratio,\n    above 1.\n\nfirst\n    The start.\n\n"
    assert "q\n    Both.\nk\n    Both.\n\nv\n    One.\n" in module.separated(text)

    def page(url, content):
        return SimpleNamespace(url=url, content=content)

    pages = [
        page("api/nn/", '<h2 id="lieattn.nn.A"></h2> :class:<code>lieattn.ops.f</code> :attr:<code>A.b</code>'),
        page("api/ops/", '<h2 id="lieattn.ops.f"></h2> :class:<code>torch.nn.Module</code>'),
    ]
    module.on_env("env", {}, SimpleNamespace(documentation_pages=lambda: [SimpleNamespace(page=one) for one in pages]))
    assert '<a href="../ops/#lieattn.ops.f"><code>ops.f</code></a>' in pages[0].content
    assert '<a href="#lieattn.nn.A"><code>A.b</code></a>' in pages[0].content
    assert pages[1].content.endswith(" <code>torch.nn.Module</code>")
