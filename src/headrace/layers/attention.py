"""Attention of decoders: grouped queries over K and V, and over one latent per token."""

from __future__ import annotations

from ..base.arch import Chunks, Mla
from ..base.graph import AttentionSpec, LatentSpec, Value, WeightRef
from .description import Description, matrix, vector


def attention(to: Description, layer: int, x: Value, at: str, beside: Value | None = None) -> Value:
    """Describe grouped-query attention (Ainslie et al. 2023) with rotary positions:
    `{at}.{q,k,v,o}_proj`, see `attended`."""
    return output(to, attended(to, layer, x, at, beside), at)


def output(to: Description, mixed: Value, at: str) -> Value:
    arch = to.arch
    bias = arch.output_bias
    return to.linear(mixed, f"{at}.o_proj", outputs=arch.hidden, bias=bias, purpose="output")


def attended(to: Description, layer: int, x: Value, at: str, beside: Value | None = None) -> Value:
    """Describe attention up to its output product, with biases and norms on the heads if the
    architecture has them. `beside`: a second input (EAGLE-3), by which the matrices
    `{at}.{q,k,v}_proj.tokens` multiply."""
    arch = to.arch
    window = arch.window(layer)
    local = arch.local_rope if window is not None else None
    spec = AttentionSpec(
        layer,
        arch.heads,
        arch.kv_heads,
        arch.head_dim,
        arch.scale,
        None if arch.nope and arch.nope[layer] else local or arch.rope,
        window,
        arch.caps.scores,
        arch.norm_eps,
        arch.norm_offset,
        whole_norm=arch.whole_qk_norm,
    )
    if arch.chunks is not None:
        spec = _chunked(spec, arch.chunks)
    if arch.growth is not None:
        spec = spec._replace(growth=(*arch.growth, 0))
    keys = spec.kv_heads * spec.size
    names, outputs = [f"{at}.{part}_proj" for part in ("q", "k", "v")], [spec.queries, keys, keys]
    if "qkv" in arch.fused:
        names, outputs = [f"{at}.qkv_proj"], [spec.stacked]
    qkv = to.linear(x, *names, outputs=outputs, bias=arch.qkv_bias, purpose="qkv")
    if beside is not None:
        further = [f"{name}.tokens" for name in names]
        qkv = to.add(qkv, to.linear(beside, *further, outputs=outputs))
    norms: list[WeightRef] = []
    if arch.qk_norm:
        sizes = (spec.queries, keys) if spec.whole_norm else (spec.size, spec.size)
        norms = [
            vector([f"{at}.{part}_norm.weight"], [n]) for part, n in zip("qk", sizes, strict=True)
        ]
    q = to.node("write", (qkv,), spec.queries, norms, spec)
    sinks = [vector([f"{at}.sinks"], [arch.heads])] if arch.sinks else []
    return to.node("attend", (q,), spec.queries, sinks, spec)


def _chunked(spec: AttentionSpec, chunks: Chunks) -> AttentionSpec:
    """Set Llama 4's attention: chunks in layers with positions, scaled queries in those without."""
    if spec.rope is None:
        grown = (chunks.growth, chunks.every, 1) if chunks.growth else None
        return spec._replace(growth=grown)
    return spec._replace(chunked=spec.window is not None, behind=chunks.normed)


def latent_attention(to: Description, layer: int, x: Value, at: str, mla: Mla) -> Value:
    """Describe multi-head latent attention (DeepSeek-V2, section 2.1). Queries may have their own
    latent. Only one latent and one rotated key part per token are cached.

    Two matrices unpack a head's keys and values. `k_b_proj` [rank, plain part of q and k] maps q
    into the latent space; `v_b_proj` [values, rank] maps latents to values.
    """
    arch = to.arch
    spec = LatentSpec(
        layer, arch.heads, mla.kv_rank, mla.rope_dim, mla.nope_dim, mla.v_dim, arch.scale, arch.rope
    )
    if mla.q_rank is None:
        q = to.linear(x, f"{at}.q_proj", outputs=spec.queries, purpose="qkv")
    else:
        inner = to.linear(x, f"{at}.q_a_proj", outputs=mla.q_rank, purpose="qkv")
        inner = to.rms_norm(inner, f"{at}.q_a_layernorm")
        q = to.linear(inner, f"{at}.q_b_proj", outputs=spec.queries, purpose="qkv")
    width = mla.kv_rank + mla.rope_dim
    both = to.linear(x, f"{at}.kv_a_proj_with_mqa", outputs=width, purpose="qkv")
    latent = to.rms_norm(to.part(both, 0, mla.kv_rank), f"{at}.kv_a_layernorm")
    rotated = to.part(both, mla.kv_rank, mla.rope_dim)
    q = to.node("write", (q, latent, rotated), spec.queries, spec=spec)
    unpacking = [
        matrix([f"{at}.k_b_proj.*"], [mla.kv_rank], mla.nope_dim, "heads", arch.heads, "qkv"),
        matrix([f"{at}.v_b_proj.*"], [mla.v_dim], mla.kv_rank, "heads", arch.heads, "qkv"),
    ]
    mixed = to.node("attend", (q,), arch.heads * mla.v_dim, unpacking, spec)
    return to.linear(mixed, f"{at}.o_proj", outputs=arch.hidden, purpose="output")
