"""Conversion of the older tool fields `functions` and `function_call` to the newer ones."""

from __future__ import annotations

from .schema import ChatBody, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall

CALL_ID = "call_function"
"""Id for all calls: the older form has no ids, and a call is followed by its result at once."""


def is_legacy(body: ChatBody) -> bool:
    """Whether the answer must have the older form."""
    return bool(body.functions) and not body.tools


def modern(body: ChatBody) -> ChatBody:
    """Convert a request to the newer form."""
    if not is_legacy(body):
        return body
    chosen = body.function_call
    if isinstance(chosen, NamedFunction):
        choice: NamedTool | str | None = NamedTool(type="function", function=chosen)
    else:
        choice = chosen
    tools = [Tool(type="function", function=spec) for spec in body.functions or ()]
    changed = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    return body.model_copy(update=changed)


def tool_calls(call: FunctionCall) -> list[ToolCall]:
    """Convert an earlier call to the form that templates read."""
    return [ToolCall(id=CALL_ID, type="function", function=call)]
