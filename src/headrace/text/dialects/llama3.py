"""Llama 3.1 to 3.3: an object as the whole message (`bare`), or after `<|python_tag|>`.

Several calls are separated by `;`. The older `<function=name>{…}</function>` is read as well.
"""

from __future__ import annotations

from ..calls import MAX_NAME, Calls, SectionReader, read_call, read_named, read_until
from ..jsonstream import Malformed, read_literal, skip_space
from .dialect import CallFormat, Dialect

TAG, FUNCTION = "<|python_tag|>", "<function="


def read(opener: str, calls: Calls) -> SectionReader:
    if opener == FUNCTION:
        name = yield from read_until(">", MAX_NAME)
        yield from read_named(calls, name)
        char = yield from skip_space()
        yield from read_literal("</function>", char)
        return None
    char = yield from skip_space()
    while True:
        if char != "{":
            raise Malformed("expected an object")
        yield from read_call(calls, certain=True)
        char = yield from skip_space()
        if char != ";":
            return char
        char = yield from skip_space()


LLAMA3 = Dialect(
    name="llama3",
    read=read,
    format=CallFormat(begin='{"name": "NAME", "parameters": ', end="}", separator="; "),
    openers=(TAG, FUNCTION),
    closers=("</function>",),
    markers=frozenset([TAG]),
    marks=("<|start_header_id|>", '"parameters": '),
)
