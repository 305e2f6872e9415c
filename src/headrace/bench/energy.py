"""Joules, where counters can be read: Intel and AMD package counters (RAPL), NVIDIA's (NVML).

What cannot be read is absent; nothing is ever derived from a thermal design power.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Counts from its making."""

    def __init__(self) -> None:
        self._rapl = _rapl_joules()
        self._nvml = _nvml_joules()

    def joules(self) -> float | None:
        """Since the making, packages and GPUs together; None where no counter is readable."""
        total, found = 0.0, False
        now = _rapl_joules()
        for name, (begin, _) in self._rapl.items():
            if name in now:
                end, span = now[name]
                total += end - begin if end >= begin else end - begin + span
                found = True
        later = _nvml_joules()
        for index, start in self._nvml.items():
            if index in later:
                total += later[index] - start
                found = True
        return total if found else None


def _rapl_joules() -> dict[str, tuple[float, float]]:
    """Package → (counter, range at which it wraps), in joules."""
    found = {}
    for path in RAPL.glob("*-rapl:[0-9]"):
        try:
            value = int((path / "energy_uj").read_text()) / 1e6
            span = int((path / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
        found[path.name] = (value, span)
    return found


def _nvml_joules() -> dict[int, float]:
    """GPU → energy since the driver was loaded."""
    if not Path("/dev/nvidiactl").exists():
        return {}
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if library.nvmlInit_v2() != 0:
        return {}
    found = {}
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                continue
            if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) == 0:
                found[index] = energy.value / 1000
    finally:
        library.nvmlShutdown()
    return found
