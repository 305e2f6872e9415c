"""From recorded nodes to a program: what is fused, where every value lies, and the call itself.

Fused here, by looking at who reads what:

* a value that only quantised products read is never written in fp32: its producer (norm, gate,
  attention) leaves it as int8 with units;
* the product with gate and up and the activation after it become one kernel;
* a product whose result only goes to be added to a residual adds itself: y += x · wᵀ + b;
* an attention of which only the sampled rows are read computes no others.

Buffers are shared by liveness: two values never alive at the same node may lie in one place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..operators import Forward, GroupBatch, KvCache, Operators, StepBatch, StepLimits
from ..sampling import RULE
from ..weights import LoraWeight
from . import emit
from .emit import NOT_QUANTISED, Emitted, Matrix, QuantisedRows
from .library import Team
from .mapped import MappedRows
from .recorder import Node, Recorder, Unrecordable, Value
from .records import ROWS_N, ROWS_R, UNIT, HrLinear, HrQuantised, HrStep
from .step import fill_step


class HasTeam(Operators, Protocol):
    team: Team


Additions = Mapping[int, LoraWeight]
"""What adapters add to products: by the `id` of the product's weight."""


def compile_program(
    operators: HasTeam,
    forward: Forward,
    cache: KvCache,
    limits: StepLimits,
    additions: Additions | None = None,
    beside: CpuProgram | None = None,
    *,
    every_hidden: bool = False,
) -> CpuProgram | None:
    """The recorded step of `forward`, or None where it cannot be recorded.

    With `additions` each product of one of these weights is followed by what the adapters of
    `StepBatch.adapters` add to it. The program may use the buffers of `beside`: then the results
    of either are valid until the next call of either.
    """
    recorder = Recorder(limits)
    try:
        stand_in = _stand_in(cache, limits)
        stand_in.every_hidden = every_hidden
        hidden, logits = forward(recorder, stand_in, cache)
        return CpuProgram(
            operators, forward, cache, limits, recorder, hidden, logits, additions or {}, beside
        )
    except Unrecordable:
        return None


