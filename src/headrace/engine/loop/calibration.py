"""A machine's ceilings at its first start, and the shares of them that our products reach, in about
a second, so that metrics mean something.

ADR 0065. Rougher than `headrace roofline --calibrate`, which replaces it, and than `--measure`,
which fits the efficiencies to real steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy
import numpy.typing as npt

from ...base.hardware import cpu
from ...kernels.cpu.library import LibraryAbsent, Team, allocate
from ...kernels.cpu.probe import product
from ...roofline.efficiency import CPU_EFFICIENCY, PRODUCTS, Efficiency, of_products
from ...roofline.hardware import Hardware
from ...roofline.hardware_files import save_hardware
from ...roofline.machine import calibration_path, last_level_cache, this_hardware

READ_BYTES = 96 * 2**20
"""Least bytes read; also at least twice the largest cache: a host's may hold 300 MiB."""
CACHED_BYTES = 4 * 2**20
READ = 0x3C
"""Each byte of what is read: as weights they are plain numbers in fp16, fp32 and codes."""
SIZE = 512
ROWS, OUTPUTS = 64, 2048
"""Rows and outputs of a product that is bound by its computing."""
SECONDS = 0.12
"""For each figure: long enough that a round falls between others' turns on a busy machine."""
RETRIES = 3
"""Retries of a measurement that cannot be true; if none can, the next start measures again."""
ITERATIONS = 200_000
SHARE = 0.8
"""Least share of the processors that a measurement uses on an otherwise idle machine."""
SOURCE = "measured in a moment at the first start"
BUSY = f"{SOURCE}, beside the work of others"
"""A start an hour later measures such figures again, and keeps the better."""
AGAIN_SECONDS = 3600.0
log = logging.getLogger("headrace.engine")


def needs_calibration(device: str) -> bool:
    """Return whether a CPU has no plausible figures, or only some measured while others used the
    machine.

    GPUs are known by name.
    """
    if device != "cpu":
        return False
    kept = this_hardware("cpu")
    if kept is None:
        return True
    if kept.source == SOURCE and kept.efficiency == CPU_EFFICIENCY and "int8" in kept.rates:
        return True  # An earlier version did not measure the products.
    # Ceilings that efficiencies were fitted to stay.
    again = kept.source == BUSY and kept.efficiency.source in (CPU_EFFICIENCY.source, PRODUCTS)
    return again and time.time() - calibration_path().stat().st_mtime > AGAIN_SECONDS


def calibrate_quickly(threads: int) -> None:
    """Measure this CPU's ceilings with `threads` threads, and keep them.

    A cache folder that cannot be written is no error: there are then no predictions.
    """
    path = calibration_path()
    begin = time.perf_counter()
    hardware, alone = measured(threads)
    for _ in range(RETRIES):
        if hardware.implausible() is None:
            break
        again, alone = measured(threads)
        hardware = better(hardware, again)
    kept = this_hardware("cpu")
    if kept is not None and kept.name == hardware.name:
        hardware = better(hardware, kept)
    hardware = replace(hardware, source=SOURCE if alone else BUSY)
    try:
        save_hardware(hardware, path)
    except OSError as error:
        log.info("no calibration kept, so steps are not predicted: %s", error)
        return
    log.info(
        "calibrated in %.1f s: %.0f GB/s, int8 %.0f GOP/s, fp32 %.0f GFLOP/s (%s)",
        time.perf_counter() - begin,
        hardware.bandwidth / 1e9,
        hardware.rates.get("int8", 0.0) / 1e9,
        hardware.rates["float32"] / 1e9,
        path,
    )


def measured(threads: int) -> tuple[Hardware, bool]:
    """Return (figures, whether the machine was ours meanwhile). If it was not, the shares of the
    ceilings are assumed: these and the products were measured one after the other."""
    begin, used = time.perf_counter(), time.process_time()
    hardware = quick_hardware(threads)
    used, offered = time.process_time() - used, threads * (time.perf_counter() - begin)
    alone = undisturbed(used, offered)
    return hardware if alone else hardware.fitted(CPU_EFFICIENCY), alone


def undisturbed(used: float, offered: float) -> bool:
    """Return whether we had the processors' time. Figures measured next to other load can be half
    of the true ones."""
    return used >= SHARE * offered


def better(one: Hardware, other: Hardware) -> Hardware:
    """Return the larger of each ceiling: other load only lowers them. The shares are those of
    `one`, unless only the `other`'s are measured."""
    return replace(
        one,
        efficiency=(other if one.efficiency == CPU_EFFICIENCY else one).efficiency,
        bandwidth=max(one.bandwidth, other.bandwidth),
        cache_bandwidth=max(one.cache_bandwidth, other.cache_bandwidth),
        rates={name: max(rate, other.rates.get(name, 0.0)) for name, rate in one.rates.items()},
    )


def quick_hardware(threads: int) -> Hardware:
    """Measure the best of a few short rounds of each figure: other load can only make a round
    slower.

    numpy's product has as many threads as the process has CPUs, whatever `threads` says.
    """
    facts = cpu()
    size = min(max(READ_BYTES, 2 * last_level_cache()), facts.memory // 8)
    square = numpy.ones((SIZE, SIZE), numpy.float32)
    rates = {"float32": best(lambda: 2 * SIZE**3 / timed(lambda: square @ square))}
    efficiency = CPU_EFFICIENCY
    try:
        team = Team(threads)
    except LibraryAbsent:
        # Local: the reference has served this start, so it is here.
        import torch

        data, small = torch.ones(size // 4), torch.ones(CACHED_BYTES // 4)
        bandwidth = best(lambda: size / timed(data.sum))
        cached = best(lambda: CACHED_BYTES / timed(small.sum))
    else:
        room, less = allocate(size), allocate(CACHED_BYTES)
        room.fill(READ)
        less.fill(1)
        bandwidth = best(lambda: team.read_bandwidth(room))
        cached = best(lambda: team.read_bandwidth(less))
        rates["int8"] = best(lambda: team.int8_rate(ITERATIONS))
        efficiency = shares(team, room, rates, bandwidth)
    return Hardware(
        name=f"{facts.name}, {threads} threads",
        rates=rates,
        bandwidth=bandwidth,
        memory=facts.memory,
        cache=last_level_cache(),
        cache_bandwidth=max(cached, bandwidth),
        kind="cpu",
        efficiency=efficiency,
        source=SOURCE,
    )


def shares(
    team: Team, room: npt.NDArray[numpy.uint8], rates: dict[str, float], bandwidth: float
) -> Efficiency:
    """Measure the shares of the ceilings that our products reach: of the bandwidth with one row of
    4-bit codes, of the rates with many rows of these and of fp32."""
    one, size, _ = product(team, "Q4_0", room, 1)
    found = [best(partial(_rate, size, one)) / bandwidth]
    for kind, type in (("Q4_0", "int8"), ("F32", "float32")):
        many, _, work = product(team, kind, room, ROWS, OUTPUTS)
        found.append(best(partial(_rate, work, many)) / rates[type])
    return of_products(*found)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _rate(amount: float, work: Callable[[], object]) -> float:
    return amount / timed(work)


def best(rate: Callable[[], float]) -> float:
    """Return the largest of the rates measured in `SECONDS`; the first round also warms up."""
    found, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        found = max(found, rate())
    return found
