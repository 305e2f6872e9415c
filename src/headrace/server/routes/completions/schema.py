"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Integer, TokenId
from .frontend import FrontendFields

DEFAULT_MAX_TOKENS = 16


class CompletionBody(FrontendFields):
    IDS: ClassVar = "prompt"
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="Text, token ids, or a list of either."
    )
    max_tokens: Integer | None = Field(
        None, description="16 where absent, as OpenAI has it; -1: to the end of the context."
    )
    logprobs: Integer | None = Field(None, description="Alternatives per token, 0 to 20.")
    echo: bool | None = Field(None, description="The prompt precedes the answer.")
    best_of: Integer | None = Field(None, description="Only equal to n.")
    add_special_tokens: bool | None = Field(
        None, description="false: do not put the model's begin-of-text before a text."
    )
    suffix: str | None = Field(
        None, description="Text after the gap: the answer is what is missing between the two."
    )

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most; None: to the end of the context."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return None if limit == -1 else limit


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class UsageReply(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class MetricsReply(TypedDict):
    speculative_decoding: dict[str, Any]
    """What `base.drafted.Drafted.told` says; seconds are predicted."""


class CompletionLogprobsReply(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobsReply | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class CompletionReply(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageReply | None]
    metrics: NotRequired[MetricsReply]
