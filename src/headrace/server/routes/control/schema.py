"""Answers of the routes that control the engine."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class SleepReply(TypedDict):
    is_sleeping: bool
    level: int
    kv_bytes: NotRequired[int]
    """Bytes of the KV pool that were given back."""


class SleepingReply(TypedDict):
    is_sleeping: bool
    level: int


class ResetReply(TypedDict):
    blocks: int
    """Blocks that could have been found again."""


class ProfileReply(TypedDict):
    path: str
    """On the server's disk; open it in ui.perfetto.dev."""
    steps: int
    left_out: int
    """Later steps that are not in the profile, because the recording was full."""
