"""`headrace roofline` of a Whisper: the tables of a folder, and their sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import application
from headrace.models.whisper import WhisperArch
from headrace.roofline.hardware import DEVICES
from headrace.roofline.hearing import cross_bytes, token_parts, window_parts
from headrace.speech import finding

BASE = WhisperArch(512, 6, 6, 80, 51_865)


def test_more_users_read_no_more_weights() -> None:
    one, eight = (token_parts(BASE, 1500, users) for users in (1, 8))
    assert eight[0].bytes == one[0].bytes / 8
    assert eight[0].flops == one[0].flops
    assert eight[1] == one[1]


def test_half_a_window_is_less_than_half_the_attention() -> None:
    whole, half = ({one.name: one.flops for one in window_parts(BASE, n)} for n in (1500, 750))
    assert half["encoder, products"] == whole["encoder, products"] / 2
    assert half["encoder, attention"] == whole["encoder, attention"] / 4


def test_kinds_of_cross_attention() -> None:
    sizes = [cross_bytes(BASE, 1500, kind) for kind in ("float32", "bfloat16", "int8")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 2 * 6 * 1500 * 512 * 4


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.roofline.hears", lambda name: True)
    monkeypatch.setattr("headrace.cli.roofline_hearing.find", lambda name, **more: tmp_path)
    monkeypatch.setattr(
        "headrace.cli.roofline_hearing.open_whisper", lambda path: type("F", (), {"arch": BASE})
    )
    words = ["roofline", "whisper-base", "--hardware", "H100", "--batch", "8"]
    shown = CliRunner().invoke(application, words)
    assert shown.exit_code == 0, shown.output
    assert "95.3 MB  cross K and V, 10 windows" in shown.output
    told = json.loads(CliRunner().invoke(application, [*words, "--json"]).output)
    window = sum(one["seconds"] for one in told["a window of 30 s"])
    token = sum(one["seconds"] for one in told["a token, 8 at a time"])
    assert told["rtfx"] == pytest.approx(30 / (window + told["tokens"] * token))
    device = DEVICES["H100"]
    flops = sum(one["flops"] for one in told["a window of 30 s"])
    assert window >= flops / device.rate("int8")


def test_an_unknown_name_is_no_whisper() -> None:
    assert not finding.hears("qwen2.5-coder-0.5b")
