"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ....text.tools import MAX_TOOLS
from ...fields import Integer, Loose, ToolName
from ...form import FormFields
from ..completions.schema import MetricsReply, UsageReply

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(Loose):
    type: Literal[
        "text",
        "image_url",
        "input_audio",
        "video_url",
        "file",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning",
    ]
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None


class Thinking(Loose):
    """Reasoning settings in the format of DeepSeek and GLM."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Integer | None = Field(None, ge=1, lt=2**31)


class Reasoning(Loose):
    """Reasoning settings in OpenRouter's format."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: Integer | None = Field(None, ge=1, lt=2**31)
    exclude: bool | None = Field(None, description="true: drop the reasoning.")


class FunctionCall(Loose):
    name: str = Field(min_length=1, max_length=256)
    arguments: str | dict[str, Any] = Field(description="JSON text, or the object itself.")


class ToolCall(Loose):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: Integer | None = None


class Message(Loose, neglects="chat message"):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="An earlier turn's reasoning.")
    reasoning: str | None = Field(None, description="Other name of reasoning_content.")
    function_call: FunctionCall | None = Field(None, description="Older form of tool_calls.")


class FunctionSpec(Loose):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Loose):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Loose):
    name: str


class NamedTool(Loose):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Loose):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedChoice(Loose):
    """A choice of some tools: the others are not offered."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Prediction(Loose):
    """Text that the client expects in the answer, such as a file before an edit."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class ChatBody(FormFields, neglects="chat"):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(
        None, description="Maximum tokens of the answer; absent: up to the end of the context."
    )
    max_tokens: Integer | None = Field(
        None, description="Older name of max_completion_tokens; -1: up to the end of the context."
    )
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, description="0 to 20; needs logprobs: true.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = Field(None, description="Passed to the chat template.")
    thinking: Thinking | None = Field(
        None, description="DeepSeek's form of enable_thinking and thinking_token_budget."
    )
    reasoning: Reasoning | None = Field(
        None, description="OpenRouter's form of the reasoning fields."
    )
    include_reasoning: bool | None = Field(None, description="false: drop the reasoning.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, which must be the assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )

    enable_thinking: bool | None = Field(
        None, description="Template variable of this name, as in chat_template_kwargs."
    )
    prediction: Prediction | None = Field(
        None, description="Expected answer; where it is right, the answer is generated faster."
    )
    functions: list[FunctionSpec] | None = Field(
        None, max_length=MAX_TOOLS, description="Older form of tools; answered in the older form."
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="Older form of tool_choice."
    )
    echo: bool | None = Field(
        None, description="With continue_final_message: begin the answer with that message."
    )
    add_special_tokens: bool | None = Field(
        None, description="true: put the model's begin-of-text token before the template's text."
    )
    documents: list[dict[str, Any]] | None = Field(None, description="Passed to the template.")

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the answer; None: up to the end of the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return None if self.max_tokens == -1 else self.max_tokens


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
    function_call: NotRequired[FunctionCallReply]


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
    metrics: NotRequired[MetricsReply]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]
