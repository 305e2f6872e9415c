"""The CPU kernels at every ISA level that this machine has; skipped, with the reason, without."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.kernels.cpu import library
from headrace.kernels.cpu.operators import CpuOperators

# The cases of the reference kernels (tests/kernels/kernel_cases.py) serve here too.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "kernels")]

if os.environ.get("KERNELS_UNDER_TEST"):  # `make sanitize`, test_amx: a library of another build
    library.FILE = library.INSTALLED = Path(os.environ["KERNELS_UNDER_TEST"])
ONLY = os.environ.get("KERNELS_LEVEL_UNDER_TEST")
LEVELS = (ONLY,) if ONLY else library.LEVELS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    try:
        library.load()
    except library.LibraryAbsent as absent:
        if os.environ.get("KERNELS_UNDER_TEST") or isinstance(absent, library.LibraryStale):
            raise  # It was asked for by name, or built: a run without it would prove nothing.
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(absent)))


@pytest.fixture(params=LEVELS, scope="session")
def ops(request: pytest.FixtureRequest) -> CpuOperators:
    """Operators of two threads at one level."""
    why = library.refused(request.param)
    if why is not None:
        assert not ONLY, f"the library under test has no level {ONLY}: {why}"
        pytest.skip(why)
    return CpuOperators(2, request.param)


@pytest.fixture(scope="session")
def best() -> CpuOperators:
    return CpuOperators(2)
