"""Bodies of `/rerank`: Jina's, Cohere's and vLLM's fields."""

from __future__ import annotations

from typing import NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Integer, Loose
from ..embeddings.schema import VectorFields, VectorUsage


class Document(Loose):
    text: str


class RerankBody(VectorFields):
    query: str = Field(min_length=1)
    documents: list[str | Document] = Field(min_length=1)
    top_n: Integer | None = Field(None, ge=0, description="The best so many; 0 or none: all.")
    return_documents: bool | None = Field(
        None, description="Put the texts into the answer (default true; /v2/rerank: false)."
    )
    max_tokens_per_doc: Integer | None = Field(
        None,
        ge=1,
        description="Cut each input, its query included, to so many tokens (Cohere).",
    )


class RerankDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RerankDocument]


class RerankReply(TypedDict):
    id: str
    model: str
    results: list[RerankResult]
    usage: VectorUsage
