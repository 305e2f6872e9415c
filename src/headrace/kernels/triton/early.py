"""Kernels that start before the one before them has ended (programmatic dependent launch).

A decode step is some two hundred kernels of ten microseconds. Between two of them the device
drains, starts the next one and waits for its first bytes: about three microseconds in which
nothing comes from memory. From sm_90 on a kernel may be launched while its predecessor still runs
and wait, inside, until what that one wrote is there. What it does before it waits is hidden.

Every kernel that is launched so begins the same way, before it loads or stores anything:

1. `ask_ahead`, where it has weights of known place: L2 is asked for the first of them. That is a
   hint, which loads nothing into the kernel and could be wrong without changing a result; weights
   are the only arrays for which it is not wasted, since no step writes them.
2. `wait_for_inputs`: the next kernel may be launched from here on; then everything before this one
   is waited for.

Why that is right whatever runs around it. A kernel's wait ends when its predecessor has ended and
its writes are visible. The predecessor was launched so too, and then cannot end before its own
wait has; or it was launched the usual way, and then began after everything before it had ended. So
behind the wait all earlier kernels of the stream have ended: reads see their writes, and buffers
that they read may be written. Before the wait there is no access to memory, which `make gpu-dry`
reads from the machine code of every such kernel (`sass.Code.unwaited`). No program may leave
before the wait, and it stands before the loop: in a loop Triton's pipelining moves loads over it.

Sources: PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch; for the
loop, issue 11905 of triton-lang/triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .support import INTERPRETED

LINE = tl.constexpr(64)
"""Bytes that one hint surely brings: two sectors, what a read of HBM brings at least."""


@dataclass(frozen=True, slots=True)
class EarlyConfig:
    """Are kernels launched before their predecessors end? Not part of any result."""

    early: bool = False
    ahead: int = 0
    """Bytes of its weights that a program of a product asks L2 for before it waits; 0 or a power
    of two."""


OFF = EarlyConfig()


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch is given: the kernel's constant, and the attribute of the launch."""
    if not early or INTERPRETED:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """The first thing that a kernel does but for `ask_ahead`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ask_ahead(weight, first, rows, stride, start, end, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """Ask L2 for about AHEAD bytes of weight [rows, …]: of ROWS rows from `first` on, from column
    `start` on. Behind the last row and behind `end` it asks for the last again: every address is
    one of the matrix."""
    COLUMNS: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
    EACH: tl.constexpr = AHEAD // (ROWS * LINE)
    if EACH > 0:
        place = tl.arange(0, ROWS * EACH)
        row = tl.minimum(first + place // EACH, rows - 1)
        column = tl.minimum(start + place % EACH * COLUMNS, end - 1)
        at = weight + row.to(tl.int64) * stride + column
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
