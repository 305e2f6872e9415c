"""FLOPs and bytes of every operator of a step, from the architecture and the step's sums.

The list is that of `kernels.operators`, in the order in which the models call it; a test holds it
against the calls of real steps. Letters as there: N tokens, B entries, R sampled rows, D hidden,
H heads, G KV heads, E head size, V vocabulary, I intermediate; b bytes of an activation.
One multiply-add is two FLOPs. Bytes are the least that must move: each operand once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..base.arch import ModelArch
from .composition import Attended, Composition
from .formats import dtype_bytes, kv_token_bytes
from .weights import WeightBytes


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread: `tp` ranks share every layer, `pp` stages share the layers."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Case:
    """What the counts depend on beside the step: model, number formats, layout."""

    arch: ModelArch
    weights: WeightBytes = field(default_factory=WeightBytes)
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    layout: Layout = Layout()


@dataclass(frozen=True, slots=True)
class Count:
    """One operator of a step, for one call on one device."""

    operator: str
    """The method of `kernels.operators.Operators`; "sample" and "all_reduce" come beside it."""
    label: str
    """What the call is for: qkv, gate_up, head …"""
    calls: int
    """Equal calls in the step."""
    kind: str
    """product, attention, vector or network: which efficiency applies."""
    flops: float
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    read_bytes: float = 0.0
    """Activations read."""
    write_bytes: float = 0.0
    rows: int = 0
    """Rows of a product: what tiles are cut from."""
    shape: tuple[int, int] | None = None
    """(out, in) of the weight, before it is shared among ranks."""

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def count_step(case: Case, step: Composition) -> list[Count]:
    """Every operator of one step on one device, calls of equal cost counted together.

    With pipeline stages the list is the whole pipeline's: each device does 1 / pp of it.
    """
    return list(_model(case, step))


def attention_counts(case: Case, step: Composition) -> Iterator[Count]:
    """What alone depends on how long the sequences are; all else goes by tokens and samples."""
    arch = case.arch
    if arch.mla is not None:
        yield latent_attention(case, step)
        return
    for window, attended in step.attended.items():
        members = arch.windows.count(window) if arch.windows else arch.layers
        yield attention(case, step.tokens, window, attended, members)


def _model(case: Case, step: Composition) -> Iterator[Count]:
    arch, tokens = case.arch, step.tokens
    b = dtype_bytes(case.dtype)
    yield embed(case, tokens)
    yield from _layers(case, step)
    yield select(case, step.samples)
    yield linear(
        case, "head", "logits", arch.vocab_size, arch.hidden, step.samples, 1, 1, out_bytes=4
    )
    yield Count(
        "sample", "greedy", 1, "vector", flops=step.samples * arch.vocab_size,
        read_bytes=step.samples * arch.vocab_size * 4,
    )  # fmt: skip
    if case.layout.tp > 1:
        yield Count(
            "all_reduce", "ranks", 2 * arch.layers, "network", flops=0,
            read_bytes=tokens * arch.hidden * b,
        )  # fmt: skip


def _layers(case: Case, step: Composition) -> Iterator[Count]:
    arch, tokens, tp = case.arch, step.tokens, case.layout.tp
    layers = arch.layers
    yield rms_norm(case, "input", tokens, 1)
    yield add_rms_norm(case, "norms", tokens, 2 * layers)
    if arch.post_norms:
        yield rms_norm(case, "post", tokens, 2 * layers)
    if arch.mla is not None:
        yield from _latent(case, step)
    else:
        width = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        yield linear(case, "qkv", "linear", width, arch.hidden, tokens, layers, layers, tp)
        yield rope_and_cache(case, tokens, layers)
        yield from attention_counts(case, step)
        queries = arch.heads * arch.head_dim
        yield linear(case, "output", "linear", arch.hidden, queries, tokens, layers, layers, tp)
    dense = layers if arch.moe is None else arch.moe.dense_layers
    if dense:
        yield from _dense(case, tokens, dense)
    if arch.moe is not None:
        yield from _sparse(case, tokens, layers - dense)


def _dense(case: Case, tokens: int, layers: int) -> Iterator[Count]:
    arch, tp = case.arch, case.layout.tp
    inner = arch.intermediate
    yield linear(case, "gate_up", "linear", 2 * inner, arch.hidden, tokens, layers, layers, tp)
    yield gated(case, tokens, inner, layers, "gated")
    yield linear(case, "down", "linear", arch.hidden, inner, tokens, layers, layers, tp)


def _sparse(case: Case, tokens: int, layers: int) -> Iterator[Count]:
    arch, tp = case.arch, case.layout.tp
    assert arch.moe is not None
    yield linear(case, "router", "linear", arch.moe.experts, arch.hidden, tokens, layers, layers)
    yield moe(case, tokens, layers)
    shared = arch.moe.shared_intermediate
    if shared:
        size = 3 * shared * arch.hidden
        weight = case.weights.of("shared", size, layers) / size
        for label, out, inner in (
            ("shared_gate_up", 2 * shared, arch.hidden),
            ("shared_down", arch.hidden, shared),
        ):
            yield linear(
                case, label, "linear", out, inner, tokens, layers, layers, tp,
                weight_bytes=out * inner * weight,
            )  # fmt: skip
        yield gated(case, tokens, shared, layers, "shared_gated")
        yield _vector(case, "add", "shared", layers, tokens * arch.hidden, 1, 2, 1)


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
    return _vector(case, "rms_norm", label, calls, tokens * case.arch.hidden, 4, 1, 1)


def add_rms_norm(case: Case, label: str, tokens: int, calls: int) -> Count:
    """5 FLOPs per number; two arrays of N · D read, two written."""
    return _vector(case, "add_rms_norm", label, calls, tokens * case.arch.hidden, 5, 2, 2)


def gated(case: Case, tokens: int, inner: int, calls: int, label: str) -> Count:
    """About 6 FLOPs per result (exponential counted as 4); 2 · N · I read, N · I written."""
    return _vector(case, "gated", label, calls, tokens * inner / case.layout.tp, 6, 2, 1)


def select(case: Case, samples: int) -> Count:
    """R · D read and written."""
    return _vector(case, "select", "sampled", 1, samples * case.arch.hidden, 0, 1, 1)


def linear(
    case: Case, role: str, operator: str, out: int, inner: int, rows: int, calls: int,
    layers: int, share: int = 1, *, out_bytes: int | None = None,
    weight_bytes: float | None = None,
) -> Count:  # fmt: skip
    """2 · N · in · out FLOPs; in · out · bits / 8 of weights, N · in · b read, N · out · b written.

    `share` ranks hold 1 / share of the weight each.
    """
    b = dtype_bytes(case.dtype)
    if weight_bytes is None:
        weight_bytes = case.weights.of(role, out * inner, layers)
    touched = weight_bytes if rows else 0.0
    return Count(
        operator, role, calls, "product", flops=2.0 * rows * inner * out / share,
        weight_bytes=touched / share, read_bytes=rows * inner * b,
        write_bytes=rows * out * (out_bytes or b) / share, rows=rows, shape=(out, inner),
    )  # fmt: skip


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


def attention(case: Case, tokens: int, window: int | None, attended: Attended, calls: int) -> Count:
    """4 · H · E FLOPs per (query, position) pair; the visible KV read once per entry.

    P = Σ over queries of the positions seen (`composition.visible_pairs`): 2 · H · E · P for q·k
    and as much for the weighted sum, 5 · H · P for the softmax. q is read, the result written.
    A kernel that reads the KV once per tile of queries reads more: that is its efficiency.
    """
    arch, tp = case.arch, case.layout.tp
    b = dtype_bytes(case.dtype)
    size = tokens * arch.heads * arch.head_dim * b / tp
    token = kv_token_bytes(arch, case.kv_dtype) / min(tp, arch.kv_heads)
    return Count(
        "attention", "attention" if window is None else f"attention/{window}", calls, "attention",
        flops=attended.pairs * arch.heads * (4 * arch.head_dim + 5) / tp,
        kv_bytes=attended.kv_tokens * token, read_bytes=size, write_bytes=size, rows=tokens,
    )  # fmt: skip


def moe(case: Case, tokens: int, calls: int) -> Count:
    """6 · N · k · D · I FLOPs for k active experts; the experts that are hit are read.

    Expected number of experts hit under even routing: X · (1 - (1 - k / X) ** N).
    """
    arch, tp = case.arch, case.layout.tp
    assert arch.moe is not None
    experts, active, inner = arch.moe.experts, arch.moe.active, arch.moe.intermediate
    hit = experts * (1 - (1 - active / experts) ** tokens)
    one = case.weights.of("experts", experts * 3 * arch.hidden * inner, calls) / experts
    b = dtype_bytes(case.dtype)
    return Count(
        "moe", "experts", calls, "product",
        flops=6.0 * tokens * active * arch.hidden * inner / tp, weight_bytes=hit * one / tp,
        read_bytes=tokens * (arch.hidden * b + experts * b), write_bytes=tokens * arch.hidden * b,
        rows=max(1, round(tokens * active / hit)) if tokens else 0,
    )  # fmt: skip


def latent_attention(case: Case, step: Composition) -> Count:
    """MLA (DeepSeek-V2): attention over the latent, or over unpacked heads.

    Absorbed (Wᵤₖ into the query, Wᵤᵥ into the result): per pair and head 2 · (r + p) for the score
    and 2 · r for the sum, with rank r and rotary size p. Unpacked: the latents of the visible
    tokens go through kv_b (2 · r · H · (n + v) each), then 2 · (n + p) + 2 · v per pair and head.
    The cheaper one of the step is counted.
    """
    arch, tokens, tp = case.arch, step.tokens, case.layout.tp
    mla = arch.mla
    assert mla is not None
    b = dtype_bytes(case.dtype)
    head = mla.nope_dim + mla.rope_dim
    out, inner = arch.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank
    pairs, cached = step.attended[None]
    scores = arch.heads * pairs
    absorbed = scores * (2 * (mla.kv_rank + mla.rope_dim) + 2 * mla.kv_rank)
    absorbed += 2 * tokens * out * inner
    unpacked = scores * (2 * head + 2 * mla.v_dim) + 2 * cached * out * inner
    return Count(
        "attention", "latent", arch.layers, "attention",
        flops=(min(absorbed, unpacked) + 5 * scores) / tp,
        weight_bytes=out * inner * _latent_bytes(case) / tp,
        kv_bytes=(cached + tokens) * kv_token_bytes(arch, case.kv_dtype),
        read_bytes=tokens * arch.heads * head * b / tp,
        write_bytes=tokens * arch.heads * mla.v_dim * b / tp, rows=tokens,
    )  # fmt: skip


def _latent(case: Case, step: Composition) -> Iterator[Count]:
    """The projections of MLA around `latent_attention`."""
    arch, tokens, tp, layers = case.arch, step.tokens, case.layout.tp, case.arch.layers
    mla = arch.mla
    assert mla is not None
    each = _latent_bytes(case)
    for label, out, inner, share in _latent_shapes(case):
        yield linear(
            case, label, "linear", out, inner, tokens, layers, layers, share,
            weight_bytes=out * inner * each,
        )  # fmt: skip
    yield latent_attention(case, step)
    yield linear(
        case, "output", "linear", arch.hidden, arch.heads * mla.v_dim, tokens, layers, layers, tp
    )


def _latent_shapes(case: Case) -> list[tuple[str, int, int, int]]:
    """(label, out, in, ranks that share it) of the projections before the attention."""
    arch, tp = case.arch, case.layout.tp
    mla = arch.mla
    assert mla is not None
    queries = arch.heads * (mla.nope_dim + mla.rope_dim)
    shapes = [("kv_a", mla.kv_rank + mla.rope_dim, arch.hidden, 1)]
    if mla.q_rank is None:
        return [*shapes, ("q", queries, arch.hidden, tp)]
    return [*shapes, ("q_a", mla.q_rank, arch.hidden, 1), ("q_b", queries, mla.q_rank, tp)]


def _latent_bytes(case: Case) -> float:
    """Bytes per weight of one layer's projections, kv_b included."""
    arch = case.arch
    mla = arch.mla
    assert mla is not None
    total = arch.heads * (mla.nope_dim + mla.v_dim) * mla.kv_rank
    total += sum(out * inner for _, out, inner, _ in _latent_shapes(case))
    return case.weights.of("qkv", total, arch.layers) / total


def _vector(
    case: Case, operator: str, label: str, calls: int, size: float, flops: int, reads: int,
    writes: int,
) -> Count:  # fmt: skip
    b = dtype_bytes(case.dtype)
    return Count(
        operator, label, calls, "vector", flops=size * flops, read_bytes=size * reads * b,
        write_bytes=size * writes * b,
    )  # fmt: skip
