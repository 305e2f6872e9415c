"""Every kernel on real shapes: is it right (against the reference, on the device), and how near
is it to the ceiling that was measured in the same run?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpu_models import BLOCK, Step, across, attend, decode, make_batch, mixture, prefill

from headrace.base.graph import AttentionSpec
from headrace.kernels import reference_attention, sampling
from headrace.kernels.cuda_graphs import CudaGraphMaker
from headrace.kernels.fuse import Norm
from headrace.kernels.operators import KvLayer
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators, unpack_rows
from headrace.kernels.triton import sampling as triton_sampling
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.packed import tile_weight
from headrace.kernels.triton.product_fp8 import quantise_weight
from headrace.kernels.weights import DenseWeight, PackedWeight, Weight


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the cases are cut from: real ones on a GPU, small ones to prove the script."""

    hidden: int = 4096
    inner: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128_256
    experts: int = 128
    active: int = 8
    expert_hidden: int = 2048
    expert_inner: int = 768
    rows: tuple[int, ...] = (1, 16, 64, 256, 2048)
    decodes: tuple[tuple[int, int], ...] = ((1, 8192), (32, 4096), (128, 1024))
    prefills: tuple[tuple[int, int], ...] = ((8192, 0), (2048, 2048))


TINY = Sizes(
    hidden=64,
    inner=96,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=300,
    experts=4,
    active=2,
    expert_hidden=32,
    expert_inner=16,
    rows=(1, 17),
    decodes=((2, 40),),
    prefills=((20, 16),),
)


@dataclass(slots=True)
class Kernel:
    """One measurement: what to run, what it must move or compute, and what it must equal."""

    name: str
    run: Callable[[], object]
    bytes: float
    flops: float
    check: Callable[[], float] | None = None
    """Largest error against the reference, in units of what is allowed (1: the border)."""


