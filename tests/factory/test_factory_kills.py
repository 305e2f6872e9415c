"""`kill -9` at the start of each stage of a build; the same command then ends in the same."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from factory_cell import headrace, make_tiny_model

pytestmark = pytest.mark.slow

STAGES = "fetch", "licence", "verify", "format", "sbom", "limits", "accuracy", "profile", "sign"


def contents(root: Path) -> dict[str, bytes]:
    """Every file that a build leaves, but locks and what was half done."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("locks", "tmp")
    }


def test_killed_in_every_stage_the_same_command_ends_in_the_same(tmp_path: Path) -> None:
    """One after the other in one store; then it is left to end."""
    model = make_tiny_model(tmp_path / "tiny")
    environment = {
        **os.environ,
        "HEADRACE_CACHE": str(tmp_path / "cache"),
        "PYTHONUNBUFFERED": "1",
    }
    same = ("build", str(model), "--threads", "1", "--without", "performance", "--windows", "2")

    def start(store: str) -> subprocess.Popen[str]:
        command = headrace("factory", *same, "--store", str(tmp_path / store))
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    whole = start("whole")
    said, _ = whole.communicate()
    assert whole.returncode == 0
    assert "9 of 9 stages ran" in said
    for stage in STAGES:
        process = start("killed")
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"{stage} ") and "runs" in line:
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait() == -signal.SIGKILL, stage
        process.stdout.close()
    last = start("killed")
    last.communicate()
    assert last.returncode == 0
    found, wanted = contents(tmp_path / "killed"), contents(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert [name for name, data in found.items() if data != wanted[name]] == []
