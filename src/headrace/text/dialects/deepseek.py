"""DeepSeek V3 and R1 (arguments in a fenced block) and V3.1 (arguments bare)."""

from __future__ import annotations

from ..calls import MAX_NAME, Calls, SectionReader, read_either, read_named, read_until
from ..jsonstream import read_literal, skip_space
from .dialect import CallFormat, Dialect

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE_BEGIN, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


def read(opener: str, calls: Calls) -> SectionReader:
    if opener == ALL_BEGIN:
        char = yield from skip_space()
        yield from read_literal(ONE_BEGIN, char)
    while True:
        calls.begin()
        head = yield from read_until(SEPARATOR, MAX_NAME)
        fenced = head.strip() == "function"
        if fenced:
            head = yield from read_until("\n", MAX_NAME)
            yield from read_literal(FENCE + "json")
        yield from read_named(calls, head)
        char = yield from skip_space()
        if fenced:
            yield from read_literal(FENCE, char)
            char = yield from skip_space()
        yield from read_literal(ONE_END, char)
        char = yield from skip_space()
        if not (yield from read_either(ONE_BEGIN, ALL_END, char)):
            return None


_MARKERS = frozenset([ALL_BEGIN, ALL_END, ONE_BEGIN, ONE_END, SEPARATOR])

DEEPSEEK = Dialect(
    name="deepseek",
    read=read,
    format=CallFormat(
        open=ALL_BEGIN,
        begin=ONE_BEGIN + "function" + SEPARATOR + "NAME\n" + FENCE + "json\n",
        end="\n" + FENCE + ONE_END,
        separator="\n",
        close=ALL_END,
        quoted=False,
    ),
    openers=(ALL_BEGIN, ONE_BEGIN),
    closers=(ALL_END,),
    markers=_MARKERS,
    marks=(ALL_BEGIN, SEPARATOR, FENCE + "json"),
)

DEEPSEEK_V31 = Dialect(
    name="deepseek_v31",
    read=read,
    format=CallFormat(
        open=ALL_BEGIN,
        begin=ONE_BEGIN + "NAME" + SEPARATOR,
        end=ONE_END,
        close=ALL_END,
        quoted=False,
    ),
    openers=(ALL_BEGIN, ONE_BEGIN),
    closers=(ALL_END,),
    markers=_MARKERS,
    marks=(ALL_BEGIN, SEPARATOR),
)
