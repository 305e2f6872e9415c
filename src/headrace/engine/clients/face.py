"""The engine's interface for its users: the server, the terminal and the factory code against it.

`AsyncEngine` is the real one. A test may bring its own: nothing outside this package needs more
than this protocol. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from ...base.config import Decision, EngineOptions
from ...base.denoising import PictureWish
from ...base.identity import Identity
from ...base.items import RetrievalWish
from ...base.modelfiles import ModelFiles
from ...base.ranking import RankingInput
from ...base.request import EmbeddingOutput, OutputDelta, RequestOutput, Retained, StepStats
from ...base.sampling import SamplingParams
from ...base.spec import InputSpan, Task
from ...base.text_prefixes import TextPrefixes
from ..loop.adapters import AdapterBook

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from .operations import Operations

Prompt = str | list[int]
"""Text, which is tokenised with the model's begin-of-text if it has one, or token ids."""


class RequestOptions(TypedDict, total=False):
    """Options of a request in addition to prompt and sampling. `InputProcessor.request` documents
    them and their defaults. Without a `request_id` one is made."""

    request_id: str
    priority: int
    cache_salt: str
    adapter: str | None
    grammar: str | None
    keep_ids: Collection[int]
    expected: Sequence[int]
    task: Task
    second_at: int
    retained: Sequence[Retained]
    prefixes: TextPrefixes
    inputs: Sequence[InputSpan]
    given: RankingInput | PictureWish | RetrievalWish | None


@dataclass(frozen=True, slots=True)
class Health:
    """Ready: a new request would be served. Alive: the step loop runs, or is being restarted."""

    ready: bool
    alive: bool
    reason: str = ""
    """Reason why it is not ready or not alive; empty if it is both."""
    retry_after: float | None = None
    """Seconds after which readiness is expected, for `Retry-After`."""
    heartbeat_age: float = 0.0
    """Seconds since the step loop last reported."""
    restarts: int = 0


class OutputStream(Protocol):
    """The answer to one request while it comes: an asynchronous iterator of `OutputDelta`.

    Deltas of one choice that its reader has not taken yet are merged, so a slow reader holds no
    more memory than the answer itself. `__anext__` raises errors: `Overloaded` if the engine
    refused the request, `EngineFault` if its step failed, `EngineDead` if the engine died with it.
    Leaving the iteration early does not stop the work: call `cancel`.
    """

    request_id: str
    prompt_ids: list[int]

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...
    async def __anext__(self) -> OutputDelta: ...
    def divert(self, straight: Callable[[OutputDelta], bool]) -> None:
        """Offer further deltas to a function, past a reader that waits: see `Stream.divert`."""

    def show(self) -> bool:
        """Note that the answer is visible and cannot come again from the start: see
        `Stream.show`."""

    def cancel(self) -> None:
        """Stop the work (if it still goes on) and free its memory; further deltas are lost."""


class ServingEngine(Protocol):
    """One model, served. All methods belong to the event loop that started the engine."""

    options: EngineOptions
    files: ModelFiles
    tokenizer: Any
    """`text.Tokenizer`."""
    template: Any
    """`text.ChatTemplates`, or None if the model has none."""
    items: Any
    """`base.items.ItemCatalogue` of a model that retrieves items; else None."""
    model_name: str
    max_context: int
    """Longest prompt plus output that is served, in tokens."""
    rows: int
    """Sequences that can run at the same time."""
    features: frozenset[str]
    """Abilities of the worker beyond text: "grammar", "adapter", "pooling" (vectors); "score" (a
    cross-encoder: one number for a pair), "ranking" (scores of candidates), "pictures". A request
    for any other is refused."""
    operations: Operations
    """Sleep and wake, reset of the prefix cache, recording of a profile."""
    adapters: AdapterBook
    """The LoRA adapters that requests can have by name."""
    decisions: list[Decision]
    """The values of the options and their reasons: `headrace explain`."""
    identity: Identity | None
    """Everything that the bits of its answers depend on; None until it has once been ready."""
    memory: dict[str, float]
    """`weight_bytes`, `kv_bytes` and `kv_tokens`, once it has been ready. Of a model that draws
    also `step_seconds_1` and `step_seconds_2`, predicted for a step of one picture without guidance
    and with it."""
    phases: dict[str, float]
    """Seconds of each start phase, in the order in which they ended."""
    stats: StepStats
    """Statistics of the latest step."""
    registry: CollectorRegistry
    """Metrics of this engine; the server adds its own and renders it under /metrics."""
    # Optional, read with `getattr`: `metrics` (obs.metrics.EngineMetrics, whose sketches give
    # latencies of the last seconds), `held_prefixes` (for routers), `in_work()` (id and life of
    # each request, for the page) and `on_end` (called with id and life when a request has ended,
    # for traces).

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        whole: bool = False,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Verify a request and send it to the engine.

        `whole`: the reader shows nothing before the answer is complete. If the engine dies before
        that, the next one sends the whole answer again, and its deltas say so (`OutputDelta.void`).

        Raises at once, before any work: `InvalidRequest` (a field out of bounds, an empty prompt,
        an id that is already in work), `ContextOverflow`, `Overloaded` (starting, restarting,
        draining, or as many requests as `max_sequences + max_waiting`).
        """

    def stream(
        self, prompt: Prompt, sampling: SamplingParams, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[OutputDelta]:
        """Do as `submit`, as an asynchronous generator: closing or cancelling it stops the work."""

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Return the whole answer."""

    async def embed(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> EmbeddingOutput:
        """Return the vector of a text (with the model's tokens before and after it) or of token
        ids."""

    def abort(self, request_id: str) -> bool:
        """End a request; its stream ends with finish reason "abort". False: the id is unknown."""

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """See `AsyncEngine.load_adapter`."""

    async def unload_adapter(self, name: str) -> None:
        """See `AsyncEngine.unload_adapter`."""

    def health(self) -> Health: ...

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        """Call back after each step; return the function that ends the subscription."""

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait `drain_seconds` for those in work, end the rest, stop the
        process."""
