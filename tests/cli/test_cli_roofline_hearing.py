"""`headrace roofline` of a Whisper: the tables of a folder, and their sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.groups import cross_groups, group_bytes
from headrace.bench.hearing_limit import token_step
from headrace.cli.main import application
from headrace.models.whisper import WhisperArch, describe_decoder, describe_encoder
from headrace.roofline.hardware import DEVICES
from headrace.roofline.slices import part_work
from headrace.speech import finding

BASE = WhisperArch(512, 6, 6, 80, 51_865)


def test_more_users_read_no_more_weights() -> None:
    one, eight = (token_step(BASE.text, DEVICES["H100"], 50, 1500, users) for users in (1, 8))
    for alone, shared in zip(one.operators, eight.operators, strict=True):
        assert alone.count.label == shared.count.label
        assert shared.count.flops == pytest.approx(8 * alone.count.flops)
        if alone.count.kind == "product":
            assert shared.count.weight_bytes == alone.count.weight_bytes
        assert shared.count.kv_bytes == pytest.approx(8 * alone.count.kv_bytes)


def test_half_a_window_is_less_than_half_the_attention() -> None:
    whole, half = (part_work(describe_encoder(BASE), rows, coded=True) for rows in (1500, 750))
    for one, less in zip(whole, half, strict=True):
        share = {"attention": 0.25, "convolutions": less.flops / one.flops if one.flops else 0}
        assert less.flops == one.flops * share.get(one.label, 0.5)


def test_kinds_of_cross_attention() -> None:
    decoder = describe_decoder(BASE)
    sizes = [
        group_bytes(cross_groups(decoder, kind, 1500), 1)
        for kind in ("float32", "bfloat16", "int8")
    ]
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
    step = sum(one["seconds"] for one in told["a step of 8 sounds"])
    predicted = 30 / (window + told["tokens"] * step / 8)
    assert told["predicted_rtfx"] == pytest.approx(predicted, rel=0.05), "a step's fixed part"
    assert told["predicted_rtfx"] < told["rtfx"]
    device = DEVICES["H100"]
    flops = sum(one["flops"] for one in told["a window of 30 s"])
    assert window >= flops / device.rate("int8")


def test_an_unknown_name_is_no_whisper() -> None:
    assert not finding.hears("qwen2.5-coder-0.5b")
