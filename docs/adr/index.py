"""Write the list of decisions into README.md of this folder, by subject.

Run: `python docs/adr/index.py`; `tests/test_decisions.py` compares the list with the files.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN = "<!-- written by index.py -->\n"
FORM = re.compile(
    r"# (?P<number>\d{4}) (?P<title>.+)\n\nSubject: (?P<subject>.+)\n\n"
    r"\*\*Context\.\*\* .+\n\n\*\*Decision\.\*\* .+\n\n\*\*Consequence\.\*\* .+\n\n"
    r"\*\*What would change our mind\.\*\* .{20}.*\n"
)


def read(path: Path) -> re.Match[str]:
    """Parse a decision.

    Raises: ValueError for a file of another form.
    """
    found = FORM.fullmatch(path.read_text())
    if found is None or found["number"] != path.name[:4]:
        raise ValueError(
            f"{path.name}: a decision has the title '# NNNN Sentence', the line 'Subject: …' and "
            "one paragraph each that begins with **Context.**, **Decision.**, **Consequence.** and "
            "**What would change our mind.**"
        )
    return found


def written() -> str:
    """Text of README.md for the files of this folder."""
    text = README.read_text()
    subjects: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("[0-9]*.md")):
        found = read(path)
        row = f"- [{found['number']}]({path.name}) {found['title']}"
        subjects.setdefault(found["subject"], []).append(row)
    parts = [f"## {name}\n\n" + "\n".join(rows) for name, rows in subjects.items()]
    return text[: text.index(BEGIN)] + BEGIN + "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    README.write_text(written())
