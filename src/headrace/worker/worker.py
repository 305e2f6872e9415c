"""One process, one device: loads a model and executes step plans."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import speculate
from ..base import hardware
from ..base.config import Decision
from ..base.environment import check_plans
from ..base.errors import EngineFault
from ..base.facts import WorkerFacts
from ..base.groups import graph_groups, pool_bytes, pool_of_rank
from ..base.modelfiles import ModelFiles
from ..base.step import PoolShape, StepPlan, StepResult
from ..dist.commons import Commons
from ..kernels.cpu.meeting import meeting_of
from ..kernels.model import Model
from ..kernels.operators import KvCache, StepBatch, StepLimits
from ..kernels.program import BEST, EVERY, Program
from ..kernels.ranks import Ranks
from ..kernels.timing import OperatorTimes, operator_times
from ..loader.adapters import open_adapter
from ..loader.panels import PanelShelf
from ..models.registry import describe
from .alignment import Aligner
from .bans import AllowedTokens, BadWords
from .batch import make_batch
from .device_memory import DeviceMemory, StepMemory, check, out_of_memory
from .draft_slots import DraftPart
from .drafter import load_drafter
from .encoder import Encoder, load_encoder
from .features import Features, RowFeature
from .filters import Filters
from .gaps import Gaps
from .grammar import GrammarCompiler, GrammarMasks, MakeTokenizer
from .host_batch import HostBatches
from .kv_tensors import PoolMemory, clear_null_blocks
from .loading import open_parts
from .logprobs import Logprobs
from .masks import LogitBias, MinTokens, Penalties
from .options import WorkerOptions, resolve
from .part import Part
from .pooling import Pooler
from .prompt_scores import PromptScores
from .reasoning import ReasoningBudgets
from .rows import BlockTables, Rows
from .step import Steps
from .time_rules import TimedText
from .transfer import Stopwatch
from .verification import Verification

if TYPE_CHECKING:
    from .adapters import Adapters

log = logging.getLogger("headrace.worker")


class Worker:
    """A model on one device: the constructor loads it; then `allocate`, `warm_up`, and `execute`
    plan after plan.

    All calls come from one thread. `execute` never raises: a failed step is a `StepResult` with its
    `error`. The tables are as the plan left them, so that the next plan finds them.
    """

    def __init__(
        self,
        files: ModelFiles,
        options: WorkerOptions,
        *,
        grammar_tokenizer: MakeTokenizer | None = None,
        shelf: PanelShelf | None = None,
        memory: DeviceMemory | None = None,
        speculation: speculate.Speculation | None = None,
        beside: Worker | None = None,
    ) -> None:
        """Load the model. `grammar_tokenizer` makes the `llguidance.LLTokenizer`, in a thread, when
        the first grammar comes; without it there are no grammars.

        `shelf` keeps repacked weights. `memory` is asked in place of the device's own.
        `speculation` makes the drafters of each sequence; it survives a second `allocate`. `beside`
        is the worker of another model in this process, never computing at the same time: its
        threads serve this one too.
        """
        self._grammars = None if grammar_tokenizer is None else GrammarCompiler(grammar_tokenizer)
        self._masks: GrammarMasks | None = None
        self._speculation = speculation or speculate.Speculation(
            names=speculate.names_of(options.drafters)
        )
        self.gaps = Gaps()
        """Inter-step windows, for readers that bring blocks into the pool."""
        self.pool_memory = PoolMemory.lent() if options.lends else PoolMemory(options.pool_file)
        self.options = options
        self._failed_at: set[str] = set()
        """Lines that raised an error in a step."""
        self.arch = files.arch
        self._pooling = files.pooling
        self._resolved = resolve(options)
        device, dtype = self._resolved.device, self._resolved.dtype
        threads = options.threads or hardware.cpu().cores
        phases = {}
        begin = time.perf_counter()
        opened = open_parts(files, options)
        phases["open_weights"] = time.perf_counter() - begin
        if device == "cpu":
            _set_torch_threads(threads)
        begin = time.perf_counter()
        graph, source = opened["text"][1:3]
        self.text: Part
        self.text = text = Part(
            graph,
            source,
            options,
            self._resolved,
            options.max_context,
            shelf=shelf,
            beside=None if beside is None else beside.text,
        )
        """The part whose steps are planned."""
        decisions = text.decisions
        with text.inference():
            self.encoder: Encoder | None = None
            if "encoder" in opened:
                given = opened["encoder"], options, self._resolved, text, shelf
                self.encoder = load_encoder(*given)
            begin, phases["load_weights"] = (now := time.perf_counter()), now - begin
            # Before any rank takes its part of a matrix: packed weights are read from here on.
            if shelf is not None and shelf.finish():
                decisions.append(Decision("panels", shelf.outcome, shelf.reason))
            phases["keep_weights"] = time.perf_counter() - begin
            whole = text.model
            weight_bytes = whole.weights.nbytes
            if options.ranks > 1:
                commons = Commons(options.commons, options.ranks, options.rank, options.stages)
                ranks = Ranks(commons, meeting_of(commons), options.step_tokens)
                text.model = whole.part(ranks, dealt=options.dealt)
            decisions += getattr(text.operators, "told", ())
            self._adapters: Adapters | None = None
            if options.adapters and whole.generates:
                # Local: they are tensors everywhere.
                import torch

                from .adapters import Adapters

                self._adapters = Adapters(
                    text.model.products(),
                    slots=options.adapters,
                    rank=options.adapter_rank,
                    device=device,
                    dtype=getattr(torch, dtype),
                )
                weight_bytes += self._adapters.nbytes
            self.drafter: DraftPart[Any] | None = None
            if "draft" in opened:
                self.drafter = load_drafter(opened["draft"], options, self._resolved, text, whole)
                weight_bytes += self.drafter.part.model.weights.nbytes
            if self.encoder is not None:
                weight_bytes += self.encoder.part.model.weights.nbytes
        if device == "cpu":
            _set_torch_threads(threads)  # Again, if a weight was the first to need torch.
        self._memory = memory or _memory_of(device)
        begin = time.perf_counter()
        measured = StepMemory(0, 0)
        if self._memory is not None and text.model.generates:
            from .step_memory import measure_step  # Local: a matter of GPUs, on tensors.

            with text.inference():
                measured = measure_step(
                    text.model,
                    text.operators,
                    files.arch,
                    self._resolved.kv_dtype,
                    device,
                    StepLimits(options.step_tokens, options.rows, options.max_context),
                    self._memory,
                )
            phases["measure_step"] = time.perf_counter() - begin
        self._phases = phases
        free = hardware.cpu().available if self._memory is None else self._memory.free()
        self.facts = WorkerFacts(
            weight_bytes=weight_bytes,
            device_memory=free,
            kernels=[*self._resolved.decisions, *decisions],
            phases=phases,
            features=self._features(whole),
            step_bytes=measured.step_bytes,
            graph_bytes=measured.graph_bytes,
        )

    @property
    def cache(self) -> KvCache:
        """KV of the pool's groups."""
        return self.text.cache

    def _features(self, model: Model) -> tuple[str, ...]:
        if not model.generates:
            return ("pooling", "score") if model.labels else ("pooling",)
        parts = {"grammar": self._grammars, "adapter": self._adapters}
        found = ["pooling", *(name for name, part in parts.items() if part is not None)]
        if self.encoder is not None:
            found.append("inputs")
        return tuple(found)

    def allocate(self, pool: PoolShape) -> None:
        """Make the KV pool and whatever the backend prepares for whole steps; all rows are free.

        A second call replaces the first pool, whose memory goes back to the system (an engine that
        sleeps has an empty pool). Raises `DoesNotFit` if the device has no room for it.
        """
        again = hasattr(self, "cache")
        try:
            self._allocate(pool)
        except RuntimeError as error:
            # Torch's own class, which may not be imported here.
            if self._memory is None or type(error).__name__ != "OutOfMemoryError":
                raise
            wanted = pool_bytes(pool)
            raise out_of_memory(self._memory, self.facts.device_memory, wanted) from None
        if again:
            # Captured graphs and their runner refer to each other; objects made at the start may be
            # frozen.
            gc.unfreeze()
            gc.collect()
            if self._resolved.device == "cuda":
                import torch  # Local, as everywhere here.

                torch.cuda.empty_cache()

    def _allocate(self, pool: PoolShape) -> None:
        begin = time.perf_counter()
        options, device = self.options, self._resolved.device
        ours = graph_groups(describe(self.arch), self._resolved.kv_dtype, 0)
        planned = tuple(group._replace(blocks=0) for group in pool.groups)
        assert planned == ours, f"the pool is of another model: {planned}, not {ours}"
        assert bool(pool.slots) == (self.drafter is not None), "slots are of the part that drafts"
        text = self.text
        with text.inference():
            self._pool = pool
            if text.model.ranks is not None:
                text.model.ranks.begin_anew()  # The program that had its rooms is gone.
            self._rows = Rows(options.rows, options.max_context, device, self.facts.features)
            if self.encoder is not None:
                self._rows.encoded = self.encoder.rows_of
                self._rows.turns = self.encoder.turns_of
                self._rows.reach = self.encoder.reach_of
                if self.encoder.cross is not None:
                    self._rows.across = self.encoder.across
            if self._adapters is not None:
                self._adapters.bind(self._rows)
            self._tables = BlockTables(options.rows, options.max_context, pool, device)
            limits = StepLimits(
                options.step_tokens, options.rows, options.max_context, options.drafts
            )
            additions = None if self._adapters is None else self._adapters.additions
            text.allocate(self._kept(pool), limits, memory=self.pool_memory, additions=additions)
            if self.encoder is not None:
                self.encoder.bind(pool, text.cache)
            program = text.program
            typed = "types" in text.model.indices
            host = None
            if device == "cpu":
                host = HostBatches(
                    self._rows,
                    self._tables,
                    pool,
                    limits,
                    token_types=typed,
                    tensors=not program.host,
                )
            self._batch: Callable[[StepPlan, list[int] | None], StepBatch] = (
                host.make
                if host is not None
                else partial(
                    make_batch,
                    rows=self._rows,
                    tables=self._tables,
                    pool=pool,
                    token_types=typed,
                    draws=True,
                    planner=text.operators.planner(text.cache, options.drafts),
                )
            )
            if program.lowered:
                # Torch's remaining work in a step is small, and waking its threads costs more.
                _set_torch_threads(1)
            self._steps = Steps(
                program=program,
                drawing=text.operators.drawing,
                rows=self._rows,
                tables=self._tables,
                cache=text.cache,
                features=Features(self._listed(program), options.rows),
                batch=self._batch,
                stopwatch=Stopwatch() if device == "cuda" else None,
                check=check_plans(),
                host=host if program.host and not text.headless else None,
                inference=text.inference,
                verification=self._verification(),
                encoder=self.encoder,
                silent=text.headless,
            )
        self._phases["allocate"] = time.perf_counter() - begin

    def _kept(self, pool: PoolShape) -> PoolShape:
        """Return the part of the pool that this worker keeps."""
        if self.text.model.commons is None:
            return pool
        return pool_of_rank(pool, graph_groups(self.text.model.graph, self._resolved.kv_dtype))

    def _verification(self) -> Verification | None:
        if not self.options.drafts or not self.text.model.generates:
            return None
        drafter = self.drafter
        if drafter is not None:
            drafter.bind(self._rows, self._resolved.kv_dtype, self._pool.slots)
        most = self.options.drafts
        return Verification(self._rows, self._speculation, most, self._masks, drafter)

    def _listed(self, program: Program) -> list[RowFeature]:
        """List the row features in the order of `features`, for a table without a held row. A stage
        without the head has adapters alone."""
        if self.text.headless:
            return [] if self._adapters is None else [self._adapters]
        listed: list[RowFeature] = [Logprobs()]
        if self._masks is not None:
            self._masks.close()
        if self._grammars is not None:
            on_host = self._resolved.device == "cpu"
            self._masks = GrammarMasks(self._grammars, self.arch.vocab_size, on_host=on_host)
            listed.append(self._masks)
        listed += [
            TimedText(self._rows),
            ReasoningBudgets(self._rows),
            AllowedTokens(),
            BadWords(self._rows),
            MinTokens(),
            LogitBias(),
            Penalties(self._rows),
            Filters(),
        ]
        if self._adapters is not None:
            listed.append(self._adapters)
        head = program.head if self.text.model.labels else None
        if self.encoder is not None and self.arch.cross is not None:
            listed.append(Aligner(self.arch, self.encoder.keys))
        return [*listed, Pooler(self._pooling, head), PromptScores(self._rows, program.head)]

    def time_operators(self) -> OperatorTimes:
        """Run further steps operator by operator, each timed."""
        assert not self.text.program.host, "the library times its own records"
        times = self.text.plain.times = operator_times(self._resolved.device)
        self.text.program = self._steps.program = self.text.plain
        return times

    def warm_up(self) -> None:
        """Touch every path once: a decode step and a short prefill, on the null block."""
        begin = time.perf_counter()
        with self.text.inference():
            for count in (1, min(16, self.options.step_tokens, self.options.max_context)):
                plan = StepPlan(0, rows=[0], starts=[0], counts=[count], samples=[True])
                self._rows.begin_anew(0)
                batch = self._batch(plan, None)
                self.text.program.step(batch, BEST if self.text.model.generates else EVERY)
                ended = self._alike(plan, begin, StepResult(0, []))  # No rank is a step ahead.
                if ended.error is not None:
                    raise EngineFault(ended.error)
            if self.encoder is not None:
                self.encoder.warm_up()
            clear_null_blocks(self.cache)
            if self.text.model.dealing is not None:
                self.text.model.dealing.forget()
        if self._memory is not None:
            pool = pool_bytes(self._pool)
            planned = {"KV pool": pool, "graphs": self.facts.graph_bytes}
            check(self._memory, self.facts.device_memory, planned, self.facts.step_bytes)
        self._phases["warm_up"] = time.perf_counter() - begin

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Order: releases, admissions, block tables, copies, forward, sampling."""
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step; the returned function waits for its result.

        On a GPU the next step may be launched before this one's result is taken. Tokens stay on the
        device, where the next step finds them, and only a copy of them comes to the host. The
        function may be called in any thread, once; launches stay in their own.
        """
        self.gaps.step_begins()
        dealing = self.text.model.dealing
        if dealing is not None:
            dealing.begin(plan.number)
        begin = time.perf_counter()
        # The boundary of the data plane: any failure in a step ends that step's sequences and no
        # others.
        try:
            started = self._steps.launch(plan, begin)
        except Exception as error:  # noqa: BLE001
            started = self._failed(plan, begin, error)
        if isinstance(started, StepResult):
            self.gaps.step_ended()
            result = self._alike(plan, begin, started)
            return lambda: result
        finish = started

        def wait() -> StepResult:
            try:
                ended = finish()
            except Exception as error:  # noqa: BLE001 - the same boundary
                ended = self._failed(plan, begin, error)
            finally:
                self.gaps.step_ended()
            return self._alike(plan, begin, ended)

        return wait

    def _failed(self, plan: StepPlan, begin: float, error: Exception) -> StepResult:
        """Return the result of a step that raised, with what a device says of it. Only the log has
        the stack: once for each line that raised, since every step may fail there."""
        result = _failed(plan, begin, error)
        place = [f"{at.f_code.co_filename}:{line}" for at, line in walk_tb(error.__traceback__)][-1]
        if place not in self._failed_at:
            self._failed_at.add(place)
            log.warning("step %d failed", plan.number, exc_info=error)
        if self._memory is not None:
            error.__traceback__ = None  # It holds the step's tensors.
            try:
                self._memory.free()  # Waits for the device, and empties torch's cache.
            except Exception:  # noqa: BLE001 - an error that stays: the context is lost
                result.cause = "device"
            else:
                # Of torch, of its libraries and of Triton, which have no class in common.
                short = ("out of memory", "ALLOC_FAILED")
                result.cause = "memory" if any(part in str(error) for part in short) else ""
        return result

    def _alike(self, plan: StepPlan, begin: float, result: StepResult) -> StepResult:
        """Return the result of a step after all ranks that share the model have ended it, well or
        not. Otherwise the others would wait at an all-gather for a rank that failed alone."""
        model = self.text.model
        ranks, commons, dealing = model.ranks, model.commons, model.dealing
        if ranks is not None and ranks.memory.ranks > 1:
            try:
                sign = 0 if dealing is None else dealing.sign
                ranks.meet(sign + (1 if result.error is None else 2))
            except EngineFault as fault:
                result = _failed(plan, begin, fault)
        if commons is not None and commons.stages > 1 and result.error is not None:
            commons.tear()  # The later stages wait for values that will not come.
        if dealing is not None and result.error is not None:
            dealing.forget()
        return result

    def learn(self, rows: list[int], places: list[int], tokens: list[list[int]]) -> None:
        """Take the tokens that the last stage sampled in a step of this one, which lacks the
        head."""
        for row, place, new in zip(rows, places, tokens, strict=True):
            if new:
                self._rows.append(np.array([row]), np.array([place]), np.array(new))

    def prepare_grammar(
        self, source: str, owner: str = "", done: Callable[[], None] | None = None
    ) -> bool:
        """Begin to compile a grammar that will come; return whether it is done. If not, `done` is
        called when it is. May be called from any thread."""
        assert self._grammars is not None, "this worker has no support for grammar"
        return self._grammars.prepare(source, owner, done)

    def load_adapter(self, name: str, path: str) -> None:
        """Read the adapter in the folder `path`; sequences may then use it by its name. Raises
        `ModelFileError`, `UnsupportedModel`, and then changes nothing."""
        if self._adapters is None:
            raise EngineFault("this worker serves no adapters")
        files = open_adapter(Path(path), self.arch, max_rank=self.options.adapter_rank)
        self._adapters.load(name, files)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; sequences that use it go on."""
        if self._adapters is not None:
            self._adapters.unload(name)

    def close(self) -> None:
        """Free the memory."""
        if self._grammars is not None:
            self._grammars.close()
        if self._masks is not None:
            self._masks.close()
        for name in list(self.__dict__):
            if name not in ("options", "arch", "facts", "gaps"):
                del self.__dict__[name]


def _failed(plan: StepPlan, begin: float, error: Exception) -> StepResult:
    return StepResult(
        plan.number,
        tokens=[[] for _ in plan.rows],
        seconds=time.perf_counter() - begin,
        error=f"{type(error).__name__}: {' '.join(str(error).split())}",
    )


def _memory_of(device: str) -> DeviceMemory | None:
    if device != "cuda":
        return None
    from .step_memory import CudaMemory  # Local, as above.

    return CudaMemory(device)


def _set_torch_threads(count: int) -> None:
    """Set torch's threads, the one setting that workers in a process share: the last one wins."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)
