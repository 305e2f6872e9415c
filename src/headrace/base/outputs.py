"""Outputs of a step for entries that want no tokens."""

from __future__ import annotations

from .tagged import Tagged


class Vector(Tagged, frozen=True, array_like=True, tag="vector"):
    """The vector of an input, pooled by `ModelFiles.pooling`."""

    values: list[float]


class Scores(Tagged, frozen=True, array_like=True, tag="scores"):
    """The scores of an input: one logit for each of the model's labels."""

    values: list[float]


class Alignment(Tagged, frozen=True, array_like=True, tag="alignment"):
    """Position of an encoded input at which each of the wished tokens begins."""

    starts: list[int]


class Artefact(Tagged, frozen=True, array_like=True, tag="artefact"):
    """Something too large for a message (pixels, sound): its place and type."""

    handle: str
    bytes: int
    media_type: str
    final: bool


Output = Vector | Scores | Alignment | Artefact
"""Output of a step for an entry that wants no tokens."""
