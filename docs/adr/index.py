"""Writes the table of decisions into README.md beside this file, newest last.

Run: `python docs/adr/index.py`; `tests/test_decisions.py` holds the table against the files.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN = "| Number | Decision | Date | Status |\n|---|---|---|---|\n"
HEAD = re.compile(
    r"# (\d{4}) (.+)\n\nStatus: (accepted|superseded by [^,]+), (\d{4}-\d\d-\d\d)(.*)\n"
)


def line(path: Path) -> str:
    """One row of the table.

    Raises: ValueError where the file does not begin as all of them do.
    """
    found = HEAD.match(path.read_text())
    if found is None or found[1] != path.name[:4]:
        raise ValueError(
            f"{path.name}: the first lines are to be '# NNNN Title', an empty one, and "
            "'Status: accepted, YYYY-MM-DD.' or 'Status: superseded by [NNNN](file), YYYY-MM-DD.'"
        )
    number, title, status, date, rest = found.groups()
    if "replaced" in rest:
        status = rest.strip(" ;.").split(":")[0]
    return f"| [{number}]({path.name}) | {title} | {date} | {status} |"


def written() -> str:
    """README.md as the files want it."""
    rows = [line(path) for path in sorted(HERE.glob("[0-9]*.md"))]
    rows.sort(key=lambda row: (row.split(" | ")[2], row))
    text = README.read_text()
    return text[: text.index(BEGIN)] + BEGIN + "\n".join(rows) + "\n"


if __name__ == "__main__":
    README.write_text(written())
