"""The CPU kernels and their thread team under the sanitizers of the compiler.

A driver without Python (sanitized/driver.cpp) runs every kind of weight at every number of rows and
every operator record at random shapes, strides and values, in memory of exactly the right size:
rows of matrices have poisoned gaps between them, the team's work space ends where the record said
it would. `make test` runs it with one ISA level, `make sanitize` with each that this machine has,
and there the whole of the other kernel tests as well, file by file, with a library of the same
build.

That it finds faults was tried in a copy: a norm that loads whole vectors past the end of a row, and
a work space of attention that is too small by a cache line and a few rows, are each reported as
heap-buffer-overflow or use-after-poison in the first round.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from building import built

from headrace.kernels.cpu import library

ROOT = Path(__file__).parents[2]
DRIVER = "kernels_sanitized"
EVERYTHING = os.environ.get("SANITIZE") == "all"
MEMORY = "address,undefined"
PATIENCE = 3600
"""Seconds for one part on a machine that others use too; the longest takes three minutes alone."""
FILES = sorted(
    file.name
    for file in Path(__file__).parent.glob("test_*.py")
    if file.name
    not in (
        Path(__file__).name,
        "test_default_model_on_cpu.py",  # Needs hours on a library without optimisation.
        "test_amx.py",  # Builds a library of its own: of `BESIDE` the driver's.
    )
)

BESIDE = ("rounded", "amx_emulated")
"""Levels by name that run where level bf16 does: the AMX kernels over tiles in plain C++."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE + 600)]


def missing(sanitizers: str, folder: Path) -> str | None:
    """Why this machine cannot build with `sanitizers`, or None."""
    compiler = compiler_name()
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


def compiler_name() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def checked_build(target: str, sanitizers: str, level: str, folder: Path) -> Path:
    """The folder with `target` in it; skips where it cannot be."""
    needed = "bf16" if level in BESIDE else level
    why = library.refused(needed)
    if why and "not built" not in why:
        pytest.skip(why)
    reason = missing(sanitizers, folder)
    if reason is not None:
        pytest.skip(reason)
    options = [f"-DHEADRACE_SANITIZE={sanitizers}", f"-DHEADRACE_SANITIZE_LEVEL={level}"]
    return built(f"checked-{sanitizers.replace(',', '-')}-{level}", *options, target=target)


@pytest.mark.parametrize("sanitizers", [MEMORY, "thread"])
@pytest.mark.parametrize("level", [*library.LEVELS, *BESIDE])
def test_kernels_and_team(sanitizers: str, level: str, tmp_path: Path) -> None:
    if level != library.LEVELS[0] and not EVERYTHING:
        pytest.skip("one level here, the others by `make sanitize`")
    driver = checked_build(DRIVER, sanitizers, level, tmp_path) / DRIVER
    ran = subprocess.run([driver], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.endswith("all right\n")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole library, every level in it, built so that it checks itself."""
    folder = tmp_path_factory.mktemp("checked")
    return checked_build("headrace_cpu", MEMORY, library.LEVELS[0], folder) / library.FILE.name


@pytest.mark.skipif(not EVERYTHING, reason="takes minutes: `make sanitize`")
@pytest.mark.parametrize("file", FILES)
def test_the_kernel_tests_themselves(file: str, checked: Path) -> None:
    """Everything else in this folder but the whole model, on that library."""
    found = subprocess.run(
        [str(compiler_name()), "-print-file-name=libasan.so"], capture_output=True, text=True
    )
    environment = {
        **os.environ,
        "KERNELS_UNDER_TEST": str(checked),
        "LD_PRELOAD": found.stdout.strip(),
        # Python keeps what it has allocated; and a request for too much is an error, not the end.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, str(Path(__file__).with_name(file))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, (ran.stdout[-2000:], ran.stderr[-6000:])
    assert " passed" in ran.stdout
