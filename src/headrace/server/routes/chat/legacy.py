"""The older form of tools, `functions` and `function_call`, as the newer one."""

from __future__ import annotations

from .schema import ChatBody, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall

CALL_ID = "call_function"
"""The older form has no ids; a call is followed by its result at once."""


def is_legacy(body: ChatBody) -> bool:
    """Is the answer wanted in the older form?"""
    return bool(body.functions) and not body.tools


def modern(body: ChatBody) -> ChatBody:
    """The same request in the newer form."""
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
    """An earlier call as a template reads it."""
    return [ToolCall(id=CALL_ID, type="function", function=call)]
