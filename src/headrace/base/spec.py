"""A request's demands on every step that computes for it: resolved once, then carried whole.

`engine.clients.input` makes a spec from the user's fields. Request, message, sequence and admission
hand on the same object, and the worker reads it. Its fields are never copied and never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .encodings import SealedHandle
from .sampling import SamplingParams

Task = Literal["tokens", "vector", "score"]
"""Requested output: text token by token, the vector of an input, or the score of a pair of
texts."""

SEEDS = 2**64
"""Exclusive upper bound of seeds, which start at 0."""


class ReasoningBudget(NamedTuple):
    """Limit of a sequence's reasoning: the ids of the marks around it, and its start."""

    tokens: int
    """Largest number of tokens between the marks."""
    open: int
    close: int
    inside: bool
    """Whether the prompt ends inside reasoning."""


class InputSpan(NamedTuple):
    """Positions of a prompt that stand for an input which is not text. Their ids are placeholders;
    the input gives the content there."""

    first: int
    length: int
    kind: str
    """Encoder that reads it ("sound", …)."""
    digest: bytes
    """Digest of the input's content, shape, preparation and model: equal digests mean equal
    encodings."""
    source: SealedHandle | None = None
    """Handle of the input. The encoder's rows for it take the place of the ids' embeddings."""
    units: int = 0
    """Size of the input in units of its encoder."""
    columns: int = 0
    """Positions of a row of the grid that these positions are, row by row; 0: they are none."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request's parameters, verified and resolved against the model."""

    sampling: SamplingParams
    seed: int
    """Seed of all random streams, 0 to 2**64 - 1: the user's, or drawn when the spec is resolved.
    Ranks, the run after a preemption and a replay draw the same tokens from it. `sampling.seed`
    still says whether the user gave one."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a sequence: the model's end-of-text (unless ignored) and the user's. Masked
    before `min_tokens` are generated."""
    task: Task = "tokens"
    adapter: str | None = None
    grammar: str | None = None
    """Grammar of the answer, in the format of `text.grammar`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """`sampling.bad_words` as ids of this model."""
    reasoning: ReasoningBudget | None = None
    """`sampling.thinking_token_budget` with the marks of this model."""
    second_at: int = 0
    """Start of a pair's second text in the prompt (token type 1); 0 without one."""
    expected: tuple[int, ...] = ()
    """An answer that the client expects: a hint for drafts, which changes no answer."""
    inputs: tuple[InputSpan, ...] = ()
    """Parts of the prompt that stand for something other than text, in the order of their
    places."""

    @property
    def generates(self) -> bool:
        """Whether tokens are wanted."""
        return self.task == "tokens"
