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


class Samples(Tagged, frozen=True, array_like=True, tag="samples"):
    """The next samples of a sound that comes in pieces; the last has the finish reason."""

    pieces: list[bytes]
    """fp32 from -1 to 1, in the machine's order of bytes."""
    dropped: int = 0
    """Tokens since the previous piece that were not a code of their place."""

    def then(self, later: Samples) -> Samples:
        """Return these samples and later ones."""
        return Samples([*self.pieces, *later.pieces], self.dropped + later.dropped)


class PictureOutput(Tagged, frozen=True, array_like=True, tag="picture"):
    """A picture after some of its steps; the one after the last step has the finish reason."""

    values: bytes
    """fp32 [channels, size, size], in the machine's order of bytes; shades are from -1 to 1."""
    step: int
    """Steps done."""


class Continuations(Tagged, frozen=True, array_like=True, tag="continuations"):
    """The best continuations of a beam: those that can be among the best of their search."""

    tokens: list[int]
    scores: list[float]
    """Log-probabilities of the paths, the beam's own included."""


class FoundItems(Tagged, frozen=True, array_like=True, tag="items"):
    """Items that a search found, the best first, by their places in the catalogue."""

    items: list[int]
    scores: list[float]
    """Log-probability of each item's path after the prompt."""


Output = Vector | Scores | Alignment | Samples | PictureOutput | Continuations | FoundItems
"""Output of a request other than tokens."""
