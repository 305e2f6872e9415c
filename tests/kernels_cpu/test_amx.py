"""The AMX level without a CPU that has AMX: emulated tiles, and the instructions in the library.

`kernels_amx.h` is compiled twice: over instructions (level amx, by name where CPU and system allow)
and, in a test build, over tiles in plain C++ that refuse what the architecture refuses (level
amx-emulated, chosen by name only). The tests of products, programs and shapes then run on the
latter, where any product of sixteen rows and more goes through tiles. docs/kernels.md tells how the
former ran in an emulator of a whole CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bochs.run import run_in_bochs
from building import built

from headrace.kernels.cpu import library
from headrace.kernels.cpu.backend import CpuBackend

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EMULATED = "amx-emulated"


def test_a_build_for_use_has_no_emulated_tiles() -> None:
    assert library.level(EMULATED) is None
    assert EMULATED not in library.LEVELS


def test_the_level_serves_by_name_only_and_there_is_a_reason() -> None:
    why = library.best_refused()
    assert why is not None
    assert (library.level("amx") is not None) == ("slower" in why)
    assert re.search("AMX|tiles|XSAVE|XCR0", why)
    decision = CpuBackend().decisions()[0]
    assert decision.value == library.level() != "amx"
    assert why in decision.reason


def test_the_instructions_are_in_the_library() -> None:
    if library.best_refused() == "this build's assembler did not know AMX":
        pytest.skip("this build's assembler did not know AMX")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    file = library.FILE if library.FILE.exists() else library.INSTALLED
    command = ["objdump", "-d", "--no-show-raw-insn", str(file)]
    found = subprocess.run(command, capture_output=True, check=True)
    for name in ("ldtilecfg", "tileloadd", "tilezero", "tdpbssd", "tilestored", "tilerelease"):
        assert f"\t{name}".encode() in found.stdout, name


def emulated() -> Path:
    """The folder of a build with emulated tiles; skips where there can be none."""
    if library.level("bf16") is None:
        pytest.skip("this CPU has no AVX512-BF16, which the level needs beside tiles")
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    return built("cpu-amx", "-DHEADRACE_TEST_AMX=ON", target="headrace_cpu")


@pytest.mark.slow
def test_the_kernel_tests_on_emulated_tiles() -> None:
    build = emulated()
    environment = {
        **os.environ,
        "KERNELS_UNDER_TEST": str(build / library.FILE.name),
        "KERNELS_LEVEL_UNDER_TEST": EMULATED,
    }
    names = (
        "test_products.py",
        "test_rows.py",
        "test_program.py",
        "test_shapes_and_strides.py",
        "test_head_in_planes.py",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *(str(HERE / name) for name in names)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ran.returncode == 0, (ran.stdout[-4000:], ran.stderr[-4000:])
    assert "skipped" not in ran.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif("BOCHS" not in os.environ, reason="BOCHS names no emulator (bochs/run.py)")
def test_the_instructions_in_an_emulated_cpu(tmp_path: Path) -> None:
    build = emulated()
    objects = list(build.rglob("kernels_amx.cpp.o"))
    assert len(objects) == 1
    said = run_in_bochs(
        os.environ["BOCHS"], build / library.FILE.name, objects[0].absolute(), tmp_path
    )
    assert "amx-tile 1, amx-int8 1" in said
    right = re.search(r"(\d+) of (\d+) cases have the bits of level bf16", said)
    assert right is not None, said[-2000:]
    assert int(right[1]) == int(right[2]) > 60, said[-2000:]
