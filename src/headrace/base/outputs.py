"""What a step gives an entry that wants no tokens."""

from __future__ import annotations

from .tagged import Tagged


class Vector(Tagged, frozen=True, array_like=True, tag="vector"):
    """The vector of an input, as `ModelFiles.pooling` says."""

    values: list[float]


class Scores(Tagged, frozen=True, array_like=True, tag="scores"):
    """What a model that scores makes of an input: one logit for each of its labels."""

    values: list[float]


class Artefact(Tagged, frozen=True, array_like=True, tag="artefact"):
    """Something too large for a message (pixels, sound): where it lies and what it is."""

    handle: str
    bytes: int
    media_type: str
    final: bool


Output = Vector | Scores | Artefact
"""What a step gives an entry that wants no tokens."""
