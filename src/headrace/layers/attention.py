"""Grouped-query attention (Ainslie et al. 2023) with rotary positions over the paged KV."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import KvCache, Operators, StepBatch
from .build import Builder
from .codes import Activations, Stream, product, product_onto


class Attention:
    """`{prefix}{q,k,v,o}_proj`, with biases and per-head norms where the architecture has them."""

    def __init__(self, build: Builder, layer: int, prefix: str) -> None:
        arch = build.arch
        self.layer = layer
        self.heads, self.kv_heads = arch.heads, arch.kv_heads
        self.scale, self.softcap = arch.scale, arch.attention_softcap
        self.eps, self.norm_offset = arch.norm_eps, arch.norm_offset
        local = arch.local_rope is not None and arch.window(layer) is not None
        self.rope = build.rope(arch.local_rope if local and arch.local_rope else arch.rope)
        query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        names = [f"{prefix}{part}_proj" for part in ("q", "k", "v")]
        self.qkv = build.matrix(
            *(f"{name}.weight" for name in names),
            rows=[query, key, key],
            width=arch.hidden,
            role="linear",
        )
        self.qkv_bias = (
            build.vector(*(f"{name}.bias" for name in names), sizes=[query, key, key])
            if arch.qkv_bias
            else None
        )
        self.q_norm = self.k_norm = None
        if arch.qk_norm:
            self.q_norm = build.vector(f"{prefix}q_norm.weight", sizes=[arch.head_dim])
            self.k_norm = build.vector(f"{prefix}k_norm.weight", sizes=[arch.head_dim])
        self.out = build.matrix(
            f"{prefix}o_proj.weight", rows=[arch.hidden], width=query, role="linear"
        )
        self.out_bias = (
            build.vector(f"{prefix}o_proj.bias", sizes=[arch.hidden]) if arch.output_bias else None
        )

    def write(self, ops: Operators, x: Activations, batch: StepBatch, cache: KvCache) -> Array:
        """x [N, D] → queries [N, H, E]; writes the KV of the step's tokens."""
        kv, group = cache.layers[self.layer], cache.groups[self.layer]
        return ops.rope_and_cache(
            product(ops, x, self.qkv, self.qkv_bias),
            self.heads,
            self.kv_heads,
            self.q_norm,
            self.k_norm,
            self.eps,
            self.norm_offset,
            self.rope,
            kv,
            batch,
            group,
        )

    def mix(
        self,
        ops: Operators,
        q: Array,
        batch: StepBatch,
        cache: KvCache,
        rows: Array | None,
        residual: Array | None = None,
    ) -> Stream:
        """What `write` gave → ([N, D], residual), or their sum; [R, D] of the tokens `rows` [R],
        where only theirs are wanted."""
        kv, group = cache.layers[self.layer], cache.groups[self.layer]
        mixed = ops.attention(q, kv, batch, group, self.scale, self.softcap)
        if rows is not None:
            mixed = ops.select(mixed, rows)
        return product_onto(ops, mixed, self.out, self.out_bias, residual)
