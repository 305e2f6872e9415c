"""One process, one device: loads a model and executes step plans."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..base.errors import EngineFault
from ..base.groups import pool_bytes
from ..base.modelfiles import ModelFiles
from ..base.step import PoolShape, StepPlan, StepResult
from ..kernels.operators import KvCache
from ..kernels.program import BEST, EVERY
from ..kernels.timing import OperatorTimes, operator_times
from ..loader.adapters import open_adapter
from ..loader.panels import PanelShelf
from ..speculate import Speculation, names_of
from .allocation import Allocator
from .device_memory import DeviceMemory, check, out_of_memory
from .gaps import Gaps
from .grammar import GrammarCompiler, GrammarMasks, MakeTokenizer
from .kv_tensors import PoolMemory, clear_null_blocks
from .opening import open_worker
from .options import WorkerOptions, resolve
from .outcome import alike, failed_step
from .part import Part


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
        speculation: Speculation | None = None,
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
        self.gaps = Gaps()
        """Inter-step windows, for readers that bring blocks into the pool."""
        self.pool_memory = PoolMemory.lent() if options.lends else PoolMemory(options.pool_file)
        self.options = options
        self.arch = files.arch
        self._resolved = resolve(options)
        opened = open_worker(
            files,
            options,
            self._resolved,
            shelf=shelf,
            memory=memory,
            beside=None if beside is None else beside.text,
            grammar=self._grammars is not None,
        )
        self.text: Part = opened.text
        """The part whose steps are planned."""
        self.encoder, self.drafter, self._adapters = opened.encoder, opened.drafter, opened.adapters
        self._memory, self.facts = opened.memory, opened.facts
        self._phases = opened.facts.phases
        self._allocator = Allocator(
            options,
            self._resolved,
            files.arch,
            files.pooling,
            opened,
            self._grammars,
            speculation or Speculation(names=names_of(options.drafters)),
            self.pool_memory,
        )

    @property
    def cache(self) -> KvCache:
        """KV of the pool's groups."""
        return self.text.cache

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
        if self._masks is not None:
            self._masks.close()
        with self.text.inference():
            made = self._allocator.allocate(pool)
        self._pool, self._rows, self._tables = made.pool, made.rows, made.tables
        self._batch, self._masks, self._steps = made.batch, made.masks, made.steps
        self._phases["allocate"] = time.perf_counter() - begin

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
                # No rank is a step ahead.
                ended = alike(self.text.model, plan, begin, StepResult(0, []))
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
            started = failed_step(plan, begin, error, self._memory)
        if isinstance(started, StepResult):
            self.gaps.step_ended()
            result = alike(self.text.model, plan, begin, started)
            return lambda: result
        finish = started

        def wait() -> StepResult:
            try:
                ended = finish()
            except Exception as error:  # noqa: BLE001 - the same boundary
                ended = failed_step(plan, begin, error, self._memory)
            finally:
                self.gaps.step_ended()
            return alike(self.text.model, plan, begin, ended)

        return wait

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
