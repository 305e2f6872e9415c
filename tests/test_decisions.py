"""The table of decisions is what the files say, and what they name exists."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent.parent / "docs" / "adr"
DECISIONS = sorted(FOLDER.glob("[0-9]*.md"))


def test_the_table_is_what_the_files_say() -> None:
    index = runpy.run_path(str(FOLDER / "index.py"))
    assert index["README"].read_text() == index["written"](), "run: python docs/adr/index.py"


def test_a_number_is_given_once() -> None:
    numbers = [path.name[:4] for path in DECISIONS]
    assert len(numbers) == len(set(numbers)) > 100


def test_links_lead_somewhere() -> None:
    for path in [*DECISIONS, *FOLDER.parent.glob("*.md"), FOLDER.parent.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_decision_says_what_would_reopen_it() -> None:
    index = runpy.run_path(str(FOLDER / "index.py"))
    begin = "# 0001 Title\n\nStatus: accepted, 2026-11-23{}.\n\nSomething was decided.\n"
    end = "\n**What would change our mind.** A measurement in which it is the slower way.\n"
    for path in DECISIONS:
        index["line"](path)  # Raises where there is none.
    for rest, last, refused in (("", "", True), ("", end, False), ("; settled", "", False)):
        assert refused == raises(index["line"], begin.format(rest) + last)


def raises(line: Callable[[Path], str], text: str) -> bool:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "0001-title.md"
        path.write_text(text)
        try:
            line(path)
        except ValueError as error:
            return "change our mind" in str(error)
    return False
