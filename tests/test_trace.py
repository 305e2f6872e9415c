"""`docs/trace.md` names functions that exist, in an order that a reader can follow."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "trace.md"
NAMES = re.findall(r"`(headrace\.[\w.]+)`", PAGE.read_text())


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


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_the_trace_exists(name: str) -> None:
    find(name)


def test_the_trace_stays_short_enough_to_be_read() -> None:
    modules = {getattr(find(name), "__module__", name) for name in NAMES}
    assert 20 <= len(NAMES) <= 35
    lines = sum(
        len(Path(import_module(module).__file__ or "").read_text().splitlines())
        for module in modules
    )
    assert lines <= 7000, f"{len(modules)} files with {lines} lines"
