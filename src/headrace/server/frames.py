"""Frames of an answer: sent directly if the connection waits for them, otherwise by a task.

Normally a token of a stream wakes its exchange's task, which passes it through two iterators and
the layers around the routes. On a machine whose cores all compute, that time is taken from the next
step, once per stream (docs/adr/0046). The layers on the way change no part of a body, so a frame
may bypass them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..base.request import OutputDelta
from .generation import deltas
from .wire import Large

if TYPE_CHECKING:
    from ..engine.clients.face import OutputStream

log = logging.getLogger("headrace.server")


class Outlet(Protocol):
    """Direct output for the parts of one answer's body."""

    @property
    def open(self) -> bool:
        """Whether the next part would leave now, after everything sent earlier."""

    def write(self, data: bytes, /) -> None:
        """Send a part; only allowed while it is open."""


@dataclass(slots=True)
class Frames:
    """Frames made by `news` of each delta, then by `end`."""

    streams: Sequence[OutputStream]
    news: Callable[[int, OutputDelta], bytes | Large]
    """Gets the index of the stream and its delta, and may return nothing."""
    end: Callable[[], bytes]
    straight: bool = True
    """Whether `news` makes no large data; otherwise the exchange's task sends all frames."""

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield all frames except those sent directly; raise as `generation.deltas`."""
        async for place, delta in deltas(self.streams):
            data = self.news(place, delta)
            if isinstance(data, Large):
                yield await data.written()
            elif data:
                yield data
        yield self.end()

    def divert(self, outlet: Outlet) -> None:
        """Send frames directly to `outlet` while it is open."""
        for place, stream in enumerate(self.streams if self.straight else ()):
            stream.divert(partial(self._straight, place, outlet))

    def _straight(self, place: int, outlet: Outlet, delta: OutputDelta) -> bool:
        if not outlet.open:
            return False
        try:
            data = self.news(place, delta)
        except Exception:  # One answer's failure must not stop the engine's delivery to others.
            log.exception("a delta could not be told")
            return False  # Its reader meets the same error, as the error of its exchange.
        assert not isinstance(data, Large)
        if data:
            outlet.write(data)
        return True
