"""From recorded nodes to records: what is fused, and where every value lies.

Fused here, by looking at who reads what:

* a value that only quantised products read is never written in fp32: its producer (norm, gate,
  attention) leaves it as int8 with units;
* the product with gate and up and the activation after it become one kernel;
* a product whose result only goes to be added to a residual adds itself: y += x · wᵀ + b;
* an attention of which only the sampled rows are read computes no others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..weights import LoraWeight
from . import emit
from .arena import Arena
from .emit import NOT_QUANTISED, Emitted, Matrix, QuantisedRows
from .recorder import Node, Value
from .records import UNIT, HrLinear, HrQuantised

Additions = Mapping[int, LoraWeight]
"""What adapters add to products: by the `id` of the product's weight."""


class Lowering:
    """The records of `nodes`, once; what is asked afterwards is in its attributes."""

    def __init__(
        self, nodes: list[Node], results: list[Value], arena: Arena, additions: Additions
    ) -> None:
        self.nodes, self.results, self.arena = nodes, results, arena
        self._additions = additions
        self.floats: dict[Value, npt.NDArray[np.float32]] = {}
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
