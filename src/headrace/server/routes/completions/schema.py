"""Bodies of `/v1/completions`, with fields of front ends that send all their settings.

SillyTavern's text completion is the model. A setting that it has switched off must not be an error.
A setting that it has switched on and that is not implemented here must be one.
"""

from __future__ import annotations

from typing import Any, ClassVar, NotRequired

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from ....base.errors import InvalidRequest
from ...fields import Integer, ReplyHead, TokenId
from ...form import FormFields

OTHER_NAMES = {
    "typical": "typical_p",
    "nsigma": "top_n_sigma",
    "rep_pen": "repetition_penalty",
    "sampler_seed": "seed",
    "ban_eos_token": "ignore_eos",
    "stopping_strings": "stop",
    "grammar_string": "guided_grammar",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "add_bos_token": "add_special_tokens",
}
"""Field → the field for which it is another name."""


def _other(name: str) -> Any:
    return Field(None, description=f"Another name of {OTHER_NAMES[name]}.")


class FrontendFields(FormFields, neglects="completions"):
    typical: float | None = _other("typical")
    nsigma: float | None = _other("nsigma")
    rep_pen: float | None = _other("rep_pen")
    sampler_seed: Integer | None = _other("sampler_seed")
    ban_eos_token: bool | None = _other("ban_eos_token")
    stopping_strings: list[str] | None = _other("stopping_strings")
    grammar_string: str | None = _other("grammar_string")
    max_new_tokens: Integer | None = _other("max_new_tokens")
    n_predict: Integer | None = _other("n_predict")
    num_predict: Integer | None = _other("num_predict")
    add_bos_token: bool | None = _other("add_bos_token")

    @model_validator(mode="after")
    def _one_name_each(self) -> FrontendFields:
        for other in OTHER_NAMES.keys() & self.__pydantic_fields_set__:
            value, name = getattr(self, other), OTHER_NAMES[other]
            if value is None:
                continue
            own = getattr(self, name)
            if own is not None and own != value:
                words = f"{other} is another name of {name}, and both are set to different values"
                raise ValueError(InvalidRequest(words, param=other))
            setattr(self, name, value)
        return self


DEFAULT_MAX_TOKENS = 16


class CompletionBody(FrontendFields):
    IDS: ClassVar = "prompt"
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="Text, token ids, or a list of either."
    )
    max_tokens: Integer | None = Field(
        None, description="Absent: 16, as in OpenAI's API; -1: up to the end of the context."
    )
    logprobs: Integer | None = Field(None, description="Alternatives per token, 0 to 20.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    best_of: Integer | None = Field(None, description="Must equal n.")
    add_special_tokens: bool | None = Field(
        None, description="false: do not put the model's begin-of-text token before a text."
    )
    suffix: str | None = Field(
        None, description="Text after the gap: the answer fills the gap between prompt and suffix."
    )

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the answer; None: up to the end of the context."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return None if limit == -1 else limit


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    image_tokens: NotRequired[int]
    video_tokens: NotRequired[int]


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
    """Result of `base.drafted.Drafted.told`; seconds are predicted."""


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


class CompletionReply(ReplyHead):
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageReply | None]
    metrics: NotRequired[MetricsReply]
