"""Bodies of llama.cpp's native routes."""

from __future__ import annotations

from typing import Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, Integer, PlainSampling, TokenId


class NativeFields(PlainSampling, neglects="llamacpp"):
    """Sampling fields and slot options of llama.cpp."""

    model: str | None = None
    n_predict: Integer | None = Field(
        None, description="Maximum tokens; -1, -2: up to the end of the context."
    )
    max_tokens: Integer | None = Field(None, description="Other name of n_predict.")
    n_indent: Integer | None = Field(
        None, ge=0, description="End the answer before a line with less indentation."
    )
    stream: bool | None = None
    top_n_sigma: float | None = Field(None, description="0 or -1: off.")
    seed: Integer | None = Field(None, description="-1: no seed.")
    ignore_eos: bool | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = Field(
        None,
        max_length=64,
        description="Return only these fields of the answer; a/b extracts b from a.",
    )


class ExtraFile(Body, neglects="llamacpp file"):
    filename: str = Field("", max_length=4096)
    text: str


class InfillBody(NativeFields):
    input_prefix: str = Field("", description="Text before the gap.")
    input_suffix: str = Field("", description="Text after the gap.")
    input_extra: list[ExtraFile] | None = Field(None, max_length=1024)
    prompt: str | None = Field(None, description="Beginning of the missing text.")


class NativeBody(NativeFields):
    prompt: str | list[TokenId]


class Timings(TypedDict):
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class NativeReply(TypedDict):
    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: NotRequired[str]
    tokens_predicted: NotRequired[int]
    tokens_evaluated: NotRequired[int]
    tokens_cached: NotRequired[int]
    prompt: NotRequired[str]
    truncated: NotRequired[bool]
    stop_type: NotRequired[str]
    stopping_word: NotRequired[str]
    timings: NotRequired[Timings]
