"""Dialect of tool calls: where calls begin, how they are read, how they are written."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..calls import Calls, SectionReader
from ..lark import Rules
from ..tools import Tool

Value = Callable[[Any], str]
"""Function from a JSON schema to the grammar expression of a value in JSON."""


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Make nine letters and digits: all that Mistral's templates take."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Form of written calls; grammars and tests are made from it.

    A message's calls are `open`, the calls with `separator` between them, `close`; a call is
    `begin` with the name in it, the arguments, `end`.
    """

    begin: str
    """Text before the arguments: `NAME` stands for the name, `NUMBER` for the call's place in its
    message, from 0."""
    end: str
    open: str = ""
    separator: str = ""
    close: str = ""
    quoted: bool = True
    """Flag: the name is inside a JSON string."""

    def begin_call(self, name: str) -> str:
        return self.begin.replace("NAME", json.dumps(name)[1:-1] if self.quoted else name)

    def body(self, arguments: str) -> str:
        """Convert arguments from JSON to their form between `begin` and `end`."""
        return arguments

    def arguments(
        self, tool: Tool, name: str, value: Value, special: Mapping[str, int]
    ) -> tuple[str, Rules]:
        """Make a tool's arguments as a grammar expression, and further rules for it.

        The rules' names begin with `name` or mean the same for every tool. `special`: special
        tokens, text → id.
        """
        return value({"type": "object", **tool.parameters}), []

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write the text of calls given as (name, arguments as JSON)."""
        texts = [
            self.begin_call(name).replace("NUMBER", str(number)) + self.body(arguments) + self.end
            for number, (name, arguments) in enumerate(calls)
        ]
        return self.open + self.separator.join(texts) + self.close


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    read: Callable[[str, Calls], SectionReader]
    """Function (opener, calls) → reader of the text after the opener."""
    format: CallFormat
    openers: tuple[str, ...] = ()
    """Texts with which calls begin anywhere in a message."""
    wrappers: tuple[str, ...] = ()
    """Further openers that models of this dialect write untaught: a call follows only if it names
    an offered tool."""
    closers: tuple[str, ...] = ()
    """Texts with which calls end. The rest of a call that broke off is left out up to there."""
    markers: frozenset[str] = field(default_factory=frozenset)
    """Texts that must survive detokenising, even if they are special tokens."""
    marks: tuple[str, ...] = ()
    """Texts that are all in a chat template of this dialect."""
    head: str = ""
    """Text before content: if set, no message is read without the dialect."""
    new_id: Callable[[], str] = long_id
