"""Bounds of inner loops that the compiler loses (`benchmarks/gpu_bounds.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_bounds import lost_bounds

ROOT = Path(__file__).parents[2]
KERNELS = """
import triton
import triton.language as tl
from gpu_bounds import lost_bounds
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def carried(x, y, per, groups, SPLITS: tl.constexpr):
    total = tl.zeros([64], tl.float32)
    start = tl.program_id(0) * per
    for _ in range(SPLITS):
        part = tl.zeros([64], tl.float32)
        for group in range(start, tl.minimum(start + per, groups)):
            part += tl.load(x + group * 64 + tl.arange(0, 64))
        total += part * 0.5
        start += per
    tl.store(y + tl.arange(0, 64), total)


@triton.jit
def computed(x, y, per, groups, SPLITS: tl.constexpr):
    total = tl.zeros([64], tl.float32)
    for number in range(SPLITS):
        start = (tl.program_id(0) + number) * per
        part = tl.zeros([64], tl.float32)
        for group in range(start, tl.minimum(start + per, groups)):
            part += tl.load(x + group * 64 + tl.arange(0, 64))
        total += part * 0.5
    tl.store(y + tl.arange(0, 64), total)


types = {"x": "*fp32", "y": "*fp32", "per": "i32", "groups": "i32", "SPLITS": "constexpr"}
for kernel in (carried, computed):
    source = ASTSource(kernel, types, {"SPLITS": 4})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
    print(*(len(lost_bounds(made["ttir"], made[after])) for after in ("ttgir", "ttir")))
"""


@pytest.mark.slow
def test_a_bound_that_the_compiler_takes_out_of_the_outer_loop_is_found(tmp_path: Path) -> None:
    """The form that deterministic products had, which added the first part again and again."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": str(ROOT / "benchmarks")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Begin and end of the carried one. A Triton that has none is mended: the rule may go then.
    assert done.stdout.splitlines() == ["2 0", "0 0"]


def text(begin: str, carried: str = "%start", following: str = "%next") -> str:
    return f"""
tt.func public @kernel(%x: !tt.ptr<f32> loc("x"(#loc)), %n: i32 loc("n"(#loc))) {{
  %low = tt.get_program_id x : i32 loc(#loc2)
  %0:2 = scf.for %i = %c0 to %c4 step %c1 iter_args(%sum = %cst, {carried} = %low) -> (f32, i32) {{
    %part = scf.for %j = {begin} to %n step %c1 iter_args(%acc = %cst) -> (f32)  : i32 {{
      %more = arith.addf %acc, %cst : f32 loc(#loc3)
      scf.yield %more : f32 loc(#loc3)
    }} loc(#loc3)
    %next = scf.if %odd -> (i32) {{
      %2 = arith.addi {carried}, %n : i32
      scf.yield %2 : i32
    }} else {{
      scf.yield {carried} : i32
    }}
    %2 = arith.muli %i, %n : i32
    scf.yield %part, {following} : f32, i32 loc(#loc3)
  }} {{tt.num_stages = 3 : i32}} loc(#loc3)
  tt.return loc(#loc)
}} loc(#loc)
"""


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (text("%start"), text("%start"), 0),
        (text("%start"), text("%low"), 1),
        # What the loop counts will do as well as what it carries.
        (text("%start"), text("%i"), 0),
        # The same number in every turn may be taken out.
        (text("%start", following="%start"), text("%low"), 0),
        (text("%low"), text("%low"), 0),
        # Nobody can say which loop is which.
        (text("%start"), text("%start").replace("scf.for %j", "scf.while %j"), 1),
    ],
)
def test_what_a_bound_depends_on(before: str, after: str, found: int) -> None:
    assert len(lost_bounds(before, after)) == found
