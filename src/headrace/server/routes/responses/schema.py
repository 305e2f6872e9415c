"""Bodies of `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, Integer, inert, unsupported


class InputPart(Body):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text",
                  "input_image", "input_file"]  # fmt: skip
    text: str | None = None
    refusal: str | None = None
    annotations: Any = inert("part of answers that clients send back")
    logprobs: Any = inert("part of answers that clients send back")
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    filename: Any = None


class InputItem(Body):
    """A message, a call, the output of one, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: Any = inert("reasoning is kept in clear")
    phase: Any = inert("part of answers that clients send back")


class FunctionTool(Body):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Any = unsupported("medium")


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Any = unsupported("auto")
    generate_summary: Any = unsupported("auto")


class ResponseStreamOptions(Body):
    include_obfuscation: Any = inert("events are never padded")


class ResponseBody(Body):
    model: str | None = None
    input: str | list[InputItem] = Field(description="Text, or items.")
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Keep it for later turns (default true).")
    background: bool | None = Field(None, description="Answer at once, work on; needs store.")
    previous_response_id: str | None = Field(None, max_length=128)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    priority: Integer | None = Field(None, description="Lower runs first (policy priority).")

    include: Any = unsupported([])
    top_logprobs: Any = unsupported(0)
    truncation: Any = unsupported("disabled")
    conversation: Any = unsupported()
    prompt: Any = unsupported()
    max_tool_calls: Any = unsupported()
    context_management: Any = unsupported([])
    moderation: Any = unsupported()
    service_tier: Any = unsupported("auto", "default")
    safety_identifier: Any = inert("nothing is kept about users")
    prompt_cache_key: Any = inert("equal prefixes are always shared")
    prompt_cache_options: Any = inert("the prefix cache has one policy")
    prompt_cache_retention: Any = inert("the prefix cache has one policy")


class ResponseReply(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    usage: dict[str, Any] | None


class DeletedReply(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
