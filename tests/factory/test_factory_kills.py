"""`kill -9` in each stage of a build; the same build then ends in the same, byte for byte."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import talker

pytestmark = pytest.mark.slow

STAGES = (
    *("fetch", "licence", "verify", "format", "sbom", "limits", "advisories"),
    *("accuracy", "profile", "sign", "provenance"),
)
BUILD = """
import os, signal, sys
from headrace.base.config import EngineOptions
from headrace.factory.build import Build, BuildOptions
from headrace.factory.store import Store

model, cache, store, moment, stage = sys.argv[1:]
def end():
    os.kill(os.getpid(), signal.SIGKILL)
running = None
def watch(what, step):
    global running
    running = step.stage.name
    if (what, running) == (moment, stage):
        end()
def keep(self, key, manifest, kept=Store.keep):
    if (moment, stage) == ("written", running):
        end()
    kept(self, key, manifest)
Store.keep = keep
engine = EngineOptions(model=model, cache_dir=cache, threads=1)
Build(engine, BuildOptions(store=store, without="performance", windows=2)).run(watch)
"""
"""A build that kills itself: when a stage starts, or between its result and the pointer to it."""


def contents(root: Path) -> dict[str, bytes]:
    """Every file that a build leaves, but locks and what was half done."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("locks", "tmp")
    }


def build(root: Path, store: str, moment: str = "", stage: str = "") -> int:
    words = (str(root / "tiny"), str(root / "cache"), str(root / store), moment, stage)
    return subprocess.run([sys.executable, "-c", BUILD, *words], check=False).returncode


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a cache with a key, and the store of a build that nothing disturbed."""
    root = tmp_path_factory.mktemp("kills")
    talker.make(root / "tiny")
    assert build(root, "whole") == 0
    return root


@pytest.mark.parametrize("moment", ["starts", "written"])
def test_killed_in_every_stage_the_same_build_ends_in_the_same(root: Path, moment: str) -> None:
    """One after the other in one store; then it is left to end."""
    for stage in STAGES:
        assert build(root, moment, moment, stage) == -signal.SIGKILL, stage
    assert build(root, moment) == 0
    found, wanted = contents(root / moment), contents(root / "whole")
    assert found.keys() == wanted.keys()
    assert [name for name, data in found.items() if data != wanted[name]] == []
