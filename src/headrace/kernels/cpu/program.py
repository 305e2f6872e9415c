"""A model's step as one call of the library: lowered once, called for any step."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...base.graph import SAMPLED
from ..arrays import Array, address
from ..draws import RULE
from ..operators import Operators, StepBatch, StepLimits
from ..program import CallByCall, Outputs, Want
from ..ranks import RankMemory
from . import emit
from .arena import Arena
from .emit import Emitted
from .fusion import Unrecordable
from .head import Head, HeadPart
from .library import Team
from .lowering import Lowering, tables
from .mapped import MappedRows
from .records import ROWS_N, ROWS_R, ROWS_T, HrStep
from .step import fill_step


class HasTeam(Operators, Protocol):
    team: Team


class Variant(NamedTuple):
    """Choice of a step's records."""

    every: bool = False
    """Hidden states of all tokens, not only of those that sample."""
    adapted: bool = False
    """Whether the adapters of `StepBatch.adapters` add to the products in
    `CallByCall.additions`."""
    scattered: int = 0
    """`Model.scattered_of`."""


PLAIN = Variant()


def compile_program(
    operators: HasTeam,
    plain: CallByCall,
    limits: StepLimits,
    beside: CpuProgram | None = None,
    variant: Variant = PLAIN,
) -> CpuProgram | None:
    """Compile the step of `plain`'s model to records; None: something in it has no record.

    It may share the buffers of `beside`: then the results of each are valid until the next call of
    either.
    """
    try:
        return CpuProgram(operators, plain, limits, variant, beside)
    except Unrecordable:
        return None


class CpuProgram:
    """A model's step as one call of the library. See `Program`.

    A step has one of three ends after the same records: logits; the most likely tokens, without
    logits, by the bounds of the head; or logits and tokens by rules.
    """

    host = lowered = True

    def __init__(
        self,
        operators: HasTeam,
        plain: CallByCall,
        limits: StepLimits,
        variant: Variant,
        beside: CpuProgram | None,
    ) -> None:
        self._operators, self._plain, self._limits = operators, plain, limits
        self._variant = variant
        self._others: dict[Variant, CpuProgram | None] = {}
        """Variants of the same step, made when first wanted; None: it cannot be recorded. They do
        not refer to this one, so all of it is freed with the last reference to it."""
        rows = {ROWS_N: limits.tokens, ROWS_R: limits.samples, ROWS_T: limits.texts}
        commons = plain.model.commons
        self._arena: Arena = Arena(rows, None if beside is None else beside._arena, commons)
        every = variant.every or not plain.model.generates
        graph = plain.model.variant("every" if every else "sampled", scattered=variant.scattered)
        hidden, logits = graph.outputs["hidden"], graph.outputs.get("logits")
        self._sampled = hidden.rows == SAMPLED
        self._selects: bool = self._sampled if beside is None else beside._selects
        additions, weights = plain.additions if variant.adapted else {}, plain.model.weights
        given = graph, weights, plain.cache, self._arena, additions, plain.model.dealing
        lowering = Lowering(*given)
        self._emitted = lowering.run()
        if commons is not None and commons.stage + 1 < commons.stages:
            lowering.hand_on(hidden)
        self.names, self._scattered = lowering.names, lowering.scattered
        self._hidden = lowering.floats(hidden)
        self._states = lowering.floats(graph.outputs.get("states", hidden))
        known = ("hidden", "states", "logits", "labels")
        self._more = {
            name: lowering.floats(value)
            for name, value in graph.outputs.items()
            if name not in known
        }
        # [0, 0] for a model without a vocabulary head, which is never asked for tokens.
        self._logits = self._hidden[:0, :0] if logits is None else lowering.floats(logits)
        self._records = emit.program(self._emitted)
        first, count = ctypes.addressof(self._records), len(self._emitted)
        self._logits_end = _End(first, count, None, self._logits)
        self._head: _GreedyHead | None = None
        if lowering.head is not None:
            self._head = _GreedyHead(lowering, operators.team.threads, limits.samples, commons)
        self._shared = commons is not None and commons.ranks > 1
        self._drawing = _DrawingEnd(self._emitted, self._logits)
        self._tables = [MappedRows(weights.weight(table)) for table in tables(graph)]
        self._step = HrStep()
        self._filled: StepBatch | None = None
        """The batch in `_step` and `_outputs`, if it may come again unchanged."""
        self._wanted: Want | None = None
        """The outputs for which `_at` and `_outputs` are set."""
        self._at = first, count, ctypes.addressof(self._step)
        self._outputs = Outputs()

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        if batch is not self._filled or want is not self._wanted:
            program = self.variant_of(batch, want)
            if program is not self:
                return (program or self._plain).step(batch, want)
            if not self._fill(batch, want):
                return self._plain.step(batch, want)
        if want.tokens == "rules":
            self._drawing.use(batch.rules)
        for table in self._tables:
            table.read(self._step.n)
        self._operators.team.run_at(*self._at)
        if self._shared and want.logits:
            # Masks change them in place, in each rank separately.
            logits = self._logits[: self._step.r].copy()
            return Outputs(self._outputs.tokens, logits, self._outputs.hidden, self._outputs.states)
        return self._outputs

    def head(self, hidden: Array) -> Array:
        return self._plain.head(hidden)

    def variant_of(self, batch: StepBatch, want: Want) -> CpuProgram | None:
        """Return the program for this step's outputs, or None if it cannot be recorded."""
        some = self._selects and len(batch.sample_rows) != len(batch.tokens)
        every = want.hidden == "every" and some
        scattered = self._plain.model.scattered_of(batch)
        variant = Variant(every, batch.adapters is not None, scattered)
        if variant == self._variant:
            return self
        if variant not in self._others:
            self._others[variant] = compile_program(
                self._operators, self._plain, self._limits, self, variant
            )
        return self._others[variant]

    def _fill(self, batch: StepBatch, want: Want) -> bool:
        """Point the step to `batch`, and choose its end. Return False if it is beyond the
        limits."""
        if batch is not self._filled:
            self._filled = None
            step, limits = fill_step(self._step, batch), self._limits
            beyond = step.n > limits.tokens or step.b > limits.entries or step.t > limits.texts
            if beyond or step.r > limits.samples:
                return False
            for record, first in self._scattered:
                assert batch.encoded is not None, "this variant is for rows of other parts"
                emit.fill_scatter(record, batch.encoded.rows, batch.encoded.places, first)
            # Adapters, rows of other parts and turns are in new memory at every step.
            new = batch.adapters is not None or batch.turns is not None
            again = batch.fixed and not new and batch.encoded is None
            self._filled = batch if again else None
        end, samples = self._end_of(want), self._step.r
        self._wanted, self._at = want, (end.at, end.count, self._at[2])
        self._outputs.tokens = None if end.tokens is None else end.tokens[:samples]
        self._outputs.logits = None if end.logits is None else end.logits[:samples]
        rows = samples if self._sampled else self._step.n
        self._outputs.hidden, self._outputs.states = self._hidden[:rows], self._states[:rows]
        if self._more:
            self._outputs.more = {name: rows_[:rows] for name, rows_ in self._more.items()}
        return True

    def _end_of(self, want: Want) -> _End:
        if want.tokens == "none":
            return self._logits_end
        if want.tokens == "best" and self._head is not None and not want.logits:
            return self._head
        if want.tokens == "best":
            self._drawing.use(None)
        return self._drawing


