"""Is what runs on the device right? Every kernel against the reference, and whole paths.

    python tests/gpu/gpu_checks.py --shard 0/4     (prints one JSON line per check)

`make gpu-bench` runs these first, in several processes, so that compiling goes in parallel and one
kernel that faults takes only its own process with it; where pytest is installed, `pytest -m gpu`
runs them one by one. The same functions run on a CPU under Triton's interpreter (`--tiny`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product as pairs
from pathlib import Path

if "--tiny" in sys.argv:  # Read by triton when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import torch
from gpu_family_checks import FAMILIES
from gpu_kernels import error
from gpu_models import BLOCK, Step, attend, make_batch, mixture, seeded
from gpu_paths import PATHS

from headrace.base.graph import AttentionSpec
from headrace.kernels import reference_attention, sampling
from headrace.kernels.fuse import Norm
from headrace.kernels.operators import KvLayer, StepBatch
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators, unpack_rows
from headrace.kernels.triton import gated, norm
from headrace.kernels.triton import sampling as drawing
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.packed import tile_weight
from headrace.kernels.triton.product_fp8 import quantise_rows, quantise_weight
from headrace.kernels.weights import DenseWeight, Fp8Weight, PackedWeight, Weight

Check = Callable[[str, torch.dtype], float]
"""(device, dtype) → the error in units of what is allowed: right up to 1."""

ATTENTION: tuple[tuple[Step, int, int, int, int | None, float | None], ...] = (
    (Step("one token", ((0, 1),)), 2, 1, 64, None, None),
    (Step("groups of 7", ((16, 1), (0, 1), (1129, 1))), 14, 2, 64, None, None),
    (Step("windowed decode", ((900, 1), (7, 1))), 4, 4, 32, 64, None),
    (Step("capped decode", ((150, 1), (3, 1))), 4, 1, 80, None, 30.0),
    (Step("mixed", ((0, 5), (33, 1), (700, 140))), 32, 8, 128, None, None),
    (Step("windowed, capped", ((0, 70), (65, 3))), 8, 2, 64, 33, 50.0),
    (Step("head of 48", ((20, 17),)), 3, 3, 48, None, None),
    (Step("head of 256", ((20, 150), (300, 1))), 4, 1, 256, 512, None),
)
"""(entries, H, G, E, window, softcap): the shapes of the interpreter's tests, and larger ones."""


def attention(case: int, kind: str, *, deterministic: bool = False, sunk: bool = False) -> Check:
    """`sunk`: with sinks."""

    def check(device: str, dtype: torch.dtype) -> float:
        step, heads, groups, width, window, softcap = ATTENTION[case]
        batch = make_batch(step, [window], device)
        blocks = int(batch.groups[0].tables.max()) + 1
        wide = [torch.randn(blocks, groups, BLOCK, width, device=device) for _ in range(2)]
        stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kind, dtype)
        if kind in ("fp8", "int8"):
            high = 448.0 if kind == "fp8" else 127.0
            scales = [reference_attention.scale_above(x.abs().amax(-1) / high) for x in wide]
            codes = [x / s.float().unsqueeze(-1) for x, s in zip(wide, scales, strict=True)]
            codes = [c.round() if kind == "int8" else c for c in codes]
            kv = KvLayer(codes[0].to(stored), codes[1].to(stored), *scales)
            values = [
                k.float() * s.unsqueeze(-1) for k, s in zip((kv.k, kv.v), scales, strict=True)
            ]
        else:
            kv = KvLayer(wide[0].to(stored), wide[1].to(stored))
            values = [kv.k.float(), kv.v.float()]
        q = torch.randn(step.tokens, heads, width, device=device).to(dtype)
        ops = TritonOperators(dtype, deterministic=deterministic)
        sinks = torch.randn(heads, device=device).to(dtype) if sunk else None
        actual = attend(ops, q, kv, batch, width**-0.5, softcap, sinks)
        expected = reference_attention.attention(
            q.float(), KvLayer(*values), batch, 0, width**-0.5, softcap, sinks
        )
        return error(actual, expected, 0.02)

    return check


def norms(device: str, dtype: torch.dtype) -> float:
    worst, ref = 0.0, ReferenceOperators(torch.float32)
    for rows, width, offset in ((1, 896, 0.0), (5, 1152, 1.0), (33, 4096, 0.0)):
        x, more = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(width, device=device).to(dtype)
        expected, total = ref.add_rms_norm(x.float(), more.float(), weight.float(), 1e-6, offset)
        out, added = norm.add_rms_norm(x, more, weight, 1e-6, offset)
        worst = max(worst, error(out, expected, 0.01), error(added, total, 0.005))
        alone = ref.rms_norm(x.float(), weight.float(), 1e-6, offset)
        worst = max(worst, error(norm.rms_norm(x, weight, 1e-6, offset), alone, 0.01))
    return worst


