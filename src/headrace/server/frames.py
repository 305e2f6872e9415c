"""The frames of an answer: straight to the connection where it waits for them, else by a task.

A token of a stream would wake its exchange's task, which carries it through two iterators and the
layers around the routes. On a machine whose cores all compute, all of that is taken from the next
step, once for each stream (docs/adr/0046). What lies on the way changes no part of a body, so a
frame may go past it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..base.request import OutputDelta
from .generation import deltas
from .wire import Large

if TYPE_CHECKING:
    from ..engine.face import OutputStream

log = logging.getLogger("headrace.server")


class Outlet(Protocol):
    """Where the parts of one answer's body go at once."""

    @property
    def open(self) -> bool:
        """Would the next part leave now, behind everything before it?"""

    def write(self, data: bytes, /) -> None:
        """Send a part; only while it is open."""


class Frames:
    """What `news` makes of each delta, then what `end` makes."""

    def __init__(
        self,
        streams: Sequence[OutputStream],
        news: Callable[[int, OutputDelta], bytes | Large],
        end: Callable[[], bytes],
        *,
        straight: bool = True,
    ) -> None:
        """`news` gets the index of the stream and its delta; it may make nothing of it. Where not
        `straight` it may make what is large, and all of it is told by the exchange's task."""
        self._streams = streams
        self._news = news
        self._end = end
        self._goes_straight = straight

    async def frames(self) -> AsyncIterator[bytes]:
        """All of them, but for those that went straight; raises as `generation.deltas`."""
        async for place, delta in deltas(self._streams):
            data = self._news(place, delta)
            if isinstance(data, Large):
                yield await data.written()
            elif data:
                yield data
        yield self._end()

    def divert(self, outlet: Outlet) -> None:
        """Let frames go straight to `outlet` while it is open."""
        for place, stream in enumerate(self._streams if self._goes_straight else ()):
            stream.divert(partial(self._straight, place, outlet))

    def _straight(self, place: int, outlet: Outlet, delta: OutputDelta) -> bool:
        if not outlet.open:
            return False
        try:
            data = self._news(place, delta)
        except Exception:  # The border between one answer and the engine's delivery to all.
            log.exception("a delta could not be told")
            return False  # Its reader meets the same, as the error of its exchange.
        assert not isinstance(data, Large)
        if data:
            outlet.write(data)
        return True