@dataclass
class _End:
    """Records that give a step's results."""

    at: int
    count: int
    tokens: npt.NDArray[np.int64] | None
    logits: npt.NDArray[np.float32] | None


class _GreedyHead(_End):
    """End whose last record gives the most likely tokens instead of the logits."""

    def __init__(
        self, lowering: Lowering, threads: int, rows: int, commons: RankMemory | None
    ) -> None:
        assert lowering.head is not None
        kept, share = lowering.emitted[:-1], None
        if lowering.share is not None:
            assert commons is not None
            kept = lowering.emitted[:-2]
            first = lowering.share.bounds[commons.rank]
            share = HeadPart(commons, first, lowering.meetings - 1)
        self.head = Head(lowering.head, threads, rows, share=share)
        emitted = [*kept, *self.head.records()]
        self._records = emit.program(emitted)
        super().__init__(ctypes.addressof(self._records), len(emitted), self.head.tokens, None)


class _DrawingEnd(_End):
    """End with an additional record: tokens from the logits, by rules."""

    def __init__(self, emitted: list[Emitted], logits: npt.NDArray[np.float32]) -> None:
        tokens = np.zeros(len(logits), np.int64)
        op = emit.sample(emit.matrix(logits), logits.shape[1], tokens)
        self._op, self._records = op[1], emit.program([*emitted, op])
        super().__init__(ctypes.addressof(self._records), len(emitted) + 1, tokens, logits)
        self._most_likely = np.zeros(len(logits), RULE)
        self._rules: npt.NDArray[np.void] | None = None

    def use(self, rules: npt.NDArray[np.void] | None) -> None:
        """Draw the next steps by `rules` [R], which must live until they are replaced; None: every
        row takes its most likely token."""
        if rules is None:
            rules = self._most_likely
        if rules is not self._rules:
            assert rules.dtype == RULE
            assert rules.flags.c_contiguous
            self._rules = rules
            self._op.rules = address(rules)
