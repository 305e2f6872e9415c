"""Which tokens a piece of the answer's text was made of, for its log-probabilities."""

from __future__ import annotations

from typing import Any

from ....base.request import OutputDelta
from ...logprobs import chat_logprobs
from ..chat.request import Chat


class Trail:
    """Tokens that have come and whose text has not been shown yet.

    Text is held back (the beginning of a marker) and divided (reasoning, content, calls), so the
    tokens of a delta are not those of its text. What is shown is looked for in the text of the
    tokens that wait; those before it made a marker, those behind it are still held.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._waiting: list[dict[str, Any]] = []
        """Entries of `logprobs`."""

    def take(self, delta: OutputDelta) -> None:
        if self._chat.top_logprobs is not None and delta.logprobs is not None:
            self._waiting += chat_logprobs(
                self._chat.service.engine.tokenizer,
                delta.token_ids,
                delta.logprobs,
                self._chat.top_logprobs,
            )

    def of(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """The tokens of the content in these fields; those of other text are forgotten."""
        text = fields.get("content") or fields.get("reasoning_content")
        if not text or not self._waiting:
            return []
        pieces = [bytes(entry["bytes"]) for entry in self._waiting]
        first = b"".join(pieces).find(text.encode())
        last = first + len(text.encode())
        if first < 0:  # A character that no token has whole, or a special token that is not shown.
            first, last = 0, sum(map(len, pieces))
        found, place, used = [], 0, 0
        for entry, piece in zip(self._waiting, pieces, strict=True):
            if place >= last:
                break
            if place + len(piece) > first:
                found.append(entry)
            place, used = place + len(piece), used + 1
        del self._waiting[:used]
        return found if "content" in fields else []
