"""Bodies of `/v1/embeddings`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, Integer, TokenId, inert


class VectorFields(Body):
    """What the routes that make vectors share."""

    model: str | None = Field(None, description="Served name; none: the model that is served.")
    truncate_prompt_tokens: Integer | None = Field(
        None,
        description="Cut a longer input at its end to so many tokens (-1: to what fits); none: "
        "a longer input is an error.",
    )
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower runs first (policy priority)."
    )
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="NIM's word: END cuts what does not fit, NONE is an error."
    )
    input_type: Any = inert("no model served here has a prefix for the kinds of input")
    user: Any = inert("nothing is kept about users")

    @property
    def cut(self) -> int | None:
        """`truncate_prompt_tokens`, or what `truncate` says of it."""
        if self.truncate == "END" and self.truncate_prompt_tokens is None:
            return -1
        return self.truncate_prompt_tokens


class EmbeddingBody(VectorFields):
    IDS: ClassVar = "input"
    input: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="Text, token ids, or a list of either. Ids are taken as they are."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the little-endian 32-bit floats."
    )
    dimensions: Integer | None = Field(
        None, description="Length of the vectors; shorter only where the model was made for it."
    )


class EmbeddingData(TypedDict):
    object: str
    index: int
    embedding: list[float] | str


class VectorUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(TypedDict):
    object: str
    data: list[EmbeddingData]
    model: str
    usage: VectorUsage
