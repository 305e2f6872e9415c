"""Compiling ahead of time: the launchers run as they would on a GPU, but nothing is launched.

Inside `compiling(architecture)` every kernel launch compiles its kernel for that architecture and
notes it. The launchers themselves are called, with tensors on torch's "meta" device (a shape, a
dtype, no memory), so what is compiled is exactly what serving would compile for these shapes:
same configuration, same constants, same specialisation. A whole forward pass of a model can be
run in it. Not under the interpreter, and in a process without a GPU only: Triton's driver is
replaced while the context is open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from gpu_bounds import lost_bounds
from gpu_ptx import exponent_sources
from gpu_sass import Code, read_code, read_codes, resident_blocks
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headrace.kernels.triton.support import INTERPRETED


@dataclass(slots=True)
class Compiled:
    """One kernel as one configuration and one set of shapes gave it."""

    kernel: str
    """Module and function below `kernels.triton`."""
    architecture: str
    warps: int
    stages: int
    constants: dict[str, Any]
    shared: int
    """Bytes per block."""
    machine: bytes | Code
    """The cubin, or what was read in it."""
    seconds: float
    """Processor time to compile it, or to find it in Triton's cache."""
    exponents: list[dict[str, int]] = field(default_factory=list)
    """See `gpu_ptx.exponent_sources`."""
    bounds: list[str] = field(default_factory=list)
    """See `gpu_bounds.lost_bounds`."""
    grids: list[tuple[int, ...]] = field(default_factory=list)
    """One a launch."""
    columns: int = 0
    """Columns of tensor memory that a block takes."""
    wide: bool = False
    """Its first operand is fp32, of which matrix instructions keep ten bits: it goes without."""

    @property
    def code(self) -> Code:
        """Read when it is first asked for; `read_all` is quicker for many."""
        if isinstance(self.machine, bytes):
            self.machine = read_code(self.machine, self.architecture)
        return self.machine

    @property
    def resident(self) -> int:
        """Blocks per multiprocessor."""
        cut = self.code.registers, self.warps, self.shared, self.columns
        return resident_blocks(self.architecture, *cut)


class _AbsentDevice:
    """What a launch asks Triton's driver, answered for a GPU that is not there."""

    def __init__(self, architecture: str) -> None:
        self._number = int(architecture.removeprefix("sm_"))

    def get_current_device(self) -> int:
        # Kernels are cached by device: one number for each architecture.
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._number, 32)


@contextmanager
def compiling(
    architecture: str, known: dict[int, Compiled] | None = None
) -> Iterator[list[Compiled]]:
    """Inside, launches compile for `architecture` (sm_80 …) and are noted in the list given.

    `known`, kept between uses, saves looking at a kernel again.
    """
    assert not INTERPRETED, "the interpreter compiles nothing: start without TRITON_INTERPRET"
    known = {} if known is None else known
    found: dict[int, Compiled] = {}
    listed: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        begin = used()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        if id(kernel) in known and id(kernel) not in found:
            found[id(kernel)] = replace(known[id(kernel)], grids=[])
            listed.append(found[id(kernel)])
        if id(kernel) not in found:
            metadata = kernel.metadata
            constants = {name: value for name, value in options.items() if name.isupper()}
            found[id(kernel)] = Compiled(
                f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}",
                architecture,
                metadata.num_warps,
                metadata.num_stages,
                constants,
                metadata.shared,
                kernel.asm["cubin"],
                used() - begin,
                exponent_sources(kernel.asm["ptx"]),
                lost_bounds(kernel.asm["ttir"], kernel.asm["ttgir"]),
                columns=getattr(metadata, "tmem_size", None) or 0,
                wide=getattr(args[0], "dtype", None) == torch.float32,
            )
            listed.append(found[id(kernel)])
            known[id(kernel)] = found[id(kernel)]
        found[id(kernel)].grids.append(tuple(grid))
        return kernel

    driver.set_active(_AbsentDevice(architecture))
    try:
        with patch.object(JITFunction, "run", compile_only):
            yield listed
    finally:
        driver._active = None


def read_all(kernels: Iterable[Compiled]) -> None:
    """Read the machine code of all of them at once."""
    unread = [each for each in kernels if isinstance(each.machine, bytes)]
    for architecture in {each.architecture for each in unread}:
        cubins = list({each.machine for each in unread if each.architecture == architecture})
        codes = dict(zip(cubins, read_codes(cubins, architecture), strict=True))
        for each in unread:
            if each.architecture == architecture:
                each.machine = codes[each.machine]


def used() -> float:
    """Return the processor's seconds of this process and of its children that have ended: a busy
    machine makes them no longer."""
    return sum(os.times()[:4])


def triton_version() -> str:
    return str(triton.__version__)
