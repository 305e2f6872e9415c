"""Steps as CUDA graphs: captured per bucket before readiness, replayed with static inputs.

A step of a small batch is some ten kernels a layer, each shorter than its launch by Python; a graph
launches all of them at once. A graph's shapes and addresses are fixed, so a step is *padded* to the
next bucket and its tensors are copied into buffers that all graphs share:

* decode (every entry computes one token): buckets of entries. Padding entries have length 1, token
  0 and an empty table, so they read and write the null block only.
* mixed steps, up to the tokens at which kernels hide their launches: buckets of tokens. One padding
  entry takes all padding tokens as a chunk of the null block; further ones have no tokens.
* sequence lengths do not matter: the host lists pieces of the KV, at most as many as the bucket's
  grid has programs, however unequal the lengths (`attention_plan`).

Graphs compute the last layer for every token, so that one graph also serves steps that need all
hidden states. At these sizes products are bound by their weights, so sampled rows alone would take
as long. In a decode bucket every entry has logits; if drafts are verified, so has every token of
small mixed buckets.

A graph ends with its tokens, drawn without filters: a peak per tile of the logits, a mass per tile,
a token. A greedy row is a special draw (`DrawParameters`) that skips the masses. So one graph
serves both, and such a step is the graph and one small copy to the host. Separate graphs for greedy
steps would double their number to save one kernel of a microsecond. Filters are 8 or 16 more
kernels. A step with a filter launches them on the logits after the graph (`triton.sampling`):
inside it, rows without a filter would pay for them.

A step that fits no bucket or has adapters runs call by call, as without graphs. Results are padded
too: their first rows are the step's, valid until the next step. All graphs share one memory pool,
since only one of them runs at a time. Logits are outside it in one buffer, so that they do not
prevent the sharing: the head writes them there, or they are copied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from .attention_lists import AttentionLists, Bucket, plan_step
from .draws import DrawParameters
from .operators import GroupBatch, HostStep, KvCache, StepBatch, StepLimits
from .program import CallByCall, Outputs, Want, choose, want
from .state_lines import StateLines

ENTRIES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 1025, 64))
"""Buckets of decode steps. Up to some 200 rows products are bound by their weights and padding
costs nothing. Above that there is a bucket every 64 rows: 0.3 % of a step on average, 1.3 % at
worst, by the roofline. A 1,000 / 1,000 load of the 8B in fp8 has 872 rows."""
MIXED = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Buckets of tokens for mixed steps. Steps that verify drafts use the small ones."""
LONGER = (1536, 2048, 3072, 4096)
"""Larger buckets, used if a layer of that many tokens takes longer to launch than to compute."""
LAUNCHED = 7e10
"""Largest product of a layer's weights and tokens for which launching takes longer. It is the work
of 0.4 ms, an H200 host's time to launch a layer, at 55 % of the bf16 rate (ADR 0030): 4,700 tokens
of a 0.5B, 320 of an 8B."""
MIXED_ENTRIES = 256
VERIFIED = 128
"""Fewest rows of logits for which graphs have room if drafts are verified."""
TYPICAL = 16_384
"""KV tokens assumed when a graph is captured, to choose attention's order."""

Replay = Callable[[], None]


class GraphMaker(Protocol):
    """Captures the launches of a function."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run the function once or more, capture it, and return a function that replays it."""
        ...

    def memory(self) -> int:
        """Return the device bytes that the process holds for tensors."""
        ...


