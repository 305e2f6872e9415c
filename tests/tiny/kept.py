"""Tiny models that are made once in a run, whichever worker of pytest asks first."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def digest(folder: Path) -> str:
    """Hash the names and contents of the files below `folder`."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


class Kept:
    """Models below `root`, by the function that makes them and what it was given."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[Path, str] = {}

    def __call__(self, make: Callable[..., Any], *args: Any, **options: Any) -> Path:
        """The folder that `make(folder, *args, **options)` filled, to be read only."""
        said = f"{make.__module__}.{make.__qualname__} {args} {sorted(options.items())}"
        # A server calls its model as the folder is called.
        folder = self._root / hashlib.sha256(said.encode()).hexdigest()[:16] / "tiny"
        if folder in self._found:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                # A worker that dies meanwhile leaves no half of a model under the name.
                half = folder.parent / f"half-{os.getpid()}"
                half.mkdir()
                make(half, *args, **options)
                half.rename(folder)
        self._found[folder] = digest(folder)
        return folder

    def changed(self) -> list[Path]:
        """Folders that are no longer what they were when they were asked for."""
        return [folder for folder, was in self._found.items() if digest(folder) != was]


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`kept(make, …)`: the folder of a tiny model that every test of this run may read."""
    root = tmp_path_factory.getbasetemp()
    # The workers of xdist have a folder each, side by side.
    found = Kept((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "tiny")
    yield found
    assert not found.changed(), "a test wrote to a model that others read"
