"""Caller of a request, and the separation between names of clients and our own."""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base.text_prefixes import NOTHING, TextPrefixes

if TYPE_CHECKING:
    from starlette.types import Receive

    from .accounts import Account


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of a request's key; empty if there are no keys."""

    owner: str = ""
    prefixes: str = ""
    """Name within which requests share the prefix cache."""

    def salt(self, given: str | None) -> str:
        """Return the salt of a request's prefixes: the client's salt, within its own namespace."""
        return f"{self.prefixes}\0{given or ''}" if self.prefixes else given or ""


_NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("headrace_caller", default=_NOBODY)
"""Caller of the request that this task serves; its child tasks inherit it."""


def begin_exchange() -> None:
    """Forget the previous exchange: pipelined requests, and the lines of a batch, run in the same
    task."""
    CALLER.set(_NOBODY)
    RECEIVE.set(None)
    BODY_SIZE.set(0)
    PREFIXES.set(NOTHING)


def caller_of(account: Account) -> Caller:
    key = account.key
    # A shared namespace and a key's own differ even if their names are equal.
    return Caller(key.name, f"shared {key.prefixes}" if key.prefixes else f"key {key.name}")


RECEIVE: ContextVar[Receive | None] = ContextVar("headrace_receive", default=None)
"""ASGI `receive` that reports the client's disconnect; set once the request body has been read."""

BODY_SIZE: ContextVar[int] = ContextVar("headrace_body_size", default=0)
"""Bytes of this task's request body; set once it has been read."""

PREFIXES: ContextVar[TextPrefixes] = ContextVar("headrace_prefixes", default=NOTHING)
"""Prefix hashes of this task's prompt, as routers compute them; set once its body has been read."""

_MARK = "~"


def engine_id(name: str) -> str:
    """Make an id for the engine that contains the response's name and cannot be guessed by clients.

    The name alone would not be unique: proxies, and any client, may give one id to several
    requests.
    """
    return f"{name}{_MARK}{secrets.token_hex(6)}"


def named(engine_id: str) -> str:
    """Return the name in an `engine_id`."""
    return engine_id.rpartition(_MARK)[0] or engine_id
