"""The folder of a calibration: what is done, so that a killed run goes on and gives the same bytes.

A file has its name only when it is whole. `state.json` names the files of all finished segments
with their digests, and the digests of model, text and recipe: another run's folder is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest, OptionError, Untrusted
from ..base.foreign import any_json

STATE = "state.json"
LOCK = "lock"


class WorkFolder:
    """One run's files; a process at a time has it. Raises `OptionError` if it cannot be written."""

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        """Open the folder of a run `about` these digests, by what they are of.

        Raises `InvalidRequest` if the folder holds another run; `Untrusted` if a file of it has
        other bytes than when it was written.
        """
        self.path, self._about = path, dict(about)
        self.done = 0
        """Segments that are finished."""
        self.record: list[dict[str, Any]] = []
        """Reports on their tensors."""
        self.plan: dict[str, int] = {}
        """Sizes that the bytes depend on, which a run that goes on reuses; empty: not planned."""
        self._files: dict[str, str] = {}
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise InvalidRequest(
                    f"another process calibrates in {path}; wait for it, or choose another folder",
                    param="work",
                ) from None
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def write(self, name: str, arrays: Iterable[npt.NDArray[Any]]) -> None:
        """Write the bytes of arrays, one after the other; `commit` makes them part of the run."""
        hashed = hashlib.sha256()
        with self._writing(), (self.path / f"{name}.part").open("wb") as file:
            for array in arrays:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                hashed.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with self._writing():
            os.replace(self.path / f"{name}.part", self.path / name)
        self._files[name] = hashed.hexdigest()

    def commit(self, done: int, record: Iterable[Mapping[str, Any]], keep: Iterable[str]) -> None:
        """Make segment number `done` the last finished one, with its files.

        `keep`: names of the values for the next segment; those of the one before are deleted.
        """
        kept = {*keep}
        old = [name for name in self._files if name.startswith("values") and name not in kept]
        for name in old:
            del self._files[name]
        self.done, self.record = done, [*self.record, *map(dict, record)]
        state = {
            "about": self._about, "done": done, "record": self.record, "files": self._files,
            "plan": self.plan,
        }  # fmt: skip
        with self._writing():
            fresh = self.path / f"{STATE}.part"
            with fresh.open("w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self.path / STATE)
            for name in old:
                (self.path / name).unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        return name in self._files

    def array(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Map a file's numbers, read-only."""
        return np.memmap(self.path / name, dtype, "r")

    def _resume(self) -> None:
        try:
            text = (self.path / STATE).read_bytes()
        except FileNotFoundError:
            return
        try:
            state = any_json(text)
            about, files = dict(state["about"]), dict(state["files"])
            self.done, self.record = int(state["done"]), list(state["record"])
            self.plan = {name: int(one) for name, one in dict(state["plan"]).items()}
        except (ValueError, KeyError, TypeError):
            raise Untrusted(f"{self.path / STATE} is damaged; delete the folder") from None
        for what, digest in self._about.items():
            if about.get(what) != digest:
                raise InvalidRequest(
                    f"{self.path} holds a run with another {what} ({str(about.get(what))[:12]}…, "
                    f"now {digest[:12]}…); delete it, or name another result with --out",
                    param=what,
                )
        for name, digest in files.items():
            if Path(name).name != name or _digest(self.path / name) != digest:
                raise Untrusted(
                    f"{self.path / name} is missing or has other bytes than when it was written; "
                    "delete the folder"
                )
        self._files = files

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OptionError(
                f"{self.path} cannot be written: {error.strerror}; what is finished stays, and the "
                "same command goes on from it",
                param="work",
            ) from None


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
