"""The table of decisions is what the files say, and what they name exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

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
