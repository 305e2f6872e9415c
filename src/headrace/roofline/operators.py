"""FLOPs and bytes of every operator of a step, from the architecture and the step's sums.

The list is that of `kernels.operators`, in the order in which the models call it; a test holds it
against the calls of real steps. Letters as there: N tokens, B entries, R sampled rows, D hidden,
H heads, G KV heads, E head size, V vocabulary, I intermediate; b bytes of an activation.
One multiply-add is two FLOPs. Bytes are the least that must move: each operand once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .collectives import collectives
from .composition import Attended, Composition
from .counts import Case, Count, linear, vector
from .encoder import encoder_attention, encoder_counts
from .experts import sparse_layers
from .formats import dtype_bytes, kv_token_bytes
from .latent import latent_attention, latent_layers

LAST = "/last"
"""Behind the labels of what is of the last layer, where that is of fewer rows."""


def count_step(case: Case, step: Composition) -> list[Count]:
    """Every operator of one step on one device, calls of equal cost counted together.

    With pipeline stages the list is the whole pipeline's: each device does 1 / pp of it.
    """
    own = _decoder(case, step) if case.arch.encoder is None else encoder_counts(case, step)
    return [*own, *collectives(case, step.tokens)]


def attention_counts(case: Case, step: Composition) -> Iterator[Count]:
    """What alone depends on how long the sequences are; all else goes by tokens and samples."""
    arch = case.arch
    if arch.encoder is not None:
        yield encoder_attention(case, step)
        return
    if arch.mla is not None:
        yield latent_attention(case, step)
        return
    for window, attended in step.attended.items():
        members = arch.windows.count(window) if arch.windows else arch.layers
        if not step.samples and window == arch.window(arch.layers - 1):
            members -= 1
        if members:
            yield attention(case, step, window, attended, members)


def _decoder(case: Case, step: Composition) -> Iterator[Count]:
    arch, tokens = case.arch, step.tokens
    yield embed(case, tokens)
    yield from _layers(case, step)
    if not step.samples:
        return
    yield linear(
        case, "head", "logits", arch.vocab_size, arch.hidden, step.samples, 1, 1, case.layout.tp,
        out_bytes=4,
    )  # fmt: skip
    yield Count(
        "sample", "greedy", 1, "vector", flops=step.samples * arch.vocab_size,
        read_bytes=step.samples * arch.vocab_size * 4,
    )  # fmt: skip


class Part(NamedTuple):
    """Calls of equal cost among those behind the attention of each layer."""

    rows: int
    calls: int
    mark: str
    """Behind the label."""


def behind_attention(step: Composition, layers: int) -> list[Part]:
    """`layers` calls for each token, but the last for the rows that sample alone.

    The models compute no more where nobody wants other hidden states; steps of embeddings and of
    prompt log-probabilities, which do, take up to a layer's time more than is counted.
    """
    if step.samples == step.tokens:
        return [Part(step.tokens, layers, "")]
    parts = [Part(step.tokens, layers - 1, ""), Part(step.samples, 1, LAST)]
    return [part for part in parts if part.rows and part.calls]


def _layers(case: Case, step: Composition) -> Iterator[Count]:
    arch, tokens, tp = case.arch, step.tokens, case.layout.tp
    layers = arch.layers
    parts = behind_attention(step, layers)
    yield rms_norm(case, "input", tokens, 1)
    for rows, calls, mark in parts:
        # The norm before the feed-forward, and the one before the next layer or the head.
        yield add_rms_norm(case, f"norms{mark}", rows, 2 * calls)
        if arch.post_norms:
            yield rms_norm(case, f"post{mark}", rows, 2 * calls)
    if arch.mla is not None:
        yield from latent_layers(case, step)
        mixed = arch.heads * arch.mla.v_dim
    else:
        width = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        yield linear(case, "qkv", "linear", width, arch.hidden, tokens, layers, layers, tp)
        yield rope_and_cache(case, tokens, layers)
        yield from attention_counts(case, step)
        mixed = arch.heads * arch.head_dim
    if step.samples < tokens and step.samples:
        yield select(case, "sampled", step.samples, arch.hidden)
        yield select(case, "sampled/attention", step.samples, mixed / tp)
    for rows, calls, mark in parts:
        yield linear(case, f"output{mark}", "linear", arch.hidden, mixed, rows, calls, layers, tp,
                     split="in")  # fmt: skip
    dense = layers if arch.moe is None else arch.moe.dense_layers
    if dense < layers:
        for part in behind_attention(step, layers - dense):
            yield from sparse_layers(case, part.rows, part.calls, layers - dense, part.mark)
        if dense:
            yield from _dense(case, Part(tokens, dense, ""), dense)
        return
    for part in parts:
        yield from _dense(case, part, dense)


def _dense(case: Case, part: Part, layers: int) -> Iterator[Count]:
    arch, tp = case.arch, case.layout.tp
    inner = arch.intermediate
    rows, calls, mark = part
    yield linear(case, f"gate_up{mark}", "linear", 2 * inner, arch.hidden, rows, calls, layers, tp)
    yield gated(case, rows, inner, calls, f"gated{mark}")
    yield linear(case, f"down{mark}", "linear", arch.hidden, inner, rows, calls, layers, tp,
                 split="in")  # fmt: skip


def embed(case: Case, tokens: int) -> Count:
    """N rows of the table are read (D · bits / 8 each) and N · D · b written; N · D FLOPs."""
    arch = case.arch
    size = arch.vocab_size * arch.hidden
    row = case.weights.of("embed", size, 1) / arch.vocab_size
    return Count(
        "embed", "embed", 1, "vector", flops=tokens * arch.hidden,
        weight_bytes=tokens * row, read_bytes=tokens * 8,
        write_bytes=tokens * arch.hidden * dtype_bytes(case.dtype),
    )  # fmt: skip


def rms_norm(case: Case, label: str, tokens: int, calls: int) -> Count:
    """4 FLOPs per number (square, sum, scale, weight); N · D read and written."""
    return vector(case, "rms_norm", label, calls, tokens * case.arch.hidden, 4, 1, 1)


def add_rms_norm(case: Case, label: str, tokens: int, calls: int) -> Count:
    """5 FLOPs per number; two arrays of N · D read, two written."""
    return vector(case, "add_rms_norm", label, calls, tokens * case.arch.hidden, 5, 2, 2)


def gated(case: Case, tokens: int, inner: int, calls: int, label: str) -> Count:
    """About 6 FLOPs per result (exponential counted as 4); 2 · N · I read, N · I written."""
    return vector(case, "gated", label, calls, tokens * inner / case.layout.tp, 6, 2, 1)


def select(case: Case, label: str, samples: int, width: float) -> Count:
    """R · width read and written."""
    return vector(case, "select", label, 1, samples * width, 0, 1, 1)


def rope_and_cache(case: Case, tokens: int, calls: int) -> Count:
    """6 FLOPs per rotated pair, 4 per number of a q/k norm; qkv read, q and the KV written.

    N · (H + 2G) · E · b read; N · H · E · b and N · `kv_token_bytes` written.
    """
    arch, tp = case.arch, case.layout.tp
    b = dtype_bytes(case.dtype)
    rotated = tokens * (arch.heads + arch.kv_heads) * arch.head_dim
    return Count(
        "rope_and_cache", "rope_and_cache", calls, "vector",
        flops=rotated * (3 + (4 if arch.qk_norm else 0)) / tp,
        read_bytes=tokens * (arch.heads + 2 * arch.kv_heads) * arch.head_dim * b / tp,
        write_bytes=tokens * arch.heads * arch.head_dim * b / tp,
        kv_bytes=tokens * kv_token_bytes(arch, case.kv_dtype) / min(tp, arch.kv_heads),
    )  # fmt: skip


def attention(
    case: Case, step: Composition, window: int | None, attended: Attended, calls: int
) -> Count:
    """4 · H · E FLOPs per (query, position) pair; the visible KV read once per entry.

    P = Σ over queries of the positions seen (`composition.visible_pairs`): 2 · H · E · P for q·k
    and as much for the weighted sum, 5 · H · P for the softmax. q is read, the result written.
    A kernel that reads the KV once per tile of queries reads more: that is its efficiency.
    """
    label = "attention" if window is None else f"attention/{window}"
    parts = tuple(_attention(case, label, *part, calls) for part in attended.parts(step))
    whole = _attention(case, label, attended, step.tokens, step.entries, calls)
    return replace(whole, parts=parts) if parts else whole


def _attention(
    case: Case, label: str, attended: Attended, tokens: int, entries: int, calls: int
) -> Count:
    arch, tp = case.arch, case.layout.tp
    b = dtype_bytes(case.dtype)
    size = tokens * arch.heads * arch.head_dim * b / tp
    token = kv_token_bytes(arch, case.kv_dtype) / min(tp, arch.kv_heads)
    return Count(
        "attention", label, calls, "attention",
        flops=attended.pairs * arch.heads * (4 * arch.head_dim + 5) / tp,
        kv_bytes=attended.kv_tokens * token, read_bytes=size, write_bytes=size, rows=tokens,
        depth=attended.kv_tokens / max(1, entries), entries=entries,
        pieces=entries * arch.kv_heads / min(tp, arch.kv_heads),
    )  # fmt: skip
