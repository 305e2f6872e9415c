"""Builds of the native libraries by tests, kept so that a later run compiles only what changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def built(name: str, *options: str, target: str = "all") -> Path:
    """Configure `build/<name>` with `options`, build `target` in it, and return that folder.

    Objects that another build has made come from where it kept them (kernels/cpu/kept.py).
    """
    folder = ROOT / "build" / name
    make = ["cmake", "--build", str(folder), "--target", target, "--parallel", "2"]
    for command in (["cmake", "-S", str(ROOT), "-B", str(folder), *options], make):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder
