"""Grammars that hold a model to a dialect's calls and to its tools' schemas.

If only a call is allowed, it must have the dialect's own form. If the model may choose (`auto`), a
call may also begin the answer as plain JSON (`bare`). Many models write it so in spite of their
training. Text that begins like such a call and goes on differently is then forbidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest

from .dialects import Dialect
from .grammar import checked_schema, loose_value, triggered, verified
from .lark import TEXT, Rules, grammar, joined, json_value, literal
from .tools import Tool, ToolChoice

_NO_SPECIAL: Mapping[str, int] = {}
_S = r"(\x20|\x0A{1,2}[\x20\x09]{0,20})?"
"""Optional `lark.WHITESPACE`."""
_FENCE = r"```(json)?"


def tool_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    form: str | None = None,
    special: Mapping[str, int] = _NO_SPECIAL,
) -> str | None:
    """Make the grammar of the answer; None if it is free.

    `required`: one call or more and nothing else; `named`: one call of that tool; `none`: the form,
    or free. `auto` with a `form` (a grammar of its own): calls or the form. `auto` without one:
    text with calls in it, constrained only if a tool is strict. `special`: the special tokens of
    the model, text → id. Raises `InvalidRequest` for an unsupported strict schema; unsupported
    parts of a schema that is not strict are left open.
    """
    if choice.kind == "none" or not tools:
        return form
    if choice.kind == "named":
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    elif choice.kind == "auto" and form is None and not any(tool.strict for tool in tools):
        return None
    for index, tool in enumerate(tools):
        if tool.strict:
            where = f"tools.{index}.function.parameters"
            checked_schema(tool.parameters, where)
            verified(grammar(_arguments(tool)), where)
    if choice.kind != "auto":
        return verified(grammar("calls", _calls(dialect, tools, parallel, special)), "tools")
    if form is not None:
        return verified(_or_form(dialect, tools, parallel, form, special), "tools")
    return verified(_free(dialect, tools, parallel, special), "tools")


def headed(form: str, dialect: Dialect, special: Mapping[str, int] = _NO_SPECIAL) -> str:
    """Put the dialect's text before content in front of a form."""
    if not dialect.head:
        return form
    return joined(grammar(f"{literal(dialect.head, special)} @content"), {"content": form})


def _arguments(tool: Tool) -> str:
    """Make the grammar of a tool's arguments in JSON."""
    return _value(tool)({"type": "object", **tool.parameters})


def _value(tool: Tool) -> Callable[[Any], str]:
    return json_value if tool.strict else loose_value


def _call(
    dialect: Dialect, index: int, tool: Tool, special: Mapping[str, int], skip: str = ""
) -> Rules:
    """Make the rule `call_{index}`: a call in the dialect's own form, without `skip` at its
    begin."""
    form = dialect.format
    head, _, tail = form.begin_call(tool.name)[len(skip) :].partition("NUMBER")
    begin = literal(head, special)
    if tail:
        begin += f" /[0-9]{{1,3}}/ {literal(tail, special)}"
    body, rules = form.arguments(tool, f"given_{index}", _value(tool), special)
    return [(f"call_{index}", f"{begin} {body} {literal(form.end, special)}"), *rules]


def _each(
    dialect: Dialect, tools: Sequence[Tool], special: Mapping[str, int], skip: str = ""
) -> Rules:
    """Make the rule `call`: a call of any of the tools."""
    rules: dict[str, str] = {}
    for index, tool in enumerate(tools):
        rules.update(_call(dialect, index, tool, special, skip))
    return [("call", " | ".join(f"call_{index}" for index in range(len(tools)))), *rules.items()]


def _marked(dialect: Dialect) -> bool:
    """Return whether a call in the dialect's own form begins with a marker."""
    return (dialect.format.open + dialect.format.begin).startswith(dialect.openers or ("\0",))


def _calls(
    dialect: Dialect, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]
) -> Rules:
    """Make the rule `calls`: the dialect's own form."""
    form = dialect.format
    more = f"({literal(form.separator, special)} call)*" if parallel else ""
    whole = f"{literal(form.open, special)} call {more} {literal(form.close, special)}"
    return [("calls", whole), *_each(dialect, tools, special)]


def _or_form(
    dialect: Dialect, tools: Sequence[Tool], parallel: bool, form: str, special: Mapping[str, int]
) -> str:
    """Make the grammar of calls, marked or plain, or the form. Plain ones are written token by
    token of JSON, so that a form that is JSON too can still diverge after each."""
    start, rules = ["plain", "@form"], _plain_tokens(tools, parallel)
    if _marked(dialect):
        start.append("calls")
        rules += _calls(dialect, tools, parallel, special)
    return joined(grammar(" | ".join(start), rules), {"form": form})


