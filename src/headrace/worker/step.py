"""One step of a worker, from its plan to its result.

Order: releases, admissions, block tables, copies, forward, sampling. In addition to the forward
pass, a step pays only for its rows' wishes. On the host a step of greedy rows is a few writes into
static arrays around one call. Between two calls the weights have gone through all caches, so other
code in a step would run cold: a microsecond of Python becomes ten, entering `inference_mode` takes
fifty.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..base.step import StepPlan, StepResult
from ..kernels.arrays import Array, host
from ..kernels.draws import Drawing
from ..kernels.operators import KvCache, StepBatch
from ..kernels.program import BEST, RULES, Outputs, Program, Tokens, Want, choose, want
from .encoder import Encoder
from .features import Arrived, Asked, Features, Indices
from .host_batch import HostBatches
from .kv_tensors import copy_blocks
from .rows import BlockTables, Rows
from .transfer import Stopwatch, to_host
from .verification import Verification

SPOILED = "the model's numbers are not finite: it computed NaN logits for this sequence"


@dataclass(slots=True)
class Steps:
    """State that all steps of an allocated worker share."""

    program: Program
    drawing: Drawing
    rows: Rows
    tables: BlockTables
    cache: KvCache
    features: Features
    batch: Callable[[StepPlan, list[int] | None], StepBatch]
    """Function that makes the arrays of a plan and of each entry's drafts, if there are any."""
    stopwatch: Stopwatch | None
    check: bool
    """Flag: verify every plan."""
    host: HostBatches | None
    """Source of `batch`, if a step of the program has no tensors."""
    inference: Callable[[], AbstractContextManager[object]]
    """Context in which a step with tensors runs."""
    verification: Verification | None = None
    """Verification of drafts, if rows draft."""
    encoder: Encoder | None = None
    """Part that encodes inputs which are not text."""
    silent: bool = False
    """Flag: a pipeline stage without the head, which yields no tokens; it learns them later."""
    _tokens: Array | None = None
    _values: memoryview | None = None
    """Memory of `_tokens`; steps return the same array again and again."""

    def launch(self, plan: StepPlan, begin: float) -> StepResult | Callable[[], StepResult]:
        """Do or start a step that began at `begin`; return its result, or a function that waits for
        it."""
        if self.check:
            plan.verify(rows=len(self.rows.held))
        if self.verification is not None:
            self.verification.clear()
        if self.encoder is not None:
            return self._with_encoder(self.encoder, plan, begin)
        return self._text(plan, begin)

    def _with_encoder(
        self, encoder: Encoder, plan: StepPlan, begin: float
    ) -> StepResult | Callable[[], StepResult]:
        """Do or start a step of two parts: slices of encodings, then text. An item may fail
        alone."""
        encoder.take(plan)
        if not plan.parts:
            return self._text(plan, begin)
        texts, failures = plan.texts, dict[int, str]()
        for entry in range(texts, len(plan.rows)):
            try:
                encoder.run(plan.rows[entry], plan.starts[entry], plan.counts[entry])
            except Exception as error:  # noqa: BLE001 - the boundary of an item
                failures[entry] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        spent = time.perf_counter() - begin
        started = self._text(plan.first_part(), begin)

        def completed(result: StepResult) -> StepResult:
            result.encoding = spent
            result.failures.update(failures)
            for column in (result.tokens, result.logprobs, result.prompt_logprobs):
                if column is not None:
                    column += [[] for _ in plan.rows[texts:]]
            if result.proposed is not None:
                result.proposed += [b""] * (len(plan.rows) - texts)
            return result

        if isinstance(started, StepResult):
            return completed(started)
        return lambda: completed(started())

    def _text(self, plan: StepPlan, begin: float) -> StepResult | Callable[[], StepResult]:
        """Do or start the text part of a step, which may have no entry."""
        if not plan.rows:
            with self.inference():
                self._prepare(plan)
            return StepResult(plan.number, [], seconds=time.perf_counter() - begin)
        result = None if self.host is None else self._decode(self.host, plan, begin)
        if result is not None:
            return result
        with self.inference():
            return self._launch(plan, begin)

    def _decode(self, host: HostBatches, plan: StepPlan, begin: float) -> StepResult | None:
        """Do a step on the host that only decodes, and whose tokens the program chooses.

        Returns None, with nothing computed, if a row comes, goes or asks for more: then the general
        path.
        """
        if plan.released or plan.admitted or plan.copies:
            return None
        if not self.features.rows.isdisjoint(plan.rows):
            return None
        verification, drafted = self.verification, None
        if verification is not None:
            plan, drafted = verification.begin(plan)
        if self.check:
            self.rows.check_starts(plan)
        self.tables.write(plan.blocks)
        batch = host.decode(plan, drafted)
        if batch is None:
            return None
        outputs = self.program.step(batch, BEST if batch.rules is None else RULES)
        values = self._values_of(outputs.tokens)
        if batch.rules is not None and min(values) < 0:
            with self.inference():
                values = choose(self.drawing, outputs.logits, batch).tolist()
        if drafted is None:
            host.keep(values)
            result = StepResult(plan.number, [[token] for token in values])
        if verification is not None:
            if drafted is not None:
                news = verification.accept(plan, drafted, range(len(plan.rows)), values)
                result = StepResult(plan.number, news)
            verification.propose(plan, result, outputs.states)
        result.seconds = time.perf_counter() - begin
        return result

    def _values_of(self, tokens: Array) -> list[int]:
        if tokens is not self._tokens or self._values is None:
            self._tokens, self._values = tokens, host(tokens).data
        values: list[int] = self._values.tolist()
        return values

    def _launch(self, plan: StepPlan, begin: float) -> Callable[[], StepResult]:
        plan, drafted = self._prepare(plan)
        asked = self.features.of(plan.rows)
        entries, rows, places = self._drawn(plan, drafted)
        batch = self.batch(plan, drafted)
        stop = None if self.stopwatch is None else self.stopwatch.start()
        outputs = self.program.step(batch, self._wanted(plan, asked, batch, draws=bool(entries)))
        result = StepResult(plan.number, tokens=[[] for _ in plan.rows])
        arrived: Arrived = list
        if entries:
            outputs = self._chosen(outputs, batch, asked, rows, places)
            chosen = outputs.tokens
            if drafted is None:
                self.rows.append(rows, places, chosen, batch.targets)
                arrived = to_host(chosen)
            else:
                entries, rows, arrived = self._accepted(plan, drafted, entries, chosen)
        asked.collect(plan, outputs, result)
        if entries:
            for place, fault in asked.advance(rows, arrived).items():
                result.failures[entries[place]] = fault
        read = None if stop is None else stop()

        deliver = partial(_deliver, result, entries, arrived)
        if self.verification is not None:  # At once: the next step's drafts follow from the tokens.
            deliver()
            self.verification.propose(plan, result, outputs.states)
        # The step has ended already if it waited for its tokens.
        ended = None if self.verification is None else time.perf_counter()

        def finish() -> StepResult:
            if self.verification is None:
                deliver()
            end = time.perf_counter() if ended is None else ended
            result.seconds, result.gap = (end - begin, 0.0) if read is None else read()
            return result

        return finish

    def _drawn(
        self, plan: StepPlan, drafted: list[int] | None
    ) -> tuple[list[int], Indices, Indices]:
        """Return the entry, row and place of each token [R] that the step draws: one after each
        entry that samples and wants no vector, and one before each draft that is not granted."""
        pooling = self.rows.columns["pooling"][plan.rows].tolist()
        entries, depths = list[int](), list[int]()
        for entry, (samples, pools) in enumerate(zip(plan.samples, pooling, strict=True)):
            if samples and not pools:
                some = range(min(0, 0 if drafted is None else -drafted[entry]), 1)
                entries += [entry] * len(some)
                depths += some
        rows, ends = np.array(plan.rows, np.int64), np.add(plan.starts, plan.counts)
        return entries, rows[entries], ends[entries] + np.array(depths, np.int64)

    def _wanted(self, plan: StepPlan, asked: Asked, batch: StepBatch, *, draws: bool) -> Want:
        """Name the outputs that a step needs; `draws`: tokens are among them."""
        masked, hidden = asked.wants(plan)
        if self.silent or (self.verification is not None and self.verification.hidden):
            hidden = "every"
        ruled = batch.rules is not None or batch.draws is not None
        tokens: Tokens = "none" if masked or not draws else "rules" if ruled else "best"
        return want(tokens, logits=masked, hidden=hidden)

    def _chosen(
        self, outputs: Outputs, batch: StepBatch, asked: Asked, rows: Indices, places: Indices
    ) -> Outputs:
        """Return the outputs of a step with its tokens [R]: the program's, or a choice from its
        masked logits. The object is new: the program may return its own again."""
        tokens = outputs.tokens
        if tokens is None:
            asked.mask(outputs.logits, rows, places)
        if tokens is None or (isinstance(tokens, np.ndarray) and (tokens < 0).any()):
            tokens = choose(self.drawing, outputs.logits, batch)
        return replace(outputs, tokens=tokens)

    def _accepted(
        self, plan: StepPlan, drafted: list[int], drawn: list[int], chosen: Array
    ) -> tuple[list[int], Indices, Arrived]:
        """Return the entry and row of each new token, those of accepted drafts among them, and the
        tokens. `drawn`: the entries of the `chosen` ones."""
        assert self.verification is not None
        sampling = list(dict.fromkeys(drawn))
        news = self.verification.accept(plan, drafted, sampling, chosen.tolist())
        entries = [entry for entry, new in zip(sampling, news, strict=True) for _ in new]
        tokens = [token for new in news for token in new]
        return entries, np.array(plan.rows, np.int64)[entries], lambda: tokens

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, list[int] | None]:
        """Bring the tables to the state that the plan assumes; return the plan as computed, and the
        drafts of each entry, if there are any."""
        verification, drafted = self.verification, None
        released = plan.released
        if released:
            self.rows.release(released)
            self.tables.release(released)
            self.features.release(released)
            if verification is not None:
                verification.release(released)
        self.tables.write(plan.blocks)
        for admission in plan.admitted:
            self.rows.admit(admission)
            self.features.admit(admission)
            if verification is not None:
                verification.admit(admission)
        if verification is not None:
            plan, drafted = verification.begin(plan)
        if self.check:
            self.rows.check_starts(plan)
        self.rows.note_computed(plan)
        if plan.copies:
            copy_blocks(self.cache, plan.copies)
        if self.silent:
            plan = replace(plan, samples=[False] * len(plan.rows))
        return plan, drafted


def _deliver(result: StepResult, entries: list[int], arrived: Arrived) -> None:
    """Give each of these entries its token, once all have arrived."""
    for entry, token in zip(entries, arrived(), strict=True):
        if token < 0:
            result.spoiled[entry] = SPOILED
        elif entry not in result.failures:
            result.tokens[entry].append(token)
