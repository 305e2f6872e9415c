"""API keys: a TOML file with their hashes, never the keys.

    [[key]]
    name = "team-a"
    hash = "sha256:…"
    role = "user"
    requests_per_minute = 60

A key is 32 random bytes, so one round of SHA-256 is enough: there is nothing to guess (ADR 0053).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..base.config import read_toml
from ..base.errors import OptionError, file_errors

PREFIX = "hr-"
ROLES = ("user", "operator")
MAX_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Key:
    """Permissions and limits of a key. None: no limit."""

    name: str
    hash: str
    role: str = "user"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    prefixes: str | None = None
    """Keys with the same name here share the prefix cache; None: shared with no other key."""

    def verify(self, where: str) -> None:
        """Raise `OptionError` naming the wrong field."""
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 64:
            raise OptionError(f"{where}: name must be a text of 1 to 64 characters", param="keys")
        if not (
            isinstance(self.hash, str) and self.hash.startswith("sha256:") and len(self.hash) == 71
        ):
            raise OptionError(
                f"{where}: hash must be sha256: and 64 digits (headrace keys add makes one)",
                param="keys",
            )
        if self.role not in ROLES:
            raise OptionError(f"{where}: role must be one of {', '.join(ROLES)}", param="keys")
        shared = self.prefixes
        if shared is not None and not (isinstance(shared, str) and 0 < len(shared) <= 64):
            raise OptionError(
                f"{where}: prefixes must be a text of 1 to 64 characters", param="keys"
            )
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{where}: {name} must be a positive integer", param="keys")


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> list[Key]:
    """Read the key file. Raises `OptionError` naming the file and the entry."""
    if not path.exists():
        raise OptionError(f"no keys: {path} is not there; headrace keys add makes it", param="keys")
    read = read_toml(path, f"the keys in {path}", "keys")
    entries = read.pop("key", [])
    if read or not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise OptionError(f"{path} must hold [[key]] tables, at most {MAX_KEYS}", param="keys")
    known = {spec.name for spec in fields(Key)}
    keys: list[Key] = []
    for place, entry in enumerate(entries, start=1):
        where = f"{path}, key {place}"
        unknown = sorted(set(entry) - known)
        if unknown or "name" not in entry or "hash" not in entry:
            problem = f"has the unknown field {unknown[0]}" if unknown else "needs name and hash"
            raise OptionError(f"{where} {problem}", param="keys")
        key = Key(**entry)
        key.verify(where)
        if any(key.name == other.name or key.hash == other.hash for other in keys):
            raise OptionError(f"{where}: {key.name!r} is there twice", param="keys")
        keys.append(key)
    return keys


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Replace the file atomically; only its owner can read it. Raises `OptionError`."""
    text = "# Hashes of API keys; headrace keys changes this file.\n"
    for key in keys:
        text += "\n[[key]]\n"
        for spec in fields(key):
            value: Any = getattr(key, spec.name)
            if value is not None:
                text += f"{spec.name} = {_toml(value)}\n"
    fresh = path.with_name(path.name + ".new")
    with file_errors(OptionError, f"cannot write {path}", "keys"):
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)


def _toml(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    escaped = "".join(
        char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}"
        for char in value
    )
    return f'"{escaped}"'