def spread(scales: torch.Tensor, width: int) -> torch.Tensor:
    if scales.shape[1] == 1:
        return scales
    return scales.repeat_interleave(128, 1)[:, :width]


def codes(device: str, dtype: torch.dtype) -> float:
    """Norm, gate and rows as e4m3, with a scale per row and per 128 columns."""
    worst, ref = 0.0, ReferenceOperators(torch.float32)
    for width, group in pairs((896, 1152), (0, 128)):
        x, more = (torch.randn(9, width, device=device).to(dtype) for _ in range(2))
        weight = torch.rand(width, device=device).to(dtype)
        out, scales, _ = norm.rms_norm_codes(x, more, weight, 1e-6, 0.0, "fp8", group)
        expected, _ = ref.add_rms_norm(x.float(), more.float(), weight.float(), 1e-6, 0.0)
        worst = max(worst, error(out.float() * spread(scales, width), expected, 0.04))
        both = torch.randn(9, 2 * width, device=device).to(dtype)
        out, scales = gated.gated_codes(both, "silu", "fp8", group)
        wanted = ref.gated(both.float(), "silu")
        worst = max(worst, error(out.float() * spread(scales, width), wanted, 0.04))
        out, scales = quantise_rows(x, blocked=group > 0)
        worst = max(worst, error(out.float() * spread(scales, width), x, 0.04))
    return worst


def gates(device: str, dtype: torch.dtype) -> float:
    ref = ReferenceOperators(torch.float32)
    both = (torch.randn(3, 2 * 1300, device=device) * 4).to(dtype)
    return max(
        error(gated.gated(both, name), ref.gated(both.float(), name), 0.01)
        for name in ("silu", "gelu", "gelu_tanh")
    )


