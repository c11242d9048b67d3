"""Files are written whole or not at all, and a few kills and interrupts; ``make torture`` is the long run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lieattn._files import replace_text, replacing


def fill_the_disk(file: Path) -> None:
    with replacing(file) as part:
        part.write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")


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
