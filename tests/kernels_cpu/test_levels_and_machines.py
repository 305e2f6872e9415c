"""Every level of every processor gives the same bits; the levels of aarch64 run in an emulator.

A driver without Python (bits/driver.cpp) runs every operator record at random shapes, strides and
values, NaN, infinities and denormals among them, and prints a digest of each result. It is linked
with the library as it is shipped: the one under test here, and one that is compiled for aarch64 and
run by `qemu-aarch64`. What two NaNs look like is the machine's own, all else must be the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from building import built

from headrace.kernels.cpu import library

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOURCES = ROOT / "src" / "headrace" / "kernels" / "cpu" / "csrc"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROUNDS, SEED = "40", "7"
EMULATED = {"neon": "cortex-a53", "dotprod": "neoverse-n1"}
"""Level → a processor that has it and no better one."""

pytestmark = pytest.mark.skipif(
    "KERNELS_UNDER_TEST" in os.environ, reason="about the library as it is shipped"
)


def driver_of(compiler: str, built: Path, folder: Path) -> Path:
    driver = folder / "driver"
    command = [compiler, "-std=gnu++17", "-O1", "-ffp-contract=off", "-I", str(SOURCES)]
    command += ["-I", str(HERE / "sanitized"), str(HERE / "bits" / "driver.cpp"), str(built)]
    subprocess.run([*command, f"-Wl,-rpath,{built.parent}", "-o", str(driver)], check=True)
    return driver


def said_by(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, (ran.stdout[-500:], ran.stderr[-2000:])
    return ran.stdout


def digests(command: list[str], level: str) -> list[str]:
    lines = said_by([*command, level, ROUNDS, SEED]).splitlines()
    assert lines[-1] == "all right"
    assert len(lines) > 165 + 12 * int(ROUNDS)
    return lines


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The driver for this machine, as a command."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    file = Path(library.load()._name)
    return [str(driver_of(compiler, file, tmp_path_factory.mktemp("bits")))]


def test_all_levels_of_this_machine(here: list[str]) -> None:
    if library.unbuilt():
        pytest.skip(f"{', '.join(library.unbuilt())} not built: {library.BUILD_ALL}")
    first, *others = [name for name in library.LEVELS if library.level(name)]
    want = digests(here, first)
    for name in others:
        assert digests(here, name) == want, name


@pytest.fixture(scope="module")
def arm() -> list[str]:
    """The driver for aarch64, as a command but for the CPU; the build is kept for a later run."""
    for tool in (CROSS, EMULATOR, "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    options = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    build = built("cpu-aarch64", *options, f"-DCMAKE_CXX_COMPILER={CROSS}")
    assert (build / "_headrace_text.so").exists()
    libc = said_by([CROSS, "-print-file-name=libc.so.6"]).strip()
    driver = driver_of(CROSS, build / library.FILE.name, build)
    return [EMULATOR, "-L", str(Path(libc).parents[1]), str(driver)]


@pytest.mark.parametrize("source", ["operators", "products_k", "attention_codes", "levels", "team"])
def test_sources_are_valid_for_aarch64(source: str) -> None:
    """A change of a kernel that suits only one processor fails here at once."""
    if shutil.which(CROSS) is None:
        pytest.skip(f"no {CROSS}")
    options = ["-std=gnu++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    options += ["-Wno-unused-function", "-DHR_LEVEL=1", "-DHR_NAME=dotprod"]
    options += ["-DHR_BUILT=HR_EACH(neon)HR_EACH(dotprod)", "-march=armv8.2-a+dotprod"]
    command = [CROSS, *options, str(SOURCES / f"{source}.cpp")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[:2000]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it compiles for a minute and a half, on a busy machine for many
@pytest.mark.parametrize("level", EMULATED)
def test_a_level_of_aarch64(here: list[str], arm: list[str], level: str) -> None:
    command = [arm[0], "-cpu", EMULATED[level], *arm[1:]]
    assert said_by(command) == f"best: {level}\n"
    assert digests(command, level) == digests(here, "")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it may be the first that asks for the build
def test_a_level_that_the_cpu_lacks_is_refused(arm: list[str]) -> None:
    ran = subprocess.run([arm[0], "-cpu", "cortex-a53", *arm[1:], "dotprod"], capture_output=True)
    assert (ran.returncode, ran.stdout) == (3, b"no level dotprod\n")


def test_a_machine_without_kernels_gets_the_rest(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    options = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=riscv64"]
    said = said_by(["cmake", "-S", str(ROOT), "-B", str(tmp_path), *options])
    assert "No CPU kernels for riscv64: the reference path serves" in said
    targets = said_by(["cmake", "--build", str(tmp_path), "--target", "help"])
    assert "headrace_text" in targets
    assert "headrace_cpu" not in targets


def test_a_machine_without_kernels_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LEVELS", ())
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    with pytest.raises(library.LibraryAbsent, match="for x86_64 and aarch64, this is riscv64"):
        library.load.__wrapped__()


def test_a_library_of_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build that failed leaves the one before, which computes garbage without an error."""
    assert library.digest_of(library.SOURCES) == library.sources()
    changed = tmp_path / "csrc"
    shutil.copytree(library.SOURCES, changed)
    with (changed / "pages.h").open("a") as header:
        header.write("// Pages lie otherwise.\n")
    monkeypatch.setattr(library, "SOURCES", changed)
    with pytest.raises(library.LibraryStale, match="was built from other sources"):
        library.load.__wrapped__()
    monkeypatch.setattr(library, "SOURCES", tmp_path / "an installed wheel has none")
    assert library.load.__wrapped__().hr_sources().decode() == library.sources()
