"""Triton's own launcher on a driver that runs nothing: are launches such as a device takes?

    python benchmarks/gpu_driver.py [--architecture sm_90] [--model 3 …] [--json FILE]

`gpu_driver.c` becomes a libcuda.so.1, and the steps of the dry run's models go through
`JITFunction.run`, the launcher and `cuLaunchKernelEx` as they would on a device; tensors have no
memory. Refused are grids, blocks and shared memory over the limits, attributes of a launch (no
kernel of ours asks for one), images that are none; it is a fault where a launch did not arrive.
Beside the dry run's steps there are some as large as a server may make them.

The seconds are the host's in Triton's part of a launch on this machine: an attribute of the CPU
and of Triton, measured; what torch takes around it, and the real driver, are not in it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from gpu_dry import ARCHITECTURES, MODELS, STEPS, draw_tokens
from gpu_models import ARCHS, Step, batch_for, decode, prefill, thin, without_memory
from gpu_sass import SHARED_LIMIT
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headrace.kernels.model import Model
from headrace.kernels.operators import KvCache, StepBatch
from headrace.kernels.triton.operators import TritonOperators

HERE = Path(__file__).parent
DRIVEN = (0, 3, 5, 6, 8)
"""Numbers in `MODELS`: dense, coded, packed, experts."""
LARGE = (
    prefill(8192),
    decode(1024, 4096),
    decode(1024, 16_000),
    Step("mixed 1,000 + 7,192", (*((4096, 1),) * 1000, (0, 7192))),
)
ROUNDS = 5
"""Times that a step is run for its seconds."""


class _Launch(ctypes.Structure):
    """`struct launch` of gpu_driver.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("refused", ctypes.c_int),
    )


class Driver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's, but for the questions that it asks torch of a GPU."""

    def __init__(self, architecture: str) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.gpu_driver_launch.restype = ctypes.POINTER(_Launch)
        self._capability = int(architecture.removeprefix("sm_"))
        self._shared = SHARED_LIMIT[architecture]
        self.begin()
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: divmod(self._capability, 10)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def begin(self) -> None:
        """Forget what was launched."""
        self.library.gpu_driver_begin(self._capability, self._shared)

    def launches(self) -> list[_Launch]:
        count = self.library.gpu_driver_count()
        return [self.library.gpu_driver_launch(number).contents for number in range(count)]


@dataclass(frozen=True, slots=True)
class Driven:
    """One step."""

    model: str
    step: str
    launches: int
    grid: tuple[int, int, int]
    """The largest of each axis."""
    microseconds: float
    """Host time of one launch, in the quickest of `ROUNDS` steps: the CPU may have others."""
    faults: list[str]


def run_driven(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """This script in a process that finds our libcuda.so.1 where it looks for the driver's."""
    with tempfile.TemporaryDirectory() as folder:
        build_library(Path(folder))
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
        environment.pop("TRITON_INTERPRET", None)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )


def build_library(folder: Path) -> None:
    include = Path(nvidia.__file__).parent / "include"
    made = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    command += [f"-I{include}", str(HERE / "gpu_driver.c"), "-o", str(made)]
    subprocess.run(command, check=True)


def drive(device: Driver, label: str, step: Step, run: Callable[[], None]) -> Driven:
    """Launch a step once to look at it, and `ROUNDS` times for its seconds."""
    launch = JITFunction.run
    asked: list[str] = []
    seconds = 0.0

    def looked_at(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(self.fn.__name__)
        return launch(self, *args, **options)

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal seconds
        begin = time.perf_counter()
        kernel = launch(self, *args, **options)
        seconds += time.perf_counter() - begin
        return kernel

    faults: list[str] = []
    device.begin()
    with patch.object(JITFunction, "run", looked_at):
        try:
            run()
        except RuntimeError as error:
            faults.append(f"{asked[-1]}: {error}")
    found = device.launches()
    arrived = [each.name.decode() for each in found]
    if not faults and arrived != asked:
        at = next(
            (n for n, pair in enumerate(zip(asked, arrived, strict=False)) if pair[0] != pair[1]),
            min(len(asked), len(arrived)),
        )
        faults.append(f"asked for {asked[at : at + 1]} at {at}, launched {arrived[at : at + 1]}")
    rounds = []
    with patch.object(JITFunction, "run", timed):
        for _ in range(0 if faults else ROUNDS):
            seconds = 0.0
            run()
            rounds.append(seconds * 1e6 / max(1, len(asked)))
    grid = tuple(max((each.grid[axis] for each in found), default=0) for axis in range(3))
    cost = round(min(rounds), 2) if rounds else 0.0
    return Driven(label, step.name, len(found), grid, cost, faults)


def drive_models(architecture: str, numbers: list[int]) -> Iterator[Driven]:
    torch.set_num_threads(1)
    device = Driver(architecture)
    driver.set_active(device)
    for name, weights, kv, deterministic in (MODELS[number] for number in numbers):
        if architecture == "sm_80" and "fp8" in (weights, kv):
            continue
        arch = thin(ARCHS[name])
        with torch.inference_mode():
            model, operators, cache = without_memory(
                arch, architecture, weights, kv, deterministic=deterministic
            )
            for step in (*STEPS, *LARGE):
                batch = batch_for(step, cache, "meta")

                run = partial(one_step, model, operators, batch, cache, arch.vocab_size)
                yield drive(device, f"{name} {weights}, {kv} KV", step, run)


def one_step(
    model: Model, operators: TritonOperators, batch: StepBatch, cache: KvCache, vocabulary: int
) -> None:
    """The forward pass and all kernels of drawing."""
    model.forward(operators, batch, cache)
    draw_tokens(operators, len(batch.lengths), vocabulary)


def driver_table(rows: list[dict[str, Any]]) -> str:
    """The rows that `--json` writes, one a step, as a table."""
    lines = [
        "| launches that reach the driver (one layer of each kind, and drawing) | step | launches "
        "| largest grid | host us a launch, measured |",
        "|---|---|---:|---|---:|",
    ]
    lines += [
        f"| {row['model']} | {row['step']} | {row['launches']} "
        f"| {' x '.join(f'{axis:,}' for axis in row['grid'])} | {row['microseconds']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def driven_rows(
    architecture: str = "sm_90", models: tuple[int, ...] = DRIVEN
) -> list[dict[str, Any]]:
    """What a process of its own found; RuntimeError where it ended otherwise."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        given = ["--inside", "--architecture", architecture, "--json", file.name]
        given += ["--model", *map(str, models)]
        done = run_driven([__file__, *given])
        if done.returncode:
            raise RuntimeError(f"gpu_driver: {done.stderr[-800:]}")
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="sm_90")
    parser.add_argument("--model", type=int, nargs="+", default=list(DRIVEN))
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        found = [asdict(row) for row in drive_models(arguments.architecture, arguments.model)]
        arguments.json.write_text(json.dumps(found))
        return 0
    rows = driven_rows(arguments.architecture, tuple(arguments.model))
    print(f"Triton {triton.__version__}\n\n{driver_table(rows)}")
    faults = [f"{row['model']}, {row['step']}: {fault}" for row in rows for fault in row["faults"]]
    print("\n".join(faults) if faults else "no faults")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
