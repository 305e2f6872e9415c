"""A request's demands on every step that computes for it: resolved once, then carried whole.

`engine.clients.input` makes a spec from the user's fields. Request, message, sequence and admission
hand on the same object, and the worker reads it. Its fields are never copied and never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .denoising import PictureWish
from .encodings import SealedHandle
from .items import BeamRow, RetrievalWish
from .ranking import RankingInput
from .sampling import SamplingParams

Task = Literal["tokens", "sound", "vector", "score", "alignment", "rank", "picture", "items"]
"""Requested output: text token by token, the sound whose codes are the tokens, the vector of an
input, the score of a pair of texts, the positions of a text's tokens in an encoded input, the
scores of candidates, a picture, or items of the catalogue."""
GENERATING = "tokens", "sound"
"""Tasks for which tokens are sampled."""
WORKER_FEATURES = {"rank": "ranking", "picture": "pictures", "items": "beams"}
"""Features of workers that serve tasks without tokens; other such tasks need "pooling"."""

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


class TimeRules(NamedTuple):
    """Rules for the tokens of a text with timestamps, see `worker.time_rules`."""

    end: int
    """Id that ends the text; ids from `first_time` on are timestamps, all between are special."""
    first_time: int
    never: tuple[int, ...]
    """Ids that are not drawn."""
    never_first: tuple[int, ...]
    """Further ids that are not drawn first."""
    times: bool
    """Whether timestamps are drawn, in pairs that do not go back."""
    begin: int
    """Place of the text's first token; the ids before it are the prompt's."""
    most: int = 0
    """Number of the likeliest ids that are reported with each token."""


class AlignmentWish(NamedTuple):
    """Tokens of a prompt to be located in its encoded input."""

    first: int
    """Place of the first of them; they end with the prompt."""
    frames: int
    """First positions of the input, in which they lie."""


class InputSpan(NamedTuple):
    """Positions of a prompt that stand for an input which is not text. Their ids are placeholders;
    the input gives the content there."""

    first: int
    length: int
    """Number of positions; 0: every token attends to the input, and none stands for it."""
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
    """Positions per row of the grid that they form, row by row; 0: they form no grid."""
    parted: bool = False
    """Whether a token of text follows each row of the grid but the last; the length counts them."""
    aligns: bool = False
    """Whether requests for alignment will read it: its encoding then keeps what these need."""

    mutual: bool = False
    """Whether its positions see each other, also later ones; then one step computes them all."""
    follows: bool = False
    """Whether it continues the video of the preceding span: both grids begin at the same place."""
    time: int = 0
    """Positions on the axis of time from the beginning of its video to it."""

    @property
    def rows(self) -> int:
        """Rows of the encoding."""
        return self.length - (self.length // (self.columns + 1) if self.parted else 0)

    @property
    def end(self) -> int:
        """First position after it."""
        return self.first + self.length

    @property
    def content(self) -> tuple[object, ...]:
        """Key of everything that the KV of its positions depends on, but the preceding tokens."""
        known = self.kind, self.digest
        return (*known, self.follows, self.time) if self.follows or self.time else known

    def read_from(self, start: int) -> bool:
        """Return whether a token at `start` or a later one reads the input."""
        return not self.length or start < self.first + self.length


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
    rules: TimeRules | None = None
    alignment: AlignmentWish | None = None
    """Wish of the task "alignment"."""
    ranking: RankingInput | None = None
    """Features of the task "rank"; the prompt has a placeholder for each candidate."""
    picture: PictureWish | None = None
    """Wish of the task "picture", whose prompt is its label."""

    retrieval: RetrievalWish | None = None
    """Wish of the task "items"."""
    beam: BeamRow | None = None
    """The beam of that task which a row computes; written by the scheduler."""

    @property
    def generates(self) -> bool:
        """Whether tokens are wanted."""
        return self.task in GENERATING

    @property
    def predicts(self) -> bool:
        """Whether the logits of the last token are wanted."""
        return self.generates or self.retrieval is not None
