"""Records one forward pass: operator calls become nodes, arrays become values without memory.

What is handed back in place of an array has a shape, and knows which value it stands for. Since
layers only call operators and hand on what they get, the list of nodes is the whole pass, for any
number of tokens; a model that does more with an array cannot be recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..arrays import Array
from ..operators import (
    Dequantise,
    Forward,
    KvCache,
    KvLayer,
    Program,
    Role,
    RopeTable,
    StepBatch,
    StepLimits,
)
from ..weights import Weight
from .records import ROWS_N, ROWS_R


class Unrecordable(Exception):
    """This forward pass does something that no record does; the reason, as half a sentence."""


@dataclass(eq=False)
class Value:
    """A matrix [N or R, width] that one node makes and others read."""

    width: int
    rows: int
    producer: int
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Symbol:
    """An array of the pass: all of a value's numbers, in this shape."""

    of: Value
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        raise Unrecordable(f"the forward pass asks an array for {name!r}")

    def __getitem__(self, index: object) -> Any:
        raise Unrecordable("the forward pass takes a part of an array")


@dataclass
class Node:
    """One operator call. `reads` and `out` are values, `args` everything else."""

    op: str
    out: Value | None
    reads: list[Value]
    args: dict[str, Any]


class Recorder:
    """An `Operators` that computes nothing. It must be given the batch that it made itself."""

    name = "cpu"
    host = True

    def __init__(self, limits: StepLimits) -> None:
        self.rows = {ROWS_N: limits.tokens, ROWS_R: limits.entries}
        self.nodes: list[Node] = []

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        raise Unrecordable("weights are prepared inside the forward pass")

    def compile(self, forward: Forward, cache: KvCache, limits: StepLimits) -> Program | None:
        return None

    def value(self, x: Array) -> Value:
        """The value that an array of the pass is all of."""
        if not isinstance(x, Symbol) or math.prod(x.shape) != self.rows[x.of.rows] * x.of.width:
            raise Unrecordable("an operator is given an array that no operator made, or a part")
        return x.of

    def _make(self, width: int, rows: int) -> tuple[Value, Symbol]:
        value = Value(width, rows, len(self.nodes))
        return value, Symbol(value, (self.rows[rows], width))

    def _node(self, op: str, out: Value | None, reads: list[Value], **args: Any) -> None:
        for value in reads:
            value.readers.append(len(self.nodes))
        self.nodes.append(Node(op, out, reads, args))

    def embed(self, tokens: Array, weight: Weight, scale: float) -> Array:
        out, made = self._make(weight.shape[1], ROWS_N)
        self._node("embed", out, [], weight=weight, scale=scale)
        return made

    def rms_norm(self, x: Array, weight: Array, eps: float, offset: float) -> Array:
        source = self.value(x)
        out, made = self._make(source.width, source.rows)
        self._node("norm", out, [source], weight=weight, eps=eps, offset=offset)
        return made

    def add_rms_norm(
        self,
        x: Array,
        residual: Array,
        weight: Array,
        eps: float,
        offset: float,
    ) -> tuple[Array, Array]:
        source, total = self.value(x), self.value(residual)
        out, made = self._make(source.width, source.rows)
        self._node("add_norm", out, [source, total], weight=weight, eps=eps, offset=offset)
        return made, residual

    def add(self, x: Array, residual: Array) -> Array:
        self._node("add", None, [self.value(x), self.value(residual)])
        return residual

    def linear(self, x: Array, weight: Weight, bias: Array | None) -> Array:
        source = self.value(x)
        out, made = self._make(weight.shape[0], source.rows)
        self._node("linear", out, [source], weight=weight, bias=bias)
        return made

    def rope_and_cache(
        self,
        qkv: Array,
        heads: int,
        kv_heads: int,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        norm_offset: float,
        rope: RopeTable,
        kv: KvLayer,
        batch: StepBatch,
        group: int,
    ) -> Array:
        source = self.value(qkv)
        self._node(
            "rope", None, [source], heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm,
            eps=eps, offset=norm_offset, rope=rope, kv=kv, group=group,
        )  # fmt: skip
        size = kv.k.shape[-1]
        # The result lies where q lay; `attention` finds the same value behind it.
        return Symbol(source, (len(qkv), heads, size))

    def attention(
        self,
        q: Array,
        kv: KvLayer,
        batch: StepBatch,
        group: int,
        scale: float,
        softcap: float | None,
    ) -> Array:
        if not isinstance(q, Symbol) or len(q.shape) != 3:
            raise Unrecordable("attention is given queries that rope did not make")
        source = q.of
        _, heads, size = q.shape
        out, made = self._make(heads * size, ROWS_N)
        self._node(
            "attention", out, [source], heads=heads, kv=kv, group=group, scale=scale,
            softcap=softcap,
        )  # fmt: skip
        return made

    def gated(self, gate_up: Array, activation: str) -> Array:
        source = self.value(gate_up)
        out, made = self._make(source.width // 2, source.rows)
        self._node("gated", out, [source], activation=activation)
        return made

    def moe(
        self,
        x: Array,
        router: Array,
        gate_up: list[Weight],
        down: list[Weight],
        active: int,
        normalise: bool,
        activation: str,
    ) -> Array:
        raise Unrecordable("a mixture of experts routes differently in every step")

    def select(self, x: Array, rows: Array) -> Array:
        source = self.value(x)
        out, made = self._make(source.width, ROWS_R)
        self._node("select", out, [source])
        return made

    def logits(self, x: Array, weight: Weight, softcap: float | None) -> Array:
        source = self.value(x)
        out, made = self._make(weight.shape[0], source.rows)
        self._node("linear", out, [source], weight=weight, bias=None)
        if softcap is not None:
            self._node("softcap", None, [out], cap=softcap)
        return made
