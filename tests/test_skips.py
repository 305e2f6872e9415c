"""The end of a run counts its skips, and one that hides a missing install is loud."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skips import INSTALLABLE, counted

HERE = Path(__file__).parent
LOUD = "NOT TESTED: SOMETHING IS NOT INSTALLED"
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_of_another_machine(number):
    pytest.skip("this CPU has no amx")

def test_of_a_library():
    pytest.importorskip("a_library_that_nobody_has")
"""


@pytest.mark.parametrize(
    "reason",
    [
        "could not import 'duckdb': No module named 'duckdb'",
        "chromium is not installed",
        "there is no valgrind",
        "no C++ compiler",
        "no aarch64-linux-gnu-g++",
        "no qemu-aarch64",
        "the text library was not built",
        "NOT TESTED: no package index for ollama",
    ],
)
def test_what_an_install_would_end(reason: str) -> None:
    assert INSTALLABLE.search(reason)
    plain, hiding = counted([reason, "this CPU has no amx"])
    assert plain == {"this CPU has no amx": 1}
    assert hiding == {reason: 1}


def test_a_run_says_what_it_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(TESTS)
    ran = subprocess.run(
        [
            sys.executable,
            *["-m", "pytest", "-q", "-p", "skips", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "    3 this CPU has no amx" in ran.stdout
    quiet, _, loud = ran.stdout.partition(LOUD)
    assert "a_library_that_nobody_has" in loud
    assert "a_library_that_nobody_has" not in quiet
    assert "amx" not in loud
