"""Every link from a document to a file of this repository leads somewhere, headings included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Names of the headings, as a hub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for name, heading in LINK.findall(re.sub(r"`[^`]*`", "", page.read_text())):
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            wrong.append(name)
        elif heading and target.suffix == ".md" and heading not in anchors(target):
            wrong.append(f"{name}#{heading}")
    assert not wrong
