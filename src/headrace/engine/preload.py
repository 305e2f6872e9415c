"""A shorter start: work that runs parallel to the imports, and imports that can be left out.

A dense model on the CPU is served without torch. If torch is needed, its import holds the
interpreter's lock for a second. A quarter of that is the system's loader, which relocates the
largest library. That needs no interpreter, so another core does it meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.config import CPU_KERNELS, EngineOptions
from ..base.hardware import gpus, torch_build
from ..obs.threads import THREADS

LIBRARY = Path("lib", "libtorch_cpu.so")


def wants_torch(options: EngineOptions) -> bool:
    """Guess from the options, before the model is opened, whether the worker computes on tensors.
    After a wrong guess the worker imports torch later, or it was loaded in vain."""
    if options.device == "cuda":
        return True
    if options.device == "auto" and torch_build()[1] is not None and gpus():
        return True
    return options.kernels not in CPU_KERNELS or options.max_adapters > 0


def preload_torch() -> threading.Thread | None:
    """Begin to load torch's library in a thread; return None if that has no use.

    Only for builds for CPUs: the others must find CUDA's libraries themselves first. Any error is
    left to the import that follows, which does the same and can say why.
    """
    if "torch" in sys.modules or sys.platform != "linux" or torch_build()[1] is not None:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    library = Path(spec.submodule_search_locations[0]) / LIBRARY
    if not library.is_file():
        return None
    return THREADS.errand("preload", _load, library)


def _load(library: Path) -> None:
    # Not ctypes.CDLL(library): that keeps the interpreter's lock while the system loads.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen(ctypes.c_char_p(os.fsencode(library)), ctypes.c_int(os.RTLD_NOW | os.RTLD_LOCAL))


def give_back() -> None:
    """Return free memory of the C library's heaps to the system: parsing the vocabulary at a start
    leaves some tens of megabytes."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage inside: a start makes a million objects that stay, and walking over them
    again and again costs a tenth of it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if gc.get_freeze_count() == 0:
                # All of them count as old at once, without the walk that would follow now.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
