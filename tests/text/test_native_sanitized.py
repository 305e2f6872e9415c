"""The text library under the sanitizers of the compiler: all its tests, on a build that checks
itself. What it reads is hostile: vocabularies come from files, texts from whoever asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parents[1] / "src" / "headrace" / "text" / "csrc").glob("*.cpp"))
DRAFTERS = HERE.parent / "speculate"
TESTS = HERE / "test_native.py", DRAFTERS / "test_automaton.py", DRAFTERS / "test_suffix_drafter.py"
FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fsanitize=address,undefined"]


@pytest.mark.slow
def test_on_a_build_that_checks_itself(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path / "text.so"
    made = subprocess.run([compiler, *FLAGS, *SOURCES, "-o", str(library)], capture_output=True)
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if made.returncode or not Path(found).is_absolute():
        pytest.skip(f"{compiler} has no address sanitizer")
    environment = {
        **os.environ,
        "TEXT_LIBRARY_UNDER_TEST": str(library),
        "LD_PRELOAD": found,
        # Python keeps what it has allocated; and a request for too much is an error, not the end.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rs"]
    ran = subprocess.run(
        # What a process holds is not what it holds under a sanitizer.
        [*command, *TESTS, "-k", "not bytes_are_told"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ran.returncode == 0, (ran.stdout[-2000:], ran.stderr[-6000:])
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout, ran.stdout[-2000:]
