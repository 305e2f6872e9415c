"""What a request asks of every step that computes for it: resolved once, then carried whole.

`engine.input` makes a spec from what the user gave; request, message, sequence and admission hand
on the same object, and the worker reads it. Nobody copies its fields and nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .sampling import SamplingParams

Task = Literal["tokens", "vector", "score"]
"""What is wanted: text token by token, the vector of an input, or how well a pair of texts fits."""

SEEDS = 2**64
"""Seeds are from 0 to this, itself excluded."""


class ReasoningBudget(NamedTuple):
    """How long a sequence may reason: the ids of the marks around it, and where it begins."""

    tokens: int
    """Between the marks, at most."""
    open: int
    close: int
    inside: bool
    """Does the prompt end inside reasoning?"""


class InputSpan(NamedTuple):
    """Positions of a prompt that stand for an input which is not text: their ids are placeholders,
    and what lies there follows from the input."""

    first: int
    length: int
    kind: str
    """Which encoder reads it ("image", …)."""
    digest: bytes
    """Names the input's content and how it was prepared: equal digests mean equal encodings."""
    rows: bytes = b""
    """Its encoding, fp32 [length, D]: what stands in place of the embeddings of its ids."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request's wishes after they were verified and resolved against the model."""

    sampling: SamplingParams
    seed: int
    """Seed of all random streams, 0 to 2**64 - 1: the user's, or drawn where the spec is resolved.
    Ranks, a second stay after a preemption and a replay draw the same tokens from it;
    `sampling.seed` still says whether the user gave one."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a sequence: the model's end-of-text (unless ignored) and the user's. Masked
    until `min_tokens` are there."""
    task: Task = "tokens"
    adapter: str | None = None
    grammar: str | None = None
    """What the answer must match, as `text.grammar` writes it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """`sampling.bad_words` as ids of this model."""
    reasoning: ReasoningBudget | None = None
    """`sampling.thinking_token_budget` with the marks of this model."""
    second_at: int = 0
    """Where the second text of a pair begins in the prompt (token type 1); 0: there is none."""
    expected: tuple[int, ...] = ()
    """An answer that the client expects: a hint for drafts, which changes no answer."""
    inputs: tuple[InputSpan, ...] = ()
    """What of the prompt stands for something else than text, in the order of their places."""

    @property
    def generates(self) -> bool:
        """Are tokens wanted?"""
        return self.task == "tokens"