def _stand_in(cache: KvCache, limits: StepLimits) -> StepBatch:
    """A batch of the largest shape, to be looked at by the recorder only."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    groups = [
        GroupBatch(empty(limits.entries, 1), empty(limits.tokens), None)
        for _ in range(max(cache.groups, default=0) + 1)
    ]
    tokens = empty(limits.tokens)
    return StepBatch(
        tokens, tokens, empty(limits.entries + 1), empty(limits.entries), groups,
        empty(limits.entries), limits.tokens, limits.max_context,
    )  # fmt: skip


class _Arena:
    """Buffers by (rows, width), given back when their value dies."""

    def __init__(self, recorder: Recorder, beside: _Arena | None) -> None:
        self._rows = recorder.rows
        self._free: dict[tuple[str, int, int], list[torch.Tensor | QuantisedRows]] = {}
        self.all: list[tuple[tuple[str, int, int], torch.Tensor | QuantisedRows]] = (
            [] if beside is None else list(beside.all)
        )
        for key, buffer in self.all:
            self._free.setdefault(key, []).append(buffer)

    def _take(self, kind: str, rows: int, width: int) -> torch.Tensor | QuantisedRows | None:
        # Sampled rows also have room where there is room for all.
        for found in (rows, *((ROWS_N,) if self._rows[rows] <= self._rows[ROWS_N] else ())):
            free = self._free.get((kind, found, width))
            if free:
                return free.pop()
        return None

    def floats(self, rows: int, width: int) -> torch.Tensor:
        found = self._take("f", rows, width)
        if found is not None:
            assert isinstance(found, torch.Tensor)
            return found
        stride = -(-width // 16) * 16
        stride += 16 if stride % 1024 == 0 else 0
        made = torch.empty(self._rows[rows], stride)[:, :width]
        self.all.append((("f", rows, width), made))
        return made

    def codes(self, rows: int, width: int) -> QuantisedRows:
        found = self._take("q", rows, width)
        if found is not None:
            assert isinstance(found, QuantisedRows)
            return found
        made = QuantisedRows(self._rows[rows], width)
        self.all.append((("q", rows, width), made))
        return made

    def give_back(self, rows: int, width: int, buffer: torch.Tensor | QuantisedRows) -> None:
        kind = "f" if isinstance(buffer, torch.Tensor) else "q"
        self._free.setdefault((kind, rows, width), []).append(buffer)


class CpuProgram:
    """A model's step as one call of the library."""

    def __init__(
        self,
        operators: HasTeam,
        forward: Forward,
        cache: KvCache,
        limits: StepLimits,
        recorder: Recorder,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        additions: Additions,
        beside: CpuProgram | None,
    ) -> None:
        self._operators, self._forward, self._cache = operators, forward, cache
        self._limits, self._additions = limits, additions
        self._every: CpuProgram | None = None
        """The program of steps that want every hidden state, once there was one."""
        self._nodes = recorder.nodes
        self._arena: _Arena = _Arena(recorder, None if beside is None else beside._arena)
        results = [recorder.value(hidden), recorder.value(logits)]
        self._sampled = results[0].rows == ROWS_R
        lowering = _Lowering(recorder.nodes, results, self._arena, additions)
        self._emitted = lowering.run()
        self.names = lowering.names
        self._hidden, self._logits = (lowering.floats[value] for value in results)
        self._records = emit.program(self._emitted)
        self._head: _GreedyHead | None = None
        if lowering.head is not None:
            self._head = _GreedyHead(lowering, operators.team.threads, limits.entries)
        self._end = _DrawingEnd(self._emitted, self._logits)
        self._tables = [MappedRows(node.args["weight"]) for node in self._nodes
                        if node.op == "embed"]  # fmt: skip
        self._step = HrStep()
        self._at = ctypes.addressof(self._records), len(self._emitted), ctypes.addressof(self._step)
        self._filled: StepBatch | None = None
        """The batch that `_step` and `_results` are of, where it may come again as it is."""
        self._results = self._hidden, self._logits
        self._chosen: tuple[torch.Tensor, torch.Tensor] | None = None
        self._drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """What `greedy` and `draw` give for that batch, once asked: the very same tensors again."""

    def __call__(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.adapted(batch)
        return self._forward(self._operators, batch, self._cache) if found is None else found

    def adapted(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As a call; None, and nothing was computed, where the step is beyond the limits."""
        program = self._program_of(batch)
        if program is not self:
            return program.adapted(batch)
        if not self._fill(batch):
            return None
        self._operators.team.run_at(*self._at)
        return self._results

    def greedy(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
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
                self._operators, self._forward, self._cache, self._limits, self._additions, self,
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

    def __init__(self, lowering: _Lowering, threads: int, rows: int) -> None:
        assert lowering.head is not None
        room = emit.Head(threads, rows)
        emitted = [*lowering.emitted[:-1], *room.records(lowering.head)]
        self.tokens = room.tokens
        self._records, self.count = emit.program(emitted), len(emitted)
        self.at = ctypes.addressof(self._records)


class _DrawingEnd:
    """The same records and one more: tokens from the logits, by rules."""

    def __init__(self, emitted: list[Emitted], logits: torch.Tensor) -> None:
        self.tokens = torch.zeros(len(logits), dtype=torch.int64)
        op = emit.sample(emit.matrix(logits), logits.shape[1], self.tokens)
        self._op = op[1]
        self._records, self.count = emit.program([*emitted, op]), len(emitted) + 1
        self.at = ctypes.addressof(self._records)
        self._rules: npt.NDArray[np.void] | None = None

    def use(self, rules: npt.NDArray[np.void]) -> None:
        if rules is not self._rules:
            assert rules.flags.c_contiguous
            self._rules = rules
            self._op.rules = rules.ctypes.data


class _Lowering:
    def __init__(
        self, nodes: list[Node], results: list[Value], arena: _Arena, additions: Additions
    ) -> None:
        self.nodes, self.results, self.arena = nodes, results, arena
        self._additions = additions
        self.floats: dict[Value, torch.Tensor] = {}
        self.names: list[str] = []
        self._codes: dict[Value, QuantisedRows] = {}
        self.emitted: list[Emitted] = []
        self.head: HrLinear | None = None
        """The last record, where that is a product of one part which gives the logits."""
        self._dying: list[list[Value]] = [[] for _ in nodes]
        self._summed = self._find_sums()
        self._gates = self._find_gates()
        self._picked = self._find_picked()
        self._last = {v: self._last_reader(v) for v in self._values()}

    def _values(self) -> list[Value]:
        return [node.out for node in self.nodes if node.out is not None]

    def _last_reader(self, value: Value) -> int:
        if value in self.results:
            return len(self.nodes)
        last = max(value.readers, default=value.producer)
        return last + 1 if last in self._gates else last

    def _find_sums(self) -> dict[int, Value]:
        """Products that add themselves: node → the residual."""
        found = {}
        for index, node in enumerate(self.nodes):
            if node.op != "linear" or node.out is None or node.out in self.results:
                continue
            readers = node.out.readers
            if len(readers) != 1 or self.nodes[readers[0]].op not in ("add_norm", "add"):
                continue
            source, residual = self.nodes[readers[0]].reads
            if source is node.out and readers[0] == index + 1 and residual is not node.reads[0]:
                found[index] = residual
        return found

    def _find_gates(self) -> set[int]:
        """Products whose result only goes through a gate and is then wanted as codes."""
        found = set()
        for index, node in enumerate(self.nodes[:-1]):
            after = self.nodes[index + 1]
            if (
                node.op == "linear"
                and after.op == "gated"
                and node.out is not None
                and after.out is not None
                and node.args["bias"] is None
                and id(node.args["weight"]) not in self._additions
                and node.out.readers == [index + 1]
                and emit.can_gate(node.args["weight"])
                and not self._wants_floats(after.out)
            ):
                found.add(index)
        return found

    def _find_picked(self) -> dict[int, int]:
        """Attentions whose result is only read where rows of it are selected: → by which node."""
        return {
            index: node.out.readers[0]
            for index, node in enumerate(self.nodes)
            if node.op == "attention"
            and node.out is not None
            and node.out not in self.results
            and len(node.out.readers) == 1
            and self.nodes[node.out.readers[0]].op == "select"
        }

    def _wants_codes(self, value: Value) -> bool:
        return any(self._product_wants(index, emit.needs_codes) for index in value.readers)

    def _product_wants(self, index: int, need: object) -> bool:
        node = self.nodes[index]
        assert callable(need)
        return node.op == "linear" and bool(need(node.args["weight"]))

    def _wants_floats(self, value: Value) -> bool:
        if value in self.results:
            return True
        return any(
            self.nodes[index].op != "linear"
            or self._product_wants(index, emit.needs_floats)
            or id(self.nodes[index].args["weight"]) in self._additions
            for index in value.readers
        )

    def _matrix(self, value: Value) -> Matrix:
        return emit.matrix(self.floats[value])

    def _make_floats(self, value: Value) -> Matrix:
        self.floats[value] = self.arena.floats(value.rows, value.width)
        return self._matrix(value)

    def _make_codes(self, value: Value) -> HrQuantised:
        self._codes[value] = self.arena.codes(value.rows, value.width)
        return self._codes[value].struct

    def _outputs(self, value: Value, *, grain: int) -> tuple[Matrix | None, HrQuantised]:
        """Where a producer that can quantise leaves its result."""
        codes = NOT_QUANTISED
        if self._wants_codes(value) and grain % UNIT == 0:
            codes = self._make_codes(value)
        floats = None
        if codes is NOT_QUANTISED or self._wants_floats(value):
            floats = self._make_floats(value)
        return floats, codes

    def _emit(self, name: str, emitted: Emitted) -> None:
        self.names.append(name)
        self.emitted.append(emitted)

    def run(self) -> list[Emitted]:
        for value, last in self._last.items():
            if last < len(self.nodes):
                self._dying[last].append(value)
        for index, node in enumerate(self.nodes):
            getattr(self, f"_{node.op}")(index, node)
            for value in self._dying[index]:
                self._bury(value)
        self._find_head()
        return self.emitted

    def _find_head(self) -> None:
        node, (_, op) = self.nodes[-1], self.emitted[-1]
        if (
            node.op == "linear"
            and node.out is self.results[1]
            and isinstance(op, HrLinear)  # No addition follows it.
            and op.count == 1
        ):
            self.head = op

    def _bury(self, value: Value) -> None:
        if value in self.floats:
            self.arena.give_back(value.rows, value.width, self.floats.pop(value))
        if value in self._codes:
            self.arena.give_back(value.rows, value.width, self._codes.pop(value))

    def _embed(self, index: int, node: Node) -> None:
        assert node.out is not None
        self._emit(
            "embed",
            emit.embed(node.args["weight"], node.args["scale"], self._make_floats(node.out)),
        )

    def _norm_of(self, node: Node, x: Value, residual: Value | None) -> None:
        assert node.out is not None
        y, q = self._outputs(node.out, grain=node.out.width)
        self._emit(
            "norm",
            emit.norm(
                self._matrix(x), None if residual is None else self._matrix(residual),
                node.args["weight"], node.args["eps"], node.args["offset"], y, q, node.out.rows,
            ),
        )  # fmt: skip

    def _norm(self, index: int, node: Node) -> None:
        self._norm_of(node, node.reads[0], None)

    def _add_norm(self, index: int, node: Node) -> None:
        x, residual = node.reads
        if self._summed.get(index - 1) is residual:
            self._norm_of(node, residual, None)
        else:
            self._norm_of(node, x, residual)

    def _add(self, index: int, node: Node) -> None:
        x, residual = node.reads
        if self._summed.get(index - 1) is not residual:
            self._emit("add", emit.add(self._matrix(x), self._matrix(residual), x.width, x.rows))

    def _linear(self, index: int, node: Node) -> None:
        assert node.out is not None
        (x,) = node.reads
        weight = node.args["weight"]
        if emit.needs_codes(weight) and x not in self._codes:
            floats = self._matrix(x)
            self._emit("quantise", emit.quantise(floats, self._make_codes(x), x.width, x.rows))
        if index in self._gates:
            return
        codes = self._codes[x].struct if x in self._codes else NOT_QUANTISED
        residual = self._summed.get(index)
        y = self._make_floats(node.out) if residual is None else self._matrix(residual)
        self._emit(
            f"linear {weight.shape[0]}×{weight.shape[1]} "
            + "+".join(dict.fromkeys(part.kind for part in emit.parts_of(weight))),
            emit.linear(
                codes, self._matrix(x) if x in self.floats else None, weight, node.args["bias"],
                y, x.rows, accumulate=residual is not None,
            ),
        )  # fmt: skip
        addition = self._additions.get(id(weight))
        if addition is not None:
            width = len(addition.up) * addition.room
            inner = self.arena.floats(x.rows, width)
            for name, emitted in zip(
                ("lora_down", "lora_up"),
                emit.lora(self._matrix(x), addition, emit.matrix(inner), y, x.rows),
                strict=True,
            ):
                self._emit(name, emitted)
            self.arena.give_back(x.rows, width, inner)

    def _rope(self, index: int, node: Node) -> None:
        a = node.args
        cache = emit.kv(a["kv"], a["heads"], a["kv_heads"], a["group"])
        self._emit(
            "rope",
            emit.rope(
                cache, self._matrix(node.reads[0]), a["q_norm"], a["k_norm"], a["eps"],
                a["offset"], a["rope"].cos, a["rope"].sin,
            ),
        )  # fmt: skip

    def _attention(self, index: int, node: Node) -> None:
        out = self.nodes[self._picked.get(index, index)].out
        assert out is not None
        a = node.args
        cache = emit.kv(a["kv"], a["heads"], a["kv"].k.shape[1], a["group"])
        y, q = self._outputs(out, grain=cache.head_dim)
        self._emit(
            "attention",
            emit.attention(
                cache, self._matrix(node.reads[0]), y, q, a["scale"], a["softcap"], out.rows
            ),
        )

    def _gated(self, index: int, node: Node) -> None:
        assert node.out is not None
        if index - 1 in self._gates:
            product = self.nodes[index - 1]
            weight, x = product.args["weight"], self._codes[product.reads[0]].struct
            out = self._make_codes(node.out)
            self._emit(
                f"gate_up {weight.shape[0]}×{weight.shape[1]} {emit.parts_of(weight)[0].kind}",
                emit.gate_up(x, weight, node.args["activation"], out, node.out.rows),
            )
            return
        y, q = self._outputs(node.out, grain=node.out.width)
        self._emit(
            "gated",
            emit.gated(
                self._matrix(node.reads[0]), node.out.width, node.args["activation"], y, q,
                node.out.rows,
            ),
        )  # fmt: skip

    def _select(self, index: int, node: Node) -> None:
        assert node.out is not None
        if index in self._picked.values():
            return
        y = self._make_floats(node.out)
        self._emit("select", emit.select(self._matrix(node.reads[0]), y, node.out.width))

    def _softcap(self, index: int, node: Node) -> None:
        (value,) = node.reads
        self._emit("softcap", emit.softcap(self._matrix(value), value.width, node.args["cap"]))
