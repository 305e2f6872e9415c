"""The version, in the one place from which every package and answer takes it."""

from __future__ import annotations

import functools
from pathlib import Path

VERSION = "0.1.0"


@functools.cache
def revision() -> str | None:
    """Return the commit of this code's checkout, 12 digits; None for an installed package.

    It is read from git's own files, without starting a process. A repository further up, which
    happens to contain an environment, is not taken for ours.
    """
    git = Path(__file__).parents[3] / ".git"
    try:
        if git.is_file():  # A worktree: the folder is elsewhere.
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        name, shared = head.removeprefix("ref: "), git / "commondir"
        common = git / shared.read_text().strip() if shared.is_file() else git
        for place in (git / name, common / name):
            if place.is_file():
                return place.read_text().strip()[:12]
        packed = (common / "packed-refs").read_text().splitlines()
        return next((line[:12] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None
