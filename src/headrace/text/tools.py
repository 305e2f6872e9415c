"""The tools of a request: `tools` and `tool_choice` of OpenAI's chat, read and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.base.errors import InvalidRequest

MAX_TOOLS = 1024
"""Largest number of tools in one request: agents with many tool servers offer hundreds."""
NAME = r"^[A-Za-z0-9_./:@-]{1,128}$"
"""Pattern of tool names: longer than OpenAI's 64 characters, and with the marks by which agents
join the names of servers and tools. None of them means anything in a dialect or in JSON."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
"""Parameters of a tool that is offered without any: OpenAI's interface says that it takes none."""

ChoiceKind = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""
    description: str = ""
    strict: bool = False
    """Flag: arguments must follow the schema, enforced by grammar."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    kind: ChoiceKind
    name: str | None = None


def read_tools(raw: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Check and convert `tools`. Raises `InvalidRequest` naming the tool and the wrong field."""
    if raw is None:
        return []
    if not isinstance(raw, list | tuple):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(raw) > MAX_TOOLS:
        raise InvalidRequest(f"{len(raw)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    tools = [_tool(entry, f"tools.{index}") for index, entry in enumerate(raw)]
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"two tools are named {name!r}", param=f"tools.{index}")
    return tools


def _tool(entry: Any, where: str) -> Tool:
    if not isinstance(entry, Mapping) or entry.get("type", "function") != "function":
        raise InvalidRequest(f"{where} must be of type 'function'", param=where)
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function must be an object", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 128 letters, digits, '_', '-', '.', '/', ':' or "
            f"'@', not {name!r:.200}",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters") or NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{where}.function.parameters must be a JSON schema of an object",
            param=f"{where}.function.parameters",
        )
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise InvalidRequest(f"{where}.function.description must be text", param=where)
    return Tool(name, dict(parameters), description, bool(function.get("strict")))


def read_choice(raw: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """Convert `tool_choice`; the default is auto if there are tools, else none. Raises
    `InvalidRequest`."""
    if raw is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(raw, str):
        if raw not in ("auto", "none", "required"):
            raise InvalidRequest(
                f"tool_choice must be auto, none, required or a named function, not {raw!r}",
                param="tool_choice",
            )
        if raw == "required" and not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools", param="tools")
        return ToolChoice("none" if not tools else raw)  # type: ignore[arg-type]
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(
            f"tool_choice names {name!r}, which is not among the tools ({known})",
            param="tool_choice",
        )
    return ToolChoice("named", name)
