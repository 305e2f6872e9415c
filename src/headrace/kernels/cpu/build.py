"""Builds the libraries in place, for a source checkout: `python -m headrace.kernels.cpu.build`.

It needs only the standard library, so that `make run` can call it before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEXT = HERE.parents[1] / "text"
ROOT = HERE.parents[3]
SECONDS = {"avx2": 85, "avx512": 55, "vnni": 55, "bf16": 55, "neon": 100, "dotprod": 100}
"""Seconds to compile a level on one core (GCC 12, Zen 4)."""
_BUILDING = re.compile(r"(\[.*?\]) Building CXX object (?:.*/)?(\w+)\.dir/.*/(\w+)\.cpp\.o")
_SILENT = re.compile(r"\[.*?\] |Consolidate compiler|Scanning dependencies|ninja: no work to do")


class NotBuilt(Exception):
    """The reason why there is no library, as half a sentence."""


def build(folder: Path, *, sanitize: str = "", output: Path = HERE, levels: str = "host") -> Path:
    """Configure and build in `folder`; return the path of the kernels' library, in `output`.

    The library of byte-level BPE goes to its own package, or next to it in another `output`.
    `levels`: `host`, `all`, or names with semicolons (`HEADRACE_KERNELS` in CMakeLists.txt). Raises
    `NotBuilt`.
    """
    own = shutil.which("cmake", path=Path(sys.executable).parent)  # this environment's
    cmake = shutil.which("cmake") or own
    if cmake is None:
        raise NotBuilt("cmake is not installed: `pip install cmake` brings it")
    if not (ROOT / "CMakeLists.txt").exists():
        raise NotBuilt(f"{ROOT} is not a source checkout: install the package instead")
    folder.mkdir(parents=True, exist_ok=True)
    command = [cmake, "-S", str(ROOT), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"]
    command += [f"-DHEADRACE_SANITIZE={sanitize}", f"-DHEADRACE_KERNELS={levels}"]
    command += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}"]
    command += [f"-DHEADRACE_TEXT_OUTPUT={TEXT if output == HERE else output}"]
    configured = subprocess.run(command, capture_output=True, text=True)
    if configured.returncode:
        raise NotBuilt(f"cmake cannot configure {ROOT}: {configured.stderr.strip()}")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    found = re.search(r"Levels of the CPU kernels: (\S+)", configured.stdout)
    names = found.group(1).split(";") if found else []
    seconds = max(10, (sum(SECONDS.get(name, 2) for name in names) + 8) // cores)
    say(
        f"compiling the CPU kernels ({', '.join(names) or 'none'}): about {seconds} s on {cores} "
        "cores, and no time for what an earlier build has kept"
    )
    command = [cmake, "--build", str(folder), "--parallel", str(cores)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            progress(line.rstrip())
    if running.returncode:
        raise NotBuilt(f"cmake --build {folder} failed")
    return output / "_headrace_cpu.so"


def progress(line: str) -> None:
    """Print a line of CMake's output shortened: `[3/23] kernels: bf16 attention_codes`."""
    if found := _BUILDING.match(line):
        count, target, source = found.groups()
        of, _, part = target.removeprefix("headrace_").partition("_")
        say(f"{count} {of}: {part} {source}".replace(":  ", ": "))
    elif not _SILENT.match(line):
        say(line)


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", default="", help='"address,undefined" or "thread"')
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "cpu")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument(
        "--levels", default="host", help="host (what serves on this processor), all, or a;b"
    )
    arguments = parser.parse_args()
    wishes = {"sanitize": arguments.sanitize, "levels": arguments.levels}
    try:
        print(build(arguments.folder, output=arguments.output, **wishes))
    except NotBuilt as why:
        sys.exit(f"the CPU kernels were not built: {why}")


if __name__ == "__main__":
    main()
