"""Lifetime of one HTTP exchange: work ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..base.errors import HeadraceError
from ..obs.tasks import TaskWatch
from .errors import error_body, error_response
from .frames import Frames, Outlet
from .wire import DONE, KEEP_ALIVE, frame

Result = TypeVar("Result")
_SENDING = TaskWatch()
"""Tasks that send keep-alive comments; no service is at hand, so errors are only logged."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, which is cancelled when the client disconnects.

    The body must already have been read: the next message of `receive` is the disconnect. Raises
    `ClientDisconnect`.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, HeadraceError):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def openai_error_frame(error: HeadraceError) -> bytes:
    return frame(error_body(error)) + DONE


class EventStream(Response):
    """Server-sent events from an iterator of finished frames.

    An error before the first frame is answered with its HTTP status: nothing is sent until then, or
    until `keep_alive` seconds have passed. A later error becomes a frame. During silence comments
    are sent, so that proxies do not cut the connection while a model is thinking.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: Frames | AsyncIterator[bytes],
        *,
        keep_alive: float,
        error_frame: Callable[[HeadraceError], bytes] = openai_error_frame,
        error_reply: Callable[[HeadraceError], Response] = error_response,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._diverted = frames if isinstance(frames, Frames) else None
        self._frames = frames.frames() if isinstance(frames, Frames) else frames
        self._keep_alive = keep_alive
        self._error_frame = error_frame
        self._error_reply = error_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        frames = self._frames
        first = asyncio.ensure_future(_next(frames))
        try:
            done, _ = await asyncio.wait({first}, timeout=self._keep_alive)
            if done and isinstance(error := first.exception(), HeadraceError):
                await self._error_reply(error)(scope, receive, send)
                return
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            comments = _Comments(send, self._keep_alive)
            if not done:
                await comments.send_now()
            straight = _Straight(comments, scope.get("headrace.outlet"))
            try:
                data = await first
                if data is not None and self._diverted is not None and straight.possible:
                    self._diverted.divert(straight)
                while data is not None:
                    comments.touch()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    straight.between = True
                    data = await _next(frames)
                    straight.between = False
            except HeadraceError as error:
                data = self._error_frame(error)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                await comments.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            first.cancel()
            await asyncio.wait({first})
            close = getattr(frames, "aclose", None)
            if close is not None:
                await close()


async def _next(frames: AsyncIterator[bytes]) -> bytes | None:
    try:
        return await frames.__anext__()
    except StopAsyncIteration:
        return None


class _Straight:
    """Direct output of an exchange, open while its task waits for the next frame."""

    __slots__ = ("_comments", "_outlet", "between")

    def __init__(self, comments: _Comments, outlet: Outlet | None) -> None:
        """Wrap the connection's `outlet`; None if it has none, as in a test or a batch."""
        self._comments = comments
        self._outlet = outlet
        self.between = False

    @property
    def possible(self) -> bool:
        return self._outlet is not None

    @property
    def open(self) -> bool:
        return self.between and self._outlet is not None and self._outlet.open

    def write(self, data: bytes) -> None:
        assert self._outlet is not None
        self._comments.touch()
        self._outlet.write(data)


class _Comments:
    """Sender of a comment whenever nothing was sent for `interval` seconds."""

    def __init__(self, send: Send, interval: float) -> None:
        self._send = send
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(interval, self._tick)

    def touch(self) -> None:
        self._last = self._loop.time()

    async def send_now(self) -> None:
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        self.touch()

    def _tick(self) -> None:
        quiet = self._loop.time() - self._last
        if quiet >= self._interval * 0.99:
            # If the reader is so slow that the last comment still waits, no second one is sent.
            if self._task is None or self._task.done():
                self._task = _SENDING.errand("comment", self.send_now())
            quiet = 0.0
        self._timer = self._loop.call_later(self._interval - quiet, self._tick)

    async def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
