"""Measured operators beside predicted ones: names that meet, sums that hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.bench.operators import Operator, SumCheck, operators_page, rows, said, too_low
from headrace.cli.profile import command
from headrace.kernels.cpu.library import LibraryAbsent, load
from headrace.roofline import machine
from headrace.roofline.hardware import DEVICES
from tiny import families, talker
from tiny.kept import Kept


@pytest.mark.slow
def test_the_command_times_each_operator(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load()
    except LibraryAbsent as why:
        pytest.skip(str(why))
    monkeypatch.chdir(tmp_path)
    model = kept(talker.make)
    told = [str(model), "--requests", "3", "--input", "9", "--output", "4", "--kernels", "cpu"]
    if machine.this_hardware("cpu") is None:
        pytest.skip("this machine is not known to the roofline")
    done = CliRunner().invoke(command, [*told, "--json", "p.json", "--html", "p.html"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "p.json").read_text())
    by_name = {(one["steps"], one["operator"]): one for one in found["operators"]}
    # Two layers; one step of prompts and three that decode.
    assert by_name["prompt", "attend"]["calls"] == 2
    assert by_name["decode", "attend"]["calls"] == 6
    for one in by_name.values():
        assert one["calls"], f"{one['operator']} was predicted and did not run"
        assert one["seconds"] > 0
    # Records run within their steps.
    assert 0 < found["check"]["share"] <= 1
    total = sum(one["seconds"] for one in by_name.values())
    assert total == pytest.approx(found["check"]["operators_seconds"])
    assert "the operators' sum is" in done.output
    assert "<svg" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("family", "states"),
    [
        ("lfm2", {"short_conv"}),
        ("qwen3_5", {"short_conv", "delta_rule"}),
        ("granitemoehybrid", {"short_conv", "ssm"}),
    ],
)
def test_records_of_states_have_names_that_were_predicted(
    family: str, states: set[str], kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load()
    except LibraryAbsent as why:
        pytest.skip(str(why))
    monkeypatch.chdir(tmp_path)
    known = replace(DEVICES["L4"], kind="cpu")
    monkeypatch.setattr("headrace.cli.profile.this_hardware", lambda _device: known)
    model = kept(families.make, family)
    told = [str(model), "--requests", "2", "--input", "9", "--output", "3", "--kernels", "cpu"]
    done = CliRunner().invoke(command, [*told, "--json", "p.json"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "p.json").read_text())
    for one in found["operators"]:
        if one["operator"] in states:
            assert one["calls"], f"{one['operator']} was predicted and did not run"
            assert one["predicted_seconds"] > 0
    assert states <= {one["operator"] for one in found["operators"]}


def test_a_sum_that_does_not_hold_is_said() -> None:
    assert SumCheck(0.95, 1.0).holds
    for wrong in (SumCheck(0.5, 1.0), SumCheck(1.2, 1.0)):
        assert not wrong.holds
        assert "NOT within" in said(wrong)
    lost = Operator("decode", "norm", 2, 0.5, 0.1, 0.1)
    page = operators_page([lost], SumCheck(0.5, 1.0), "m on <h>")
    assert "verdict bad" in page
    assert "m on &lt;h&gt;" in page
    assert rows([lost])[0][-1] == "400.0"
    assert too_low([lost]) is None
    beaten = Operator("decode", "head", 1, 0.1, 0.3, 0.8)
    told = too_low([lost, beaten])
    assert told is not None
    assert "--calibrate" in told
    assert "--calibrate" in operators_page([lost, beaten], SumCheck(0.95, 1.0), "m")


def test_operators_of_eager_steps_are_timed_too(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without a program: a second run, in which a clock stands around each operator."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    known = replace(DEVICES["L4"], kind="cpu")
    monkeypatch.setattr("headrace.cli.profile.this_hardware", lambda _device: known)
    model = kept(talker.make)
    told = [str(model), "--requests", "3", "--input", "9", "--output", "4", "--kernels", "ref"]
    done = CliRunner().invoke(command, [*told, "--json", "p.json"])
    assert done.exit_code == 0, done.output
    assert "a second run" in " ".join(done.output.split())
    found = json.loads((tmp_path / "p.json").read_text())
    by_name = {(one["steps"], one["operator"]): one for one in found["operators"]}
    assert by_name["prompt", "attend"]["calls"] == 2
    assert by_name["decode", "attend"]["calls"] == 6
    assert by_name["decode", "sample"]["calls"] == 3
    for one in by_name.values():
        assert one["calls"], f"{one['operator']} was predicted and did not run"
        assert one["seconds"] > 0
    assert 0 < found["check"]["share"] <= 1
