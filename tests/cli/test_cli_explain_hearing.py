"""`headrace explain` of a Whisper: decisions and memory, as a start would make them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.base import hardware
from headrace.base.config import EngineOptions
from headrace.base.errors import DoesNotFit, OptionError
from headrace.base.several import ModelChoice
from headrace.cli import explain, explain_hearing
from headrace.models.whisper import WhisperArch
from headrace.roofline.hearing import HearingRoom, hearing_memory, room_that_fits
from headrace.speech import opening

BASE = WhisperArch(512, 6, 6, 80, 51_865)


@pytest.fixture
def whisper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineOptions:
    """A folder that is found, of a model whose file is never read."""
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    files = SimpleNamespace(arch=BASE, weights=(tmp_path / "model.bin",))
    monkeypatch.setattr(explain_hearing, "open_whisper", lambda folder: files)
    return EngineOptions(str(tmp_path), threads=2)


def test_the_memory_is_that_of_the_parts(
    whisper: EngineOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    explain.show([ModelChoice(whisper)], None)
    shown = capsys.readouterr().out
    assert "decoder of 6, width 512, 8 heads" in shown
    assert "own K and V" in shown
    explain.show([ModelChoice(replace(whisper, dtype="float32"))], None, as_json=True)
    told = json.loads(capsys.readouterr().out)
    decided = {one["name"]: one["value"] for one in told["decisions"]}
    assert decided == {
        "threads": "2", "weights": "exact", "kv_dtype": "float32", "windows": decided["windows"],
    }  # fmt: skip
    windows = int(decided["windows"])
    parts = hearing_memory(BASE, windows, min(48, 8 * windows), coded=False, kv="float32")
    assert told["memory"]["parts"] == dict(parts)


def test_options_of_text_are_refused_as_at_a_start(whisper: EngineOptions) -> None:
    with pytest.raises(OptionError, match="quantise means nothing"):
        explain.show([ModelChoice(replace(whisper, quantise="int8"))], None)


def test_little_memory_has_fewer_windows(
    whisper: EngineOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"coded": True, "kv": "int8"}
    parts = hearing_memory(BASE, 3, 24, **kinds)  # type: ignore[arg-type]
    room = 2 * sum(size for _, size in parts)
    for more, wanted in ((0, (3, 24)), (-4, (2, 16)), (100 * room, (10, 48))):
        most = HearingRoom(10, 48)
        found = room_that_fits(BASE, room + more, most, each=8, coded=True, kv="int8")
        assert found == wanted
    here = replace(hardware.cpu(), available=room)
    monkeypatch.setattr(opening, "cpu", lambda: here)
    explain.show([ModelChoice(whisper)], None)
    assert "cross K and V, 3 windows" in capsys.readouterr().out
    monkeypatch.setattr(opening, "cpu", lambda: replace(here, available=50 << 20))
    with pytest.raises(DoesNotFit, match="may take 25 MiB of the 50 that are available"):
        explain.show([ModelChoice(whisper)], None)
