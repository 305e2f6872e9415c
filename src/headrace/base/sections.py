"""Text files in sections or rows, which are the data of a module next to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Parsed = TypeVar("Parsed")


def read_sections(path: Path) -> list[tuple[str, str, str]]:
    """Return (name, title, body) of each section, which begins with a line `[name] title`.

    In SQL the line is a comment.
    """
    text = path.read_text(encoding="utf-8")
    _, *found = re.split(r"^(?:-- )?\[([\w-]+)\] ?(.*)\n", text, flags=re.MULTILINE)
    bodies = [body.strip() for body in found[2::3]]
    return list(zip(found[::3], found[1::3], bodies, strict=True))


def read_rows(path: Path, read: Callable[[str], Parsed]) -> list[Parsed]:
    """Read each line that is neither empty nor a comment, which begins with `#`. Raises
    `ValueError` that names the line."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line and not line.startswith("#"):
            try:
                found.append(read(line))
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{path.name}, line {number}: {error}: {line}") from error
    return found