def error(actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> float:
    """Root mean square error over that of the expected values, over what is allowed."""
    wide, wanted = actual.double(), expected.double()
    if not bool(torch.isfinite(wide).all()):
        return float("inf")
    scale = float(wanted.square().mean().sqrt()) or 1.0
    return float((wide - wanted).square().mean().sqrt()) / scale / allowed


def cases(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Kernel]:
    """All kernels, each as its operator calls it. Tensors of a case die with it."""
    torch.manual_seed(0)
    for batch, context in sizes.decodes:
        for kv in (dtype, torch.float8_e4m3fn):
            yield attention(sizes, decode(batch, context), device, dtype, kv, decoding=True)
        yield attention(
            sizes, decode(batch, context), device, dtype, kv, decoding=True, turned=False
        )
    for count, start in sizes.prefills:
        yield attention(sizes, prefill(count, start), device, dtype, dtype, decoding=False)
    for rows in sizes.rows:
        for form in ("dense", "deterministic", "fp8", "int4", "q6_k"):
            yield product(sizes, rows, form, device, dtype)
        yield from fused_products(sizes, rows, device, dtype)
    yield from layer(sizes, device, dtype)
    for rows in sizes.rows[:: max(1, len(sizes.rows) - 1)]:
        for form in ("dense", "fp8", "int4"):
            yield experts(sizes, rows, form, device, dtype)
        yield from vectors(sizes, rows, device, dtype)
    yield from draws(sizes, sizes.rows[1], device)


def attention(
    sizes: Sizes,
    step: Step,
    device: str,
    dtype: torch.dtype,
    kv: torch.dtype,
    *,
    decoding: bool,
    turned: bool = True,
) -> Kernel:
    """`turned`: values in e4m3 lie as a worker keeps them; else as before, beside it in turns."""
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    batch = make_batch(step, [None], device)
    blocks = int(batch.groups[0].tables.max()) + 1
    k, v = (torch.randn(blocks, groups, BLOCK, width, device=device) for _ in range(2))
    coded = kv.itemsize == 1
    shape = blocks, groups, BLOCK
    scales = [torch.full(shape, 0.5, dtype=torch.bfloat16, device=device) for _ in range(2)]
    values = across(v.to(kv)) if coded and turned else v.to(kv)
    cache = KvLayer(k.to(kv), values, *(scales if coded else (None, None)))
    q = torch.randn(step.tokens, heads, width, device=device).to(dtype)
    ops = TritonOperators(dtype)
    pairs = sum(sum(range(start + 1, start + count + 1)) for start, count in step.entries)
    cached = sum(start + count for start, count in step.entries)
    token = 2 * groups * (width * kv.itemsize + (2 if coded else 0))

    def check() -> float:
        wide = KvLayer(cache.k.float(), cache.v.float())
        if coded:
            wide = KvLayer(wide.k * 0.5, wide.v * 0.5)
        rows = slice(max(0, step.tokens - 64), step.tokens)
        expected = reference_attention.attention(q.float(), wide, batch, 0, width**-0.5, None)[rows]
        actual = attend(ops, q, cache, batch, width**-0.5)[rows]
        return error(actual, expected, 0.02)

    return Kernel(
        f"attention {step.name}, {str(kv).removeprefix('torch.')} KV" + ", along" * (not turned),
        lambda: attend(ops, q, cache, batch, width**-0.5),
        cached * token + 2 * q.nbytes,
        4.0 * pairs * heads * width,
        check,
    )


def peers(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Kernel]:
    """Torch's own kernels on the shapes of `cases`, which no other package has to be there for."""
    torch.manual_seed(0)
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    for count, _ in sizes.prefills:
        q, k, v = (
            torch.randn(1, n, count, width, device=device).to(dtype)
            for n in (heads, groups, groups)
        )
        yield Kernel(
            f"torch attention prefill {count}",
            lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            2.0 * q.nbytes + k.nbytes + v.nbytes,
            2.0 * count * (count + 1) * heads * width,
        )
    out, width, count = 2 * sizes.expert_inner, sizes.expert_hidden, sizes.experts
    weight = torch.randn(count, width, out, device=device).to(torch.bfloat16)
    for rows in sizes.rows:
        each = -(-rows * sizes.active // count)
        x = torch.randn(each * count, width, device=device).to(torch.bfloat16)
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * each
        yield Kernel(
            f"torch grouped product, {rows} rows",
            lambda x=x, ends=ends: torch._grouped_mm(x, weight, offs=ends),
            weight.nbytes + x.nbytes + len(x) * out * 2,
            2.0 * len(x) * width * out,
        )


def product(sizes: Sizes, rows: int, form: str, device: str, dtype: torch.dtype) -> Kernel:
    """The product of gate and up."""
    out, width = 2 * sizes.inner, sizes.hidden
    x = torch.randn(rows, width, device=device).to(dtype)
    ops = TritonOperators(dtype, deterministic=form == "deterministic")
    weight: Weight
    if form in ("dense", "deterministic", "fp8"):
        data = torch.randn(out, width, device=device).to(dtype)
        weight = quantise_weight(data) if form == "fp8" else DenseWeight(data)
    else:
        bits, group = {"int4": (4, min(128, width)), "q6_k": (6, 16)}[form]
        codes = torch.randint(0, 2**bits, (out, width), dtype=torch.uint8, device=device)
        scales = torch.rand(out, width // group, device=device) * 0.02 + 0.01
        packed = PackedWeight(codes, scales, -scales * 2 ** (bits - 1), bits, group, (out, width))
        data = ReferenceOperators(dtype).prepare(packed, "linear", None).data  # type: ignore[arg-type,union-attr]
        weight = tile_weight(packed)
    matrix = data

    def check() -> float:
        allowed = 0.06 if form == "fp8" else 0.01
        some = slice(0, 512)
        expected = x.float() @ matrix[some].float().T
        return error(ops.linear(x, weight, None)[:, some], expected, allowed)

    return Kernel(
        f"product {form}, {rows} rows",
        lambda: ops.linear(x, weight, None),
        weight.nbytes + x.nbytes + rows * out * x.element_size(),
        2.0 * rows * out * width,
        check,
    )


def fused_products(sizes: Sizes, rows: int, device: str, dtype: torch.dtype) -> Iterator[Kernel]:
    """A layer's products with what they take in, and the library's on the same weights."""
    ops, ref = TritonOperators(dtype), ReferenceOperators(torch.float32)
    hidden, inner = sizes.hidden, sizes.inner
    few = DenseWeight(torch.empty(16, 16, dtype=dtype, device=device))
    if ops.plan_product(few, rows) != "around":
        return
    queries = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    gain = torch.rand(hidden, device=device).to(dtype)
    x, residual = (torch.randn(rows, hidden, device=device).to(dtype) for _ in range(2))
    norm = Norm(gain, 1e-5, 0.0)
    normed = ref.rms_norm(x.float(), gain.float(), 1e-5, 0.0)

    def make(
        name: str,
        out: int,
        run: Callable[[DenseWeight], torch.Tensor],
        expected: Callable[[torch.Tensor], torch.Tensor],
        width: int = hidden,
    ) -> Iterator[Kernel]:
        weight = DenseWeight((torch.randn(out, width, device=device) * width**-0.5).to(dtype))
        read = weight.nbytes + rows * (width + out) * dtype.itemsize
        flops = 2.0 * rows * out * width
        yield Kernel(
            f"skinny {name}, {rows} rows",
            lambda: run(weight),
            read,
            flops,
            lambda: error(run(weight), expected(weight.data.float()), 0.02),
        )
        values = torch.randn(rows, width, device=device).to(dtype)
        yield Kernel(
            f"library for {name}, {rows} rows",
            lambda: torch.nn.functional.linear(values, weight.data),
            read,
            flops,
        )

    yield from make(
        "norm + qkv",
        queries,
        lambda w: ops.linear_around(x, w, None, norm, "", None),
        lambda w: normed @ w.T,
    )
    yield from make(
        "output + residual",
        hidden,
        lambda w: ops.linear_around(x, w, None, None, "", residual),
        lambda w: x.float() @ w.T + residual.float(),
    )
    yield from make(
        "norm + gate and up",
        2 * inner,
        lambda w: ops.linear_around(x, w, None, norm, "silu", None),
        lambda w: ref.gated(normed @ w.T, "silu"),
    )


def layer(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Kernel]:
    """The kernels of a layer at one row, one after the other: what lies between them beside what
    they read."""
    ops, width, hidden = TritonOperators(dtype), sizes.head_dim, sizes.hidden
    few = DenseWeight(torch.empty(16, 16, dtype=dtype, device=device))
    if ops.plan_product(few, 1) != "around":
        return
    queries = sizes.heads * width
    qkv, output, gate_up, down = (
        DenseWeight((torch.randn(out, into, device=device) * into**-0.5).to(dtype))
        for out, into in (
            (queries + 2 * sizes.kv_heads * width, hidden),
            (hidden, queries),
            (2 * sizes.inner, hidden),
            (hidden, sizes.inner),
        )
    )
    norm = Norm(torch.rand(hidden, device=device).to(dtype), 1e-5, 0.0)
    x = torch.randn(1, hidden, device=device).to(dtype)
    step = decode(1, max(context for _, context in sizes.decodes) // 8)
    batch = make_batch(step, [None], device)
    shape = int(batch.groups[0].tables.max()) + 1, sizes.kv_heads, BLOCK, width
    cache = KvLayer(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)))

    def run() -> torch.Tensor:
        q = ops.linear_around(x, qkv, None, norm, "", None)[:, :queries]
        out = attend(ops, q.view(1, sizes.heads, width), cache, batch, width**-0.5)
        y = ops.linear_around(out.view(1, queries), output, None, None, "", x)
        acted = ops.linear_around(y, gate_up, None, norm, "silu", None)
        return ops.linear_around(acted, down, None, None, "", y)

    weights = sum(weight.nbytes for weight in (qkv, output, gate_up, down))
    read = weights + cache.k.nbytes + cache.v.nbytes
    yield Kernel("a layer, 1 rows", run, read, 2.0 * weights / dtype.itemsize)


def experts(sizes: Sizes, rows: int, form: str, device: str, dtype: torch.dtype) -> Kernel:
    width, inner, count = sizes.expert_hidden, sizes.expert_inner, sizes.experts
    x = torch.randn(rows, width, device=device).to(dtype)
    router = torch.randn(rows, count, device=device).to(dtype)

    def matrices(out: int, width: int) -> tuple[list[Weight], list[Weight]]:
        """→ (as the kernels take them, the same numbers dense)."""
        made: list[Weight] = []
        plain: list[Weight] = []
        for _ in range(count):
            data = (torch.randn(out, width, device=device) * width**-0.5).to(dtype)
            if form == "fp8":
                fp8 = quantise_weight(data)
                made.append(fp8)
                data = fp8.values().to(dtype)
            elif form == "int4":
                packed = int4_weight(out, width, device)
                made.append(tile_weight(packed))
                data = unpack_rows(packed).to(dtype)
            else:
                made.append(DenseWeight(data))
            plain.append(DenseWeight(data))
        return made, plain

    (gate_up, wide_gate_up), (down, wide_down) = matrices(2 * inner, width), matrices(width, inner)
    ops, ref = TritonOperators(dtype), ReferenceOperators(dtype)
    hit = min(1.0, 1 - (1 - sizes.active / count) ** rows)
    stored = sum(weight.nbytes for weight in (*gate_up, *down))
    return Kernel(
        f"experts {form}, {rows} rows",
        lambda: mixture(ops, x, router, gate_up, down, sizes.active),
        hit * stored,
        6.0 * rows * sizes.active * width * inner,
        lambda: error(
            mixture(ops, x, router, gate_up, down, sizes.active),
            mixture(ref, x, router, wide_gate_up, wide_down, sizes.active),
            0.08 if form == "fp8" else 0.03,
        ),
    )


def int4_weight(out: int, width: int, device: str) -> PackedWeight:
    group = 128 if width % 128 == 0 else 16
    codes = torch.randint(0, 16, (out, width), dtype=torch.uint8, device=device)
    scales = torch.rand(out, -(-width // group), device=device) * 0.02 + 0.001
    return PackedWeight(codes, scales, -8 * scales, 4, group, (out, width))


def vectors(sizes: Sizes, rows: int, device: str, dtype: torch.dtype) -> Iterator[Kernel]:
    """Norm, gate, rotation: bandwidth."""
    ops, ref = TritonOperators(dtype), ReferenceOperators(dtype)
    x, residual = (torch.randn(rows, sizes.hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(sizes.hidden, device=device).to(dtype)
    yield Kernel(
        f"add_rms_norm, {rows} rows",
        lambda: ops.add_rms_norm(x, residual, weight, 1e-5, 0.0),
        4.0 * x.nbytes,
        5.0 * x.numel(),
        lambda: error(
            ops.add_rms_norm(x, residual, weight, 1e-5, 0.0)[0],
            ref.add_rms_norm(x, residual.clone(), weight, 1e-5, 0.0)[0],
            0.01,
        ),
    )
    fp8 = quantise_weight(torch.randn(256, sizes.hidden, device=device))

    def codes_error() -> float:
        codes, scales, _ = ops.norm_codes(x, residual.clone(), Norm(weight, 1e-5, 0.0), fp8)
        values = codes.float() * scales
        return error(values, ref.add_rms_norm(x, residual.clone(), weight, 1e-5, 0.0)[0], 0.04)

    yield Kernel(
        f"add_rms_norm to fp8, {rows} rows",
        lambda: ops.norm_codes(x, residual, Norm(weight, 1e-5, 0.0), fp8),
        3.5 * x.nbytes,
        5.0 * x.numel(),
        codes_error,
    )
    both = torch.randn(rows, 2 * sizes.inner, device=device).to(dtype)
    yield Kernel(
        f"gated, {rows} rows",
        lambda: ops.gated(both, "silu"),
        1.5 * both.nbytes,
        3.0 * both.numel(),
        lambda: error(ops.gated(both, "silu"), ref.gated(both.float(), "silu"), 0.01),
    )
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    batch = make_batch(prefill(rows), [None], device)
    blocks = int(batch.groups[0].tables.max()) + 1
    qkv = torch.randn(rows, (heads + 2 * groups) * width, device=device).to(dtype)
    angles = torch.randn(rows, width // 2, device=device)
    rope = RopeTable(angles.cos(), angles.sin())
    caches = [
        KvLayer(
            *(
                torch.zeros(blocks, groups, BLOCK, width, device=device, dtype=dtype)
                for _ in range(2)
            )
        )
        for _ in range(2)
    ]

    def rotate(which: TritonOperators | ReferenceOperators, cache: KvLayer) -> torch.Tensor:
        spec = AttentionSpec(0, heads, groups, width, 1.0, eps=1e-5)
        return which.write(qkv, spec, (), rope, cache, batch, 0)

    def check() -> float:
        q = error(rotate(ops, caches[0]), rotate(ref, caches[1]), 0.01)
        return max(q, error(caches[0].k, caches[1].k, 0.01), error(caches[0].v, caches[1].v, 0.01))

    yield Kernel(
        f"rope_and_cache, {rows} rows",
        lambda: rotate(ops, caches[0]),
        2.0 * qkv.nbytes,
        3.0 * qkv.numel(),
        check,
    )


def draws(sizes: Sizes, rows: int, device: str) -> Iterator[Kernel]:
    logits = torch.randn(rows, sizes.vocabulary, device=device) * 3
    column = torch.full((rows,), 0.8, device=device)
    wanted = sampling.DrawParameters(
        column,
        torch.full((rows,), 50, device=device),
        column,
        column * 0,
        torch.linspace(0.01, 0.99, rows, dtype=torch.float64, device=device),
    )
    yield Kernel(
        f"argmax, {rows} rows",
        lambda: triton_sampling.argmax(logits),
        logits.nbytes,
        logits.numel(),
        lambda: float((triton_sampling.argmax(logits) != logits.argmax(-1)).sum()),
    )

    def check(given: sampling.DrawParameters) -> float:
        # A draw within rounding of a border may fall to the neighbour.
        differing = triton_sampling.draw(logits, given) != sampling.draw(logits, given)
        return float(differing.float().mean()) / 0.05

    yield Kernel(
        f"draw top-k 50, top-p 0.8, {rows} rows",
        lambda: triton_sampling.draw(logits, wanted),
        logits.nbytes,
        logits.numel(),
        lambda: check(wanted),
    )
    # The end of every graph: without filters, and where every row takes its most likely token.
    free = replace(wanted, top_k=None, top_p=None)
    greedy = replace(free, min_p=column * 0 + 1, uniform=wanted.uniform * 0)

    yield Kernel(
        f"draw without filters, {rows} rows",
        lambda: triton_sampling.draw(logits, free),
        logits.nbytes,
        logits.numel(),
        lambda: check(free),
    )
    yield Kernel(
        f"draw of the most likely, {rows} rows",
        lambda: triton_sampling.draw(logits, greedy),
        logits.nbytes,
        logits.numel(),
        lambda: float((triton_sampling.draw(logits, greedy) != logits.argmax(-1)).sum()),
    )


class CaptureFailed(RuntimeError):
    """A run that cannot be a CUDA graph, and why."""


def measure(
    run: Callable[[], object], device: str, *, seconds: float = 0.15, graph: bool = False
) -> float:
    """Median seconds of one run; on a GPU with the second-level cache swept between runs.

    `graph`: of its replay as a CUDA graph, since of several launches in a row the host's time is
    measured otherwise. Raises `CaptureFailed`; without effect on a CPU.
    """
    run()
    if graph and device == "cuda":
        run = _captured(run, device)
    if device != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    sweep = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(5, min(100, int(seconds / max(time.perf_counter() - begin, 1e-5))))
    pairs = []
    for _ in range(repeats):
        sweep.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        pairs.append((first, last))
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(last) for first, last in pairs)
    return times[len(times) // 2] / 1e3


def _captured(run: Callable[[], object], device: str) -> Callable[[], object]:
    torch.cuda.synchronize()
    try:
        return CudaGraphMaker(torch.device(device)).capture(lambda: _drop(run()))
    except RuntimeError as fault:
        raise CaptureFailed(f"{type(fault).__name__}: {fault}"[:200]) from fault


def _drop(result: object) -> None:
    """Its memory is the graph's."""


def measure_kernel(kernel: Kernel, device: str) -> tuple[float, str | None]:
    """(seconds, why they hold the host's time between launches; None where they do not)."""
    try:
        return measure(kernel.run, device, graph=True), None
    except CaptureFailed as failed:
        return measure(kernel.run, device), f"no graph: {failed}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device does at best, measured now."""

    bandwidth: float
    """Bytes per second of a large copy, reading and writing counted."""
    rate: float
    """FLOP/s of a large product in the model's type."""

    def limits(self, kernel: Kernel) -> dict[str, float]:
        """Seconds by what binds. Operands in fp8 are multiplied at twice the rate."""
        narrow = kernel.name.startswith(("product fp8,", "experts fp8,"))
        return {
            "memory": kernel.bytes / self.bandwidth,
            "compute": kernel.flops / (self.rate * (2 if narrow else 1)),
        }


def measure_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    size = 2 * 2**30 if device == "cuda" else 2**24
    source = torch.empty(size // 4, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(source)
    copied = measure(lambda: target.copy_(source), device, seconds=0.5)
    side = 8192 if device == "cuda" else 256
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiplied = measure(lambda: a @ b, device, seconds=1.0)
    return Ceilings(2 * size / copied, 2.0 * side**3 / multiplied)