class CudaGraphMaker:
    """Maker of `torch.cuda.CUDAGraph`s with one memory pool for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Replay:
        # Run outside the capture first: kernels are compiled and libraries make their workspaces.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (another engine) may still do things that capturing forbids
        # in this one.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            run()
        return graph.replay

    def memory(self) -> int:
        torch.cuda.synchronize(self._device)
        # Cached memory of steps outside graphs does not count as the graphs'.
        torch.cuda.empty_cache()
        # The device's own figure would include other processes' memory. The driver's own memory for
        # a graph is covered by the slack of `worker.device_memory`.
        return int(torch.cuda.memory_reserved(self._device))


@dataclass(slots=True)
class GraphFacts:
    """Cost of capturing, and the number of steps served in each way."""

    graphs: int = 0
    bytes: int = 0
    replayed: int = 0
    padded_tokens: int = 0
    call_by_call: int = 0


@dataclass(slots=True)
class _Inputs:
    """Buffers that every graph reads, sized for the largest bucket."""

    tokens: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    sample_rows: torch.Tensor
    tables: list[torch.Tensor]
    slots: list[torch.Tensor]
    counting: torch.Tensor
    """0, 1, 2 … int32."""
    zeros: torch.Tensor
    """int64."""
    ones: torch.Tensor
    """int32."""
    certain: torch.Tensor
    """fp32 ones."""
    draws: DrawParameters
    """Draw rules of a graph's rows: the most likely token, unless a step overrides them."""
    windows: list[int | None] = field(default_factory=list)
    attention: AttentionLists | None = None
    """Attention lists, if the backend has a planner."""
    states: StateLines | None = None

    def view(self, bucket: Bucket, samples: int, max_context: int) -> StepBatch:
        """Return the batch for the capture of this bucket's graph; `samples` tokens get logits."""
        tokens, entries = bucket.tokens, bucket.entries
        return StepBatch(
            tokens=self.tokens[:tokens],
            positions=self.positions[:tokens],
            query_starts=self.query_starts[: entries + 1],
            lengths=self.lengths[:entries],
            state_rows=None if self.states is None else self.states.view(entries),
            groups=[
                GroupBatch(table[:entries], slots[:tokens], window)
                for table, slots, window in zip(self.tables, self.slots, self.windows, strict=True)
            ],
            sample_rows=self.sample_rows[:samples],
            max_count=1 if bucket.decode else tokens,
            max_length=min(TYPICAL, max_context),
            plan=None if self.attention is None else self.attention.view(bucket),
        )


_EVERYTHING = want(logits=True, hidden="every")
"""Outputs of every graph in addition to its tokens."""


