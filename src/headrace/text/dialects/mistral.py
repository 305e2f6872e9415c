"""Mistral: `[TOOL_CALLS]`, then a list of objects (to version 7 of its tokenizer) or, once per
call, the name and `[ARGS]` with the arguments (from version 11)."""

from __future__ import annotations

from ..calls import MAX_NAME, Calls, SectionReader, read_list, read_named, read_until
from ..jsonstream import Malformed, read_literal, skip_space
from .dialect import CallFormat, Dialect, short_id

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read(opener: str, calls: Calls) -> SectionReader:
    char = yield from skip_space()
    if char == "[":
        yield from read_list(calls, certain=True)
        return None
    name = char + (yield from read_until("[", MAX_NAME))
    call_id: str | None = None
    char = yield
    if char == "C":
        yield from read_literal(CALL_ID[2:])
        call_id = yield from read_until("[", MAX_NAME)
        char = yield
    if char != "A":
        raise Malformed("expected [ARGS]")
    yield from read_literal(ARGS[2:])
    yield from read_named(calls, name, call_id)
    return None


MISTRAL = Dialect(
    name="mistral",
    read=read,
    format=CallFormat(
        open=OPEN + "[", begin='{"name": "NAME", "arguments": ', end="}", separator=", ", close="]"
    ),
    openers=(OPEN,),
    markers=frozenset([OPEN, ARGS, CALL_ID]),
    marks=(OPEN,),
    new_id=short_id,
)

MISTRAL_V11 = Dialect(
    name="mistral_v11",
    read=read,
    format=CallFormat(begin=OPEN + "NAME" + ARGS, end="", quoted=False),
    openers=(OPEN,),
    markers=MISTRAL.markers,
    marks=(OPEN, ARGS),
    new_id=short_id,
)
