"""Events that the stream router makes of a model's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A certain call, whose name is known."""

    index: int
    """Place among the calls of the message, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Next part of a call's arguments; the parts add up to one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int
    complete: bool
    """False if the text broke off, or ceased to be JSON, inside the arguments."""


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
