"""Types of the public API: the request, the answer, and the stream between them.

A *request* is the user's; it becomes `n` *sequences*, which the engine computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .drafted import Drafted, Verified
from .encodings import EncodingStats
from .outputs import Output
from .spec import RequestSpec
from .split import SplitStats
from .step import TokenLogprobs
from .tiers import TierStats

FinishReason = Literal["stop", "length", "abort", "error"]


class Retained(NamedTuple):
    """First tokens of a prompt to keep in the cache for a while."""

    tokens: int
    seconds: float
    priority: int = 50
    """0 to 100: the lowest is evicted first."""


@dataclass(slots=True)
class Request:
    """A request as the engine takes it: tokens, already verified against the model's limits.

    Workers read its `spec`; the rest concerns the control plane and the answer.
    """

    id: str
    prompt: list[int]
    spec: RequestSpec
    priority: int = 0
    """Lower runs first (policy `priority`)."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt."""
    arrival: float = 0.0
    """`time.monotonic()` at the API border."""
    retained: tuple[Retained, ...] = ()
    """Parts of the prompt to keep in the context cache."""
    marks: tuple[tuple[int, int], ...] = ()
    """(tokens, name): routers' names for that many first tokens of the prompt, the longest first.
    The engine reports which of these it holds (`base.text_prefixes`)."""
    keep_ids: tuple[int, ...] = ()
    """Special tokens kept in the text even if special tokens are skipped: a dialect's markers."""

    @property
    def tenant(self) -> str:
        """Name of the requests that may learn from each other's texts: one salt, one adapter."""
        return f"{self.spec.adapter or ''}\0{self.cache_salt}"


@dataclass(slots=True)
class SequenceDelta:
    """New output of one sequence from one step (engine → output processing)."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The id that ended it, if one did; it is also the last of `tokens`."""
    error: str | None = None
    error_status: int = 500
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    scheduled: float = 0.0
    """`time.monotonic()` when the sequence first ran: queue time ends here."""
    preemptions: int = 0
    output: Output | None = None
    """The choice's output other than tokens: a vector, scores, or the next samples."""
    verified: Verified | None = None
    """Its drafts that the step verified."""
    loaded: int = 0
    """Tokens of `cached` that were loaded from a tier below the pool."""


@dataclass(slots=True)
class StepStats:
    """State of the engine after one step, for metrics and liveness (engine → API process)."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    entries: int = 0
    """Sequences in the step."""
    tokens: int = 0
    """Tokens computed in the step."""
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    kv_usage: float = 0.0
    """Share of blocks that hold KV of running sequences, 0 to 1."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix index since the start."""
    prefix_hits: int = 0
    preemptions: int = 0
    """Preemptions since the start."""
    drafts: int = 0
    """Draft verifications by a sequence since the start; so are the next two."""
    draft_tokens: int = 0
    """Drafts that were verified."""
    accepted_tokens: int = 0
    """Drafts that matched the model's tokens."""
    seconds: float = 0.0
    """Time on the device."""
    schedule_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Time between the end of the previous step and the submission of this one."""
    predicted_seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    launch_seconds: float = 0.0
    """Overhead within `predicted_seconds`: starts and ends of operators."""
    tier: TierStats | None = None
    """Work of the tiers below the KV pool; None without tiers."""
    encodings: EncodingStats | None = None
    """Encodings of inputs that are not text; None for a model without an encoder part."""
    split: SplitStats | None = None
    """Counts of the prefill/decode split; None for an engine without a role in one."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it; None for end-of-text and length."""
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request: whole, or its part so far while it streams."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Entry 0 is None: nothing predicts the first token."""
    cached_tokens: int = 0
    drafted: Drafted | None = None
    """Results of drafts, once the answer is whole; None if none was verified."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one input."""

    request_id: str
    prompt_token_ids: list[int]
    vector: list[float]
    """Pooled by `ModelFiles.pooling`; the one logit of a model that scores pairs."""


@dataclass(slots=True)
class ScoreOutput:
    """The score of a pair of texts."""

    prompt_tokens: int
    score: float
    """The sigmoid of the logit, 0 to 1, if the model scores pairs; the cosine of the two vectors,
    -1 to 1, if it embeds."""


@dataclass(slots=True)
class OutputDelta:
    """New output of one choice, as text (output processing → server, terminal, Python).

    The deltas of a choice concatenate to its answer; the last one carries `finish_reason`.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Complete, on the first delta of choice 0, if requested."""
    output: Output | None = None
    """The requested output instead of text."""
    drafted: Drafted | None = None
    """Results of the request's drafts, on its very last delta."""
    queue_seconds: float = 0.0
    """Arrival to first step, on the delta that carries the first token."""
    preemptions: int = 0
    void: int | None = None
    """Number of this choice's earlier tokens that are void: their engine died, and the answer
    starts again with this delta. Only for readers that requested it (`whole`)."""
