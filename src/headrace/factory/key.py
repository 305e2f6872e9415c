"""Keys: one digest of everything that can change a stage's result."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from ..base.hardware import hardware
from ..kernels.cpu.library import LibraryAbsent, level

PACKAGE = Path(__file__).parents[1]
_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def canonical(value: Any) -> bytes:
    """Encode as JSON in one canonical form: sorted names, no spaces, UTF-8; no NaN or infinity."""
    return _ENCODER.encode(value).encode()


def digest_of(data: bytes) -> str:
    """Return `sha256:` and 64 hexadecimal digits, as OCI writes it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_digest(text: object) -> bool:
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None


@functools.cache
def code_digest(parts: tuple[str, ...]) -> str:
    """Return the digest of files and folders of this package: Python, and built libraries.

    `parts`: paths relative to the package; "." is all of it.
    """
    files: set[Path] = set()
    for part in parts:
        place = PACKAGE / part
        files |= {place} if place.is_file() else {*place.rglob("*.py"), *place.rglob("*.so")}
    found = hashlib.sha256()
    for path in sorted(files):
        inner = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(PACKAGE).as_posix()}:{inner};".encode())
    return f"sha256:{found.hexdigest()}"


@functools.cache
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions of these packages; "absent" if one is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


@functools.cache
def hardware_class() -> dict[str, Any]:
    """Return the properties of this machine that affect measurements; equal on machines of one
    kind."""
    found = hardware()
    try:
        served = level()
    except LibraryAbsent:
        served = None
    return {
        "machine": platform.machine(),
        "cpu": found.cpu.name,
        "level": served or "none",
        "cores": found.cpu.cores,
        "gpus": [f"{gpu.name} {gpu.memory >> 30} GiB" for gpu in found.gpus],
    }


def changed(before: Any, now: Any, path: str = "") -> list[str]:
    """List the differences between two key documents, by dotted names."""
    if isinstance(before, dict) and isinstance(now, dict):
        dotted = {name: f"{path}.{name}" if path else str(name) for name in {*before, *now}}
        pairs = [(before.get(name), now.get(name), dotted[name]) for name in sorted(dotted)]
        return [line for pair in pairs for line in changed(*pair)]
    return [] if before == now else [f"{path} was {_short(before)}, is {_short(now)}"]


def _short(value: Any) -> str:
    text = "absent" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text[:19] + "…" if is_digest(text) else text if len(text) <= 40 else text[:39] + "…"
