"""Files are written completely or not at all, here with a few kills and interrupts; ``make torture`` runs many."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from lieattn.io import replace_text, replacing
from tests.fuzz._report import table
from tests.fuzz._target import GOOD
from tests.torture.__main__ import main
from tests.torture.soak import soak

ROOT = Path(__file__).parent.parent


def fill_the_disk(file: Path) -> None:
    with replacing(file) as part:
        part.write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("there", [True, False])
def test_links_stay_links(tmp_path, there):
    file, link = tmp_path / "disk" / "report.json", tmp_path / "report.json"
    file.parent.mkdir()
    if there:
        file.write_text("old")
    link.symlink_to(file)
    replace_text(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert list(file.parent.iterdir()) == [file]
    assert list(tmp_path.iterdir()) in ([file.parent, link], [link, file.parent])


def test_a_writing_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "folder" / "report.json"
    replace_text(file, "old")
    with pytest.raises(OSError, match="cannot write: No space left") as raised:
        fill_the_disk(file)
    assert raised.value.filename == str(file)
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]
    (file.parent / ".report.json.part").write_text("left by a kill")
    replace_text(file, "new")
    assert [path.read_text() for path in file.parent.iterdir()] == ["new"]


@pytest.mark.slow
def test_a_few_kills_and_interrupts(tmp_path, monkeypatch):
    """They run from a process without threads, because threads do not survive forks."""
    report = tmp_path / "report.json"
    chosen = ("--number", "5", "--jobs", "1", "--only", "fit", "reports", "kernels")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["torture", *chosen, "--report", str(report)])
    assert main() == 0
    found = json.loads(report.read_text())["torture"]
    assert found["inputs"] >= 5
    assert sum(found["verdicts"][good] for good in GOOD) == found["inputs"], found["examples"]


def test_a_few_steps_of_the_soak():
    """A leak would show only after thousands of steps."""
    measured, _ = soak(12, 0)
    assert measured["mib_at_last"] > 0


def test_the_table_is_that_of_the_report():
    page, results = ROOT / "docs/trust.md", ROOT / "docs/records/fuzz.json"
    assert table(json.loads(results.read_text())) in page.read_text(), "python -m tests.fuzz writes both"


def test_errors_of_read_only_disks_name_the_file(tmp_path, monkeypatch):
    """On these even a missing file cannot be removed; this error named the unfinished file instead."""

    def refuse(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=r"cannot write: Read-only file system: .*/report\.json'$"):
        replace_text(tmp_path / "report.json", "content")