class GraphProgram:
    """A model's step run by the graph of its bucket, or call by call. See `Program`."""

    host = lowered = False

    def __init__(self, plain: CallByCall, limits: StepLimits, maker: GraphMaker) -> None:
        """Make buckets and buffers; capture nothing yet: see `capture`."""
        self._plain, self._limits, self._maker = plain, limits, maker
        cache = plain.cache
        self._block_size = cache.first.block_size
        self._entries = _up_to(ENTRIES, min(limits.entries, ENTRIES[-1]))
        largest = min(limits.tokens, limits.max_context)
        launched = LAUNCHED * len(cache.layers) / max(1, plain.model.multiplied())
        sizes = *MIXED, *(size for size in LONGER if size <= launched)
        self._mixed = [size for size in sizes if size <= largest]
        self._planner = plain.operators.planner(cache, limits.drafts)
        self._inputs = self._make_inputs(cache.windows, cache.first.k.device)
        self._drawn = False
        """Whether the inputs currently contain draw rules."""
        self._replays: dict[Bucket, Replay] = {}
        self._hidden: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        self.facts = GraphFacts()

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets, largest first: later graphs fit into the memory of earlier ones."""
        for tokens in reversed(self._mixed):
            yield Bucket(tokens, self._mixed_entries(tokens))
        for entries in reversed(self._entries):
            yield Bucket(entries, entries)

    def capture(self) -> None:
        """Capture every bucket; afterwards nothing more is captured or compiled for them."""
        before = self._maker.memory()
        for bucket in self.buckets():
            self._replays[bucket] = self._capture(bucket)
        self.facts.graphs = len(self._replays)
        self.facts.bytes = self._maker.memory() - before

    def estimate(self) -> int:
        """Estimate the bytes that `capture` would take, from three graphs. The largest mixed and
        the largest decode graph allocate the memory that all share; the smallest shows the extra
        cost of each. The three are dropped afterwards."""
        buckets = list(self.buckets())
        largest = next((bucket for bucket in buckets if bucket.decode), buckets[0])
        before = self._maker.memory()
        kept = [self._capture(bucket) for bucket in {buckets[0]: 0, largest: 0}]
        shared = self._maker.memory() - before
        kept.append(self._capture(buckets[-1]))
        each = max(0, self._maker.memory() - before - shared)
        self._hidden = self._logits = self._tokens = None
        return shared + each * max(0, len(buckets) - len(kept) + 1)

    def find(self, batch: StepBatch) -> Bucket | None:
        """Return the smallest bucket that fits the step, or None."""
        tokens, entries = len(batch.tokens), len(batch.lengths)
        if any(
            one is not None for one in (batch.adapters, batch.types, batch.encoded, batch.turns)
        ):
            return None
        if batch.max_length > self._limits.max_context:
            return None
        if batch.max_count == 1:
            size = _next(self._entries, entries)
            return None if size is None else Bucket(size, size)
        size = _next(self._mixed, tokens)
        chunks = 0 if batch.plan is None else len(batch.plan.chunks)
        # Padding tokens need a free padding entry.
        while size is not None:
            found, padded = Bucket(size, self._mixed_entries(size)), tokens < size
            # It needs a free line in the lists, too.
            lists = self._inputs.attention
            room = chunks if lists is None else lists.chunks_of(found) - padded
            if (
                entries + padded <= found.entries
                and chunks <= room
                and len(batch.sample_rows) <= self._samples(found)
            ):
                return found
            size = _next(self._mixed, size + 1)
        return None

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        self._plan(batch)
        bucket = self.find(batch)
        if bucket is None or bucket not in self._replays:
            self.facts.call_by_call += 1
            return self._plain.step(batch, want)
        draws = batch.draws if want.tokens == "rules" else None
        # Tokens drawn inside the graph are laid out by row, like the logits.
        every = not self._each_row(bucket) or len(batch.sample_rows) == len(batch.tokens)
        inside = want.tokens != "none" and (draws is None or (every and not draws.filtered))
        self._replay(batch, bucket, draws if inside else None)
        assert self._logits is not None
        assert self._tokens is not None
        outputs = Outputs(hidden=self._hidden_of(batch, want))
        if want.logits or not inside:
            outputs.logits = self._sampled(batch, bucket, self._logits)
        if inside:
            outputs.tokens = self._sampled(batch, bucket, self._tokens)
        elif want.tokens != "none":
            outputs.tokens = choose(self._plain.drawing, outputs.logits, batch)
        return outputs

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._plain.head(hidden)
        return found

    def _replay(self, batch: StepBatch, bucket: Bucket, draws: DrawParameters | None) -> None:
        self._fill(batch, bucket)
        self._fill_draws(draws)
        self._replays[bucket]()
        self.facts.replayed += 1
        self.facts.padded_tokens += bucket.tokens - len(batch.tokens)

    def _sampled(self, batch: StepBatch, bucket: Bucket, found: torch.Tensor) -> torch.Tensor:
        """Return the rows that the step samples from a graph's result; in some graphs every token
        has one."""
        tokens, samples = len(batch.tokens), len(batch.sample_rows)
        if self._each_row(bucket) and samples < tokens:
            return found[:tokens][batch.sample_rows]
        return found[:samples]

    def _hidden_of(self, batch: StepBatch, want: Want) -> torch.Tensor | None:
        if want.hidden == "none":
            return None
        assert self._hidden is not None
        hidden = self._hidden[: len(batch.tokens)]
        if want.hidden == "every" or len(batch.sample_rows) == len(hidden):
            return hidden
        return hidden[batch.sample_rows]

    def _capture(self, bucket: Bucket) -> Replay:
        self._idle(bucket)
        batch = self._inputs.view(bucket, self._samples(bucket), self._limits.max_context)

        def run() -> None:
            found = self._plain.step(batch, _EVERYTHING)
            assert found.hidden is not None
            assert found.logits is not None
            self._keep(found.hidden, found.logits)

        if self._hidden is None:
            # Run once outside any graph: the shapes of the results size their buffers.
            found = self._plain.step(batch, _EVERYTHING)
            hidden, logits = found.hidden, found.logits
            assert hidden is not None
            assert logits is not None
            tokens = max(b.tokens for b in self.buckets())
            samples = max(map(self._samples, self.buckets()))
            self._hidden = hidden.new_zeros(tokens, hidden.shape[1])
            self._logits = logits.new_zeros(samples, logits.shape[1])
            self._tokens = hidden.new_zeros(samples, dtype=torch.int64)
        assert self._logits is not None
        batch.logits = self._logits[: self._samples(bucket)]
        return self._maker.capture(run)

    def _keep(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        assert self._hidden is not None
        assert self._logits is not None
        assert self._tokens is not None
        self._hidden[: len(hidden)].copy_(hidden)
        # Nothing is copied if the head already wrote them there (`StepBatch.logits`).
        self._logits[: len(logits)].copy_(logits)
        rows, draws = len(logits), self._inputs.draws
        given = DrawParameters(
            draws.temperature[:rows], None, None, draws.min_p[:rows], draws.uniform[:rows]
        )
        self._tokens[:rows].copy_(self._plain.drawing.draw(logits, given))

    def _fill_draws(self, draws: DrawParameters | None) -> None:
        """Set the draw rules; nothing changes between two greedy steps."""
        mine = self._inputs.draws
        if draws is not None:
            rows = len(draws.uniform)
            torch._foreach_copy_(
                [mine.temperature[:rows], mine.min_p[:rows]], [draws.temperature, draws.min_p]
            )
            mine.uniform[:rows].copy_(draws.uniform)
        elif self._drawn:
            torch._foreach_copy_([mine.temperature, mine.min_p], [self._inputs.certain] * 2)
            mine.uniform.zero_()
        self._drawn = draws is not None

    def _idle(self, bucket: Bucket) -> None:
        """Fill the buffers with a step that consists of padding only."""
        empty = torch.empty(0, dtype=torch.int64, device=self._inputs.tokens.device)
        short = empty.to(torch.int32)
        start = self._inputs.counting[:1]
        groups = [GroupBatch(short.view(0, 1), empty, window) for window in self._inputs.windows]
        nothing = StepBatch(empty, empty, start, short, groups, empty, bucket.tokens, 1)
        none = np.zeros(0, np.int64)
        nothing.host = HostStep(none, none, none)
        self._plan(nothing)
        self._fill(nothing, bucket)

    def _plan(self, batch: StepBatch) -> None:
        if self._planner is not None and batch.plan is None:
            batch.plan = plan_step(batch, self._planner)

    def _fill(self, batch: StepBatch, bucket: Bucket) -> None:
        """Copy a step into the buffers, followed by padding, in a few launches."""
        inputs = self._inputs
        tokens, entries = len(batch.tokens), len(batch.lengths)
        samples, extra = len(batch.sample_rows), bucket.tokens - tokens
        spare, unsampled = bucket.entries - entries, self._samples(bucket) - samples
        longs = [(inputs.tokens[:tokens], batch.tokens)]
        longs.append((inputs.positions[:tokens], batch.positions))
        ints = [(inputs.query_starts[: entries + 1], batch.query_starts)]
        ints.append((inputs.lengths[:entries], batch.lengths))
        for group, slots in zip(batch.groups, inputs.slots, strict=True):
            longs.append((slots[:tokens], group.slots))
        # If every row samples, `sample_rows` is not read.
        if not self._each_row(bucket):
            longs.append((inputs.sample_rows[:samples], batch.sample_rows))
            longs.append((inputs.sample_rows[samples:][:unsampled], inputs.zeros[:unsampled]))
        if extra:
            for buffer in (inputs.tokens, inputs.positions, *inputs.slots):
                longs.append((buffer[tokens : bucket.tokens], inputs.zeros[:extra]))
        if spare:
            starts = inputs.counting[entries + 1 :][:spare]
            lengths = inputs.ones[:spare]
            if not bucket.decode:
                # The first one gets all padding tokens.
                starts = inputs.counting[bucket.tokens].expand(spare)
                lengths = inputs.counting[0].expand(spare)
            ints.append((inputs.query_starts[entries + 1 : bucket.entries + 1], starts))
            ints.append((inputs.lengths[entries : bucket.entries], lengths))
        if inputs.states is not None:
            ints += inputs.states.copies(batch, bucket.entries)
        if inputs.attention is not None:
            ints += inputs.attention.copies(batch, bucket, inputs.counting)
        for pairs in (longs, ints):
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)
        width = -(-max(extra, 1) // self._block_size)
        for group, table in zip(batch.groups, inputs.tables, strict=True):
            used = min(group.tables.shape[1], table.shape[1])
            table[:entries, :used].copy_(group.tables[:, :used])
            if spare:
                table[entries : bucket.entries, :width].zero_()
        if spare and extra and not bucket.decode:
            inputs.lengths[entries : entries + 1].fill_(extra)
            places = inputs.positions[tokens : bucket.tokens]
            torch.arange(extra, out=places)

    def _mixed_entries(self, tokens: int) -> int:
        return min(MIXED_ENTRIES, self._limits.entries, tokens // 2) + 1

    def _samples(self, bucket: Bucket) -> int:
        """Return the number of tokens of a bucket that get logits: the last of each entry. If
        drafts are verified all do, up to the largest decode step or `VERIFIED`."""
        if bucket.decode or not self._limits.drafts:
            return bucket.entries
        most = max(VERIFIED, self._entries[-1], bucket.entries)
        return min(bucket.tokens, self._limits.samples, most)

    def _each_row(self, bucket: Bucket) -> bool:
        """Return whether all tokens get logits, row by row."""
        return self._samples(bucket) == bucket.tokens

    def _make_inputs(self, windows: list[int | None], device: torch.device) -> _Inputs:
        tokens = max([*self._entries, *self._mixed])
        entries = max([self._entries[-1], *(self._mixed_entries(size) for size in self._mixed)])
        samples = max(map(self._samples, self.buckets()))
        width = -(-self._limits.max_context // self._block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return _Inputs(
            tokens=zeros(tokens),
            positions=zeros(tokens),
            query_starts=zeros(entries + 1, dtype=torch.int32),
            lengths=zeros(entries, dtype=torch.int32),
            sample_rows=zeros(samples),
            tables=[zeros(entries, width, dtype=torch.int32) for _ in windows],
            slots=[zeros(tokens) for _ in windows],
            counting=torch.arange(max(tokens, entries) + 2, dtype=torch.int32, device=device),
            zeros=zeros(max(tokens, entries)),
            ones=torch.ones(entries, dtype=torch.int32, device=device),
            certain=torch.ones(samples, device=device),
            draws=DrawParameters(
                torch.ones(samples, device=device),
                None,
                None,
                torch.ones(samples, device=device),
                zeros(samples, dtype=torch.float64),
            ),
            windows=windows,
            attention=None
            if self._planner is None
            else AttentionLists(self._planner, list(self.buckets()), windows, device),
            states=StateLines(entries, device) if self._plain.cache.states else None,
        )


def _up_to(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Return the buckets below a limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]


def _next(sizes: list[int], size: int) -> int | None:
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


def null_step(tokens: int, cache: KvCache, max_context: int, *, decodes: int = 0) -> StepBatch:
    """Make a warm-up step of `tokens` tokens that reads and writes the null block only.

    `decodes`: number of tokens that each end a context of the greatest length.
    """
    device, block_size = cache.first.k.device, cache.first.block_size
    rest = tokens - decodes
    chunks = [max_context] * (rest // max_context)
    chunks += [rest % max_context] * (rest % max_context > 0)
    counts = [*chunks, *[1] * decodes]
    reach = [*chunks, *[max_context] * decodes]
    lengths = torch.tensor(reach, dtype=torch.int32)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    positions = torch.cat(
        [torch.arange(end - count, end) for end, count in zip(reach, counts, strict=True)]
    ).to(device)
    table = torch.zeros(len(counts), -(-max(reach) // block_size), dtype=torch.int32, device=device)
    zeros = torch.zeros_like(positions)
    groups = [GroupBatch(table, zeros, window) for window in cache.windows]
    return StepBatch(
        zeros,
        positions,
        bounds.to(device),
        lengths.to(device),
        groups,
        bounds[1:].to(device).long() - 1,
        max(counts),
        max(reach),
        host=HostStep(
            np.array(counts, np.int64), np.array(reach, np.int64), bounds[1:].numpy() - 1
        ),
    )
