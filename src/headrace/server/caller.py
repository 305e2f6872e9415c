"""The caller of a request, and what keeps apart what clients name and what we name."""

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
    """The key of a request; empty where there are no keys."""

    owner: str = ""
    prefixes: str = ""
    """Requests share the prefix cache within this name alone."""

    def salt(self, given: str | None) -> str:
        """The salt of a request's prefixes: what the client gave, within what is its own."""
        return f"{self.prefixes}\0{given or ''}" if self.prefixes else given or ""


_NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("headrace_caller", default=_NOBODY)
"""Caller of the request that this task serves; tasks begun by it inherit it."""


def begin_exchange() -> None:
    """Forget the exchange before: a pipelined request is begun by the task of the one before it,
    and the lines of a batch are asked by one."""
    CALLER.set(_NOBODY)
    RECEIVE.set(None)
    BODY_SIZE.set(0)
    PREFIXES.set(NOTHING)


def caller_of(account: Account) -> Caller:
    key = account.key
    # What keys share is apart from what is one key's own, whatever either is called.
    return Caller(key.name, f"shared {key.prefixes}" if key.prefixes else f"key {key.name}")


RECEIVE: ContextVar[Receive | None] = ContextVar("headrace_receive", default=None)
"""Tells that the client of this task's request has left; set once its body has been read."""

BODY_SIZE: ContextVar[int] = ContextVar("headrace_body_size", default=0)
"""Bytes of the body of this task's request; set once it has been read."""

PREFIXES: ContextVar[TextPrefixes] = ContextVar("headrace_prefixes", default=NOTHING)
"""What a router calls the beginnings of this task's prompt; set once its body has been read."""

_MARK = "~"


def engine_id(name: str) -> str:
    """An id for the engine's books that no client can give or guess, and that shows the name which
    the answer carries: proxies give one id to several requests, and so may anybody."""
    return f"{name}{_MARK}{secrets.token_hex(6)}"


def named(engine_id: str) -> str:
    """The name in an `engine_id`."""
    return engine_id.rpartition(_MARK)[0] or engine_id
