"""Kimi K2: a section of calls, each with its id, `functions.NAME:NUMBER`, and its arguments."""

from __future__ import annotations

from ..calls import MAX_NAME, Calls, SectionReader, read_either, read_named, read_until
from ..jsonstream import read_literal, skip_space
from .dialect import CallFormat, Dialect

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ONE_BEGIN, ONE_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


def read(opener: str, calls: Calls) -> SectionReader:
    if opener == ALL_BEGIN:
        char = yield from skip_space()
        yield from read_literal(ONE_BEGIN, char)
    while True:
        calls.begin()
        call_id = (yield from read_until(ARGUMENTS, MAX_NAME)).strip()
        name = call_id.removeprefix("functions.")
        yield from read_named(calls, name.rpartition(":")[0] or name, call_id)
        char = yield from skip_space()
        yield from read_literal(ONE_END, char)
        char = yield from skip_space()
        if not (yield from read_either(ONE_BEGIN, ALL_END, char)):
            return None


KIMI = Dialect(
    name="kimi",
    read=read,
    format=CallFormat(
        open=ALL_BEGIN,
        begin=ONE_BEGIN + "functions.NAME:NUMBER" + ARGUMENTS,
        end=ONE_END,
        close=ALL_END,
        quoted=False,
    ),
    openers=(ALL_BEGIN, ONE_BEGIN),
    closers=(ALL_END,),
    markers=frozenset([ALL_BEGIN, ALL_END, ONE_BEGIN, ONE_END, ARGUMENTS]),
    marks=(ALL_BEGIN, ARGUMENTS),
)
