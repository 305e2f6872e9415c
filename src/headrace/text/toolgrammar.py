"""Grammars that hold a model to a dialect's calls and to its tools' schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.base.errors import InvalidRequest

from .dialects import Dialect
from .grammar import checked_schema, triggered, verified
from .lark import TEXT, grammar, json_value, literal
from .tools import Tool, ToolChoice

_NO_SPECIAL: Mapping[str, int] = {}


def tool_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    special: Mapping[str, int] = _NO_SPECIAL,
) -> str | None:
    """What the answer may be, or None where it is free.

    `required`: one call or more and nothing else; `named`: one call of that tool; `auto`: text
    with calls in it, held only where a tool is strict; `none`: free. `special`: the special tokens
    of the model, text → id. Raises `InvalidRequest` for a strict schema that is not supported; of
    one that is not strict, what is not supported is left open.
    """
    if choice.kind == "none" or not tools:
        return None
    if choice.kind == "named":
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    elif choice.kind == "auto" and not any(tool.strict for tool in tools):
        return None
    for index, tool in enumerate(tools):
        if tool.strict:
            where = f"tools[{index}].function.parameters"
            checked_schema(tool.parameters, where)
            verified(grammar(_arguments(tool)), where)
    source = (
        _free(dialect, tools, parallel, special)
        if choice.kind == "auto"
        else grammar("calls", _calls(dialect, tools, parallel, special))
    )
    return verified(source, "tools")


def _arguments(tool: Tool) -> str:
    schema = {"type": "object", **tool.parameters}
    return json_value(schema, lenient=not tool.strict)


def _calls(
    dialect: Dialect, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]
) -> list[tuple[str, str]]:
    form = dialect.format
    rules = [
        (
            f"call_{index}",
            f"{literal(form.begin_call(tool.name), special)} {_arguments(tool)}"
            f" {literal(form.end, special)}",
        )
        for index, tool in enumerate(tools)
    ]
    one = " | ".join(name for name, _ in rules)
    more = f"({literal(form.separator, special)} call)*" if parallel else ""
    whole = f"{literal(form.open, special)} call {more} {literal(form.close, special)}"
    return [("calls", whole), ("call", one), *rules]


def _free(
    dialect: Dialect, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]
) -> str:
    """Text, and calls where the dialect's opener shows that one begins."""
    form = dialect.format
    if not dialect.openers or dialect.first:
        # A call is the whole message: what does not begin like one is text.
        prose = [("PROSE", r"/[^\s{\[](.|\n)*/")]
        return grammar('calls | PROSE | ""', [*prose, *_calls(dialect, tools, parallel, special)])
    opener = dialect.openers[0]
    if form.open:
        # All calls of the message stand in one frame.
        calls = _calls(dialect, tools, parallel, special)
        calls[0] = ("calls", calls[0][1].removeprefix(literal(form.open, special)).strip())
        frame = triggered("frame", opener, form.open, "calls", special)
        return grammar("frame? TEXT", [("TEXT", TEXT), *frame, *calls])
    if not form.begin.startswith(opener):  # pragma: no cover - a dialect's own consistency
        raise InvalidRequest(f"dialect {dialect.name} cannot hold calls in text", param="tools")
    # After the opener every tool is open, so they share one trigger.
    rest = [
        (
            f"call_{index}",
            f"{literal(form.begin_call(tool.name)[len(opener) :], special)} {_arguments(tool)}"
            f" {literal(form.end, special)}",
        )
        for index, tool in enumerate(tools)
    ]
    one = " | ".join(name for name, _ in rest)
    tag = triggered("tag", opener, opener, "call", special)
    many = "tag*" if parallel else "tag?"
    return grammar(f"{many} TEXT", [("TEXT", TEXT), *tag, ("call", one), *rest])
