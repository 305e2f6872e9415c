"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, Integer, inert, unsupported
from ...form import FormFields
from ..completions.schema import UsageReply


class ContentPart(Body):
    type: Literal["text", "image_url", "input_audio", "video_url", "file", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None


class FunctionCall(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: str = Field(description="JSON text.")


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Integer | None = None


class Message(Body):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="An earlier turn's reasoning.")
    reasoning: str | None = Field(None, description="The same, as some clients name it.")
    refusal: Any = inert("part of answers that clients send back")
    annotations: Any = inert("part of answers that clients send back")
    audio: Any = unsupported()
    function_call: Any = unsupported()


class FunctionSpec(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(FormFields):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(
        None, description="Absent: to the end of the context."
    )
    max_tokens: Integer | None = Field(None, description="Older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, description="0 to 20; needs logprobs: true.")
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Given to the chat template."
    )
    include_reasoning: bool | None = Field(None, description="false: drop the reasoning.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message, an assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )

    audio: Any = unsupported()
    modalities: Any = unsupported(["text"])
    prediction: Any = unsupported()
    web_search_options: Any = unsupported()
    functions: Any = unsupported([])
    function_call: Any = unsupported("none")
    verbosity: Any = unsupported("medium")
    moderation: Any = unsupported()
    best_of: Any = unsupported(1)
    echo: Any = unsupported(False)
    chat_template: Any = unsupported()
    documents: Any = unsupported([])
    mm_processor_kwargs: Any = unsupported({})


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob] | None
    refusal: None


class FunctionCallReply(TypedDict):
    name: str
    arguments: str


class ToolCallReply(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCallReply


class MessageReply(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallReply]]


class ChatChoice(TypedDict):
    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatReply(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]
