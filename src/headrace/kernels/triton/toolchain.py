"""Triton's requirements on a machine before its first launch, and replacements for missing ones.

Triton writes every kernel to a cache in the home directory, asks `/sbin/ldconfig` for the driver's
path, and uses a C compiler to make a launcher for each kernel. A container often lacks all three.
So we give it the driver's path, and continue a read-only cache in a temporary folder. Only
launchers missing from the cache need a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import tempfile
from pathlib import Path

from ...base.environment import c_compiler, keep_triton_cache_in, name_libcuda, triton_cache

log = logging.getLogger("headrace.kernels")

UTILITIES = "cuda_utils*.so"
"""The module that Triton compiles before any launcher, as files of its cache name it."""


@functools.cache
def toolchain_obstacle() -> str | None:
    """Prepare this process for Triton on a GPU; return why it cannot serve, or None. Call it before
    triton is imported."""
    folder = libcuda_folder()
    if folder is not None:
        name_libcuda(folder)
    cache = triton_cache()
    if not _writable(cache):
        made = continued(cache)
        log.warning(
            "Triton's cache %s cannot be written (TRITON_CACHE_DIR names another); kernels that it "
            "lacks are compiled again at each start, in %s",
            cache,
            made,
        )
        keep_triton_cache_in(made)
        cache = made
    if c_compiler() is None and not any(cache.glob(f"*/{UTILITIES}")):
        return (
            "Triton needs a C compiler for its launchers (gcc or clang on PATH, or CC), or a cache "
            "that has them (TRITON_CACHE_DIR)"
        )
    return None


def libcuda_folder() -> str | None:
    """Return the folder of the driver's library that this process has loaded; None without one."""
    try:
        ctypes.CDLL("libcuda.so.1")
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libcuda.so" in line)
    return next((os.path.dirname(path) for path in paths if path.startswith("/")), None)


def continued(cache: Path) -> Path:
    """Make a temporary folder with everything that a cache has, as links, and return it."""
    made = Path(tempfile.mkdtemp(prefix="headrace-triton-"))
    if cache.is_dir() and os.access(cache, os.R_OK | os.X_OK):
        for entry in cache.iterdir():
            (made / entry.name).symlink_to(entry)
    return made


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
