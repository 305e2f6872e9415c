"""Hermes, Qwen 2.5 and 3: `<tool_call>` around an object, once per call."""

from __future__ import annotations

from ..calls import Calls, SectionReader, read_call
from ..jsonstream import Malformed, read_literal, skip_space
from .dialect import CallFormat, Dialect

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(opener: str, calls: Calls) -> SectionReader:
    certain = opener == OPEN
    char = yield from skip_space()
    while True:
        if char != "{":
            raise Malformed("expected an object")
        yield from read_call(calls, certain=certain)
        char = yield from skip_space()
        if char != "{" or certain:
            break
    yield from read_literal("</" + opener[1:], char)
    return None


HERMES = Dialect(
    name="hermes",
    read=read,
    format=CallFormat(
        begin=OPEN + '\n{"name": "NAME", "arguments": ', end="}\n" + CLOSE, separator="\n"
    ),
    openers=(OPEN,),
    wrappers=("<tools>", "<function_call>"),
    closers=(CLOSE, "</tools>", "</function_call>"),
    markers=frozenset([OPEN, CLOSE]),
    marks=(OPEN, CLOSE),
)
