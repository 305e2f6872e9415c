"""A model's step as one call of the library: recorded once, lowered, called for any step."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...base.graph import SAMPLED, Graph
from ..arrays import Array, address
from ..draws import RULE
from ..model import Model
from ..operators import KvCache, Operators, StepBatch, StepLimits
from . import emit
from .arena import Arena
from .emit import Emitted
from .library import Team
from .lowering import Additions, Lowering, Unrecordable, tables
from .mapped import MappedRows
from .records import ROWS_N, ROWS_R, HrStep
from .step import fill_step


class HasTeam(Operators, Protocol):
    team: Team


def compile_program(
    operators: HasTeam,
    model: Model,
    cache: KvCache,
    limits: StepLimits,
    additions: Additions | None = None,
    beside: CpuProgram | None = None,
    *,
    every_hidden: bool = False,
) -> CpuProgram | None:
    """The records of `model`'s step, or None where there is no record of something in it.

    With `additions` each product of one of these names is followed by what the adapters of
    `StepBatch.adapters` add to it. The program may use the buffers of `beside`: then the results
    of either are valid until the next call of either.
    """
    graph = model.variant("every" if every_hidden else "sampled")
    try:
        return CpuProgram(operators, model, graph, cache, limits, additions or {}, beside)
    except Unrecordable:
        return None


class CpuProgram:
    """A model's step as one call of the library."""

    def __init__(
        self,
        operators: HasTeam,
        model: Model,
        graph: Graph,
        cache: KvCache,
        limits: StepLimits,
        additions: Additions,
        beside: CpuProgram | None,
    ) -> None:
        self._operators, self._model, self._cache = operators, model, cache
        self._limits, self._additions = limits, additions
        self._every: CpuProgram | None = None
        """The program of steps that want every hidden state, once there was one."""
        rows = {ROWS_N: limits.tokens, ROWS_R: limits.entries}
        self._arena: Arena = Arena(rows, None if beside is None else beside._arena)
        lowering = Lowering(graph, model.weights, cache, self._arena, additions)
        self._emitted = lowering.run()
        self.names = lowering.names
        hidden, logits = graph.outputs["hidden"], graph.outputs["logits"]
        self._sampled = hidden.rows == SAMPLED
        self._hidden, self._logits = lowering.floats(hidden), lowering.floats(logits)
        self._records = emit.program(self._emitted)
        self._head: _GreedyHead | None = None
        if lowering.head is not None:
            self._head = _GreedyHead(lowering, operators.team.threads, limits.entries)
        self._end = _DrawingEnd(self._emitted, self._logits)
        self._tables = [MappedRows(model.weights.weight(table)) for table in tables(graph)]
        self._step = HrStep()
        self._at = ctypes.addressof(self._records), len(self._emitted), ctypes.addressof(self._step)
        self._filled: StepBatch | None = None
        """The batch that `_step` and `_results` are of, where it may come again as it is."""
        self._results = self._hidden, self._logits
        self._chosen: tuple[Array, Array] | None = None
        self._drawn: tuple[Array, Array, Array] | None = None
        """What `greedy` and `draw` give for that batch, once asked: the very same arrays again."""

    def __call__(self, batch: StepBatch) -> tuple[Array, Array]:
        found = self.adapted(batch)
        return self._model.forward(self._operators, batch, self._cache) if found is None else found

    def adapted(self, batch: StepBatch) -> tuple[Array, Array] | None:
        """As a call; None, and nothing was computed, where the step is beyond the limits."""
        program = self._program_of(batch)
        if program is not self:
            return program.adapted(batch)
        if not self._fill(batch):
            return None
        self._operators.team.run_at(*self._at)
        return self._results

    def greedy(self, batch: StepBatch) -> tuple[Array, Array] | None:
        """See `GreedyProgram`; None also where the head is capped or of several parts."""
        program = self._program_of(batch)
        if program is not self:
            return program.greedy(batch)
        head = self._head
        if head is None or not self._fill(batch):
            return None
        self._operators.team.run_at(head.at, head.count, self._at[2])
        if self._chosen is None:
            self._chosen = self._results[0], head.tokens[: self._step.r]
        return self._chosen

    def draw(
        self, batch: StepBatch, rules: npt.NDArray[np.void]
    ) -> tuple[Array, Array, Array] | None:
        """See `DrawingProgram`."""
        program = self._program_of(batch)
        if program is not self:
            return program.draw(batch, rules)
        if not self._fill(batch):
            return None
        end = self._end
        assert rules.dtype == RULE
        assert len(rules) == self._step.r
        end.use(rules)
        self._operators.team.run_at(end.at, end.count, self._at[2])
        if self._drawn is None:
            self._drawn = *self._results, end.tokens[: self._step.r]
        return self._drawn

    def _fill(self, batch: StepBatch) -> bool:
        """Point the step to `batch`. False: it is beyond the limits."""
        if batch is not self._filled:
            self._filled = None
            step, limits = fill_step(self._step, batch), self._limits
            if step.n > limits.tokens or max(step.r, step.b) > limits.entries:
                return False
            # Adapters come in new memory with every step.
            self._filled = batch if batch.fixed and batch.adapters is None else None
            rows = step.r if self._sampled else step.n
            self._results = self._hidden[:rows], self._logits[: step.r]
            self._chosen = self._drawn = None
        for table in self._tables:
            table.read(self._step.n)
        return True

    def _program_of(self, batch: StepBatch) -> CpuProgram:
        """The program that computes what this step wants: this one, but for hidden states of tokens
        that do not sample, where it has none."""
        all_sample = len(batch.sample_rows) == len(batch.tokens)
        if not batch.every_hidden or all_sample or not self._sampled:
            return self
        if self._every is None:
            self._every = compile_program(
                self._operators, self._model, self._cache, self._limits, self._additions, self,
                every_hidden=True,
            )  # fmt: skip
        assert self._every is not None, "what was recorded once can be recorded again"
        return self._every

    def profile(self, batch: StepBatch) -> list[tuple[str, float]]:
        """Run a step; → (name, seconds) of every record."""
        count = len(self._emitted)
        seconds = (ctypes.c_double * count)()
        self._filled = None
        self._operators.team.run(self._records, count, fill_step(self._step, batch), seconds)
        return list(zip(self.names, seconds, strict=True))


class _GreedyHead:
    """The same records but for the last: the most likely tokens in place of the logits."""

    def __init__(self, lowering: Lowering, threads: int, rows: int) -> None:
        assert lowering.head is not None
        self.head = emit.Head(lowering.head, threads, rows)
        emitted = [*lowering.emitted[:-1], *self.head.records()]
        self.tokens = self.head.tokens
        self._records, self.count = emit.program(emitted), len(emitted)
        self.at = ctypes.addressof(self._records)


class _DrawingEnd:
    """The same records and one more: tokens from the logits, by rules."""

    def __init__(self, emitted: list[Emitted], logits: npt.NDArray[np.float32]) -> None:
        self.tokens = np.zeros(len(logits), np.int64)
        op = emit.sample(emit.matrix(logits), logits.shape[1], self.tokens)
        self._op = op[1]
        self._records, self.count = emit.program([*emitted, op]), len(emitted) + 1
        self.at = ctypes.addressof(self._records)
        self._rules: npt.NDArray[np.void] | None = None

    def use(self, rules: npt.NDArray[np.void]) -> None:
        if rules is not self._rules:
            assert rules.flags.c_contiguous
            self._rules = rules
            self._op.rules = address(rules)