def rotation(kind: str, normed: bool) -> Check:
    def check(device: str, dtype: torch.dtype) -> float:
        heads, groups, width = 4, 2, 128
        batch = make_batch(Step("", ((5, 3), (40, 1), (0, 17))), [None], device)
        blocks = int(batch.groups[0].tables.max()) + 1
        stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kind, dtype)

        def empty() -> KvLayer:
            k, v = (
                torch.zeros(blocks, groups, BLOCK, width, device=device).to(stored)
                for _ in range(2)
            )
            if kind not in ("fp8", "int8"):
                return KvLayer(k, v)
            return KvLayer(
                k,
                v,
                *torch.zeros(2, blocks, groups, BLOCK, dtype=torch.bfloat16, device=device),
            )

        qkv = torch.randn(len(batch.tokens), (heads + 2 * groups) * width, device=device).to(dtype)
        of_q, of_k = torch.rand(2, width, device=device).to(dtype)
        gains = (of_q, of_k) if normed else ()
        spec = AttentionSpec(0, heads, groups, width, 1.0, eps=1e-6)
        angles = torch.randn(64, width // 2, device=device)
        rope = RopeTable(angles.cos(), angles.sin())
        mine, theirs = empty(), empty()
        ops, ref = TritonOperators(dtype), ReferenceOperators(dtype)
        first, second = (
            which.write(qkv, spec, gains, rope, cache, batch, 0)
            for which, cache in ((ops, mine), (ref, theirs))
        )
        worst = error(first, second, 0.01)
        # A value that is rounded to the other neighbour may be the largest of its vector, and then
        # the scale is another one and every code of it: as far as e4m3 is from what it stands for.
        allowed = 0.026 if kind == "fp8" and normed else 0.01
        for a, b, s, t in (
            (mine.k, theirs.k, mine.k_scale, theirs.k_scale),
            (mine.v, theirs.v, mine.v_scale, theirs.v_scale),
        ):
            left, right = a.float(), b.float()
            if s is not None and t is not None:
                left, right = left * s.unsqueeze(-1), right * t.unsqueeze(-1)
            worst = max(worst, error(left, right, allowed))
        return worst

    return check


def packed_weight(bits: int, group: int, out: int, width: int, device: str) -> PackedWeight:
    shape = (out, -(-width // group))
    made = torch.randint(0, 2**bits, (out, width), dtype=torch.uint8, device=device)
    scales = torch.rand(shape, device=device) * 0.02 + 1e-3
    return PackedWeight(made, scales, scales * -(2.0 ** (bits - 1)), bits, group, (out, width))


def fp8_weight(out: int, width: int, device: str, *, blocked: bool) -> Fp8Weight:
    matrix = torch.randn(out, width, device=device)
    if not blocked:
        return quantise_weight(matrix)
    scales = torch.rand(-(-out // 128), -(-width // 128), device=device) * 0.02 + 0.01
    return Fp8Weight((matrix * 20).to(torch.float8_e4m3fn), scales)


def form(kind: str, out: int, width: int, device: str, dtype: torch.dtype) -> tuple[Weight, float]:
    """→ (a weight as `prepare` makes it, the error that its products may have)."""
    if kind in ("rows", "blocks"):
        # Activations in e4m3 are wrong by some 3 % each.
        return fp8_weight(out, width, device, blocked=kind == "blocks"), 0.05
    if kind == "dense":
        return DenseWeight((torch.randn(out, width, device=device) * 0.05).to(dtype)), 0.01
    group = {"q4": 128, "4": 32, "5": 32, "6": 16, "8": 128}[kind]
    return tile_weight(packed_weight(int(kind[-1]), group, out, width, device)), 0.015


def values(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Values of any weight, by way of the product with the unit matrix where it is packed."""
    if isinstance(weight, DenseWeight):
        return weight.data.float()
    if isinstance(weight, Fp8Weight):
        return weight.values()
    from headrace.kernels.triton.product_packed import expand
    from headrace.kernels.weights import TiledWeight

    assert isinstance(weight, TiledWeight)
    return expand(weight, 0, weight.shape[0], dtype).float()


def expansion(device: str, dtype: torch.dtype) -> float:
    """Packed codes to dense values, against the plain layout."""
    worst = 0.0
    for bits, group in ((4, 32), (5, 32), (6, 16), (8, 64)):
        weight = packed_weight(bits, group, 96, 448, device)
        worst = max(worst, error(values(tile_weight(weight), dtype), unpack_rows(weight), 0.005))
    return worst


SIZES = ((1024, 2048), (328, 1104))
LONG = ((4096, 14_336),)
"""The down projection of an 8B: where the library has refused few rows in fp8."""


def products(
    kind: str,
    rows: int,
    *,
    deterministic: bool = False,
    sizes: tuple[tuple[int, int], ...] = SIZES,
) -> Check:
    """With bias; widths that are no multiple of a tile; from 512 rows through the library."""

    def check(device: str, dtype: torch.dtype) -> float:
        worst = 0.0
        for out, width in sizes:
            weight, allowed = form(kind, out, width, device, dtype)
            bias = torch.randn(out, device=device).to(dtype)
            x = torch.randn(rows, width, device=device).to(dtype)
            ops = TritonOperators(dtype, deterministic=deterministic)
            expected = x.float() @ values(weight, dtype).T + bias.float()
            worst = max(worst, error(ops.linear(x, weight, bias), expected, allowed))
        return worst

    return check


def fused(rows: int) -> Check:
    """Products with norm, gate and residual in them; some split their input."""

    def check(device: str, dtype: torch.dtype) -> float:
        ops, ref = TritonOperators(dtype), ReferenceOperators(torch.float32)
        worst = 0.0
        for out, width in ((300, 896), (4096, 512), (80, 4096)):
            x, residual = (torch.randn(rows, n, device=device).to(dtype) for n in (width, out))
            weight = (torch.randn(out, width, device=device) * width**-0.5).to(dtype)
            gain = torch.rand(width, device=device).to(dtype)
            norm, dense = Norm(gain, 1e-5, 1.0), DenseWeight(weight)
            normed = ref.rms_norm(x.float(), gain.float(), 1e-5, 1.0) @ weight.float().T
            # Twice: the counters of the tiles are as they were.
            for _ in range(2):
                onto = ops.linear_around(x, dense, None, norm, "", residual)
                worst = max(worst, error(onto, normed + residual.float(), 0.02))
                gate = ops.linear_around(x, dense, None, norm, "silu", None)
                worst = max(worst, error(gate, ref.gated(normed, "silu"), 0.02))
        return worst

    return check


def experts(kind: str, tokens: int) -> Check:
    def check(device: str, dtype: torch.dtype) -> float:
        count, active, width, inner = 8, 3, 256, 384
        ref = ReferenceOperators(torch.float32)
        x = torch.randn(tokens, width, device=device).to(dtype)
        router = torch.randn(tokens, count, device=device).to(dtype)
        made = [
            [form(kind, *shape, device, dtype)[0] for _ in range(count)]
            for shape in ((2 * inner, width), (width, inner))
        ]
        plain: list[list[Weight]] = [[DenseWeight(values(w, dtype)) for w in part] for part in made]
        expected = mixture(ref, x.float(), router.float(), plain[0], plain[1], active)
        actual = mixture(TritonOperators(dtype), x, router, made[0], made[1], active)
        return error(actual, expected, 0.08 if kind in ("rows", "blocks") else 0.03)

    return check


def clamped_experts(device: str, dtype: torch.dtype) -> float:
    """Experts of gpt-oss, with biases; packed and dense, few rows and many."""
    count, active, width, inner, worst = 8, 3, 256, 384, 0.0
    biases = (count * 2 * inner, count * width)
    own = tuple(3 * torch.randn(size, device=device).to(dtype) for size in biases)
    wide = tuple(bias.float() for bias in own)
    for kind, tokens in pairs(("dense", "5"), (3, 200)):
        x = 3 * torch.randn(tokens, width, device=device).to(dtype)
        router = torch.randn(tokens, count, device=device).to(dtype)
        made = [
            [form(kind, *shape, device, dtype)[0] for _ in range(count)]
            for shape in ((2 * inner, width), (width, inner))
        ]
        plain: list[list[Weight]] = [[DenseWeight(values(w, dtype)) for w in part] for part in made]
        ref = ReferenceOperators(torch.float32)
        expected = mixture(ref, x.float(), router.float(), *plain, active, "clamped", wide)
        actual = mixture(TritonOperators(dtype), x, router, *made, active, "clamped", own)
        worst = max(worst, error(actual, expected, 0.03))
    return worst


def draws(device: str, dtype: torch.dtype) -> float:
    rows, width = 6, 5000
    logits = torch.randn(rows, width, device=device) * 3
    worst = float((drawing.argmax(logits) != logits.argmax(-1)).sum())
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (20, 0.8, 0.05)):
        wanted = sampling.DrawParameters(
            torch.linspace(0.5, 1.5, rows, device=device),
            torch.full((rows,), top_k, device=device),
            torch.full((rows,), top_p, device=device),
            torch.full((rows,), min_p, device=device),
            torch.linspace(0.03, 0.97, rows, dtype=torch.float64, device=device),
        )
        # One of six may lie within rounding of a border.
        found = drawing.draw(logits, wanted)
        worst = max(worst, float((found != sampling.draw(logits, wanted)).sum()) / 1.5)
        absent = replace(
            wanted,
            top_k=wanted.top_k if top_k else None,
            top_p=wanted.top_p if top_p < 1 else None,
        )
        worst = max(worst, 2.0 * float((drawing.draw(logits, absent) != found).sum()))
    logits[2, [4, 4500]] = 30.0
    likely = logits.argmax(-1)
    likely[2] = 4  # Torch promises no order of equals.
    one = torch.ones(rows, device=device)
    greedy = sampling.DrawParameters(one, None, None, one, one.double() * 0)
    return max(worst, 2.0 * float((drawing.draw(logits, greedy) != likely).sum()))


def rows_do_not_depend(device: str, dtype: torch.dtype) -> float:
    """The deterministic mode: bits of a row alone and among others."""
    ops = TritonOperators(dtype, deterministic=True)
    x = torch.randn(70, 512, device=device).to(dtype)
    differ = 0
    for kind in ("dense", "4", "6", "rows", "blocks"):
        weight, _ = form(kind, 320, 512, device, dtype)
        together = ops.linear(x, weight, None)
        differ += sum(
            not torch.equal(ops.linear(x[r : r + 1], weight, None)[0], together[r])
            for r in (0, 33, 69)
        )
    weight, _ = form("dense", 320, 512, device, dtype)
    whole = _attend(ops, device, dtype, ((0, 90), (7, 1)))
    cut = _attend(ops, device, dtype, ((60, 30),))
    differ += not torch.equal(whole[60:90], cut)
    return float(differ) * 2


def _attend(
    ops: TritonOperators, device: str, dtype: torch.dtype, entries: tuple[tuple[int, int], ...]
) -> torch.Tensor:
    """Attention whose first sequence has the same content in every call."""
    batch: StepBatch = make_batch(Step("", entries), [None], device)
    generator = seeded(device, 1)
    first = torch.randn(90, 8, 64, device=device, generator=generator).to(dtype)
    store = torch.randn(2, 6 * BLOCK, 2, 64, device=device, generator=generator).to(dtype)
    blocks = int(batch.groups[0].tables.max()) + 1
    k, v = (torch.zeros(blocks, 2, BLOCK, 64, device=device, dtype=dtype) for _ in range(2))
    for place in range(6):
        block = int(batch.groups[0].tables[0, place]) if place * BLOCK < 90 else 0
        for cache, values in ((k, store[0]), (v, store[1])):
            cache[block] = values[place * BLOCK : (place + 1) * BLOCK].transpose(0, 1)
    start, count = entries[0]
    q = torch.zeros(len(batch.tokens), 8, 64, device=device, dtype=dtype)
    q[:count] = first[start : start + count]
    return attend(ops, q, KvLayer(k, v), batch, 0.125)[:count]


def all_checks() -> dict[str, Check]:
    """By name, those first that everything else rests on."""
    found: dict[str, Check] = {
        "norms": norms,
        "gates": gates,
        "codes": codes,
        "draws": draws,
        "expansion": expansion,
        "experts, clamped": clamped_experts,
        "rows do not depend": rows_do_not_depend,
    }
    for kind, normed in (("bf16", False), ("bf16", True), ("fp8", True), ("int8", False)):
        name = f"rope and cache, {kind}" + (", normed" if normed else "")
        found[name] = rotation(kind, normed)
    for number, case in enumerate(ATTENTION):
        for kind in ("bf16", "fp8", "int8"):
            found[f"attention, {case[0].name}, {kind}"] = attention(number, kind)
    found["attention, mixed, bf16, sinks"] = attention(4, "bf16", sunk=True)
    found["attention, mixed, deterministic"] = attention(4, "bf16", deterministic=True)
    for kind in ("dense", "q4", "4", "5", "6", "8", "rows", "blocks"):
        for rows in (1, 17, 130, 520):
            found[f"product, {kind}, {rows} rows"] = products(kind, rows)
        for tokens in (1, 21, 200):
            found[f"experts, {kind}, {tokens} tokens"] = experts(kind, tokens)
    for rows in (17, 64, 256):
        found[f"product, rows, long, {rows} rows"] = products("rows", rows, sizes=LONG)
    for rows in (1, 4, 13):
        found[f"product with norm, gate, residual, {rows} rows"] = fused(rows)
    for kind in ("dense", "rows"):
        found[f"product, {kind}, deterministic"] = products(kind, 130, deterministic=True)
    return {**PATHS, **found, **FAMILIES}


SMOKE = (
    "norms",
    "codes",
    "draws",
    "rope and cache, fp8, normed",
    "attention, mixed, bf16",
    "attention, mixed, fp8",
    "attention, head of 256, bf16",
    "product, dense, 17 rows",
    "product, q4, 1 rows",
    "product, 6, 130 rows",
    "product, 4, 520 rows",
    "product, rows, 17 rows",
    "product, rows, long, 17 rows",
    "product, rows, long, 64 rows",
    "product, rows, long, 256 rows",
    "product, blocks, 17 rows",
    "product, rows, deterministic",
    "product with norm, gate, residual, 4 rows",
    "experts, dense, 21 tokens",
    "experts, rows, 21 tokens",
    "experts, 4, 21 tokens",
    "experts, 4, 1 tokens",
    "attention, mixed, bf16, sinks",
    "experts, clamped",
    *PATHS,
    *FAMILIES,
)
"""Every kernel and every path once."""


def run_check(name: str, device: str, dtype: torch.dtype) -> dict[str, object]:
    """→ what a record says of it; a fault is its record, not ours."""
    begin = time.perf_counter()
    row: dict[str, object] = {"check": name}
    try:
        torch.manual_seed(0)
        with torch.inference_mode():
            wrong = all_checks()[name](device, dtype)
        if device == "cuda":
            torch.cuda.synchronize()
        row |= {"error": wrong, "right": wrong <= 1}
    except Exception as fault:  # noqa: BLE001 - the border between checks
        row |= {"right": False, "failure": f"{type(fault).__name__}: {fault}"[:800]}
    return {**row, "seconds": round(time.perf_counter() - begin, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="0/1", help="number / how many")
    parser.add_argument("--names", help="JSON list of checks; all unless given")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, interpreted")
    arguments = parser.parse_args()
    number, count = map(int, arguments.shard.split("/"))
    names = json.loads(arguments.names) if arguments.names else list(all_checks())
    device, dtype = ("cpu", torch.float32) if arguments.tiny else ("cuda", torch.bfloat16)
    right = True
    for name in names[number::count]:
        # Said before it runs: whoever reads knows what a process died of.
        print(json.dumps({"begins": name}), flush=True)
        row = run_check(name, device, dtype)
        right = right and bool(row["right"])
        print(json.dumps(row), flush=True)
        if "CUDA error" in str(row.get("failure")):
            return 3  # The context is lost with it.
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
