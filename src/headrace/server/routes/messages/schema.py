"""Bodies of `/v1/messages`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, Integer, inert, unsupported


class Block(Body):
    """A part of a message; which fields it has depends on its type."""

    type: Literal[
        "text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document"
    ]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    source: Any = None
    title: Any = None
    context: Any = None
    citations: Any = inert("nothing is cited")
    cache_control: Any = inert("equal prefixes are always shared")


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = inert("equal prefixes are always shared")


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="Tokens of reasoning at most, where the model's marks of it are tokens of "
        "their own; else without effect.",
    )
    display: Literal["summarized", "omitted"] | None = None


class CountBody(Body):
    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Any = inert("equal prefixes are always shared")
    output_config: Any = unsupported({})
    mcp_servers: Any = unsupported([])


class MessagesBody(CountBody):
    max_tokens: Integer
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Any = inert("nothing is kept about users")
    service_tier: Any = inert("there is one tier")
    inference_geo: Any = inert("there is one place")
    diagnostics: Any = inert("the server has its own metrics")
    user_profile_id: Any = inert("nothing is kept about users")
    workspace_id: Any = inert("nothing is kept about users")
    speed: Any = unsupported("standard")
    container: Any = unsupported()
    context_management: Any = unsupported()


class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class CountReply(TypedDict):
    input_tokens: int
