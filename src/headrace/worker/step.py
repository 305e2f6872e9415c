"""One step of a worker, from its plan to its result.

Order: releases, admissions, block tables, copies, forward, sampling. What a step pays for beside
the forward pass is what some row of it asks: on the host a step of rows that take the most likely
token is a few writes into static arrays around one call. Between two calls the weights have gone
through all caches, so that whatever else a step did there would run cold: a microsecond of Python
is ten, entering `inference_mode` is fifty.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..base.step import StepPlan, StepResult, TokenLogprobs
from ..kernels.arrays import Array, host
from ..kernels.operators import KvCache, StepBatch
from ..kernels.program import BEST, RULES, Hidden, Outputs, Program, Tokens, want
from .grammar import GrammarMasks
from .host_batch import HostBatches
from .kv_tensors import copy_blocks
from .pooling import Pooler
from .prompt_scores import PromptScores
from .reasoning import ReasoningBudgets
from .rows import BlockTables, Rows
from .sampler import Sampler
from .transfer import Stopwatch, to_host

if TYPE_CHECKING:
    from .adapters import Adapters


@dataclass(slots=True)
class Steps:
    """What all steps of an allocated worker share."""

    program: Program
    rows: Rows
    tables: BlockTables
    cache: KvCache
    sampler: Sampler
    batch: Callable[[StepPlan], StepBatch]
    prompt_scores: PromptScores
    pooler: Pooler
    budgets: ReasoningBudgets
    masks: GrammarMasks | None
    adapters: Adapters | None
    stopwatch: Stopwatch | None
    check: bool
    """Verify every plan."""
    host: HostBatches | None
    """Where `batch` comes from, if no tensor is in a step of the program."""
    inference: Callable[[], AbstractContextManager[object]]
    """What a step of tensors is done in."""
    _tokens: Array | None = None
    _values: memoryview | None = None
    """The memory of `_tokens`, which is the same array step after step."""

    def launch(self, plan: StepPlan, begin: float) -> StepResult | Callable[[], StepResult]:
        """Do or start a step that began at `begin`: its result, or a function that waits for it."""
        if self.check:
            plan.verify(rows=len(self.rows.held))
        result = None if self.host is None else self._decode(self.host, plan, begin)
        if result is not None:
            return result
        with self.inference():
            return self._launch(plan, begin)

    def _decode(self, host: HostBatches, plan: StepPlan, begin: float) -> StepResult | None:
        """A step on the host that only decodes, and whose tokens the program chooses. None, and
        nothing was computed, where somebody comes or goes or asks for more: then the general way.
        """
        if plan.released or plan.admitted or plan.copies:
            return None
        if not self.rows.asking.isdisjoint(plan.rows):
            return None
        self.tables.write(plan.blocks)
        batch = host.decode(plan)
        if batch is None:
            return None
        outputs = self.program.step(batch, BEST if batch.rules is None else RULES)
        values = self._values_of(outputs.tokens)
        if min(values) < 0:
            values = self._draw_again(plan, outputs)
        host.keep(values)
        return StepResult(
            plan.number, [[token] for token in values], seconds=time.perf_counter() - begin
        )

    def _values_of(self, tokens: Array) -> list[int]:
        if tokens is not self._tokens or self._values is None:
            self._tokens, self._values = tokens, host(tokens).data
        values: list[int] = self._values.tolist()
        return values

    def _draw_again(self, plan: StepPlan, outputs: Outputs) -> list[int]:
        """All tokens of a decoding step, where the program could not draw one."""
        with self.inference():
            rows, places = np.array(plan.rows), np.array(plan.starts) + 1
            values: list[int] = self.sampler.choose(outputs.logits, rows, places).tolist()
        return values

    def _launch(self, plan: StepPlan, begin: float) -> Callable[[], StepResult]:
        self._prepare(plan)
        batch = self.batch(plan)
        scored, pooled = self.prompt_scores.wanted(plan), self.pooler.wanted(plan)
        stop = None if self.stopwatch is None else self.stopwatch.start()
        entries = self._sampling(plan)
        masked = not self.rows.choosing.isdisjoint(plan.rows)
        drawn = batch.rules is not None or batch.draws is not None
        tokens: Tokens = "none" if masked or not entries else "rules" if drawn else "best"
        hidden: Hidden = "every" if scored or pooled else "none"
        given = self.program.step(batch, want(tokens, logits=masked, hidden=hidden))
        prompt_logprobs = self.prompt_scores.score(plan, scored, self.program, given.hidden)
        outputs = self.pooler.collect(plan, pooled, given.hidden)

        logprobs: list[list[TokenLogprobs]] | None = None
        failures: dict[int, str] = {}
        arrived: Callable[[], list[int]] | None = None
        if entries:
            rows = np.array([plan.rows[entry] for entry in entries])
            places = np.array([plan.starts[entry] + plan.counts[entry] for entry in entries])
            found: list[TokenLogprobs | None] | None = None
            sampled = given.tokens
            if sampled is None:
                sampled, found = self.sampler.sample(given.logits, rows, places, batch.draws)
            elif isinstance(sampled, np.ndarray) and (sampled < 0).any():
                sampled = self.sampler.choose(given.logits, rows, places)
            self.rows.append(rows, places, sampled, batch.targets)
            arrived = to_host(sampled)
            if found is not None:
                logprobs = [[] for _ in plan.rows]
                for entry, one in zip(entries, found, strict=True):
                    logprobs[entry] = [] if one is None else [one]
            self.budgets.advance(rows, arrived)
            if self.masks is not None:
                # The next step's masks follow from these tokens: this one is waited for.
                for place, fault in self.masks.advance(rows, arrived).items():
                    failures[entries[place]] = f"the demanded form cannot be kept: {fault}"
        read = None if stop is None else stop()

        def finish() -> StepResult:
            tokens: list[list[int]] = []
            if arrived is not None and len(entries) == len(plan.rows) and not failures:
                tokens = [[token] for token in arrived()]
            else:
                tokens = [[] for _ in plan.rows]
                if arrived is not None:
                    for entry, token in zip(entries, arrived(), strict=True):
                        tokens[entry] = [] if entry in failures else [token]
            seconds, gap = (time.perf_counter() - begin, 0.0) if read is None else read()
            return StepResult(
                plan.number,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                outputs=outputs,
                seconds=seconds,
                gap=gap,
                failures=failures,
            )

        return finish

    def _prepare(self, plan: StepPlan) -> None:
        """Bring the tables to what the plan takes for granted."""
        released = plan.released
        if released:
            self.rows.release(released)
            self.tables.release(released)
            self.prompt_scores.release(released)
            self.pooler.release(released)
            self.budgets.release(released)
        self.tables.write(plan.blocks)
        if released and self.masks is not None:
            self.masks.release(released)
        if released and self.adapters is not None:
            self.adapters.release(released)
        for admission in plan.admitted:
            self.rows.admit(admission)
            self.budgets.admit(admission)
            spec = admission.spec
            if self.masks is not None and spec.grammar is not None:
                self.masks.admit(admission)
            if self.adapters is not None and spec.adapter is not None:
                slot = self.adapters.admit(admission.row, spec.adapter)
                self.rows.columns["adapter"][admission.row] = slot
        if plan.copies:
            copy_blocks(self.cache, plan.copies)

    def _sampling(self, plan: StepPlan) -> list[int]:
        """The entries that get a token: those that sample and want no vector."""
        vectors = self.rows.pooling
        return [
            entry
            for entry, (row, samples) in enumerate(zip(plan.rows, plan.samples, strict=True))
            if samples and row not in vectors
        ]
