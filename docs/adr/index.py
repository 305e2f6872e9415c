"""Writes the table of decisions into README.md beside this file, newest last.

Run: `python docs/adr/index.py`; `tests/test_decisions.py` holds the table against the files. It
prints, too, which files a decision names that are gone: a sign that its status is no longer true.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN = "| Number | Decision | Date | Status |\n|---|---|---|---|\n"
REOPENED = re.compile(r"what\s+would\s+change\s+our\s+mind\W+\w.{20}", re.DOTALL | re.IGNORECASE)
SETTLED = re.compile(r"superseded|settled")
"""Status of what nothing would reopen: another decision took its place, or it is a plain fact."""
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
    if not REOPENED.search(path.read_text()) and not SETTLED.search(status + rest):
        raise ValueError(
            f"{path.name}: a decision ends with '**What would change our mind.**' and a "
            "measurement, a need or an event; one that nothing reopens has '; settled' behind "
            "its date"
        )
    if "replaced" in rest:
        status = rest.strip(" ;.").split(":")[0]
    return f"| [{number}]({path.name}) | {title} | {date} | {status} |"


def written() -> str:
    """README.md as the files want it."""
    rows = [line(path) for path in sorted(HERE.glob("[0-9]*.md"))]
    rows.sort(key=lambda row: (row.split(" | ")[2], row))
    text = README.read_text()
    return text[: text.index(BEGIN)] + BEGIN + "\n".join(rows) + "\n"


def gone() -> list[str]:
    """Sources that decisions name as ours and that no longer exist, unless a status tells why."""
    root = HERE.parent.parent
    found = []
    for path in sorted(HERE.glob("[0-9]*.md")):
        text = path.read_text()
        head = HEAD.match(text)
        if head is None or "superseded" in head[3] or "replaced" in head[5]:
            continue
        for name in dict.fromkeys(re.findall(r"`((?:\w+/)+\w+\.(?:py|h|cpp))`", text)):
            inside = any(any((root / top).rglob(name)) for top in ("src", "tests"))
            if not inside and not (root / name).exists():
                found.append(f"{path.name}: {name}")
    return found


if __name__ == "__main__":
    README.write_text(written())
    print(*gone(), sep="\n")
