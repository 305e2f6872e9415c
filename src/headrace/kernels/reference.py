"""Every operator in plain PyTorch: the specification, the oracle of the other backends, and the
fallback.

It computes in the dtype of its inputs, with norms, softmax and rotation in fp32. Quantised weights
are expanded when they are loaded. In fp32 on the CPU its rows are invariant. The matrix library
changes its order of summation for few rows, so small products are padded (`reference_product`). On
Intel's processors the library's strict order is enabled. `tests/kernels/test_row_invariance.py`
checks this on torch 2.13 with MKL. On other processors, libraries and types it is as invariant as
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..base.graph import AttentionSpec, Role, RouteSpec
from . import latent, reference_attention, reference_states, sampling
from .arrays import tensor
from .operators import Dequantise, KvCache, KvLayer, StepBatch, StepLimits
from .prepared import RopeTable
from .reference_encoder import encoder_attention
from .reference_product import product
from .weights import BlockWeight, DenseWeight, Fp8Weight, PackedWeight, StackedWeight, Weight

if TYPE_CHECKING:
    from .attention_plan import Planner
    from .fuse import Joining
    from .program import CallByCall, Program
    from .ranks import ExpertShare


class ReferenceOperators:
    """See `Operators` for the meaning and the shapes of each method."""

    name = "ref"
    host = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.drawing = sampling.REFERENCE

    @property
    def joined(self) -> Joining | None:
        return None

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        """Convert every weight to one dense matrix in the model's dtype."""
        return DenseWeight(self._dense(weight, dequantise))

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        return None

    def compile_kernels(self, plain: CallByCall, limits: StepLimits) -> None:
        """Do nothing: there are none to compile."""

    def planner(self, cache: KvCache, drafts: int = 0) -> Planner | None:
        return None

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        return 0

    def embed(self, tokens: torch.Tensor, weight: Weight, scale: float) -> torch.Tensor:
        rows = functional.embedding(tokens, _data(weight))
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if offset:
            return (normed * (weight.float() + offset)).to(x.dtype)
        return normed.to(x.dtype) * weight

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add(x, residual)
        return self.rms_norm(total, weight, eps, offset), total

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return residual + (x if factor == 1.0 else x * factor)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        y = product(x, _data(weight))
        # Added separately: a fused bias changes the order of summation for some row counts.
        return y if bias is None else y + bias

    def write(
        self,
        qkv: torch.Tensor,
        spec: AttentionSpec,
        norms: Sequence[torch.Tensor],
        rope: RopeTable | None,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
    ) -> torch.Tensor:
        parts = [spec.heads] + [spec.kv_heads] * spec.kept
        turned = list(torch.split(qkv.view(len(qkv), -1, spec.size), parts, 1))
        v = turned.pop() if len(turned) == 3 else None
        if spec.values == "keys":
            v = turned[1]
        if v is not None and spec.values != "own":
            v = self.rms_norm(v, torch.ones_like(v[0, 0]), spec.eps, 0.0)
        for at, gain in enumerate(norms):
            heads = turned[at].flatten(1) if spec.whole_norm else turned[at]
            normed = self.rms_norm(heads, gain, spec.eps, spec.norm_offset)
            turned[at] = normed.view(turned[at].shape)
        if kv is not None and kv.bias is not None:
            turned[1] = turned[1] - torch.from_numpy(kv.bias.values).to(qkv.dtype)
        if rope is not None:
            cos, sin = (_of_tokens(table, spec, batch) for table in (rope.cos, rope.sin))
            pairs = spec.rope is not None and spec.rope.interleaved
            rotate = _rotate_pairs if pairs else _rotate
            turned = [rotate(each, cos, sin) for each in turned]
        if spec.behind:
            one = torch.ones_like(turned[0][0, 0])
            turned = [self.rms_norm(each, one, spec.eps, 0.0) for each in turned]
        if spec.growth is not None:
            growth, every, first = spec.growth
            steps = torch.log1p((batch.positions + first).div(every, rounding_mode="floor").float())
            turned[0] = turned[0] * (steps * growth + 1).to(qkv.dtype)[:, None, None]
        if kv is None:
            assert v is not None, "attention to both sides has V of its own"
            return torch.cat([*turned, v], 1).flatten(1)
        if spec.kept:
            reference_attention.store(kv, turned[1], v, batch.groups[group].slots)
        return turned[0].flatten(1)

    def attend(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if kv is None:
            bounds = batch.windows if spec.windowed else batch.query_starts
            assert bounds is not None, "the step has no windows"
            return encoder_attention(q, spec.heads, bounds.tolist(), spec.scale)
        heads = q.view(len(q), spec.heads, spec.size)
        shape = spec.scale, spec.softcap, sinks
        given = heads, kv, batch, group, *shape
        return reference_attention.attention(*given, chunked=spec.chunked)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        if activation == "clamped":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return gate / (torch.exp(gate * -1.702) + 1) * (up + 1)
        return _ACTIVATIONS[activation](gate).mul_(up)

    def multiply(self, x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
        if activation == "sigmoid":
            return x / (torch.exp_(-gate.contiguous()) + 1)
        return self.activate(gate, activation).mul_(x)

    absorb, unpack = latent.absorb, latent.unpack
    short_conv = staticmethod(reference_states.short_conv)
    recur = staticmethod(reference_states.recur)

    def route(
        self,
        logits: torch.Tensor,
        spec: RouteSpec,
        bias: torch.Tensor | None,
        gains: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wish = logits.float()
        if spec.scores == "sigmoid":
            # As in `_silu`: torch.sigmoid rounds the last elements of a thread's share differently.
            scores = wish = 1 / (torch.exp(-wish) + 1)
        elif spec.scores == "sqrt_softplus":
            # Composed: functional.softplus rounds the last elements of a thread's share
            # differently.
            small = torch.log1p(torch.exp(-wish.abs()))
            scores = wish = wish.clamp(min=0).add_(small).sqrt_()
        else:
            scores = torch.softmax(wish, -1)
        if bias is not None:
            wish = scores + bias.float()
        if spec.groups > 1:
            grouped = wish.view(len(wish), spec.groups, -1)
            best = grouped.topk(min(spec.best, grouped.shape[-1]), -1).values.sum(-1)
            order = best.sort(dim=-1, descending=True, stable=True).indices
            shut = order[:, spec.active_groups :].unsqueeze(-1).expand(-1, -1, grouped.shape[-1])
            wish = grouped.scatter(1, shut, -math.inf).flatten(1)
        chosen = wish.sort(dim=-1, descending=True, stable=True).indices[:, : spec.active]
        shares = scores.gather(-1, chosen)
        if spec.normalise:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        if gains is not None:
            shares = shares * gains.float()[chosen]
        return chosen, shares * spec.scale

    def experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        gate_up: list[Weight],
        down: list[Weight],
        activation: str,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        inside: bool = False,
        share: ExpertShare | None = None,
    ) -> torch.Tensor:
        shares = shares.to(x.dtype)
        count, width = len(down), down[0].shape[0]
        out = x.new_zeros(len(x), width)
        of_up, of_down = (bias.view(count, -1) for bias in biases) if biases else (None, None)
        # Experts in ascending order, so that a token's sum has the same order in any batch.
        for expert in torch.unique(chosen).tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part, factor = x.new_empty(len(token), 0), shares[token, place].unsqueeze(-1)
            if share is None or share.owns(expert, len(token)):
                bias = None if of_up is None else of_up[expert]
                rows = x[token] * factor if inside else x[token]
                inner = self.gated(self.linear(rows, gate_up[expert], bias), activation)
                inner = inner if share is None else share.gathered(inner)
                bias = None if of_down is None else of_down[expert]
                part = self.linear(inner, down[expert], bias)
            part = part if share is None else share.result(expert, part, width)
            out[token] += part if inside else part * factor
        return out

    def scatter(self, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x[places] = rows.to(x)
        return x

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x if len(rows) == len(x) else x[rows]

    def logits(self, x: torch.Tensor, weight: Weight, softcap: float | None) -> torch.Tensor:
        out = product(x, _data(weight)).float()
        return out if softcap is None else torch.tanh_(out.div_(softcap)) * softcap

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        # One row after the other, each in the same order: invariant, unlike torch's products.
        shift = None if bias is None else bias.float()
        normed = functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), shift, eps)
        return normed.to(x.dtype)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return torch.tanh(x) if activation == "tanh" else _ACTIVATIONS[activation](x)

    def _dense(self, weight: Weight, dequantise: Dequantise) -> torch.Tensor:
        if isinstance(weight, DenseWeight):
            return tensor(weight.data).to(self.dtype).contiguous()
        if isinstance(weight, BlockWeight):
            return tensor(dequantise(weight, self.dtype).data)
        if isinstance(weight, PackedWeight):
            return unpack_rows(weight).to(self.dtype)
        if isinstance(weight, Fp8Weight):
            return weight.values().to(self.dtype)
        assert isinstance(weight, StackedWeight)
        return torch.cat([self._dense(part, dequantise) for part in weight.parts])


# Made of exp and tanh, which give an element the same bits at any place. torch's own silu treats
# the last elements of a thread's share apart, and the shares move with the number of rows.


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (torch.exp_(-x.contiguous()) + 1)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = torch.addcmul(x, x.square() * 0.044715, x).mul_(math.sqrt(2 / math.pi))
    return (torch.tanh_(inner) + 1).mul_(x).mul_(0.5)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x.contiguous())


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square_()


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu2": _relu2,
    "relu": functional.relu,
    "identity": _identity,
}


