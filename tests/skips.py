"""Untried tests of a run: skips counted by reason, and loudly those that an install would end.

`conftest.py` loads it as a plugin.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

INSTALLABLE = re.compile(
    r"could not import|not installed|needs the extra|NOT TESTED|not built|"
    r"belongs to another version|"
    r"\b(no|there is no) (C\+\+ compiler|cmake|objdump|valgrind|\S*g\+\+\S*|qemu\S*)",
    re.IGNORECASE,
)
"""Reasons that end where something is installed or built, on any machine."""


def reason_of(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ").strip()


def counted(reasons: list[str]) -> tuple[Counter[str], Counter[str]]:
    """(skips that no install ends, skips that one would end), by reason."""
    hiding = Counter(reason for reason in reasons if INSTALLABLE.search(reason))
    return Counter(reasons) - hiding, hiding


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    plain, hiding = counted([reason_of(report) for report in skipped])
    if plain:
        terminalreporter.section("skipped, by reason")
    for reason, count in plain.most_common():
        terminalreporter.line(f"{count:5} {reason}")
    if hiding:
        terminalreporter.section("NOT TESTED: SOMETHING IS NOT INSTALLED", red=True, bold=True)
        for reason, count in hiding.most_common():
            terminalreporter.line(f"{count:5} {reason}", red=True)
