"""`docs/other-engines.md` is what the table of other engines' options says."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "other-engines.md"
sys.path.insert(0, str(DOCS))


def test_the_page_is_as_its_script_writes_it() -> None:
    from other_engines import written  # Beside the page.

    assert written() == PAGE.read_text(), "run `python docs/other_engines.py`"
