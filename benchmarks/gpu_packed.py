"""Packed products of few rows: instructions a weight, counted in the machine code, beside the room.

    python benchmarks/gpu_packed.py [--json FILE]

A loop that takes more instructions than fit while its bytes arrive is bound by them, whatever else
it does well. So both kernels are compiled for sm_90, the instructions of the loop that multiplies
are counted and divided by its weights, and the decode step of the int4 8B at one row is predicted
from that: at the tables' share of the bandwidth, or at the share that the instructions leave where
that is less. Compiled and predicted; nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_aot as aot
import torch
from gpu_models import ARCHS, ROOFLINE

from headrace.kernels.triton.packed import BYTES, planes_of
from headrace.kernels.triton.product_packed import product_packed
from headrace.kernels.triton.product_packed_skinny import product_packed_skinny
from headrace.kernels.triton.split import make_tickets
from headrace.kernels.triton.table import Table
from headrace.kernels.weights import TiledWeight
from headrace.roofline.composition import compose
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.step import step_time
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

ARCHITECTURE = "sm_90"
WIDTH = 4096
FORMATS = {
    "int4, groups of 128, one zero": (4, 128, 8),
    "int4, groups of 128, offsets": (4, 128, None),
    "Q4_K": (4, 32, None),
    "Q4_0": (4, 32, 8),
    "Q5_0": (5, 32, 16),
    "Q5_K": (5, 32, None),
    "Q6_K": (6, 16, 32),
    "Q8_0": (8, 32, 128),
}
"""Name → (bits, group, zero)."""
LANES = 128
"""Instructions of a thread that a multiprocessor issues in a cycle: four warps'."""
CLOCK = {"H100": (132, 1.755e9), "H200": (132, 1.755e9)}
"""Multiprocessors and cycles a second under load (data sheets' boost)."""
START, NODE, AROUND = 3.0e-6, 2.0e-6, 60e-6
"""Assumed seconds: of a product beside its bytes, of any other kernel, around a step."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One format: bytes, the room on each device, and instructions, all per weight."""

    format: str
    bytes: float
    room: dict[str, float]
    before: float
    """Figure of `product_packed` at one row."""
    skinny: float
    """Figure of `product_packed_skinny` at one row."""
    skinny_many: float
    """At 16 rows."""
    spills: int


def weight_of(bits: int, group: int, zero: int | None, outs: int) -> TiledWeight:
    """Without memory."""
    chunks = WIDTH // 128
    return TiledWeight(
        torch.empty(chunks, outs, BYTES[bits], dtype=torch.uint8, device="meta"),
        torch.empty(chunks, planes_of(group, zero), outs, dtype=torch.int32, device="meta"),
        torch.empty(outs, device="meta"),
        zero,
        bits,
        group,
        (outs, WIDTH),
    )


def compiled_loop(launch: Callable[[], object]) -> tuple[int, int]:
    """→ (instructions of the loop of the product that `launch` starts, its spills)."""
    with aot.compiling(ARCHITECTURE) as found:
        launch()
    (code,) = [each.code for each in found if "_product_kernel" in each.kernel]
    assert code.loop is not None, "no loop multiplies"
    return code.loop.instructions, code.spills


def count(name: str) -> Counted:
    bits, group, zero = FORMATS[name]
    weight = weight_of(bits, group, zero, 4096)
    size = (weight.codes.nbytes + weight.pairs.nbytes) / (4096 * WIDTH)
    table = Table(ARCHITECTURE)
    tickets = make_tickets(torch.device("meta"))
    few, many = (torch.empty(n, WIDTH, dtype=torch.bfloat16, device="meta") for n in (1, 16))
    # Of one thread: a chunk of 128 inputs of the tile's outputs over its threads.
    old = table.packed(1)
    before, _ = compiled_loop(lambda: product_packed(few, weight, None, old))
    loops = []
    for x in (few, many):
        config = table.packed_skinny(len(x))
        found, spills = compiled_loop(
            lambda x=x, c=config: product_packed_skinny(x, weight, None, c, tickets)  # type: ignore[misc]
        )
        loops.append((found / (128 * config.outs / (32 * config.warps)), spills))
    room = {
        device: LANES / (DEVICES[device].bandwidth / (units * clock) / size)
        for device, (units, clock) in CLOCK.items()
    }
    return Counted(
        name,
        size,
        room,
        before / (128 * old.outs / (32 * old.warps)),
        loops[0][0],
        loops[1][0],
        loops[0][1] + loops[1][1],
    )


def step_seconds(device: str, size: float, instructions: float, room: float, nodes: int) -> float:
    """The int4 8B at one row and 1,024 tokens: `nodes` kernels a layer beside its four products."""
    arch, hardware = ARCHS["llama-3.1-8b"], DEVICES[device]
    case = Case(arch, WeightBytes(ROOFLINE["int4"], formats=WIDE_ENDS), kv_dtype="int8")
    step = step_time(case, hardware, compose(arch, [1023], [1]))
    share = hardware.efficiency.curves["product/bfloat16"].memory
    seconds = AROUND + arch.layers * nodes * NODE
    for each in step.operators:
        if each.count.kind == "product" and each.count.label != "head":
            weights = each.count.weight_bytes / (case.weights.bits(each.count.label) / 8)
            streamed = weights * size / (hardware.bandwidth * min(share, room / instructions))
            seconds += each.count.calls * (START + streamed)
        elif each.count.label in ("head", "attention"):
            seconds += each.seconds
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args()
    rows = [count(name) for name in FORMATS]
    print("| format | bytes | room H200 | room H100 | product_packed | skinny | skinny, 16 rows |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.format} | {row.bytes:.2f} | {row.room['H200']:.1f} | {row.room['H100']:.1f} "
            f"| {row.before:.1f} | {row.skinny:.1f} | {row.skinny_many:.1f} |"
        )
    int4 = rows[0]
    # Scales and offsets in fp32, and the room that so many bytes left.
    wide = 0.5 + 8 / 128
    steps = {
        device: [
            step_seconds(device, wide, int4.before, int4.room[device] * wide / int4.bytes, 7),
            step_seconds(device, int4.bytes, int4.skinny, int4.room[device], 3),
        ]
        for device in CLOCK
    }
    for device, (before, after) in steps.items():
        print(f"int4 8B, one row, {device}: {before * 1e3:.2f} ms before, {after * 1e3:.2f} after")
    if arguments.json:
        facts = {
            "what": "instructions a weight, counted; steps predicted; nothing was measured",
            "triton": aot.triton_version(),
            "architecture": ARCHITECTURE,
            "formats": [asdict(row) for row in rows],
            "step_seconds": steps,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