def _plain_tokens(tools: Sequence[Tool], parallel: bool) -> Rules:
    objects = [
        (
            f"plain_{index}",
            r'"{" S "\"name\"" S ":" S '
            + literal(f'"{tool.name}"', {})
            + r' S "," S "\"arguments\"" S ":" S '
            + _arguments(tool)
            + ' S "}"',
        )
        for index, tool in enumerate(tools)
    ]
    one = " | ".join(name for name, _ in objects)
    more = '("," S plain_one)*' if parallel else ""
    return [
        ("plain", f'plain_one | "[" S plain_one {more} S "]" | FENCE plain_one FENCE_END'),
        ("plain_one", one),
        ("FENCE", rf"/{_FENCE}{_S}/"),
        ("FENCE_END", rf"/{_S}```/"),
        ("S", rf"/{_S}/"),
        *objects,
    ]


def _plain_heads(tools: Sequence[Tool], parallel: bool) -> Rules:
    """Make rules for calls as plain JSON, next to free text. All text before the arguments is one
    terminal, since the free text would win over any shorter one; PROSE is text that does not begin
    so."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    key, parameters = rf'\{{{_S}"name"{_S}:{_S}', rf'{_S},{_S}"(arguments|parameters)"{_S}:{_S}'
    rules: Rules = []
    for index, tool in enumerate(tools):
        head = rf'{key}"{re.escape(tool.name)}"{parameters}'
        rules += [
            (f"BARE_{index}", rf"/[\x20\x09\x0A]{{0,4}}{head}/"),
            (f"FENCED_{index}", rf"/[\x20\x09\x0A]{{0,4}}{_FENCE}{_S}{head}/"),
            (f"LISTED_{index}", rf"/[\x20\x09\x0A]{{0,4}}\[{_S}{head}/"),
            (f"arguments_{index}", _arguments(tool)),
        ]
    count = range(len(tools))

    def each(head: str) -> str:
        return "(" + " | ".join(f"{head}_{index} arguments_{index}" for index in count) + ")"

    bare = f"{each('BARE')} END"
    more = f'("," {bare})*' if parallel else ""
    many = f'(";"? {bare})*' if parallel else ""
    starts = rf'[\x20\x09\x0A]*(```[a-zA-Z_]*[\x20\x09\x0A]*)?(\[[\x20\x09\x0A]*)?{key}"({names})"'
    return [
        (
            "plain",
            f"{bare} {many} | {each('FENCED')} END {many} FENCE_END"
            f" | {each('LISTED')} END {more} LIST_END",
        ),
        ("END", rf"/{_S}\}}/"),
        ("FENCE_END", rf"/{_S}```/"),
        ("LIST_END", rf"/{_S}\]/"),
        ("PROSE", "TEXT & ~CALL_START"),
        ("CALL_START", rf"/{starts}(.|\n)*/"),
        ("TEXT", TEXT),
        *rules,
    ]


def _free(
    dialect: Dialect, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]
) -> str:
    """Make the grammar of text, with calls where the dialect's opener, or the answer's beginning,
    shows one."""
    if dialect.head:
        text = f"{literal(dialect.head, special)} TEXT"
        calls = _calls(dialect, tools, parallel, special)
        return grammar(f"calls | {text}", [*calls, ("TEXT", TEXT)])
    form, plain = dialect.format, _plain_heads(tools, parallel)
    if not _marked(dialect):
        return grammar("plain | PROSE", plain)
    opener = dialect.openers[0]
    if form.open:
        # All calls of the message stand in one frame.
        calls = _calls(dialect, tools, parallel, special)
        calls[0] = ("calls", calls[0][1].removeprefix(literal(form.open, special)).strip())
        frame = triggered("frame", opener, form.open, "calls", special, "PROSE")
        return grammar("plain | PROSE | frame TEXT", [*plain, *frame, *calls])
    if not form.begin.startswith(opener):  # pragma: no cover - a dialect's own consistency
        raise InvalidRequest(f"dialect {dialect.name} cannot hold calls in text", param="tools")
    # After the opener every tool is open, so they share one trigger.
    first = triggered("first", opener, opener, "call", special, "PROSE")
    tag = triggered("tag", opener, opener, "call", special)
    more = "tag*" if parallel else ""
    rules = [*plain, *first, *tag, *_each(dialect, tools, special, opener)]
    return grammar(f"plain | PROSE | first {more} TEXT", rules)
