from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiny import talker
from tiny.kept import Kept

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def model(kept: Kept) -> Path:
    return kept(talker.make)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The command in a process of its own, with a cache of its own."""

    def call(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"HEADRACE_CACHE": str(tmp_path), "COLUMNS": "120"} | more
        return subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
            check=False,
        )

    return call
