"""Records one forward pass: operator calls become nodes, tensors become values without memory.

The tensors handed back are on torch's "meta" device: they have a shape, strides and a storage of
their own, so that a model may take views of them, and no memory. Since layers only call operators
and take views, the list of nodes is the whole pass, for any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

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
    tensor: torch.Tensor
    """The meta tensor that stands for it: kept, so that its storage stays unique."""
    readers: list[int] = field(default_factory=list)


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

    def __init__(self, limits: StepLimits) -> None:
        self.rows = {ROWS_N: limits.tokens, ROWS_R: limits.entries}
        self.nodes: list[Node] = []
        self._values: dict[int, Value] = {}

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        raise Unrecordable("weights are prepared inside the forward pass")

    def compile(self, forward: Forward, cache: KvCache, limits: StepLimits) -> Program | None:
        return None

    def value(self, x: torch.Tensor) -> Value:
        """The value that a meta tensor is, or is a whole view of."""
        found = self._values.get(x.untyped_storage()._cdata)
        if found is None or x.numel() != found.tensor.numel():
            raise Unrecordable("an operator is given a tensor that no operator made, or a part")
        return found

    def _make(self, width: int, rows: int) -> Value:
        tensor = torch.empty(self.rows[rows], width, device="meta")
        value = Value(width, rows, len(self.nodes), tensor)
        self._values[tensor.untyped_storage()._cdata] = value
        return value

    def _node(self, op: str, out: Value | None, reads: list[Value], **args: Any) -> None:
        for value in reads:
            value.readers.append(len(self.nodes))
        self.nodes.append(Node(op, out, reads, args))

    def embed(self, tokens: torch.Tensor, weight: Weight, scale: float) -> torch.Tensor:
        out = self._make(weight.shape[1], ROWS_N)
        self._node("embed", out, [], weight=weight, scale=scale)
        return out.tensor

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        source = self.value(x)
        out = self._make(source.width, source.rows)
        self._node("norm", out, [source], weight=weight, eps=eps, offset=offset)
        return out.tensor

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, total = self.value(x), self.value(residual)
        out = self._make(source.width, source.rows)
        self._node("add_norm", out, [source, total], weight=weight, eps=eps, offset=offset)
        return out.tensor, residual

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._node("add", None, [self.value(x), self.value(residual)])
        return residual

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        source = self.value(x)
        out = self._make(weight.shape[0], source.rows)
        self._node("linear", out, [source], weight=weight, bias=bias)
        return out.tensor

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        norm_offset: float,
        rope: RopeTable,
        kv: KvLayer,
        batch: StepBatch,
        group: int,
    ) -> torch.Tensor:
        source = self.value(qkv)
        self._node(
            "rope", None, [source], heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm,
            eps=eps, offset=norm_offset, rope=rope, kv=kv, group=group,
        )  # fmt: skip
        size = kv.k.shape[-1]
        # The result lies where q lay; `attention` finds the same value behind it.
        return qkv.as_strided((len(qkv), heads, size), (qkv.stride(0), size, 1))

    def attention(
        self,
        q: torch.Tensor,
        kv: KvLayer,
        batch: StepBatch,
        group: int,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        source = self._values.get(q.untyped_storage()._cdata)
        if source is None:
            raise Unrecordable("attention is given queries that rope did not make")
        _, heads, size = q.shape
        out = self._make(heads * size, ROWS_N)
        self._node(
            "attention", out, [source], heads=heads, kv=kv, group=group, scale=scale,
            softcap=softcap,
        )  # fmt: skip
        return out.tensor

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        source = self.value(gate_up)
        out = self._make(source.width // 2, source.rows)
        self._node("gated", out, [source], activation=activation)
        return out.tensor

    def moe(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: list[Weight],
        down: list[Weight],
        active: int,
        normalise: bool,
        activation: str,
    ) -> torch.Tensor:
        raise Unrecordable("a mixture of experts routes differently in every step")

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        source = self.value(x)
        out = self._make(source.width, ROWS_R)
        self._node("select", out, [source])
        return out.tensor

    def logits(self, x: torch.Tensor, weight: Weight, softcap: float | None) -> torch.Tensor:
        source = self.value(x)
        out = self._make(weight.shape[0], source.rows)
        self._node("linear", out, [source], weight=weight, bias=None)
        if softcap is not None:
            self._node("softcap", None, [out], cap=softcap)
        return out.tensor
