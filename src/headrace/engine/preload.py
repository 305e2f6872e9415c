"""A faster start: work in parallel to the imports, and imports that can be skipped.

A dense model on the CPU is served without torch. If torch is needed, its import holds the
interpreter's lock for a second. A quarter of that is the dynamic loader relocating the largest
library. It needs no interpreter, so another core does it meanwhile.
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
    """Guess from the options, before the model is opened, whether the worker computes on tensors. A
    wrong guess costs a later import, or one for nothing."""
    if options.device == "cuda":
        return True
    if options.device == "auto" and torch_build()[1] is not None and gpus():
        return True
    return options.kernels not in CPU_KERNELS or options.max_adapters > 0


def preload_torch() -> threading.Thread | None:
    """Start to load torch's library in a thread; return None if that is useless.

    Only for CPU builds: others must first find CUDA's libraries themselves. Errors are ignored: the
    import that follows meets and explains them.
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
    # Not ctypes.CDLL(library): it holds the interpreter's lock while the system loads.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen(ctypes.c_char_p(os.fsencode(library)), ctypes.c_int(os.RTLD_NOW | os.RTLD_LOCAL))


def give_back() -> None:
    """Return free heap memory to the system: parsing the vocabulary leaves some tens of
    megabytes."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: a start makes a million lasting objects, and traversing them again
    and again costs a tenth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if gc.get_freeze_count() == 0:
                # They all count as old at once, without a collection now.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
