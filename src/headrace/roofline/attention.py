"""Work of attention: over K and V, over latents, and bidirectional over whole inputs."""

from __future__ import annotations

from ..base.graph import AttentionSpec, LatentSpec
from .composition import Attended, Composition
from .counts import Case, Count
from .formats import dtype_bytes, kv_token_bytes


def attention(case: Case, step: Composition, spec: AttentionSpec, calls: int) -> Count:
    """Count 4 · H · E FLOPs per (query, position) pair; the visible KV is read once per entry.

    P = Σ over queries of the positions seen (`composition.visible_pairs`): 2 · H · E · P for q·k
    and as much for the weighted sum, 5 · H · P for the softmax. q is read, the result written. A
    kernel that reads the KV once per tile of queries reads more; its efficiency accounts for that.
    """
    attended = step.across if spec.across else step.attended[spec.window]
    parts = tuple(_attention(case, spec, *part, calls) for part in attended.parts(step))
    return _attention(case, spec, attended, step.tokens, step.entries, calls, parts)


def _attention(
    case: Case,
    spec: AttentionSpec,
    attended: Attended,
    tokens: int,
    entries: int,
    calls: int,
    parts: tuple[Count, ...] = (),
) -> Count:
    size = tokens * spec.queries * dtype_bytes(case.dtype)
    token = kv_token_bytes(spec, case.kv_dtype)
    seen = "across" if spec.across else spec.window
    return Count(
        "attend",
        "attention" if seen is None else f"attention/{seen}",
        calls,
        "attention",
        flops=attended.pairs * spec.heads * (4 * spec.size + 5),
        kv_bytes=attended.kv_tokens * token,
        read_bytes=size,
        write_bytes=size,
        rows=tokens,
        depth=attended.kv_tokens / max(1, entries),
        entries=entries,
        pieces=entries * spec.kv_heads,
        parts=parts,
    )


def latent_attention(
    case: Case, spec: LatentSpec, step: Composition, calls: int, numbers: int, weight_bytes: float
) -> Count:
    """Count attention over the latent, or over unpacked heads.

    Absorbed (Wᵤₖ into the query, Wᵤᵥ into the result): per pair and head 2 · (r + p) for the score
    and 2 · r for the sum, with rank r and rotary size p. Unpacked: the latents of the visible
    tokens go through kv_b (2 · r · H · (n + v) each), then 2 · (n + p) + 2 · v per pair and head.
    The cheaper one of the step is counted. Every rank keeps the whole latent: tp does not share it.
    `weight_bytes` and `numbers`: bytes and weights of a layer's products of this role.
    """
    attended = step.attended[None]
    each = weight_bytes / numbers
    parts = tuple(_latent(case, spec, *part, calls, each) for part in attended.parts(step))
    return _latent(case, spec, attended, step.tokens, step.entries, calls, each, parts)


def _latent(
    case: Case,
    spec: LatentSpec,
    attended: Attended,
    tokens: int,
    entries: int,
    calls: int,
    each: float,
    parts: tuple[Count, ...] = (),
) -> Count:
    heads, b = spec.heads, dtype_bytes(case.dtype)
    head = spec.plain_size + spec.rope_size
    out, inner = heads * (spec.plain_size + spec.value_size), spec.rank
    pairs, cached = attended.pairs, attended.kv_tokens
    scores = heads * pairs
    absorbed = scores * (2 * (spec.rank + spec.rope_size) + 2 * spec.rank)
    absorbed += 2 * tokens * out * inner
    unpacked = scores * (2 * head + 2 * spec.value_size) + 2 * cached * out * inner
    return Count(
        "attend",
        "latent",
        calls,
        "attention",
        flops=min(absorbed, unpacked) + 5 * scores,
        weight_bytes=out * inner * each,
        kv_bytes=(cached + tokens) * kv_token_bytes(spec, case.kv_dtype),
        read_bytes=tokens * heads * head * b,
        write_bytes=tokens * heads * spec.value_size * b,
        rows=tokens,
        depth=cached / max(1, entries),
        entries=entries,
        pieces=entries * heads,
        parts=parts,
    )


def bidirectional_attention(
    case: Case, spec: AttentionSpec, step: Composition, calls: int, rows: int
) -> Count:
    """Count 4 · H · E FLOPs for each of n² pairs of an input of n tokens, 5 · H for the softmax.
    `rows`: those of all inputs at the layer's size of a picture, else the step's tokens.

    `Composition` counts causal pairs, n · (n + 1) / 2 each: all pairs are twice that less n. q, k
    and v come from this step's projection; nothing is cached. With windows of w tokens, n · w pairs
    at most.
    """
    tokens = rows
    pairs = (2 * step.attended[None].pairs - step.tokens) * rows**2 // max(1, step.tokens) ** 2
    if spec.across and case.arch.denoiser is not None:
        pairs = tokens * case.arch.denoiser.texts
    if spec.window is not None:
        pairs = min(pairs, tokens * spec.window)
    size = tokens * spec.queries * dtype_bytes(case.dtype)
    return Count(
        "attend",
        "attention",
        calls,
        "attention",
        flops=pairs * spec.heads * (4 * spec.size + 5),
        read_bytes=3 * size,
        write_bytes=size,
        rows=tokens,
        depth=tokens / max(1, step.entries),
        entries=step.entries,
        pieces=step.entries * spec.heads,
    )
