"""Tables, batches and row features of a worker for one pool: whatever `allocate` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..base.arch import ModelArch, Pooling
from ..base.environment import check_plans
from ..base.groups import graph_groups, pool_of_rank
from ..base.step import PoolShape, StepPlan
from ..kernels.operators import StepBatch, StepLimits
from ..kernels.program import Program
from ..models.registry import describe
from ..speculate import Speculation
from .alignment import Aligner
from .bans import AllowedTokens, BadWords
from .batch import make_batch
from .beams import Beams
from .denoising import Denoising
from .features import Features, RowFeature
from .filters import Filters
from .grammar import GrammarCompiler, GrammarMasks
from .host_batch import HostBatches
from .kv_tensors import PoolMemory
from .logprobs import Logprobs
from .masks import LogitBias, MinTokens, Penalties
from .opening import OpenWorker, set_torch_threads
from .options import Resolved, WorkerOptions
from .pooling import Pooler
from .prompt_scores import PromptScores
from .ranking import CandidateScores
from .reasoning import ReasoningBudgets
from .rows import BlockTables, Rows
from .step import Steps
from .time_rules import TimedText
from .transfer import Stopwatch
from .verification import Verification

Batches = Callable[[StepPlan, list[int] | None], StepBatch]


@dataclass(frozen=True, slots=True)
class Allocator:
    """Maker of allocations: a second one replaces the first, and all rows are free."""

    options: WorkerOptions
    resolved: Resolved
    arch: ModelArch
    pooling: Pooling
    opened: OpenWorker
    grammars: GrammarCompiler | None
    speculation: Speculation
    """Survives a second allocation."""
    memory: PoolMemory

    def allocate(self, pool: PoolShape) -> Allocation:
        """Make the KV pool and whatever the backend prepares for whole steps. The caller is in the
        part's inference mode."""
        options, opened, device = self.options, self.opened, self.resolved.device
        text, encoder = opened.text, opened.encoder
        ours = graph_groups(describe(self.arch), self.resolved.kv_dtype, 0)
        planned = tuple(group._replace(blocks=0) for group in pool.groups)
        assert planned == ours, f"the pool is of another model: {planned}, not {ours}"
        assert bool(pool.slots) == (opened.drafter is not None), "slots are of the part that drafts"
        if text.model.ranks is not None:
            text.model.ranks.begin_anew()  # The program that had its rooms is gone.
        rows = Rows(options.rows, options.max_context, device, opened.facts.features)
        if encoder is not None:
            rows.encoded = encoder.rows_of
            rows.turns = encoder.turns_of
            rows.reach = encoder.reach_of
            if encoder.cross is not None:
                rows.across = encoder.across
        additions = None
        if opened.adapters is not None:
            opened.adapters.bind(rows)
            additions = opened.adapters.additions
        tables = BlockTables(options.rows, options.max_context, pool, device)
        entries = options.rows
        texts = 1
        if (denoiser := self.arch.denoiser) is not None:  # A row may have two.
            entries = options.step_tokens // denoiser.tokens
            texts = max(1, entries * denoiser.texts)
        most = options.max_context, options.drafts, texts
        limits = StepLimits(options.step_tokens, entries, *most)
        text.allocate(self._kept(pool), limits, memory=self.memory, additions=additions)
        if encoder is not None:
            encoder.bind(pool, text.cache)
        for part in opened.drawing.values():
            part.bind()
        host, batch = self._batches(rows, tables, pool, limits)
        if text.program.lowered:
            # Torch's remaining work in a step is small, and waking its threads costs more.
            set_torch_threads(1)
        masks = None
        if self.grammars is not None and not text.headless:
            masks = GrammarMasks(self.grammars, self.arch.vocab_size, on_host=device == "cpu")
        steps = Steps(
            program=text.program,
            drawing=text.operators.drawing,
            rows=rows,
            tables=tables,
            cache=text.cache,
            features=Features(self._listed(text.program, rows, masks), options.rows),
            batch=batch,
            stopwatch=Stopwatch() if device == "cuda" else None,
            check=check_plans(),
            host=host if text.program.host and not text.headless else None,
            inference=text.inference,
            verification=self._verification(rows, pool, masks),
            encoder=encoder,
            silent=text.headless,
        )
        return Allocation(pool, rows, tables, batch, masks, steps)

    def _batches(
        self, rows: Rows, tables: BlockTables, pool: PoolShape, limits: StepLimits
    ) -> tuple[HostBatches | None, Batches]:
        text = self.opened.text
        typed = "types" in text.model.indices
        if self.resolved.device == "cpu":
            tensors = not text.program.host
            host = HostBatches(rows, tables, pool, limits, token_types=typed, tensors=tensors)
            return host, host.make
        return None, partial(
            make_batch,
            rows=rows,
            tables=tables,
            pool=pool,
            token_types=typed,
            draws=True,
            planner=text.operators.planner(text.cache, self.options.drafts),
        )

    def _kept(self, pool: PoolShape) -> PoolShape:
        """Return the part of the pool that this worker keeps."""
        model = self.opened.text.model
        if model.commons is None:
            return pool
        return pool_of_rank(pool, graph_groups(model.graph, self.resolved.kv_dtype))

    def _verification(
        self, rows: Rows, pool: PoolShape, masks: GrammarMasks | None
    ) -> Verification | None:
        opened, most = self.opened, self.options.drafts
        if not most or not opened.text.model.generates:
            return None
        if opened.drafter is not None:
            opened.drafter.bind(rows, self.resolved.kv_dtype, pool.slots)
        return Verification(rows, self.speculation, most, masks, opened.drafter)

    def _listed(self, program: Program, rows: Rows, masks: GrammarMasks | None) -> list[RowFeature]:
        """List the row features in the order of `features`, for a table without a held row. A stage
        without the head has adapters alone."""
        opened = self.opened
        adapters: list[RowFeature] = [] if opened.adapters is None else [opened.adapters]
        if opened.text.headless:
            return adapters
        if self.arch.ranker is not None:
            scores = CandidateScores(self.arch.ranker)
            rows.ranked = scores.rows_of
            return [scores]
        if self.arch.denoiser is not None:
            drawn = Denoising(self.arch.denoiser, opened.drawing, tensors=not program.host)
            rows.pictured = drawn.batch
            return [drawn]
        aligner: list[RowFeature] = []
        if opened.encoder is not None and self.arch.cross is not None:
            aligner.append(Aligner(self.arch, opened.encoder.keys))
        return [
            Beams(),
            Logprobs(),
            *([] if masks is None else [masks]),
            TimedText(rows),
            ReasoningBudgets(rows),
            AllowedTokens(),
            BadWords(rows),
            MinTokens(),
            LogitBias(),
            Penalties(rows),
            Filters(),
            *adapters,
            *aligner,
            Pooler(self.pooling, program.head if opened.text.model.labels else None),
            PromptScores(rows, program.head),
        ]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Everything that lies on a pool."""

    pool: PoolShape
    rows: Rows
    tables: BlockTables
    batch: Batches
    masks: GrammarMasks | None
    steps: Steps
