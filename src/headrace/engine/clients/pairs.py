"""Pairs of texts as inputs of a model, and its vectors as their scores. Torch-free.

A cross-encoder reads both texts together, and its vector is one logit. An embedding model reads
each distinct text once, and the score is the cosine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.errors import InvalidRequest
from ...base.request import ScoreOutput
from ...base.spec import Task
from ...text.tokenizer import Tokenizer

Input = tuple[list[int], int]
"""Token ids, and the start of the second text (0: there is one text)."""


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """The inputs to compute for some pairs."""

    inputs: list[Input]
    pairs: list[tuple[int, int]]
    """Indices into `inputs`; equal if one input is the whole pair."""
    task: Task
    """The task of each input."""

    def scores(self, vectors: Sequence[Sequence[float]]) -> list[ScoreOutput]:
        """Compute the scores of the pairs from the vectors of their inputs."""
        lengths = [len(ids) for ids, _ in self.inputs]
        return [
            ScoreOutput(lengths[a], sigmoid(vectors[a][0]))
            if self.task == "score"
            else ScoreOutput(lengths[a] + lengths[b], cosine(vectors[a], vectors[b]))
            for a, b in self.pairs
        ]

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(len(ids) for ids, _ in self.inputs)


def score_inputs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, cross: bool, limit: int | None = None
) -> ScoreInputs:
    """Make the inputs of pairs. `cross`: the model is a cross-encoder. `limit`: longest input, see
    `Tokenizer.encode_pair`."""
    for first, second in pairs:
        if not first or not second:
            raise InvalidRequest("a text of a pair is empty", param="text")
    if cross:
        inputs = [tokenizer.encode_pair(a, b, limit=limit) for a, b in pairs]
        return ScoreInputs(inputs, [(place, place) for place in range(len(inputs))], "score")
    places: dict[str, int] = {}
    indices = [
        (places.setdefault(a, len(places)), places.setdefault(b, len(places))) for a, b in pairs
    ]
    alone = [(tokenizer.encode_with_specials(text, limit=limit), 0) for text in places]
    return ScoreInputs(alone, indices, "vector")


def pairs_of(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair one text with each of the others, or each with its own. Raises `InvalidRequest`."""
    left = [first] if isinstance(first, str) else list(first)
    right = [second] if isinstance(second, str) else list(second)
    if not left or not right:
        raise InvalidRequest("there are no texts to compare", param="text_1")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequest(
            f"{len(left)} first texts and {len(right)} second ones: there must be one first text, "
            "or as many as second ones",
            param="text_1",
        )
    return list(zip(left, right, strict=True))


def cut_limit(wish: int | None, most: int) -> int | None:
    """Resolve `truncate_prompt_tokens`: None means no cut, -1 the longest possible input."""
    if wish is None:
        return None
    if wish == -1:
        return most
    if not 1 <= wish <= most:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or from 1 to {most}, not {wish}",
            param="truncate_prompt_tokens",
        )
    return wish


def sigmoid(logit: float) -> float:
    """Return the logistic function, computed so that neither end overflows."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1 + grown)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    norms = math.sqrt(_product(a, a) * _product(b, b))
    return min(1.0, max(-1.0, _product(a, b) / norms)) if norms else 0.0


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, a, b))
