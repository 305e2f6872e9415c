"""Packed products as the compiler makes them for sm_100, whose products have their sums in a memory
of their own. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

import torch
from gpu_aot import compiling, read_all

from headrace.kernels.triton.product_packed import product_packed
from headrace.kernels.triton.table import Table, load_table
from headrace.kernels.triton.unpack import BYTES, NONE, Packing
from headrace.kernels.weights import TiledWeight

bits, group = int(sys.argv[1]), int(sys.argv[2])
zero = None if sys.argv[3] == "none" else int(sys.argv[3])
outs, width = 4096, 2048
chunks, planes = width // 128, Packing(bits, group, zero, NONE).planes
weight = TiledWeight(
    torch.empty(chunks, outs, BYTES[bits], dtype=torch.uint8, device="meta"),
    torch.empty(chunks, planes, outs, dtype=torch.int32, device="meta"),
    torch.empty(outs, device="meta"),
    zero,
    bits,
    group,
    (outs, width),
)
table = Table("sm_100")
for bucket in load_table()["sm_100"]["product_packed"]:
    if not bucket.get("library"):
        x = torch.empty(bucket["up_to"], width, dtype=torch.bfloat16, device="meta")
        with compiling("sm_100") as found:
            product_packed(x, weight, None, table.packed(bucket["up_to"]))
        read_all(found)
        one = found[0]
        print(bucket["up_to"], one.code.tensor_core, one.code.spills, one.columns, one.resident > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "group", "zero"),
    [
        (4, 32, "none"),
        (4, 128, "none"),
        (4, 32, "8"),
        (5, 32, "16"),
        (6, 16, "32"),
        (8, 32, "128"),
        pytest.param(1, 16, "0", id="e2m1-16"),
        pytest.param(1, 32, "0", id="e2m1-32"),
    ],
)
def test_every_bucket_multiplies_by_tensor_memory(bits: int, group: int, zero: str) -> None:
    """6 bits in groups of 16 at 256 rows wanted 528 of 512 columns, and the compiler made a trap of
    it: 16 instructions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(bits), str(group), zero],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT / "benchmarks")])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.rsplit(" ", 3) for line in done.stdout.splitlines()]
    assert [head for head, *_ in lines] == [f"{n} tensor memory" for n in (16, 32, 64, 511)]
    for head, spills, columns, starts in lines:
        # Two blocks of a decode step share a multiprocessor.
        assert int(columns) <= (256 if head.startswith("511") else 128), head
        assert (spills, starts) == ("0", "True"), head
