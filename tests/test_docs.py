"""The code of the documentation runs as it is printed, from the first line of a page to the last."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from lieattn.cli import main

ROOT = Path(__file__).parent.parent
COMPARING = ROOT / "docs" / "comparing.md"
LINKED = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "datasets/README.md")
    ),
]
# The page on groups of your own runs in tests/lie_cases.py, whose spaces are tested like all others.
RUN_ELSEWHERE = {COMPARING, ROOT / "docs" / "your_own_group.md"}
PAGES = [page for page in LINKED if "```python\n" in page.read_text() and page not in RUN_ELSEWHERE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


def test_the_comparison_of_a_page_runs(tmp_path, monkeypatch, capsys):
    """Its file, and its modules by their names."""
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


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
