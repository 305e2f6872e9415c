"""Facts about this machine, from the operating system and the driver, without importing torch."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from .environment import choose_sums
from .gpus import GpuFacts, driver

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class CpuFacts:
    name: str
    flags: frozenset[str]
    """Instruction sets by Linux's names: avx2, avx512f, avx512_vnni, amx_int8 …"""
    cores: int
    """Cores usable by this process: the lesser of the affinity mask and the container's quota."""
    physical_cores: int
    """Cores among the usable ones: hardware threads of one core count once."""
    memory: int
    """Bytes: the lesser of the machine's memory and the container's limit."""
    available: int
    """Bytes that can be allocated now without swapping or exceeding the container's limit."""


@dataclass(frozen=True, slots=True)
class Hardware:
    cpu: CpuFacts
    gpus: tuple[GpuFacts, ...]
    no_gpu: str = ""
    """Reason why there is no GPU."""
    broken_driver: bool = False
    cuda: tuple[int, int] = (99, 0)
    """Newest CUDA version that the driver serves."""

    @property
    def free(self) -> int:
        """Bytes free now on the device that serves by default: the first GPU, else the CPU."""
        return self.gpus[0].free if self.gpus else self.cpu.available


def hardware() -> Hardware:
    """Return the current facts: memory and affinity are read on each call."""
    host = cpu()
    found = driver(host.available)
    return Hardware(host, found.gpus, found.obstacle, found.broken, found.cuda)


def gpus() -> tuple[GpuFacts, ...]:
    """Return the NVIDIA GPUs that this process may use, numbered as CUDA numbers them."""
    return hardware().gpus


def cpu() -> CpuFacts:
    name, flags = _cpu_model()
    memory, available = _memory()
    affinity = _affinity()
    cores = min(len(affinity), _quota())
    return CpuFacts(
        name=name,
        flags=flags,
        cores=cores,
        physical_cores=min(cores, _physical(affinity)),
        memory=memory,
        available=available,
    )


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical(cpus: set[int]) -> int:
    """Count the cores of these hardware threads; the threads themselves if the kernel does not
    say."""
    cores = set()
    for number in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        cores.add(_read(siblings) or str(number))
    return len(cores)


def _quota() -> int:
    """Return the cores that the container's CPU quota allows, rounded up; a large number without
    one."""
    fields = _read(_CGROUP / "cpu.max").split()  # cgroup 2: "max 100000" or "150000 100000"
    if len(fields) != 2:
        fields = [
            _read(_CGROUP / "cpu" / "cpu.cfs_quota_us"),
            _read(_CGROUP / "cpu" / "cpu.cfs_period_us"),
        ]
    try:
        quota, period = int(fields[0]), int(fields[1])
    except ValueError:
        return 2**16
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else 2**16


def _memory() -> tuple[int, int]:
    """Return (total, available) bytes under the container's limit."""
    total = available = 0
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, rest = line.partition(":")
        if key == "MemTotal":
            total = int(rest.split()[0]) * 1024
        elif key == "MemAvailable":
            available = int(rest.split()[0]) * 1024
    if not total:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = total // 2
    for limit_name, used_name, stat_name, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _number(_CGROUP / limit_name), _number(_CGROUP / used_name)
        if limit is None or limit >= _UNLIMITED:
            continue
        total = min(total, limit)
        if used is not None:
            # Clean file pages count as used but are given back on demand.
            used -= _stat(_CGROUP / stat_name, cache_key)
            available = min(available, max(0, limit - used))
        break
    return total, min(total, available)


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def sum_in_one_order() -> None:
    """Make MKL's sums independent of a product's rows and threads, on CPUs that need it.

    Call it before the first product of the process (ADR 0018).
    """
    facts = cpu()
    if "Intel" in facts.name:
        choose_sums("AVX512" if "avx512f" in facts.flags else "AVX2")


@functools.cache
def _cpu_model() -> tuple[str, frozenset[str]]:
    name, flags = "", frozenset[str]()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key == "model name":
            name = value.strip()
        elif key in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
        elif not line and flags:
            break
    # Last: on Linux `platform.processor` starts a process, which takes 10 ms or more.
    return name or platform.processor() or platform.machine(), flags


@functools.cache
def torch_build() -> tuple[str, str | None]:
    """Return (version, CUDA version or None) of the installed torch, read from its files.

    ("", None) if it is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "", None
    version, cuda = "", None
    for line in _read(Path(spec.submodule_search_locations[0]) / "version.py").splitlines():
        key, _, value = line.partition("=")
        key = key.partition(":")[0].strip()
        if key == "__version__":
            version = value.strip().strip("'\"")
        elif key == "cuda" and value.strip() != "None":
            cuda = value.strip().strip("'\"")
    return version, cuda


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None
