"""ADR 0191 counts the files that the next six will touch: they are there, as many as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adr" / "0191-what-the-next-six-will-touch.md"
ROWS = re.findall(r"^\| \*\*(.+?)\*\*.*? \| (\d+): (.+?) \|", PAGE.read_text(), re.MULTILINE)


def test_all_six_are_counted() -> None:
    assert len(ROWS) == 6


@pytest.mark.parametrize(("what", "count", "text"), ROWS, ids=[row[0] for row in ROWS])
def test_existing_files_are_there(what: str, count: str, text: str) -> None:
    files = [name for name in re.findall(r"`([^`]+)`", text) if "/" in name]
    assert len(files) == len(set(files)) == int(count)
    for name in files:
        assert (ROOT / "src" / "headrace" / f"{name}.py").is_file(), name
