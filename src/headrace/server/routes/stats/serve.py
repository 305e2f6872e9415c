"""Statistics board of an application, and its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from ....base.errors import Overloaded
from ....base.version import VERSION
from ...service import Service
from ...wire import named_frame
from .board import Board

MOST_WATCHERS = 32


class Watchers:
    """Statistics board of one application, made at the first request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._board: Board | None = None
        self._watching = 0

    def board(self) -> Board:
        """Return the board; make it if needed. Raises `Overloaded` while the model loads."""
        engines = [one.engine for one in self._service.models if one.writes]
        if not engines:
            _ = self._service.engine  # Raises the reason.
        if self._board is None or not self._board.of(engines):
            self._board = Board(*engines, tasks=self._service.tasks)
        self._board.asked()
        return self._board

    def snapshot(self) -> dict[str, Any]:
        board = self.board()
        return {
            "server": facts(self._service),
            "points": list(board.points),
            "requests": board.requests(),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a `snapshot` event, then a `point` event each second, until the server drains."""
        if self._watching >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} watchers are served already", retry_after=30.0)
        self._watching += 1
        try:
            yield named_frame("snapshot", self.snapshot())
            while not self._service.draining:
                board = self.board()
                try:
                    point = await board.next()
                except asyncio.CancelledError:
                    if board.closed:
                        return
                    raise
                yield named_frame(
                    "point",
                    {
                        "point": point,
                        "requests": board.requests(),
                        "in_work": self._service.in_work,
                        "ready": self._service.health()[0],
                    },
                )
        finally:
            self._watching -= 1


def facts(service: Service) -> dict[str, Any]:
    """Return the facts that do not change every second."""
    engine = service.engine
    ready, _, reason, _ = service.health()
    return {
        "model": service.name,
        "version": VERSION,
        "uptime": time.time() - service.started,
        "ready": ready,
        "reason": reason,
        "max_context": engine.max_context,
        "max_sequences": engine.rows,
        "in_work": service.in_work,
        "features": sorted(getattr(engine, "features", ())),
        "decisions": [
            {"name": decision.name, "value": decision.value, "reason": decision.reason}
            for decision in engine.decisions
        ],
    }


def watchers(app: Any) -> Watchers:
    """Return the watchers of this application."""
    if not hasattr(app.state, "watchers"):
        app.state.watchers = Watchers(app.state.service)
    found: Watchers = app.state.watchers
    return found
