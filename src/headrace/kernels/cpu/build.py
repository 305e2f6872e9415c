"""Builds the libraries in place, for a source checkout: `python -m headrace.kernels.cpu.build`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEXT = HERE.parents[1] / "text"
ROOT = HERE.parents[3]


def build(folder: Path, *, sanitize: str = "", output: Path = HERE) -> Path:
    """Configure and build in `folder`; → the library of the kernels, in `output`.

    That of byte-level BPE goes to its own package, or to another `output` beside it.
    """
    if shutil.which("cmake") is None:
        sys.exit("cmake is not installed: `pip install cmake` brings it")
    if not (ROOT / "CMakeLists.txt").exists():
        sys.exit(f"{ROOT} is not a source checkout: install the package instead")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(folder),
            f"-DHEADRACE_SANITIZE={sanitize}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
            f"-DHEADRACE_TEXT_OUTPUT={TEXT if output == HERE else output}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)], check=True
    )
    return output / "_headrace_cpu.so"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", default="", help='"address,undefined" or "thread"')
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "cpu")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    print(build(arguments.folder, sanitize=arguments.sanitize, output=arguments.output))


if __name__ == "__main__":
    main()
