"""Granite 3: `<|tool_call|>`, then a list of objects. Command R7B and A: a list of objects between
marks, whose names are `tool_name`."""

from __future__ import annotations

from ..calls import Calls, SectionReader, read_list
from ..jsonstream import Malformed, read_literal, skip_space
from .dialect import CallFormat, Dialect

TOOL_CALL, ACTION, ACTION_END = "<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>"


def read(opener: str, calls: Calls) -> SectionReader:
    char = yield from skip_space()
    if char != "[":
        raise Malformed("expected a list")
    yield from read_list(calls, certain=True)
    if opener == ACTION:
        char = yield from skip_space()
        yield from read_literal(ACTION_END, char)
    return None


GRANITE = Dialect(
    name="granite",
    read=read,
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
    read=read,
    format=CallFormat(
        open=ACTION + "[\n    ",
        begin='{"tool_name": "NAME", "parameters": ',
        end="}",
        separator=",\n    ",
        close="\n]" + ACTION_END,
    ),
    openers=(ACTION,),
    markers=frozenset([ACTION, ACTION_END]),
    marks=(ACTION, ACTION_END),
)
