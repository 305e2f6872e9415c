"""Files of text in sections or rows, which are data of a module beside them."""

from __future__ import annotations

import re
from pathlib import Path


def read_sections(path: Path) -> list[tuple[str, str, str]]:
    """Return (name, title, body) of each section, which begins with a line `[name] title`.

    In SQL the line is a comment.
    """
    text = path.read_text(encoding="utf-8")
    _, *found = re.split(r"^(?:-- )?\[([\w-]+)\] ?(.*)\n", text, flags=re.MULTILINE)
    bodies = [body.strip() for body in found[2::3]]
    return list(zip(found[::3], found[1::3], bodies, strict=True))


def read_rows(path: Path) -> list[str]:
    """Return the lines that are neither empty nor a comment, which begins with `#`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
