"""Bodies of `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ....base.sampling import MAX_LOGPROBS
from ...fields import Body, Integer, ListReply, Loose, StructuredOutputs, ToolName


class InputPart(Loose, neglects="responses part"):
    type: Literal[
        "input_text",
        "output_text",
        "text",
        "refusal",
        "reasoning_text",
        "summary_text",
        "input_image",
        "input_file",
    ]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    filename: Any = None


class InputItem(Loose, neglects="responses item"):
    """A message, a call, a call's output, or earlier reasoning."""

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


class FunctionTool(Loose):
    type: Literal["function"] = Field(description="OpenAI's hosted tools do not exist here.")
    name: ToolName
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


class TextOptions(Body, neglects="responses text"):
    format: TextFormat | None = None


class ReasoningOptions(Body, neglects="responses reasoning"):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseStreamOptions(Body, neglects="responses stream"):
    """Options of the events."""


LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
]
"""Values of `include`. All but the first are accepted without effect: there is no such content, and
reasoning is not encrypted."""


class ResponseBody(Body, neglects="responses"):
    model: str | None = None
    input: str | list[InputItem] = Field(description="Text, or items.")
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(
        None, description="Keep the response for later turns (default true)."
    )
    background: bool | None = Field(
        None, description="Return at once and generate in the background; needs store."
    )
    previous_response_id: str | None = Field(None, max_length=128)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    priority: Integer | None = Field(None, description="Lower runs first (policy priority).")

    top_k: Integer | None = Field(None, description="0 or -1: all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = Field(None, max_length=256)
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    include: list[Included] | None = Field(
        None, description="Only message.output_text.logprobs has an effect."
    )
    top_logprobs: Integer | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Alternatives per token; above 0 it turns logprobs on.",
    )

    @property
    def logprobs_wanted(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


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


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(ListReply):
    data: list[dict[str, Any]]