def _data(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight), "the reference was handed a weight it did not prepare"
    return tensor(weight.data)


def _of_tokens(table: torch.Tensor, spec: AttentionSpec, batch: StepBatch) -> torch.Tensor:
    """Return the entries of a rope's table for each token's pairs, [N, 1, pairs]."""
    if spec.rope is None or not spec.rope.axes or batch.turns is None:
        return table[batch.positions].unsqueeze(1)
    axes = torch.tensor(spec.rope.axes, device=table.device)
    pairs = torch.arange(len(axes), device=table.device)
    return table[batch.turns[axes].T, pairs].unsqueeze(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 · angles numbers of each head of x [N, heads, E] by each token's angles.
    Pairs are (i, i + half)."""
    half = cos.shape[-1]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = [low * cos - high * sin, high * cos + low * sin]
    return torch.cat([*turned, x[..., 2 * half :].float()], -1).to(x.dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as `_rotate` does, with pairs (2i, 2i + 1)."""
    both = 2 * cos.shape[-1]
    low, high = x[..., :both:2].float(), x[..., 1:both:2].float()
    turned = torch.stack([low * cos - high * sin, high * cos + low * sin], -1).flatten(-2)
    return torch.cat([turned, x[..., both:].float()], -1).to(x.dtype)


def unpack_rows(weight: PackedWeight) -> torch.Tensor:
    """Return the values of a packed weight in the plain layout, in fp32."""
    assert weight.layout == "rows", f"layout {weight.layout} belongs to its kernel"
    rows, width = weight.shape
    codes = weight.codes.view(rows, width // weight.group, weight.group).float()
    values: torch.Tensor = codes * weight.scales.float().unsqueeze(-1)
    if weight.offsets is not None:
        values += weight.offsets.float().unsqueeze(-1)
    values = values.view(rows, width)
    return values if weight.order is None else values[:, weight.order.long().argsort()]
