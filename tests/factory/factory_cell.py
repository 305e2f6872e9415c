"""A tiny model and what the factory made of it, for the tests beside this file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "server"))
from processes import headrace

from headrace.base.config import EngineOptions
from headrace.factory.build import Build, BuildOptions, CellResult
from headrace.factory.profile import ProfileBody, read_profile
from headrace.factory.revoke import trusted
from headrace.factory.sign import STATEMENT
from headrace.factory.store import Store
from tiny import talker

AT_LEAST = 0.001
"""Tokens a second: every machine has them, so that the gate can decide."""


@dataclass
class Made:
    """A build that ended, its model and its folders."""

    model: Path
    cache: Path
    result: CellResult
    cell: str

    @property
    def store(self) -> Store:
        return Store(self.cache / "factory" / "store")

    @property
    def keys(self) -> list[Any]:
        return trusted(None, str(self.cache))

    @property
    def envelope(self) -> bytes:
        assert self.result.profile is not None
        return self.store.read(self.result.profile.digest)

    @property
    def body(self) -> ProfileBody:
        return read_profile(self.envelope, self.keys).body

    def again(self, **wanted: Any) -> Build:
        """The same cell in the same store, with another wish."""
        return Build(self.engine(), BuildOptions(**{"at_least": AT_LEAST, **wanted}))

    def engine(self, model: Path | None = None) -> EngineOptions:
        return EngineOptions(model=str(model or self.model), cache_dir=str(self.cache), threads=1)

    def fork(self, folder: Path) -> str:
        """A copy of the store: a build of the same cell with another wish takes its name there."""
        return str(shutil.copytree(self.store.root, folder / "fork"))

    def call(self, *words: str, status: int = 0) -> str:
        """Return the output of `headrace factory …`."""
        environment = {**os.environ, "HEADRACE_CACHE": str(self.cache)}
        done = subprocess.run(
            headrace("factory", *words),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


def make(root: Path, **wanted: Any) -> Made:
    """Build the tiny model once; its accuracy has nothing to be held against."""
    model = talker.make(root / "tiny")
    engine = EngineOptions(model=str(model), cache_dir=str(root / "cache"), threads=1)
    build = Build(engine, BuildOptions(**{"at_least": AT_LEAST, **wanted}))
    return Made(model, root / "cache", build.run(), build.cell)


def flip(data: bytes) -> bytes:
    """One bit in the middle is another."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: list[Callable[[bytes], bytes]] = [flip, lambda data: data[:-1], lambda data: data + b"0"]


def rewrite(path: Path, data: bytes) -> None:
    """Another file in its place: a link to the same bytes elsewhere stays what it was."""
    path.unlink()
    path.write_bytes(data)


def statement(body: Any, **changes: Any) -> dict[str, Any]:
    """The statement that a profile's envelope holds, with changes."""
    subject = [
        {"name": one["path"], "digest": {"sha256": one["digest"].removeprefix("sha256:")}}
        for one in body["model"]["files"]
    ]
    kind = "urn:headrace:profile:v1"
    made = {"_type": STATEMENT, "subject": subject, "predicateType": kind, "predicate": body}
    return {**made, **changes}
