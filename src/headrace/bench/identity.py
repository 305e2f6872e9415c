"""Identity of the measured server: software, version and commit, as it reports them.

A value that none of these paths reports is unknown, never guessed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.foreign import any_json
from .http import Address, ConnectionLost, fetch

SECONDS = 10.0
PATHS = ("/version", "/info", "/get_server_info", "/props")
"""Paths of ours and vLLM, of TGI, SGLang and llama.cpp."""
_VERSION = ("version", "sglang_version", "build_info")
_LOCAL = re.compile(r"\+g?([0-9a-f]{7,40})\b|^b\d+-([0-9a-f]{7,40})$")
"""A commit in a version: vLLM's 0.11.1.dev3+gabc1234.cu128, llama.cpp's b4567-abc1234."""


class ServerIdentity(NamedTuple):
    """Version and commit; None: unknown."""

    version: str | None = None
    commit: str | None = None


def identify(address: Address, headers: Mapping[str, str]) -> ServerIdentity:
    """Identify the server by the first version endpoint that answers."""
    for path in PATHS:
        try:
            status, body = asyncio.run(
                fetch(address, "GET", path, headers=dict(headers), timeout=SECONDS)
            )
            found = read_identity(any_json(body)) if status == 200 else ServerIdentity()
        except (ConnectionLost, ValueError):
            continue
        if found.version is not None:
            return found
    return ServerIdentity()


def read_identity(answer: Any) -> ServerIdentity:
    """Read version and commit from the JSON object of any of `PATHS`."""
    if not isinstance(answer, dict):
        return ServerIdentity()
    version = next((str(answer[name]) for name in _VERSION if answer.get(name)), None)
    commit = answer.get("commit") or answer.get("sha")
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{7,40}", commit):
        match = _LOCAL.search(version or "")
        commit = None if match is None else match[1] or match[2]
    return ServerIdentity(version, None if commit is None else commit[:12])
