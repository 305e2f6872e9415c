"""Every decision has the one form, and their list agrees with the files."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "adr"
DECISIONS = sorted(FOLDER.glob("[0-9]*.md"))
INDEX = runpy.run_path(str(FOLDER / "index.py"))
WHOLE = """# 0001 A title is a sentence

Subject: Architecture

**Context.** Something was open.

**Decision.** Something was decided.

**Consequence.** Something follows.

**What would change our mind.** A measurement in which it is the slower way.
"""


def test_the_list_is_written_from_the_files() -> None:
    assert INDEX["README"].read_text() == INDEX["written"](), "run: python docs/adr/index.py"


def test_numbers_are_unique() -> None:
    numbers = [path.name[:4] for path in DECISIONS]
    assert len(numbers) == len(set(numbers)) > 50


def test_links_lead_somewhere() -> None:
    for path in [
        *FOLDER.glob("*.md"),
        *FOLDER.parent.glob("*.md"),
        FOLDER.parents[1] / "README.md",
    ]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_named_decision_exists() -> None:
    root, numbers = FOLDER.parents[1], {path.name[:4] for path in DECISIONS}
    tops = [*(root / name for name in ("src", "tests", "docs", "benchmarks", "deploy")), root]
    found = 0
    for top in tops:
        for path in top.glob("*" if top == root else "**/*"):
            if path.suffix not in {".py", ".h", ".cpp", ".md", ".yaml", ".toml"}:
                continue
            for number in re.findall(r"\bADR (\d{4})\b", path.read_text()):
                found += 1
                assert number in numbers, f"{path.relative_to(root)}: ADR {number}"
    assert found > 20


@pytest.mark.parametrize("part", re.findall(r"^.+$", WHOLE, re.MULTILINE))
def test_a_decision_without_one_of_its_parts_is_refused(part: str, tmp_path: Path) -> None:
    path = tmp_path / "0001-title.md"
    path.write_text(WHOLE)
    assert INDEX["read"](path)["title"] == "A title is a sentence"
    path.write_text(WHOLE.replace(part, ""))
    with pytest.raises(ValueError, match="a decision has"):
        INDEX["read"](path)


def test_a_number_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "0002-title.md"
    path.write_text(WHOLE)
    with pytest.raises(ValueError, match="0002-title"):
        INDEX["read"](path)
