"""Harmony (gpt-oss): a message is a head, which names its channel and its recipient, and a text.

    <|channel|>analysis<|message|>…<|end|>                                      reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                    content
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

A commentary without a recipient is content too: text before a call. The prompt ends with
`<|start|>assistant`, so that the first head begins after it.
"""

from __future__ import annotations

import re

from ..calls import MAX_NAME, Calls, SectionReader, read_named, read_until
from ..jsonstream import Malformed, skip_space
from ..reasoning import HARMONY as MARKS
from .dialect import CallFormat, Dialect

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, CALL, END, RETURN = "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"
BARE = "to=functions."
"""Beginning of an answer that calls at once: the recipient comes before the channel."""
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEAD = MAX_NAME + 128


def read(opener: str, calls: Calls) -> SectionReader:
    """Read a head: a call with its arguments, the mark of reasoning to give back, or nothing."""
    while opener not in (END, CALL, RETURN):
        calls.begin()
        head = opener + (yield from read_until(MESSAGE, _MAX_HEAD))
        channel, to = _CHANNEL.search(head), _RECIPIENT.search(head)
        if channel is None:
            raise Malformed("a head without a channel")
        if to is None:
            calls.begun = False
            return MARKS.open if channel[1] == "analysis" else None
        if calls.known is not None and not calls.known:
            raise Malformed("a call where no tool is on offer")
        yield from read_named(calls, to[1])
        char = yield from skip_space()
        if char != "<":
            return char
        opener = char + (yield from read_until(">", len(CONSTRAIN))) + ">"
        if opener not in (START, CHANNEL):
            return None
    return (yield)


HARMONY = Dialect(
    name="harmony",
    read=read,
    format=CallFormat(
        begin=CHANNEL + "commentary to=functions.NAME " + CONSTRAIN + "json" + MESSAGE,
        end=CALL,
        separator=START + "assistant",
        quoted=False,
    ),
    openers=(CHANNEL, START, END, CALL, RETURN, BARE),
    closers=(CALL, END, RETURN),
    markers=frozenset([START, CHANNEL, MESSAGE, CONSTRAIN, CALL, END, RETURN]),
    marks=(START + "assistant", CHANNEL + "commentary", CALL),
    head=CHANNEL + "final" + MESSAGE,
)
