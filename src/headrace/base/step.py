"""The contract between the planes: the input of a step, and its result.

The control plane (`kv`, `sched`) builds plans and never sees a tensor. The data plane (`worker`)
executes them and never sees a queue. They share only this file. There is no prefill phase and no
decode phase: a chunk of a prompt, a prefix hit, a decoded token, the verification of a draft and
the recomputation after a preemption are all `(start, count)`.

Plans are columns, not row objects: entry i of each column is about the same sequence. That is cheap
to build, and one copy turns a column into an array.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from .drafted import Verified
from .encodings import EncodingStart
from .outputs import Output
from .spec import RequestSpec

NULL_BLOCK = 0
"""Block 0 of every group is never owned: unused table entries point to it."""


MOST_KEEPS = 2
"""Maximum checkpoints of a row's state that one step takes."""
MOST_DRAFTS = 7
"""Maximum drafts of a sequence that one step verifies: a state's tail has this many inputs."""

GroupKind = Literal["full", "sliding", "state", "slots", "cross"]
"""Content of a group's blocks. full: all tokens. sliding: tokens of a window. state: a sequence's
state, in one block. slots: a sequence's tokens, in one block. cross: rows of an encoded input."""


class ArrayShape(NamedTuple):
    """One of the arrays in a block, for each layer of its group."""

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
    """Number of latest tokens that a query of the group sees (itself included); None for all."""
    blocks: int
    """Number of blocks in the pool, the null block included."""
    arrays: tuple[ArrayShape, ...] = ()
    """Content of a block per token and layer. This is its meaning; each backend chooses the memory
    layout of a page."""
    state: bool = False
    """Whether a block holds not tokens but the state of a sequence up to some token. Its table then
    has one entry, and `arrays` describe a block's content per layer."""
    span: int = 0
    """Tokens of a slot. There is no null slot: a sequence without one is not computed. 0: blocks
    have `PoolShape.block_size` tokens."""
    cross: bool = False
    """Whether blocks hold the rows of an encoded input, written once and read by every row that
    attends to it, in place of a sequence's tokens."""

    @property
    def kind(self) -> GroupKind:
        if self.state or self.span:
            return "state" if self.state else "slots"
        if self.cross:
            return "cross"
        return "full" if self.window is None else "sliding"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The KV pool, which the worker allocates and the KV manager hands out."""

    block_size: int
    groups: tuple[GroupShape, ...]
    slots: tuple[GroupShape, ...] = ()
    """Groups of the part that drafts. A sequence has the slot of one number in all of them, or
    none; slots are not shared, indexed or moved to lower tiers."""
    cross: tuple[GroupShape, ...] = ()
    """Groups of encodings that cross attention reads. The encoding with slot s has the s-th
    part of their blocks; none of them is in a sequence's table."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a row. Sent once per stay in a row, again after a preemption."""

    row: int
    sequence_id: int
    tokens: list[int]
    """Prompt and, after a preemption, the tokens generated since."""
    prompt_length: int
    choice: int
    """Index among the request's n choices: part of the random stream."""
    spec: RequestSpec
    tenant: str = ""
    """Name of the requests that may learn from each other's texts; no other sees any of it."""


class BlockWrite(NamedTuple):
    """Blocks appended to (or replaced in) one row's table of one group."""

    row: int
    group: int
    first: int
    """Position in the table of the first of `blocks`."""
    blocks: list[int]


class BlockCopy(NamedTuple):
    """A block to copy to another of its group before the step runs."""

    group: int
    source: int
    target: int


class StateKeep(NamedTuple):
    """A copy of a row's state during the step: a checkpoint for later requests."""

    row: int
    at: int
    """Number of the sequence's tokens in the state; the step computes the last of them for good."""
    block: int
    """Block of the state group that gets the copy."""


class DraftCosts(NamedTuple):
    """Costs of the part that drafts, in steps without it."""

    draft: float
    """Cost of one more draft of each row."""
    read: float
    """Cost of reading one token."""


class SlotWrite(NamedTuple):
    """A slot that a row gets until it is released."""

    row: int
    slot: int
    tokens: int
    """Leading tokens that the row shares with the slot's last sequence."""


