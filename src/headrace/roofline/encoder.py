"""The operators of an encoder (BERT) on a step of whole inputs."""

from __future__ import annotations

from collections.abc import Iterator

from .composition import Composition
from .counts import Case, Count, linear, vector
from .formats import dtype_bytes


def encoder_counts(case: Case, step: Composition) -> Iterator[Count]:
    """Three tables, then per layer: qkv, attention, output, norm, up, activation, down, norm."""
    arch, tokens, tp, layers = case.arch, step.tokens, case.layout.tp, case.arch.layers
    encoder = arch.encoder
    assert encoder is not None
    hidden, inner = arch.hidden, arch.intermediate
    size = tokens * hidden
    tables = arch.vocab_size + arch.max_context + encoder.types
    row = case.weights.of("embed", tables * hidden, 1) / tables
    yield Count(
        "embed", "tables", 3, "vector", flops=size, weight_bytes=tokens * row,
        read_bytes=tokens * 8, write_bytes=size * dtype_bytes(case.dtype),
    )  # fmt: skip
    yield vector(case, "add", "sums", 2 + 2 * layers, size, 1, 2, 1)
    yield vector(case, "layer_norm", "norms", 1 + 2 * layers, size, 8, 1, 1)
    yield linear(case, "qkv", "linear", 3 * hidden, hidden, tokens, layers, layers, tp)
    yield encoder_attention(case, step)
    yield linear(case, "output", "linear", hidden, hidden, tokens, layers, layers, tp, split="in")
    yield linear(case, "up", "linear", inner, hidden, tokens, layers, layers, tp)
    yield vector(case, "activate", "inner", layers, tokens * inner / tp, 8, 1, 1)
    yield linear(case, "down", "linear", hidden, inner, tokens, layers, layers, tp, split="in")
    if encoder.labels:
        yield from _head(case, step.samples, encoder.labels)
    else:
        yield vector(case, "pool", "inputs", 1, size, 1, 1, 0)


def encoder_attention(case: Case, step: Composition) -> Count:
    """4 · H · E FLOPs for each of n² pairs of an input of n tokens, 5 · H for the softmax.

    `Composition` counts causal pairs, n · (n + 1) / 2 each: all pairs are twice that less n.
    q, k and v come from this step's projection; nothing is cached.
    """
    arch, tokens, tp = case.arch, step.tokens, case.layout.tp
    pairs = 2 * step.attended[None].pairs - tokens
    size = tokens * arch.heads * arch.head_dim * dtype_bytes(case.dtype) / tp
    return Count(
        "encoder_attention", "attention", arch.layers, "attention",
        flops=pairs * arch.heads * (4 * arch.head_dim + 5) / tp, read_bytes=3 * size,
        write_bytes=size, rows=tokens, depth=tokens / max(1, step.entries), entries=step.entries,
        pieces=step.entries * arch.heads / tp,
    )  # fmt: skip


def _head(case: Case, rows: int, labels: int) -> Iterator[Count]:
    """Pooled first token, tanh, classifier: one row per input that is scored."""
    hidden = case.arch.hidden
    each = case.weights.of("head", (hidden + labels) * hidden, 1) / ((hidden + labels) * hidden)
    yield vector(case, "select", "first", 1, rows * hidden, 0, 1, 1)
    yield linear(
        case, "pooler", "linear", hidden, hidden, rows, 1, 1, weight_bytes=hidden * hidden * each
    )
    yield vector(case, "activate", "pooled", 1, rows * hidden, 8, 1, 1)
    yield linear(
        case, "head", "linear", labels, hidden, rows, 1, 1, weight_bytes=labels * hidden * each
    )
