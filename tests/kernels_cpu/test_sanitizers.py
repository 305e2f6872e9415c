"""The CPU kernels and their thread team under the thread sanitizer.

`make sanitize` runs this file. The driver (sanitized/driver.cpp) is built with one ISA level.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = "kernels_sanitized"

pytestmark = pytest.mark.slow


def missing(sanitizers: str, folder: Path) -> str | None:
    """Why this machine cannot build with `sanitizers`, or None."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which("cmake") is None:
        return "no C++ compiler or no cmake"
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, f"-fsanitize={sanitizers}", str(source), "-o", str(folder / "empty")]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        return f"{compiler} cannot link -fsanitize={sanitizers}"
    started = subprocess.run([folder / "empty"], capture_output=True, text=True)
    return f"-fsanitize={sanitizers} does not start here" if started.returncode else None


@pytest.mark.parametrize("sanitizers", ["thread"])
def test_kernels_and_team(sanitizers: str, tmp_path: Path) -> None:
    reason = missing(sanitizers, tmp_path)
    if reason is not None:
        pytest.skip(reason)
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DHEADRACE_SANITIZE={sanitizers}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    make = ["cmake", "--build", str(build), "--target", DRIVER, "--parallel", "2"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    ran = subprocess.run([build / DRIVER], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.endswith("all right\n")
