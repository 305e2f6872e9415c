"""Authentication: with keys, every route is closed but the ones named here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import Forbidden, HeadraceError, Unauthorised
from ..base.text_prefixes import PATH_TOLD
from .caller import CALLER, caller_of
from .refusal import last_frame, refusal
from .socket import SOCKET_KEY

if TYPE_CHECKING:
    from .accounts import Account, Accounts

HEALTH = frozenset({
    "/health", "/ping", "/v1/health/live", "/v1/health/ready", "/v2/health/live",
    "/v2/health/ready",
})  # fmt: skip
"""Health probes: they need no secret and reveal only whether the server works."""
OPEN = HEALTH | {"/", "/favicon.ico", "/docs"}
"""Routes open without a key: probes, the page's own files, and facts that are public in the
source."""
PAGE = "/page/"
OPERATOR = frozenset({
    "/metrics", "/v1/metrics", "/v1/stats", "/v1/stats/stream", PATH_TOLD, "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
})  # fmt: skip
"""Routes of the public port that only an operator's key opens."""


class KeyRemoved(Unauthorised):
    """Failure: the key was removed from the file while its request was in work."""

    code = "key_removed"


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith(PAGE)


@dataclass(slots=True)
class Authentication:
    """ASGI layer that finds the caller's account; without `accounts` every route is open."""

    app: ASGIApp
    accounts: Accounts | None
    operator: bool = False
    """Whether all routes of this application are the operator's."""
    refused: Callable[[HeadraceError], None] = lambda error: None
    """Counter of errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.accounts is not None and not is_open(scope["path"]):
            try:
                account = account_of(self.accounts, scope, operator=self.operator)
            except HeadraceError as error:
                self.refused(error)
                reply = refusal(scope["path"], error)
                if isinstance(error, Unauthorised):
                    reply.headers["www-authenticate"] = "Bearer"
                await reply(scope, receive, send)
                return
            scope["headrace.account"] = account
            scope["headrace.owner"] = account.key.name
            CALLER.set(caller_of(account))
            await _while_valid(self.app, account.removed, scope, receive, send)
            return
        await self.app(scope, receive, send)


def account_of(accounts: Accounts, scope: Scope, *, operator: bool = False) -> Account:
    """Return the caller's account. `operator`: all routes of this application are the operator's.
    Raises `Unauthorised`, `Forbidden`."""
    headers = Headers(scope=scope)
    kind, _, secret = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secret:
        secret = headers.get("x-api-key", "")
    if not secret and "headrace.socket" in scope:
        secret = _offered(scope["headrace.socket"].subprotocols)
    if not secret:
        raise Unauthorised("an API key is needed: Authorization: Bearer …")
    account = accounts.find(secret.strip())
    if account is None:
        raise Unauthorised("this API key is not known here")
    if (operator or scope["path"] in OPERATOR) and account.key.role != "operator":
        raise Forbidden("this route is the operator's")
    return account


def _offered(subprotocols: list[str]) -> str:
    """Return the key among the subprotocols, or "": a page's script cannot set websocket
    headers."""
    for each in subprotocols:
        if each.startswith(SOCKET_KEY):
            return each.removeprefix(SOCKET_KEY)
    return ""


async def _while_valid(
    app: ASGIApp, removed: asyncio.Event, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the application until the key is removed.

    It then sees a client disconnect, which ends its work, and the client gets the reason.
    """
    started = streams = ended = cut = False

    async def relay(message: Message) -> None:
        nonlocal started, streams, ended
        if cut and not started:
            return  # A route's answer to a client that it believes gone.
        if message["type"] == "http.response.start":
            started = True
            kind = Headers(raw=message["headers"]).get("content-type", "")
            streams = kind.startswith("text/event-stream")
        else:
            ended = not message.get("more_body", False)
        await send(message)

    async def received() -> Message:
        nonlocal cut
        gone = asyncio.ensure_future(removed.wait())
        message = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({gone, message}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
            cut = True
            return {"type": "http.disconnect"}
        finally:
            gone.cancel()
            message.cancel()

    try:
        await app(scope, received, relay)
    except ClientDisconnect:
        if not cut:
            raise
    if cut and not ended:
        error = KeyRemoved("this API key was removed")
        if not started:
            await refusal(scope["path"], error)(scope, receive, send)
        elif "headrace.socket" in scope:
            scope["headrace.socket"].refuse(error)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif streams:
            last = {"type": "http.response.body", "body": last_frame(scope["path"], error)}
            await send({**last, "more_body": False})
