"""The record of a request: times on one monotonic clock, in nanoseconds."""

from __future__ import annotations

import msgspec


class RequestRecord(msgspec.Struct):
    """One request. All clients use the machine's monotonic clock, so times are comparable."""

    number: int
    session: int
    turn: int
    group: int
    planned_ns: int
    """Due time, from which latency counts, however late the client sent it."""
    sent_ns: int = 0
    chunk_ns: list[int] = []
    """Arrival of each piece with a part of the answer."""
    end_ns: int = 0
    status: int = 0
    error: str | None = None
    error_kind: str | None = None
    """refused (4xx), overload (429, 503), server (5xx), connection, timeout, stalled, protocol."""
    cancelled: bool = False
    """Cancelled on purpose."""
    asked_tokens: int = 0
    known_prompt_tokens: int = 0
    """Prompt tokens that the client counted itself; 0: unknown."""
    exact_prompt: bool = False
    """Whether `known_prompt_tokens` must equal the server's count (token ids)."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Counts in the server's `usage`."""
    cached_tokens: int | None = None
    picture_tokens: int | None = None
    """Prompt tokens that stand for pictures, if the server's `usage` reports them."""
    right: bool | None = None
    """Whether the answer is right; None: the right answer is unknown."""
    characters: int = 0
    text_bytes: int = 0
    """Length of the answer in UTF-8; with the end token the most tokens that it can have."""
    call_bytes: int = 0
    """Length of the names and arguments of its tool calls."""
    recount_tokens: int | None = None
    """Tokens of the answer's text, if the client has the tokenizer."""
    finish_reason: str | None = None
    process: int = 0
    reconnected: bool = False
    """Whether it was sent again on a new connection because the kept one was closed."""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.cancelled

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, otherwise the pieces received."""
        return self.output_tokens if self.output_tokens is not None else len(self.chunk_ns)


class ClientAudit(msgspec.Struct):
    """Load and lateness of one client process."""

    process: int
    lag_ns: list[int] = []
    """Lateness of an event-loop timer, sampled throughout."""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    connections: int = 0
    requests: int = 0
    gave_up: bool = False
    """Whether it stopped sending because too many connections in a row had failed."""
