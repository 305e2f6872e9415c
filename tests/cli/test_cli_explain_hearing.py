"""`headrace explain` of a Whisper: decisions and memory, as a start would make them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import DoesNotFit, OptionError
from headrace.base.groups import cross_groups, group_bytes
from headrace.base.hardware import hardware
from headrace.base.several import read_models
from headrace.cli import explain
from headrace.engine.hearing.options import SEQUENCES, engine_options, form_of
from headrace.engine.loop.start import Resolved, plan, resolve
from headrace.loader import whisper as loader
from headrace.models.registry import describe
from headrace.models.whisper import WhisperArch
from headrace.roofline.memory import MemoryPlan

BASE = WhisperArch(512, 6, 6, 80, 51_865)
CROSS = 6 * 1_504 * 2 * (512 + 2 * 8)
"""Bytes of a window: K and V of six layers in codes, with a scale for each head."""


@pytest.fixture
def whisper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineOptions:
    """A folder that is found, of a model whose weights are never read."""
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    files = SimpleNamespace(arch=BASE, weights=(), special=SimpleNamespace(end=50_257))
    monkeypatch.setattr(loader, "open_whisper", lambda folder: files)
    return EngineOptions(str(tmp_path), threads=2)


def planned(options: EngineOptions, available: int) -> tuple[Resolved, MemoryPlan]:
    form = form_of(options)
    files = loader.open_transcription(Path(options.model), coded=form.precision == "int8")
    here = hardware()
    here = replace(here, cpu=replace(here.cpu, available=available))
    resolved = resolve(engine_options(options, form), files, here)
    return resolved, plan(resolved, files, 100 << 20)


@pytest.mark.parametrize(("available", "windows"), [(8 << 30, 10), (500 << 20, 6)])
def test_windows_are_those_that_have_room(
    whisper: EngineOptions, available: int, windows: int
) -> None:
    resolved, memory = planned(whisper, available)
    assert resolved.encoder is not None
    shape = resolved.encoder.shape
    assert (shape.slot, shape.bound) == (CROSS, windows * CROSS)
    (group,) = memory.pool.cross
    assert group.blocks == (windows + 1) * 94, "one more for the step in flight"
    assert memory.rows <= SEQUENCES
    assert memory.encoding_bytes > (windows + 1) * CROSS
    memory.verify()


def test_little_memory_is_refused(whisper: EngineOptions) -> None:
    with pytest.raises(DoesNotFit):
        planned(whisper, 120 << 20)


def test_the_group_is_that_of_the_graph() -> None:
    graph = describe(BASE.text)
    assert group_bytes(cross_groups(graph, "int8", 94), 16) == CROSS


def test_options_of_text_are_refused_as_at_a_start(whisper: EngineOptions) -> None:
    with pytest.raises(OptionError, match="quantise means nothing"):
        show(replace(whisper, quantise="int8"))


@pytest.mark.model
@pytest.mark.slow
def test_the_catalog_model_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    show(EngineOptions("whisper-base", dtype="float32"))
    told = json.loads(capsys.readouterr().out)
    decided = {one["name"]: one["value"] for one in told["decisions"]}
    assert decided["weights"] == "exact"
    assert decided["parts"] == "encoder, text"
    assert told["options"]["kv_dtype"] == "float32"
    assert told["arch"]["family"] == "whisper"
    assert told["memory"]["sequences"] == SEQUENCES


def show(options: EngineOptions) -> None:
    explain.show(read_models([options.model], options), None, as_json=True)
