"""Calls as a list of objects, between marks.

Granite 3 (`<|tool_call|>` and no closing mark), Phi-4-mini (with one), Nemotron Nano 2, and Command
R7B and A, whose names are `tool_name`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..calls import Calls, SectionReader, read_list
from ..jsonstream import Malformed, read_literal, skip_space
from .dialect import CallFormat, Dialect

TOOL_CALL, ACTION, ACTION_END = "<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>"
TOOL_CALL_END = "<|/tool_call|>"
NEMOTRON_CALL, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"


def reader(close: str = "") -> Callable[[str, Calls], SectionReader]:
    """Make a reader of a list, and of the mark that closes it."""

    def read(opener: str, calls: Calls) -> SectionReader:
        char = yield from skip_space()
        if char != "[":
            raise Malformed("expected a list")
        yield from read_list(calls, certain=True)
        if close:
            char = yield from skip_space()
            yield from read_literal(close, char)
        return None

    return read


GRANITE = Dialect(
    name="granite",
    read=reader(),
    format=CallFormat(
        open=TOOL_CALL + "[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]",
    ),
    openers=(TOOL_CALL,),
    markers=frozenset([TOOL_CALL]),
    marks=(TOOL_CALL,),
)

COMMAND = Dialect(
    name="command",
    read=reader(ACTION_END),
    format=CallFormat(
        open=ACTION + "[\n    ",
        begin='{"tool_name": "NAME", "parameters": ',
        end="}",
        separator=",\n    ",
        close="\n]" + ACTION_END,
    ),
    openers=(ACTION,),
    closers=(ACTION_END,),
    markers=frozenset([ACTION, ACTION_END]),
    marks=(ACTION, ACTION_END),
)

PHI4 = Dialect(
    name="phi4",
    read=reader(TOOL_CALL_END),
    format=CallFormat(
        open=TOOL_CALL + "[",
        begin='{"type": "function", "function": {"name": "NAME", "arguments": ',
        end="}}",
        separator=", ",
        close="]" + TOOL_CALL_END,
    ),
    openers=(TOOL_CALL,),
    closers=(TOOL_CALL_END,),
    markers=frozenset([TOOL_CALL, TOOL_CALL_END]),
    marks=("<|tool|>", "<|/tool|>"),
)

NEMOTRON = Dialect(
    name="nemotron",
    read=reader(NEMOTRON_END),
    format=CallFormat(
        open=NEMOTRON_CALL + "[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]" + NEMOTRON_END,
    ),
    openers=(NEMOTRON_CALL,),
    closers=(NEMOTRON_END,),
    markers=frozenset([NEMOTRON_CALL, NEMOTRON_END]),
    marks=(NEMOTRON_CALL,),
)
