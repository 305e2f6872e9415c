"""Reader of JSON objects of bounded size from untrusted files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ModelFileError, UnsupportedModel

MAX_JSON = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a file. Raises `ModelFileError` if it has no object or is too large."""
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name}: must be a JSON object")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Read an object like `read_json`; an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_list(path: Path) -> list[Any]:
    """Read a list like `read_json`."""
    value = _read(path)
    if not isinstance(value, list):
        raise ModelFileError(f"{path.name}: must be a JSON list")
    return value


def natural(config: Mapping[str, Any], name: str, most: int) -> int:
    """Return a number of config.json from 1 to `most`; raises `ModelFileError`."""
    value = config.get(name)
    if type(value) is not int or not 0 < value <= most:
        raise ModelFileError(f"config.json: {name} must be a number from 1 to {most:,}")
    return value


def verify_usual(config: Mapping[str, Any], file: str = "config.json", **usual: object) -> None:
    """Raise `UnsupportedModel` unless the config has the usual values, the only ones supported."""
    for name, value in usual.items():
        if config.get(name, value) != value:
            raise UnsupportedModel(f"{file}: {name}: only {value} is run")


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelFileError(f"{path.name}: larger than {MAX_JSON >> 20} MiB")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: not JSON: {error}") from None
