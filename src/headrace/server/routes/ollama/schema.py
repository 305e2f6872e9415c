"""Bodies of Ollama's `/api/*`, and their fields without effect here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, Integer, PlainSampling, TokenId

Think = bool | Literal["low", "medium", "high"]


class Options(PlainSampling, neglects="ollama options"):
    """Ollama's `options`: sampling, and how its own runner loads a model."""

    num_predict: Integer | None = Field(
        None, description="Maximum tokens; -1, -2: up to the end of the context."
    )


class Asked(Body):
    """Fields common to all requests."""

    model: str = Field(min_length=1, max_length=512)
    keep_alive: float | Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="Seconds that the model stays loaded after its last request, or a time as in "
        "5m; below 0: always. The server's first model stays.",
    )


class CalledFunction(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)
    description: str | None = None
    index: Integer | None = None


class Called(Body):
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(None, description="Pictures in base64, if the model sees.")
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class Spoken(Asked, neglects="ollama"):
    """Fields common to chat and generate."""

    stream: bool | None = Field(
        None, description="JSON lines while it is generated (default true)."
    )
    format: str | dict[str, Any] | None = Field(None, description='"json", or a JSON schema.')
    options: Options | None = None
    think: Think | None = None


class OllamaChatBody(Spoken):
    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class GenerateBody(Spoken, neglects="ollama generate"):
    prompt: str | None = None
    suffix: str | None = Field(None, description="Text after the gap; the answer fills it.")
    system: str | None = None
    raw: bool | None = Field(None, description="true: use the prompt without a template.")
    context: list[TokenId] | None = Field(None, description="The `context` of an earlier answer.")
    images: list[Any] | None = Field(None, description="Pictures in base64, if the model sees.")


class EmbedBody(Asked):
    input: str | list[str] | None = None
    truncate: bool | None = Field(None, description="Cut inputs that are too long (default true).")
    dimensions: Integer | None = None
    options: Options | None = None


class EmbeddingsBody(Asked):
    """Body of the older `/api/embeddings`."""

    prompt: str | None = None
    options: Options | None = None


class ShowBody(Body, neglects="ollama show"):
    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512, description="Older name of model.")


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class TagsReply(TypedDict):
    models: list[Listed]


class Loaded(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class PsReply(TypedDict):
    models: list[Loaded]


class ShowReply(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionReply(TypedDict):
    version: str


class Durations(TypedDict):
    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaChatReply(Durations):
    message: dict[str, Any]


class GenerateReply(Durations):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class EmbedReply(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsReply(TypedDict):
    embedding: list[float]


class OllamaError(TypedDict):
    """Body of an answer with status 400 or more, under `/api`."""

    error: str
