"""The operators one by one: each call builds its records and runs them at once.

The model's step does not go this way (see `recorder` and `compile`); prompt log-probabilities,
tests and forward passes that cannot be recorded do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..backend import Shelf
from ..operators import (
    AdaptedProgram,
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
from ..reference import ReferenceOperators
from ..weights import BlockWeight, DenseWeight, LoraWeight, PanelWeight, StackedWeight, Weight
from . import emit
from .drawing import drawing
from .emit import NOT_QUANTISED, Emitted, Matrix, QuantisedRows, matrix
from .library import Team
from .panels import Packer
from .program import CpuProgram, compile_program
from .records import ROWS_N, HrStep
from .step import fill_step


class CpuOperators:
    """See `Operators` for the meaning and the shapes of each method. Activations are fp32."""

    name = "cpu"

    def __init__(self, threads: int, level: str | None = None, shelf: Shelf | None = None) -> None:
        self.team = Team(threads, level)
        self._packer = Packer(self.team, shelf)
        self._reference = ReferenceOperators(torch.float32)
        self.drawing = drawing(self.team)

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        if role == "moe":
            return self._reference.prepare(weight, role, dequantise)
        if isinstance(weight, StackedWeight):
            return StackedWeight(tuple(self._pack(part) for part in weight.parts))
        assert isinstance(weight, DenseWeight | BlockWeight)
        if role == "embed":
            weight.data = weight.data.contiguous()
            return weight
        return self._pack(weight)

    def _pack(self, weight: Weight) -> PanelWeight:
        assert isinstance(weight, DenseWeight | BlockWeight)
        return self._packer.pack(weight)

    def compile(self, forward: Forward, cache: KvCache, limits: StepLimits) -> Program | None:
        return compile_program(self, forward, cache, limits)

    def compile_adapted(
        self,
        forward: Forward,
        cache: KvCache,
        limits: StepLimits,
        additions: Mapping[int, LoraWeight],
        beside: Program | None,
    ) -> AdaptedProgram | None:
        assert beside is None or isinstance(beside, CpuProgram)
        made = compile_program(self, forward, cache, limits, additions, beside)
        return None if made is None else made.adapted

    def embed(self, tokens: torch.Tensor, weight: Weight, scale: float) -> torch.Tensor:
        y = torch.empty(len(tokens), weight.shape[1])
        step = HrStep(n=len(tokens), tokens=tokens.contiguous().data_ptr())
        self._run([emit.embed(weight, scale, matrix(y))], step)
        return y

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        y = torch.empty_like(x)
        op = emit.norm(matrix(x), None, weight, eps, offset, matrix(y), NOT_QUANTISED, ROWS_N)
        self._run([op], HrStep(n=len(x)))
        return y

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty_like(x)
        op = emit.norm(
            matrix(x), matrix(residual), weight, eps, offset, matrix(y), NOT_QUANTISED, ROWS_N
        )
        self._run([op], HrStep(n=len(x)))
        return y, residual

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._run([emit.add(matrix(x), matrix(residual), x.shape[1], ROWS_N)], HrStep(n=len(x)))
        return residual

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, width = x.shape
        y = torch.empty(rows, weight.shape[0])
        ops: list[Emitted] = []
        codes = NOT_QUANTISED
        if emit.needs_codes(weight):
            room = QuantisedRows(rows, width)
            codes = room.struct
            ops.append(emit.quantise(matrix(x), codes, width, ROWS_N))
        ops.append(emit.linear(codes, matrix(x), weight, bias, matrix(y), ROWS_N))
        self._run(ops, HrStep(n=rows))
        return y

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
        cache = emit.kv(kv, heads, kv_heads, group)
        op = emit.rope(cache, matrix(qkv), q_norm, k_norm, eps, norm_offset, rope.cos, rope.sin)
        self._run([op], fill_step(HrStep(), batch))
        width = cache.head_dim
        return qkv[:, : heads * width].view(len(qkv), heads, width)

    def attention(
        self,
        q: torch.Tensor,
        kv: KvLayer,
        batch: StepBatch,
        group: int,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        rows, heads, width = q.shape
        if q.stride(2) != 1 or q.stride(1) != width:
            q = q.contiguous()
        y = torch.empty(rows, heads * width)
        op = emit.attention(
            emit.kv(kv, heads, kv.k.shape[1], group), Matrix(q.data_ptr(), q.stride(0)),
            matrix(y), NOT_QUANTISED, scale, softcap, ROWS_N,
        )  # fmt: skip
        self._run([op], fill_step(HrStep(), batch))
        return y

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        rows, both = gate_up.shape
        y = torch.empty(rows, both // 2)
        self._run(
            [emit.gated(matrix(gate_up), both // 2, activation, matrix(y), NOT_QUANTISED, ROWS_N)],
            HrStep(n=rows),
        )
        return y

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
        return self._reference.moe(x, router, gate_up, down, active, normalise, activation)

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x if len(rows) == len(x) else x.index_select(0, rows)

    def logits(self, x: torch.Tensor, weight: Weight, softcap: float | None) -> torch.Tensor:
        y = self.linear(x, weight, None)
        if softcap is not None:
            self._run([emit.softcap(matrix(y), y.shape[1], softcap)], HrStep(r=len(y)))
        return y

    def _run(self, ops: list[Emitted], step: HrStep) -> None:
        self.team.run(emit.program(ops), len(ops), step)
