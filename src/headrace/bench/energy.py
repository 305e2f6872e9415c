"""Energy in joules, if counters are readable: Intel's and AMD's (RAPL), NVIDIA's (NVML).

An unreadable counter is absent; nothing is derived from a thermal design power.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Energy used on this machine since its creation; without `local` it counts nothing."""

    def __init__(self, *, local: bool = True) -> None:
        self._rapl = rapl_joules() if local else {}
        self._nvml = _nvml_joules() if local else {}

    def joules(self) -> float | None:
        """Return the joules since creation, packages and GPUs together; None without a counter."""
        total, found = 0.0, False
        now = rapl_joules()
        for name, (begin, _) in self._rapl.items():
            if name in now:
                end, span = now[name]
                total += end - begin if end >= begin else end - begin + span
                found = True
        later = _nvml_joules() if self._nvml else {}
        for index, start in self._nvml.items():
            if index in later:
                total += later[index] - start
                found = True
        return total if found else None


def rapl_joules() -> dict[str, tuple[float, float]]:
    """Return package → (counter, range at which it wraps), in joules."""
    found = {}
    for path in RAPL.glob("*-rapl:[0-9]"):
        try:
            value = int((path / "energy_uj").read_text()) / 1e6
            span = int((path / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
        found[path.name] = (value, span)
    return found


@contextlib.contextmanager
def _nvml() -> Iterator[dict[int, tuple[ctypes.CDLL, ctypes.c_void_p]]]:
    """Yield GPU → (library, handle); empty without a driver."""
    handles: dict[int, tuple[ctypes.CDLL, ctypes.c_void_p]] = {}
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1") if Path("/dev/nvidiactl").exists() else None
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2() != 0:
        yield handles
        return
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                handles[index] = library, handle
        yield handles
    finally:
        library.nvmlShutdown()


def _nvml_joules() -> dict[int, float]:
    """Return GPU → joules since the driver was loaded."""
    found, energy = {}, ctypes.c_ulonglong()
    with _nvml() as handles:
        for index, (library, handle) in handles.items():
            if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) == 0:
                found[index] = energy.value / 1000
    return found


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


SM_CLOCK = 1
"""NVML's number of the compute clock. As a sensor, number 0 is the chip's temperature."""


def gpu_states() -> dict[int, dict[str, tuple[float, str]]]:
    """Return GPU → {quantity: (current value, unit)}, as far as its driver reports them."""
    found: dict[int, dict[str, tuple[float, str]]] = {}
    share, memory, number = _Utilisation(), _Memory(), ctypes.c_uint()
    with _nvml() as handles:
        for index, (library, handle) in handles.items():
            state = found[index] = {}
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(share)) == 0:
                state["utilisation"] = (float(share.gpu), "%")
                state["memory utilisation"] = (float(share.memory), "%")
            if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                state["memory"] = (float(memory.used), "B")
            if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(number)) == 0:
                state["power"] = (number.value / 1e3, "W")
            if library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(number)) == 0:
                state["temperature"] = (float(number.value), "°C")
            if library.nvmlDeviceGetClockInfo(handle, SM_CLOCK, ctypes.byref(number)) == 0:
                state["clock"] = (float(number.value), "MHz")
    return found
