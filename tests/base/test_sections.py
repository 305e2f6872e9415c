"""Tables that are data: a wrong row is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.base.sections import read_rows
from headrace.roofline.curves import _read
from headrace.roofline.hardware import _datasheet
from headrace.server.fields import _neglected

READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no section": (_neglected, "user | nothing is kept"),
    "no reason": (_neglected, "[chat]\nuser nothing is kept"),
    "no list": (_neglected, "[chat]\nuser | [1"),
    "too few figures": (_read, "H100 product/fp8 0.6 1.1 0.4 5.7 0.3"),
    "no figure": (_read, "H100 product/fp8 0.6 1.1 0.4 5.7 0.3 much"),
    "a short device": (lambda path: read_rows(path, _datasheet), "H100 67 989 | a data sheet"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_row_is_named(name: str, tmp_path: Path) -> None:
    read, rows = READERS[name]
    table = tmp_path / "table.txt"
    table.write_text(f"# a comment\n\n{rows}\n")
    last = rows.splitlines()[-1]
    with pytest.raises(ValueError, match=rf"table\.txt, line {3 + rows.count(chr(10))}: ") as wrong:
        read(table)
    assert last in str(wrong.value)
