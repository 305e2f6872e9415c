"""Builds of the native libraries by tests, kept so that a later run compiles only what changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def built(name: str, *options: str, target: str = "all") -> Path:
    """The folder `build/<name>`, configured with `options`, with `target` built in it.

    Levels that another build compiled with the same flags come from `ccache`, where it is there.
    """
    folder = ROOT / "build" / name
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    if shutil.which("ccache"):
        options = *options, "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"
    make = ["cmake", "--build", str(folder), "--target", target, "--parallel", "2"]
    for command in (["cmake", "-S", str(ROOT), "-B", str(folder), *options], make):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return folder
