"""One process, one device: loads a model and executes step plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..base import hardware
from ..base.config import Decision
from ..base.environment import check_plans
from ..base.errors import EngineFault
from ..base.modelfiles import ModelFiles
from ..base.step import PoolShape, StepPlan, StepResult, TokenLogprobs
from ..kernels.backend import Question
from ..kernels.operators import Operators, StepBatch, StepLimits
from ..kernels.select import choose, drawing_of
from ..layers.build import Builder
from ..layers.source import WeightSource
from ..loader.adapters import open_adapter
from ..loader.weights import load_weights
from ..models.registry import build_model
from .adapters import Adapters
from .batch import make_batch
from .grammar import GrammarCompiler, GrammarMasks, MakeTokenizer
from .kv_tensors import allocate_kv, clear_null_blocks, copy_blocks
from .options import Resolved, WorkerFacts, WorkerOptions, resolve
from .pooling import Pooler
from .prompt_scores import PromptScores
from .rows import BlockTables, Rows
from .runner import Runner
from .sampler import Sampler
from .transfer import Stopwatch, to_device, to_host


def choose_operators(
    files: ModelFiles, options: WorkerOptions, resolved: Resolved, source: WeightSource
) -> tuple[Operators, list[Decision]]:
    """The kernels that serve this model here, operator by operator, with reasons."""
    question = Question(
        device=resolved.device.type,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        head_dim=files.arch.head_dim,
        weights=source.kinds(),
        threads=options.threads or hardware.cpu().cores,
        deterministic=options.deterministic,
        quantise=options.quantise,
        encoder=files.arch.encoder is not None,
    )
    return choose(question, options.kernels)


def kernel_decisions(files: ModelFiles, options: WorkerOptions) -> list[Decision]:
    """What a worker would choose, without loading a weight. Raises as `Worker` does."""
    resolved = resolve(options)
    source = WeightSource(load_weights(files))
    return choose_operators(files, options, resolved, source)[1]


class Worker:
    """Load (the constructor), `allocate`, `warm_up`, then `execute` plan after plan.

    All calls come from one thread. `execute` never raises: a step that fails is a `StepResult`
    with its `error`, and the tables are as the plan left them, so that the next plan finds them.
    """

    def __init__(
        self,
        files: ModelFiles,
        options: WorkerOptions,
        *,
        grammar_tokenizer: MakeTokenizer | None = None,
    ) -> None:
        """`grammar_tokenizer` makes the `llguidance.LLTokenizer`, in a thread, when the first
        grammar comes; without it there are no grammars."""
        self._grammars = None if grammar_tokenizer is None else GrammarCompiler(grammar_tokenizer)
        self._masks: GrammarMasks | None = None
        self.options = options
        self.arch = files.arch
        self._pooling = files.pooling
        self._resolved = resolve(options)
        device, dtype = self._resolved.device, self._resolved.dtype
        threads = options.threads or hardware.cpu().cores
        if device.type == "cpu" and torch.get_num_threads() != threads:
            # The one setting that two workers in a process share: the last one started wins.
            torch.set_num_threads(threads)
        phases = {}
        begin = time.perf_counter()
        with torch.inference_mode():
            source = WeightSource(load_weights(files))
            phases["open_weights"] = time.perf_counter() - begin
            self._operators, decisions = choose_operators(files, options, self._resolved, source)
            begin = time.perf_counter()
            builder = Builder(
                files.arch,
                source,
                self._operators,
                device=device,
                dtype=dtype,
                max_context=options.max_context,
            )
            self._model = build_model(builder)
            self._adapters: Adapters | None = None
            if options.adapters and files.arch.encoder is None:
                self._adapters = Adapters(
                    builder.products,
                    slots=options.adapters,
                    rank=options.adapter_rank,
                    device=device,
                    dtype=dtype,
                )
                builder.weight_bytes += self._adapters.nbytes
            phases["load_weights"] = time.perf_counter() - begin
        self._phases = phases
        self.facts = WorkerFacts(
            weight_bytes=builder.weight_bytes,
            device_memory=_free_memory(device),
            kernels=[*self._resolved.decisions, *decisions],
            phases=phases,
            features=self._features(),
        )

    def _features(self) -> tuple[str, ...]:
        encoder = self.arch.encoder
        if encoder is not None:
            return ("pooling", "score") if encoder.labels else ("pooling",)
        parts = {"grammar": self._grammars, "adapter": self._adapters}
        return ("pooling", *(name for name, part in parts.items() if part is not None))

    def allocate(self, pool: PoolShape) -> None:
        """Make the KV pool and whatever the backend prepares for whole steps; all rows are free."""
        begin = time.perf_counter()
        options, device = self.options, self._resolved.device
        with torch.inference_mode():
            self._pool = pool
            self._rows = Rows(options.rows, options.max_context, device, self.facts.features)
            if self._adapters is not None:
                self._adapters.release(range(options.rows))
            if self._masks is not None:
                self._masks.close()
            if self._grammars is not None:
                self._masks = GrammarMasks(self._grammars, self.arch.vocab_size, device)
            masks = () if self._masks is None else (self._masks,)
            self._sampler = Sampler(self._rows, masks, drawing_of(self._operators))
            self._stopwatch = Stopwatch() if device.type == "cuda" else None
            self._prompt_scores = PromptScores(self._rows)
            encoder = self.arch.encoder
            self._pooler = Pooler(
                self._rows, self._pooling, self._head if encoder and encoder.labels else None
            )
            self._cache = allocate_kv(pool, self.arch, self._resolved.kv_dtype, device)
            self._tables = BlockTables(options.rows, options.max_context, pool, device)
            limits = StepLimits(options.step_tokens, options.rows, options.max_context)
            self._runner = Runner(self._model, self._operators, self._cache, limits)
        self._phases["allocate"] = time.perf_counter() - begin

    def _head(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._model.logits(self._operators, hidden, rows)

    def warm_up(self) -> None:
        """Touch every path once: a decode step and a short prefill, on the null block."""
        begin = time.perf_counter()
        with torch.inference_mode():
            for count in (1, min(16, self.options.step_tokens, self.options.max_context)):
                plan = StepPlan(0, rows=[0], starts=[0], counts=[count], samples=[True])
                self._runner.run(self._batch(plan))
            clear_null_blocks(self._cache)
        self._phases["warm_up"] = time.perf_counter() - begin

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Order: releases, admissions, block tables, copies, forward, sampling."""
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step; the function that comes back waits for its result.

        On a GPU the next step may be launched before this one's result is taken: tokens stay on
        the device, where the next step finds them, and only a copy of them comes to the host. The
        function may be called in any thread, once; launches stay in their own.
        """
        begin = time.perf_counter()

        def guarded(work: Callable[[], StepResult]) -> StepResult:
            # The border of the data plane: whatever went wrong in a step ends that step's
            # sequences and no others.
            try:
                return work()
            except Exception as error:  # noqa: BLE001
                return StepResult(
                    plan.number,
                    tokens=[[] for _ in plan.rows],
                    seconds=time.perf_counter() - begin,
                    error=f"{type(error).__name__}: {' '.join(str(error).split())}",
                )

        finish: Callable[[], StepResult] | None = None

        def start() -> StepResult:
            nonlocal finish
            with torch.inference_mode():
                finish = self._launch(plan, begin)
            return StepResult(plan.number, [])

        started = guarded(start)
        if finish is None:
            return lambda: started
        ready = finish
        return lambda: guarded(ready)

    def prepare_grammar(self, source: str) -> bool:
        """Begin to compile a grammar that will come; is it done? May be called from any thread."""
        assert self._grammars is not None, "this worker has no support for grammar"
        return self._grammars.prepare(source)

    def load_adapter(self, name: str, path: str) -> None:
        """Read the adapter in the folder `path`; sequences may then have it by its name.

        Raises `ModelFileError`, `UnsupportedModel`; then nothing has changed.
        """
        if self._adapters is None:
            raise EngineFault("this worker serves no adapters")
        files = open_adapter(Path(path), self.arch, max_rank=self.options.adapter_rank)
        self._adapters.load(name, files)

    def unload_adapter(self, name: str) -> None:
        """Forget it; sequences that have it go on."""
        if self._adapters is not None:
            self._adapters.unload(name)

    def close(self) -> None:
        """Give the memory back."""
        if self._grammars is not None:
            self._grammars.close()
        if self._masks is not None:
            self._masks.close()
        for name in list(self.__dict__):
            if name not in ("options", "arch", "facts"):
                del self.__dict__[name]

    def _batch(self, plan: StepPlan) -> StepBatch:
        typed = self.arch.encoder is not None
        return make_batch(plan, self._rows, self._tables, self._pool, token_types=typed)

    def _launch(self, plan: StepPlan, begin: float) -> Callable[[], StepResult]:
        if check_plans():
            plan.verify(rows=self.options.rows)
        self._rows.release(plan.released)
        self._tables.release(plan.released)
        self._prompt_scores.release(plan.released)
        self._pooler.release(plan.released)
        self._tables.write(plan.blocks)
        if self._masks is not None:
            self._masks.release(plan.released)
        if self._adapters is not None:
            self._adapters.release(plan.released)
        for admission in plan.admitted:
            self._rows.admit(admission)
            if self._masks is not None and admission.grammar is not None:
                self._masks.admit(admission)
            if self._adapters is not None and admission.adapter is not None:
                self._adapters.admit(admission.row, admission.adapter)
        copy_blocks(self._cache, plan.copies)
        batch = self._batch(plan)
        adapted = None
        if self._adapters is not None:
            groups = self._adapters.groups(plan, self._resolved.device)
            if groups:
                adapted = self._adapters.operators(self._operators, groups)
        stop = None if self._stopwatch is None else self._stopwatch.start()
        hidden, logits = self._runner.run(batch, adapted)
        prompt_logprobs = self._prompt_scores.score(plan, self._runner, hidden)

        logprobs: list[list[TokenLogprobs]] | None = None
        failures: dict[int, str] = {}
        arrived: Callable[[], torch.Tensor] | None = None
        vectors = self._pooler.collect(plan, hidden)
        pooled = self._rows.columns[plan.rows]["pooling"]
        entries = np.flatnonzero(np.asarray(plan.samples, np.bool_) & ~pooled)
        if len(entries):
            rows = np.asarray(plan.rows, np.int64)[entries]
            places = (np.asarray(plan.starts) + np.asarray(plan.counts))[entries]
            sampled, found = self._sampler.sample(logits, rows, places)
            device = sampled.device
            self._rows.append(to_device(rows, device), to_device(places, device), sampled)
            arrived = to_host(sampled)
            if found is not None:
                logprobs = [[] for _ in plan.rows]
                for entry, one in zip(entries, found, strict=True):
                    logprobs[entry] = [] if one is None else [one]
            if self._masks is not None:
                # The next step's masks follow from these tokens: this one is waited for.
                for place, fault in self._masks.advance(rows, arrived().tolist()).items():
                    failures[int(entries[place])] = f"the demanded form cannot be kept: {fault}"
        read = None if stop is None else stop()

        def finish() -> StepResult:
            tokens: list[list[int]] = [[] for _ in plan.rows]
            if arrived is not None:
                for entry, token in zip(entries, arrived().tolist(), strict=True):
                    tokens[entry] = [] if int(entry) in failures else [token]
            seconds, gap = (time.perf_counter() - begin, 0.0) if read is None else read()
            return StepResult(
                plan.number,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                vectors=vectors,
                seconds=seconds,
                gap=gap,
                failures=failures,
            )

        return finish


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return hardware.cpu().available
