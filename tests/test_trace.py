"""`docs/trace.md` names functions that exist, in an order that a reader can follow, and the files
that hold them are few enough to be read."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "trace.md").read_text()
CSRC = ROOT / "src" / "headrace" / "kernels" / "cpu" / "csrc"
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
"""Names in the tables: `headrace.module.function`, or `csrc/file: function`."""
BESIDE = re.findall(r"`(headrace\.[\w.]+|csrc/[\w.]+)`", PAGE.replace("| `", "| "))
"""Names in the text."""
COUNTED = re.compile(r"(\(docs/trace\.md\) is the way in \()\d+ files\)")
"""README's number, which `python tests/test_trace.py` writes."""
MOST = 56, 14_000
"""Files and lines of the walk, with drafts and the making of records."""


def find(name: str) -> Any:
    """The module, class, function or method behind a dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def file_of(name: str) -> Path:
    if name.startswith("csrc/"):
        return CSRC / name.removeprefix("csrc/").partition(":")[0]
    return Path(import_module(getattr(find(name), "__module__", name)).__file__ or "")


def word_of(name: str) -> str:
    """Return the name that callers use."""
    return re.split(r"[.: ]+", name)[-1]


FILES = {file_of(name) for name in (*ROWS, *BESIDE)}


@pytest.mark.parametrize("name", [*ROWS, *BESIDE])
def test_every_name_in_the_trace_exists(name: str) -> None:
    text = file_of(name).read_text()
    if name.startswith("csrc/"):
        assert ":" not in name or re.search(rf"\b{word_of(name)}\(", text)
    else:
        find(name)


@pytest.mark.parametrize("name", ROWS[1:])
def test_each_is_called_from_a_file_of_the_trace(name: str) -> None:
    """Nothing else has to be opened to see how one gets there."""
    word = word_of(name)
    named = re.compile(rf"(?<!def )(?<!class )\b{word}\b")
    assert any(
        len(named.findall(file.read_text())) > (name.startswith("csrc/") and file == file_of(name))
        for file in FILES
    )


def test_the_reading_set_does_not_grow() -> None:
    lines = sum(len(file.read_text().splitlines()) for file in FILES)
    assert 20 <= len(ROWS) <= 60
    assert len(FILES) <= MOST[0]
    assert lines <= MOST[1], f"{len(FILES)} files with {lines} lines"
    readme = (ROOT / "README.md").read_text()
    assert COUNTED.sub(rf"\g<1>{len(FILES)} files)", readme) == readme, "python tests/test_trace.py"


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(COUNTED.sub(rf"\g<1>{len(FILES)} files)", README.read_text()))
