"""Bodies of `/pooling` and `/classify`, as vLLM has them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import inert
from ..embeddings.schema import EmbeddingBody, VectorFields, VectorUsage


class PoolingBody(EmbeddingBody):
    task: Literal["embed"] | None = Field(
        None, description="Vectors of whole inputs; those of single tokens are not given out."
    )
    normalize: Any = inert("the model's own files say whether its vectors have length one")


class PoolingData(TypedDict):
    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingReply(TypedDict):
    id: str
    object: str
    created: int
    model: str
    data: list[PoolingData]
    usage: VectorUsage


class ClassifyBody(VectorFields):
    input: str | list[str]
