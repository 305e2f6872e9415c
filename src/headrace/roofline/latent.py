"""MLA (DeepSeek-V2, section 2.1): attention whose cache is one latent per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .composition import Attended, Composition
from .counts import Case, Count, linear
from .formats import dtype_bytes, kv_token_bytes


def latent_layers(case: Case, step: Composition) -> Iterator[Count]:
    """All layers' projections before `latent_attention`, and that."""
    arch, tokens, layers = case.arch, step.tokens, case.arch.layers
    mla = arch.mla
    assert mla is not None
    each = _bytes_each(case)
    for label, out, inner, share in _shapes(case):
        yield linear(
            case, label, "linear", out, inner, tokens, layers, layers, share,
            weight_bytes=out * inner * each,
        )  # fmt: skip
    yield latent_attention(case, step)


def latent_attention(case: Case, step: Composition) -> Count:
    """Attention over the latent, or over unpacked heads.

    Absorbed (Wᵤₖ into the query, Wᵤᵥ into the result): per pair and head 2 · (r + p) for the score
    and 2 · r for the sum, with rank r and rotary size p. Unpacked: the latents of the visible
    tokens go through kv_b (2 · r · H · (n + v) each), then 2 · (n + p) + 2 · v per pair and head.
    The cheaper one of the step is counted. Every rank keeps the whole latent: tp does not share it.
    """
    attended = step.attended[None]
    parts = tuple(_latent(case, step, *part) for part in attended.parts(step))
    whole = _latent(case, step, attended, step.tokens, step.entries)
    return replace(whole, parts=parts) if parts else whole


def _latent(case: Case, step: Composition, attended: Attended, tokens: int, entries: int) -> Count:
    arch, tp = case.arch, case.layout.tp
    mla = arch.mla
    assert mla is not None
    b = dtype_bytes(case.dtype)
    head = mla.nope_dim + mla.rope_dim
    out, inner = arch.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank
    pairs, cached = attended.pairs, attended.kv_tokens
    scores = arch.heads * pairs
    absorbed = scores * (2 * (mla.kv_rank + mla.rope_dim) + 2 * mla.kv_rank)
    absorbed += 2 * tokens * out * inner
    unpacked = scores * (2 * head + 2 * mla.v_dim) + 2 * cached * out * inner
    return Count(
        "attention", "latent", arch.layers - (not step.samples), "attention",
        flops=(min(absorbed, unpacked) + 5 * scores) / tp,
        weight_bytes=out * inner * _bytes_each(case) / tp,
        kv_bytes=(cached + tokens) * kv_token_bytes(arch, case.kv_dtype),
        read_bytes=tokens * arch.heads * head * b / tp,
        write_bytes=tokens * arch.heads * mla.v_dim * b / tp, rows=tokens,
        depth=cached / max(1, entries), entries=entries,
        pieces=entries * arch.heads / tp,
    )  # fmt: skip


def _shapes(case: Case) -> list[tuple[str, int, int, int]]:
    """(label, out, in, ranks that share it) of the projections before the attention."""
    arch, tp = case.arch, case.layout.tp
    mla = arch.mla
    assert mla is not None
    queries = arch.heads * (mla.nope_dim + mla.rope_dim)
    shapes = [("kv_a", mla.kv_rank + mla.rope_dim, arch.hidden, 1)]
    if mla.q_rank is None:
        return [*shapes, ("q", queries, arch.hidden, tp)]
    return [*shapes, ("q_a", mla.q_rank, arch.hidden, 1), ("q_b", queries, mla.q_rank, tp)]


def _bytes_each(case: Case) -> float:
    """Bytes per weight of one layer's projections, kv_b included."""
    arch = case.arch
    mla = arch.mla
    assert mla is not None
    total = arch.heads * (mla.nope_dim + mla.v_dim) * mla.kv_rank
    total += sum(out * inner for _, out, inner, _ in _shapes(case))
    return case.weights.of("qkv", total, arch.layers) / total
