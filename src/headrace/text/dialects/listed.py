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


def _dialect(
    name: str, opener: str, begin: str, closer: str, marks: tuple[str, ...] = (), end: str = "}"
) -> Dialect:
    ends = (closer,) if closer else ()
    return Dialect(
        name=name,
        read=reader(closer),
        format=CallFormat(
            open=opener + "[", begin=begin, end=end, separator=", ", close="]" + closer
        ),
        openers=(opener,),
        closers=ends,
        markers=frozenset([opener, *ends]),
        marks=marks or (opener,),
    )


_BEGIN = '{"name": "NAME", "arguments": '
GRANITE = _dialect("granite", TOOL_CALL, _BEGIN, "")
NEMOTRON = _dialect("nemotron", NEMOTRON_CALL, _BEGIN, NEMOTRON_END)
PHI4 = _dialect(
    "phi4",
    TOOL_CALL,
    '{"type": "function", "function": ' + _BEGIN,
    TOOL_CALL_END,
    ("<|tool|>", "<|/tool|>"),
    "}}",
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
