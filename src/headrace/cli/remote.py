"""Options and errors shared by the commands that talk to a running server."""

from __future__ import annotations

from typing import Annotated

import httpx

from ..base.errors import InvalidRequest, Unreachable
from .flags import flag

HERE = "http://127.0.0.1:8000"
"""The address of `headrace serve` with its defaults."""
API_KEY = ("--api-key", "--key")
"""Spellings of the option with a server's key: the common one, and an older one."""
Url = Annotated[str | None, flag("The server, as an option.", "--url")]


def named(argument: str | None, url: str | None, default: str | None = None) -> str:
    """Return the server named by a command's argument or its `--url`."""
    if argument and url:
        raise InvalidRequest("the server is named twice, by an argument and by --url", param="url")
    found = argument or url or default
    if not found:
        raise InvalidRequest("no server is named: --url http://HOST:PORT", param="url")
    return found if "://" in found else f"http://{found}"


def unreachable(base: object, error: Exception) -> Unreachable:
    """Return the error for a server that does not answer."""
    hint = "; headrace serve starts one" if isinstance(error, httpx.ConnectError) else ""
    return Unreachable(f"cannot reach {base}: {error or type(error).__name__}{hint}")
