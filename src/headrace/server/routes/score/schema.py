"""Bodies of `/score`."""

from __future__ import annotations

from pydantic import Field
from typing_extensions import TypedDict

from ..embeddings.schema import VectorFields, VectorUsage


class ScoreBody(VectorFields):
    text_1: str | list[str] = Field(description="One text for all of text_2, or one for each.")
    text_2: str | list[str]


class ScoreData(TypedDict):
    index: int
    object: str
    score: float


class ScoreReply(TypedDict):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoreData]
    usage: VectorUsage
