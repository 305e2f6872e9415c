"""Bodies of `/v1/messages`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from ....base.errors import InvalidRequest
from ...fields import Body, Integer, Loose, ToolName

KEEPS = "Keep the preceding prompt in the context cache for 5m or 1h (ttl) after its last use."


class Block(Loose, neglects="messages block"):
    """A part of a message; its fields depend on its type."""

    type: Literal[
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "image",
        "document",
        "search_result",
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
    title: str | None = None
    context: str | None = None
    cache_control: Any = Field(None, description=KEEPS)


class Turn(Loose):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Loose, neglects="messages tool"):
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="Required.")
    type: str | None = Field(
        None, description="Only custom; the tools of Anthropic's service do not exist here."
    )
    strict: bool | None = None
    cache_control: Any = Field(None, description=KEEPS)

    @model_validator(mode="after")
    def _only_custom(self) -> MessageTool:
        if self.type not in (None, "custom"):
            raise ValueError(
                InvalidRequest(
                    f"type {self.type[:100]!r} is a tool of Anthropic's service, which is not "
                    "here; offer a tool of type custom with its input_schema",
                    param="type",
                    code="unsupported_parameter",
                )
            )
        if self.input_schema is None:
            words, code = "input_schema is required", "missing_required_parameter"
            raise ValueError(InvalidRequest(words, param="input_schema", code=code))
        return self


class OutputFormat(Loose):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body, neglects="messages output"):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template as reasoning_effort (max as xhigh)."
    )


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
        description="Maximum tokens of reasoning, if the model marks it with tokens of "
        "their own; otherwise no effect.",
    )
    display: Literal["summarized", "omitted"] | None = None


class CountBody(Body, neglects="messages count"):
    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Any = Field(None, description=KEEPS)
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="Older form of output_config.format."
    )
    context_management: dict[str, Any] | None = Field(
        None,
        description="Accepted, but nothing is ever removed; the answer's applied_edits show it.",
    )


class MessagesBody(CountBody, neglects="messages"):
    max_tokens: Integer
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class CacheCreation(TypedDict):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
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
    context_management: NotRequired[dict[str, Any]]


class CountReply(TypedDict):
    input_tokens: int
