"""NVIDIA GPUs that this process may use, from the driver's libraries, without importing torch.

The CUDA driver decides which they are. It numbers them (fastest first, unless `CUDA_DEVICE_ORDER`
says otherwise) and applies `CUDA_VISIBLE_DEVICES`. An instance of a partitioned GPU (MIG) is a
device. The management library (NVML) counts in another order, so it is only asked for the free
memory of a UUID that CUDA named. No CUDA context is made: it takes memory and seconds.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from dataclasses import dataclass, replace

_MULTIPROCESSORS, _INTEGRATED, _MAJOR, _MINOR, _BLOCK_MEMORY = 16, 18, 75, 76, 97
"""Numbers of CUdevice_attribute."""
_NO_DEVICE = 100
_WHY = {
    34: "the libcuda.so.1 that was found is the toolkit's stub, not the driver's",
    _NO_DEVICE: "the driver shows none to this process (see nvidia-smi and CUDA_VISIBLE_DEVICES)",
    802: "the driver is not ready (on a machine with NVSwitch: is nvidia-fabricmanager running?)",
    803: "libcuda.so.1 and the kernel's driver are of different versions: restart the machine",
}
"""Answers of cuInit."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    index: int
    """Its number in CUDA, and so in torch."""
    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""
    free: int
    """Bytes free now; all of them if the driver does not report it."""
    uuid: str = ""
    """UUID of the GPU, or of the instance of a partitioned one."""
    multiprocessors: int = 132
    block_memory: int = 232_448
    """Bytes of shared memory that a thread block may have."""
    integrated: bool = False
    """Whether its memory is the host's, as on Jetson and DGX Spark."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The usable GPUs and the state of the driver."""

    gpus: tuple[GpuFacts, ...] = ()
    obstacle: str = ""
    """Reason why there is no GPU."""
    broken: bool = False
    """Whether a driver is there and does not work."""
    cuda: tuple[int, int] = (0, 0)
    """Newest CUDA version that it serves; (0, 0) without one."""


def driver(host_available: int) -> Driver:
    """Return the driver's GPUs with the memory that is free now.

    `host_available`: bytes that can be allocated on the host, for GPUs that share its memory.
    """
    known = _ask_cuda()
    if not known.gpus:
        return known
    free = _free([gpu.uuid for gpu in known.gpus if not gpu.integrated])
    gpus = [
        replace(
            gpu,
            free=min(gpu.memory, host_available if gpu.integrated else free.get(gpu.uuid, 2**63)),
        )
        for gpu in known.gpus
    ]
    return replace(known, gpus=tuple(gpus))


@functools.cache
def _ask_cuda() -> Driver:
    """Return the devices that CUDA numbers, once per process; `free` is not asked here."""
    library = _library("libcuda.so.1")
    if library is None:
        return Driver(
            obstacle="no NVIDIA driver is there (libcuda.so.1; nvidia-smi shows it; a container "
            "needs --gpus all, and NVIDIA_DRIVER_CAPABILITIES with compute)"
        )
    if error := library.cuInit(0):
        why = _WHY.get(error, f"cuInit of the driver failed with error {error}")
        return Driver(obstacle=why, broken=error != _NO_DEVICE)
    number, count = ctypes.c_int(), ctypes.c_int()
    try:
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_describe(library, index) for index in range(count.value))
    except OSError as error:
        return Driver(obstacle=str(error), broken=True)
    version = (number.value // 1000, number.value % 1000 // 10)
    return Driver(gpus, "" if gpus else _WHY[_NO_DEVICE], cuda=version)


def _call(library: ctypes.CDLL, name: str, *given: object) -> None:
    """Call a function of the driver. Raises `OSError` with its name if it fails."""
    if error := getattr(library, name)(*given):
        raise OSError(f"{name} of the driver failed with error {error}")


def _describe(library: ctypes.CDLL, index: int) -> GpuFacts:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name, identity = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    # The first version gives an instance the UUID of its whole GPU; old drivers have no other.
    newest = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _call(library, newest, identity, device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _call(library, "cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    return GpuFacts(
        index,
        name.value.decode(errors="replace"),
        (attribute(_MAJOR), attribute(_MINOR)),
        memory.value,
        memory.value,
        str(uuid.UUID(bytes=identity.raw)),
        attribute(_MULTIPROCESSORS),
        attribute(_BLOCK_MEMORY),
        bool(attribute(_INTEGRATED)),
    )


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _free(uuids: list[str]) -> dict[str, int]:
    """Return the free bytes of each of these devices that NVML knows."""
    library = _library("libnvidia-ml.so.1")
    if library is None or library.nvmlInit_v2() != 0:
        return {}
    found = {}
    try:
        for identity in uuids:
            for kind in ("GPU", "MIG"):
                handle, memory = ctypes.c_void_p(), _NvmlMemory()
                name = f"{kind}-{identity}".encode()
                if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
                    continue
                if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                    found[identity] = memory.free
    finally:
        library.nvmlShutdown()
    return found


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
