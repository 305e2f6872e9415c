"""Job of a client process: target, form of the requests, and its share of the sessions."""

from __future__ import annotations

from typing import Any

import msgspec

from .workload import Session


class Target(msgspec.Struct):
    """The server and the form of the requests."""

    url: str
    model: str
    endpoint: str = "completions"
    """completions, chat or embeddings."""
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    stream: bool = True
    extra: dict[str, Any] = {}
    """Further fields of every body."""
    timeout: float = 600.0
    """Seconds for a whole request."""
    stall: float = 60.0
    """Seconds without a byte after which a stream counts as stalled."""


class Job(msgspec.Struct):
    """One process's share of a run."""

    process: int
    target: Target
    sessions: list[Session]
    numbers: list[int]
    """Number of each session in the whole run."""
    concurrency: int | None = None
    """Closed loop: concurrent sessions. None: open loop by `offsets`."""
    offsets: list[float] | None = None
    """Open loop: start time of each session, in seconds."""
    duration: float | None = None
    """Seconds after which nothing new is started."""
    tokenizer: str | None = None
    """Model whose tokenizer recounts the answers."""
    endless: bool = False
    """Whether more sessions than these can be requested."""
    most: int | None = None
    """Open loop: most sessions in flight."""
    ramp: float = 0.0
    """Closed loop: seconds over which the users start."""
    grace: float | None = None
    """Seconds after the duration until requests in flight are cancelled."""


class More(msgspec.Struct):
    """Further sessions for a process that requested them, or notice that the run is over."""

    sessions: list[Session] = []
    numbers: list[int] = []
    stop: bool = False
