"""The short form of `soak.py`: half an hour of it is a command of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.slow
def test_random_traffic_leaves_nothing_behind(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [
            sys.executable,
            str(SOAK),
            "--minutes",
            "0.2",
            "--least",  # So that all that is counted below was drawn, on a busy machine, too.
            "500",
            "--clients",
            "12",
            "--growth",
            "24",
            "--json",
            str(record),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(record.read_text())["counts"]
    assert min(counts[kind] for kind in ("answered", "refused", "left", "half a head")) > 0
