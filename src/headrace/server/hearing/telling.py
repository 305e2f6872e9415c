"""Events that a live session sends, in order."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from starlette.types import Send

from ...base.errors import HeadraceError
from ..errors import error_body
from ..wire import encode
from .spoken import SpokenTurn

SESSION_SECONDS = 3600.0
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class SessionEvents:
    """Sender of one session's events; `beta`: with the names of the beta."""

    def __init__(self, send: Send, *, beta: bool) -> None:
        self._send = send
        self.beta = beta
        self._id = f"sess_{secrets.token_hex(12)}"
        self._sending = asyncio.Lock()
        self._count = 0

    async def tell(self, kind: str, **fields: Any) -> None:
        """Send an event; waits until the client reads."""
        self._count += 1
        name = f"event_{self._id[5:17]}_{self._count}"
        body = encode({"event_id": name, "type": kind, **fields})
        async with self._sending:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def item(self, kind: str, turn: SpokenTurn, **fields: Any) -> None:
        """Send an event about the transcription of a turn."""
        await self.tell(f"{_TRANSCRIPTION}.{kind}", item_id=turn.id, content_index=0, **fields)

    async def failed(self, turn: SpokenTurn, error: HeadraceError) -> None:
        await self.item("failed", turn, **error_body(error))

    async def error(self, error: HeadraceError, event_id: str | None = None) -> None:
        """Send an error. `event_id` is that of the client's wrong event."""
        await self.tell("error", error={**error_body(error)["error"], "event_id": event_id})

    async def session(self, what: str, shown: dict[str, Any]) -> None:
        """Send the session that was created or updated."""
        kind = "transcription_session" if self.beta else "session"
        session = {
            "id": self._id,
            "object": f"realtime.{kind}",
            "expires_at": int(time.time() + SESSION_SECONDS),
            **shown,
        }
        await self.tell(f"{kind}.{what}", session=session)

    async def committed(self, turn: SpokenTurn, before: str | None) -> None:
        """Report that a turn became an item of the conversation, after the item `before`."""
        named = {"item_id": turn.id, "previous_item_id": before}
        await self.tell("input_audio_buffer.committed", **named)
        item = {
            "id": turn.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        for kind in ("created",) if self.beta else ("added", "done"):
            await self.tell(f"conversation.item.{kind}", previous_item_id=before, item=item)
