"""The contract between the planes: what to compute in a step, and what came out.

The control plane (`kv`, `sched`) builds plans and never sees a tensor; the data plane (`worker`)
executes them and never sees a queue. This file is all that they share. There is no prefill phase
and no decode phase: a chunk of a prompt, a prefix hit, a decoded token, the verification of a
draft and the recomputation after a preemption are all `(start, count)`.

Plans are columns, not row objects: entry i of each column speaks of the same sequence. That is
cheap to build and one copy turns a column into an array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .drafted import Verified
from .outputs import Output
from .spec import RequestSpec

NULL_BLOCK = 0
"""Block 0 of every group is never owned: table entries that are not to be read point to it."""


MOST_KEEPS = 2
"""Checkpoints of a row's state that one step takes."""
MOST_DRAFTS = 7
"""Drafts of a sequence that one step verifies, at most: so many inputs lie behind a state."""

GroupKind = Literal["full", "sliding", "state"]
"""What lies in a group's blocks and for how long: every token, those of a window, or what all
tokens of a sequence came to, in one block."""


class ArrayShape(NamedTuple):
    """One of the arrays of which a block holds a piece, for each layer of its group."""

    name: str
    shape: tuple[int, ...]
    """Shape of one token's part."""
    dtype: str


class GroupShape(NamedTuple):
    """One layer group's share of the KV pool, as both planes see it.

    Layers of a group keep their KV in the same blocks of the same table.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    """The number of latest tokens that a query of the group sees (itself included); None: all."""
    blocks: int
    """Number of blocks in the pool, the null block included."""
    arrays: tuple[ArrayShape, ...] = ()
    """What a block holds of each token and layer. This is the meaning; how a backend lays out a
    page of it is the backend's."""
    state: bool = False
    """A block is not of so many tokens but of a whole sequence up to some token: its table has one
    entry, and `arrays` say what a block holds of each layer."""

    @property
    def kind(self) -> GroupKind:
        if self.state:
            return "state"
        return "full" if self.window is None else "sliding"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The KV pool: what the worker allocates and the KV manager hands out."""

    block_size: int
    groups: tuple[GroupShape, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a row. Sent once per stay in a row, again after a preemption."""

    row: int
    sequence_id: int
    tokens: list[int]
    """Prompt and, after a preemption, what was generated since."""
    prompt_length: int
    choice: int
    """Which of the request's n choices this is: part of the random stream."""
    spec: RequestSpec
    tenant: str = ""
    """Names those whose texts may teach each other: nothing of one is told to another."""


class BlockWrite(NamedTuple):
    """Blocks appended to (or replaced in) one row's table of one group."""

    row: int
    group: int
    first: int
    """Position in the table of the first of `blocks`."""
    blocks: list[int]


class BlockCopy(NamedTuple):
    """Content of a block is copied to another of its group before the step runs."""

    group: int
    source: int
    target: int


class StateKeep(NamedTuple):
    """A row's state is copied while the step computes it: a checkpoint for who comes later."""

    row: int
    at: int
    """Behind so many tokens of the sequence; the step computes the last of them for good."""
    block: int
    """Block of the state group that gets the copy."""


@dataclass(slots=True)
class StepPlan:
    """What to compute in one step (control → data). Nobody changes one that was scheduled; it is
    not frozen because that would cost every step a call for each field."""

    number: int
    rows: list[int]
    """Permanent row of each sequence in the worker's tables."""
    starts: list[int]
    """Tokens already computed. With two steps in flight: once the earlier one is done."""
    counts: list[int]
    """Tokens to compute now: a chunk of the prompt, 1 to decode. 1 + drafts to verify, which is the
    most: with two steps in flight it was planned before it was known how many are ready."""
    samples: list[bool]
    """Does this entry produce a token? True where start + count reaches all known tokens."""
    admitted: list[Admission] = field(default_factory=list)
    blocks: list[BlockWrite] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    """Rows given back before this step's admissions take theirs."""
    parts: tuple[int, ...] = ()
    """Number of the part of a model that each entry runs; empty: 0 for all, as text has it."""
    drafts: int = 0
    """Tokens of `counts` that are drafts, at most; each is followed by a draw of its own."""
    keeps: list[StateKeep] = field(default_factory=list)
    """At most `MOST_KEEPS` of a row."""
    draft_costs: tuple[float, float] | None = None
    """The latest `Drafting.costs`: ranks, whose clocks differ, are to draft alike."""

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def verify(self, *, budget: int | None = None, rows: int | None = None) -> None:
        """Assert what makes a plan legal by itself; `kv` asserts what concerns blocks."""
        size = len(self.rows)
        assert len(self.starts) == len(self.counts) == len(self.samples) == size
        assert len(set(self.rows)) == size, "a row appears twice"
        assert all(start >= 0 for start in self.starts)
        assert all(count > 0 for count in self.counts)
        assert budget is None or self.tokens <= budget, f"{self.tokens} tokens over {budget}"
        assert rows is None or all(0 <= row < rows for row in self.rows)
        assert len(self.parts) in (0, size)
        # Drafts stand behind the token of an entry that decodes, which is one that samples.
        longer = sum(count - 1 for count, one in zip(self.counts, self.samples, strict=True) if one)
        assert 0 <= self.drafts <= longer, f"{self.drafts} drafts in {longer} tokens"
        admitted = [admission.row for admission in self.admitted]
        assert len(set(admitted)) == len(admitted), "a row is admitted twice"
        assert not set(self.released) & (set(self.rows) - set(admitted)), "a released row computes"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token's, its rank, and the k most likely."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class Drafting(NamedTuple):
    """What a draft model takes. It drafts when the step that verifies begins: until then there are
    only the chances of what it will say."""

    entries: list[int]
    """The sequences whose drafts it would make."""
    each: float
    """Seconds of one more draft of each of these."""
    seconds: float
    """Its part of this step's."""
    costs: tuple[float, float] = (0.0, 0.0)
    """Parts of a step that one more draft of each row takes, and a token to be read."""


@dataclass(slots=True)
class StepResult:
    """What came out of one step (data → control). Lists run parallel to the plan's rows."""

    number: int
    tokens: list[list[int]]
    """Per entry: accepted drafts + 1, or [] where nothing was sampled."""
    logprobs: list[list[TokenLogprobs]] | None = None
    """Per entry and token; None where no entry asked."""
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    """Per entry, one for each prompt token of the chunk but the prompt's first."""
    outputs: dict[int, Output] | None = None
    """Entry → what it gave that is no token; None where no entry did."""
    proposed: list[bytes] | None = None
    """Per entry: for each draft that is ready for the next step one byte, how likely it and all
    before it survive (of 255). None where nobody drafts."""
    verified: dict[int, Verified] | None = None
    """Entry → the drafts of it that this step verified; None where none were."""
    drafting: Drafting | None = None
    """None where no model drafts."""
    seconds: float = 0.0
    """Time on the device, as the worker measured it."""
    gap: float = 0.0
    """Seconds that the device waited for this step after the one before; 0 where not measured."""
    error: str | None = None
    """Set when the step failed: every sequence in it ends with an `EngineFault`."""
    failures: dict[int, str] = field(default_factory=dict)
    """Entry → why this sequence alone cannot go on; its request ends with an `InvalidRequest`."""