@dataclass(slots=True)
class StepPlan:
    """The work of one step (control → data). A scheduled plan is never changed. It is not frozen
    because that would cost every step a call for each field."""

    number: int
    rows: list[int]
    """Permanent row of each sequence in the worker's tables."""
    starts: list[int]
    """Tokens already computed. With two steps in flight: once the earlier one is done."""
    counts: list[int]
    """Tokens to compute now: a chunk of the prompt, or 1 to decode. 1 + drafts to verify is an
    upper bound: with two steps in flight the number of ready drafts is not known at planning."""
    samples: list[bool]
    """Whether this entry produces a token: true if start + count reaches all known tokens."""
    admitted: list[Admission] = field(default_factory=list)
    blocks: list[BlockWrite] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    """Rows released before this step's admissions take theirs."""
    parts: tuple[int, ...] = ()
    """Number of the model part that each entry runs, ascending; empty: 0 for all, as for text. An
    entry of the encoder (1) has an encoding's slot as its row, and slices as its units. It samples
    if it computes the last of them."""
    encodings: list[EncodingStart] = field(default_factory=list)
    """Encodings whose first slices this step computes."""
    dropped: list[int] = field(default_factory=list)
    """Slots of encodings that are released before this step's begin."""
    drafts: int = 0
    """Maximum tokens of `counts` that are drafts; each is followed by a draw of its own."""
    keeps: list[StateKeep] = field(default_factory=list)
    """At most `MOST_KEEPS` of a row."""
    slots: list[SlotWrite] = field(default_factory=list)
    draft_costs: DraftCosts | None = None
    """None before the first step with a part that drafts."""

    @property
    def texts(self) -> int:
        """Entries of the first part, which come first."""
        return self.parts.count(0) if self.parts else len(self.rows)

    def first_part(self) -> StepPlan:
        """Return the plan without entries of other parts."""
        texts = self.texts
        return replace(
            self,
            rows=self.rows[:texts],
            starts=self.starts[:texts],
            counts=self.counts[:texts],
            samples=self.samples[:texts],
            parts=(),
        )

    @property
    def tokens(self) -> int:
        """Tokens of the first part."""
        return sum(self.counts[: self.texts] if self.parts else self.counts)

    def verify(self, *, budget: int | None = None, rows: int | None = None) -> None:
        """Assert that the plan is legal by itself; `kv` asserts the rules about blocks."""
        size = len(self.rows)
        assert len(self.starts) == len(self.counts) == len(self.samples) == size
        parts = self.parts or (0,) * size
        assert len(parts) == size
        assert list(parts) == sorted(parts), "parts run in their order"
        assert len({*zip(parts, self.rows, strict=True)}) == size, "a row appears twice"
        assert all(start >= 0 for start in self.starts)
        assert all(count > 0 for count in self.counts)
        assert budget is None or self.tokens <= budget, f"{self.tokens} tokens over {budget}"
        mine = self.rows[: self.texts]
        assert rows is None or all(0 <= row < rows for row in mine)
        # Drafts follow the token of an entry that decodes, which is one that samples.
        tries = zip(self.counts[: self.texts], self.samples[: self.texts], strict=True)
        longer = sum(count - 1 for count, one in tries if one)
        assert 0 <= self.drafts <= longer, f"{self.drafts} drafts in {longer} tokens"
        admitted = [admission.row for admission in self.admitted]
        assert len(set(admitted)) == len(admitted), "a row is admitted twice"
        assert not set(self.released) & (set(mine) - set(admitted)), "a released row computes"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token's, its rank, and the k most likely."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class Drafting(NamedTuple):
    """Work of the part that drafts. It drafts at the start of the step that verifies; before that
    only the probabilities of its drafts are known."""

    entries: list[int]
    """Sequences for which it would make drafts."""
    estimate: DraftCosts
    """Costs before any step was timed, by the bytes read."""
    seconds: float = 0.0
    """Its part of this step's seconds."""
    making: float = 0.0
    """Seconds of these in which it made drafts; it read texts in the others."""
    depth: int = 0
    """Maximum drafts that it made of one row."""
    read: int = 0
    """Tokens of texts that it read."""


@dataclass(slots=True)
class StepResult:
    """The result of one step (data → control). Lists run parallel to the plan's rows."""

    number: int
    tokens: list[list[int]]
    """Per entry: accepted drafts + 1, or [] if nothing was sampled."""
    logprobs: list[list[TokenLogprobs]] | None = None
    """Per entry and token; None if no entry asked."""
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    """Per entry, one for each prompt token of the chunk except the prompt's first."""
    outputs: dict[int, Output] | None = None
    """Outputs other than tokens, by entry; None without any."""
    proposed: list[bytes] | None = None
    """Per entry, one byte for each draft that is ready for the next step: the probability that it
    and all before it are accepted (of 255). None without drafting."""
    verified: dict[int, Verified] | None = None
    """Drafts that this step verified, by entry; None without any."""
    drafting: Drafting | None = None
    """None if no model drafts."""
    seconds: float = 0.0
    """Time on the device, as the worker measured it."""
    encoding: float = 0.0
    """Seconds of these in the encoder part."""
    gap: float = 0.0
    """Seconds that the device waited for this step after the previous one; 0 if not measured."""
    error: str | None = None
    """Set if the step failed: every sequence in it ends with an `EngineFault`."""
    cause: Literal["", "memory", "device"] = ""
    """Cause of the error, if a worker knows it: the device had no memory for the step, and a
    smaller one may fit; or the device is lost, and no step of this process will succeed."""
    spoiled: dict[int, str] = field(default_factory=dict)
    """Reasons why single sequences cannot go on that are not their requests' fault, by entry."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reasons why single sequences cannot go on, by entry; their requests end with an
    `InvalidRequest`."""

    @property
    def plain(self) -> bool:
        """Whether it has nothing but tokens."""
        more = self.logprobs, self.prompt_logprobs, self.outputs, self.proposed, self.verified
        return not (self.failures or self.spoiled) and more == (None,) * len(more)
