"""Internal request: through the same routes, without HTTP, authentication or outer middleware."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from starlette.datastructures import State
from starlette.types import ASGIApp, Message

from .access import CLIENT_GONE, log_exchange
from .caller import CALLER, begin_exchange, caller_of
from .errors import error_body, internal_error
from .wire import encode

if TYPE_CHECKING:
    from .accounts import Account
    from .generation import Usage

log = logging.getLogger("headrace.server")


class Inside(Protocol):
    """A server's application as its internal callers see it."""

    state: State

    @property
    def inside(self) -> ASGIApp: ...


@dataclass(slots=True)
class Answer:
    """Status, body and token usage of one answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    usage: Usage | None = None

    def begin(self, message: Message) -> None:
        """Take status and headers from an ASGI message."""
        self.status = message["status"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
        }


def exchange_scope(
    method: str, path: str, headers: list[tuple[bytes, bytes]], **more: Any
) -> dict[str, Any]:
    """Return the ASGI scope of an exchange that no connection brought."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "root_path": "",
        "query_string": b"",
        "client": None,
        "server": ("inside", 0),
        "headers": headers,
        **more,
    }


async def post(
    app: Any,
    stack: ASGIApp,
    path: str,
    body: bytes,
    *,
    request_id: str,
    account: Account | None,
    owner: str,
    left: Callable[[Usage], None] = lambda usage: None,
) -> Answer:
    """Post a body to `path` and return the whole answer.

    Cancelling it stops the work, as a client disconnect does; `left` then gets the usage so far.

    The request is marked as one of a batch (`headrace.batch`): it takes no place in the queue and
    does not count against its key's limits per minute.
    """
    headers = [
        (b"host", b"inside"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    scope = exchange_scope("POST", path, headers, app=app)
    scope |= {"headrace.request_id": request_id, "headrace.batch": True, "headrace.owner": owner}
    begin_exchange()
    if account is not None:
        scope["headrace.account"] = account
        CALLER.set(caller_of(account))
    answer = Answer()
    sent = False
    begin = time.perf_counter()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # Stay connected until the answer is complete.
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.begin(message)
        elif message["type"] == "http.response.body":
            answer.body += message.get("body", b"")

    try:
        await stack(scope, receive, send)
    except asyncio.CancelledError:
        usage = scope.get("headrace.usage")
        if usage is not None:
            left(usage)
            answer.status = CLIENT_GONE
            _log(scope, answer, begin)
        raise
    except Exception:  # the border of a batch: a bug ends one line of it
        log.exception("unexpected error", extra={"request_id": request_id})
        answer.status, answer.body = 500, encode(error_body(internal_error()))
    answer.usage = scope.get("headrace.usage")
    _log(scope, answer, begin)
    return answer


def _log(scope: dict[str, Any], answer: Answer, begin: float) -> None:
    """Write the line of the access log, as for a request that came over HTTP."""
    fields = {
        "request_id": scope["headrace.request_id"],
        "method": "POST",
        "path": scope["path"],
        "status": answer.status,
        "seconds": round(time.perf_counter() - begin, 6),
        "inside": True,
    }
    log_exchange(logging.INFO, fields, scope, begin)
