"""Constraints that a chat request puts on its answer: tools and formats as one grammar; a
prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....base.errors import InvalidRequest
from ....text.grammar import after_reasoning
from ....text.toolgrammar import headed, tool_grammar
from ....text.tools import Tool, ToolChoice, read_choice, read_tools
from .schema import AllowedChoice, ChatBody, NamedTool

if TYPE_CHECKING:
    from ...service import Service
    from ...speech import Speech

CHARACTERS = 16
"""Characters per token that are read of an expected answer: few texts have longer tokens."""


def tools_of(body: ChatBody) -> tuple[list[Tool], ToolChoice]:
    """Return the offered tools and the tool choice; the choice "none" offers none."""
    tools = read_tools([tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    given: Any = body.tool_choice
    if isinstance(given, AllowedChoice):
        allowed = [read_choice(tool.model_dump(), tools).name for tool in given.allowed_tools.tools]
        tools = [tool for tool in tools if tool.name in allowed]
        given = given.allowed_tools.mode
    choice = read_choice(given.model_dump() if isinstance(given, NamedTool) else given, tools)
    if given not in (None, "none", "auto") and not tools:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    return ([] if choice.kind == "none" else tools), choice


def grammar_of(
    body: ChatBody, speech: Speech, tools: list[Tool], choice: ToolChoice, opened: bool
) -> str | None:
    """Combine all constraints in one grammar, or None.

    `opened`: the prompt ends inside reasoning. Raises `InvalidRequest`.
    """
    source = body.form()
    if source is not None and speech.dialect is not None:
        source = headed(source, speech.dialect, speech.special)
    if tools and speech.dialect is not None:
        source = tool_grammar(
            speech.dialect,
            tools,
            choice,
            parallel=body.parallel_tool_calls is not False,
            form=source,
            special=speech.special,
        )
    if source is not None and speech.marks is not None:
        source = after_reasoning(source, speech.marks, opened=opened, special=speech.special)
    return source


async def expected_of(service: Service, body: ChatBody, prompt: int) -> list[int]:
    """Return the token ids of the client's expected answer, as many as fit after `prompt`
    tokens."""
    if body.prediction is None:
        return []
    most = body.limit or service.engine.max_context - prompt
    text = body.prediction.text[: CHARACTERS * most]
    ids = await service.encode(text, raw=False, must_fit=False)
    return ids[:most]
