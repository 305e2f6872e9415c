"""Several models on virtual time: the real loop, schedulers and arbiter, with predicted steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from engine_fakes import OPTIONS
from typer.testing import CliRunner

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.base.modelfiles import ModelFiles
from headrace.cli import simulate_beside
from headrace.cli.simulate import command
from headrace.engine.hearing.options import engine_options, form_of
from headrace.engine.loop.prediction import case_of, serving_types
from headrace.engine.simulator.sim_models import Course, Load, ModelsAtOnce
from headrace.loader import open_model
from headrace.loader import whisper as loader
from headrace.models.whisper import WhisperArch
from headrace.roofline.composition import compose
from headrace.roofline.hardware import Hardware, Loop
from headrace.roofline.hardware_files import save_hardware
from headrace.roofline.machine import calibration_path
from headrace.roofline.step import StepModel
from tiny import bytewise
from tiny import encoder as encoders
from tiny.encoder import write_modules
from tiny.kept import Kept

SLOW = Hardware("CPU", {"float32": 1e9, "int8": 2e9}, 1e9, 2**34, kind="cpu", loop=Loop(0.01))
"""Steps of a millisecond; ten before a request reaches the engine."""
Served = tuple[EngineOptions, ModelFiles]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    save_hardware(SLOW, calibration_path())


@pytest.fixture
def text(kept: Kept) -> Served:
    folder = str(kept(bytewise.make))
    return EngineOptions(**{**OPTIONS, "model": folder}), open_model(folder)


@pytest.fixture
def vectors(tmp_path: Path) -> Served:
    folder = encoders.make(tmp_path / "encoder")
    folder = write_modules(folder, "pooling_mode_mean_tokens", normalise=True)
    return EngineOptions(**{**OPTIONS, "model": str(folder)}), open_model(str(folder))


@pytest.fixture
def sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A Whisper of base's shape, whose weights are never read."""
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    arch = WhisperArch(512, 6, 6, 80, 51_865)
    files = SimpleNamespace(arch=arch, weights=(), special=SimpleNamespace(end=50_257))
    files.file_bytes = 2
    monkeypatch.setattr(loader, "open_whisper", lambda folder: files)
    options = EngineOptions(str(tmp_path), threads=1, offline=True)
    opened = loader.open_transcription(tmp_path, coded=True)
    return engine_options(options, form_of(options)), opened


def run(models: list[Served], loads: list[Load], seconds: float = 2.0) -> list[Course]:
    server = ModelsAtOnce(models)
    try:
        return server.run(loads, seconds)
    finally:
        server.close()


def test_a_model_alone_takes_its_predicted_steps(text: Served) -> None:
    _, files = text
    (course,) = run([text], [Load(0, prompt=10, tokens=20)])
    dtype, kv_dtype = serving_types(files)
    model = StepModel(case_of(files, dtype=dtype, kv_dtype=kv_dtype), SLOW)
    steps = [model.seconds(compose(files.arch, [0], [10], 1))]
    steps += [model.seconds(compose(files.arch, [start], [1], 1)) for start in range(10, 29)]
    assert course.requests[0] == pytest.approx(sum(steps) + 0.01, rel=0.01)
    assert course.gaps[:19] == pytest.approx(steps[1:], rel=0.01)
    assert course.requests == pytest.approx([course.requests[0]] * len(course.requests))
    assert len(course.requests) == pytest.approx(2.0 / course.requests[0], abs=1)


def test_two_models_have_half_of_the_time_each(text: Served) -> None:
    load = Load(0, prompt=10, tokens=50)
    (alone,) = run([text], [load])
    both = run([text, text], [load, replace(load, model=1)])
    for course in both:
        assert mean(course.gaps) == pytest.approx(2 * mean(alone.gaps), rel=0.05)
    assert both == run([text, text], [load, replace(load, model=1)]), "the same again"


def test_texts_vectors_and_sounds_share_one_device(
    text: Served, vectors: Served, sounds: Served
) -> None:
    """All that is asked for is computed, and no two steps at the same time."""
    loads = [Load(0, 10, 50), Load(1, 20, at_once=4, every=3.0), Load(2, 4, 5, units=1500)]
    server = ModelsAtOnce([text, vectors, sounds])
    spent = dict.fromkeys(server.core.lanes, 0.0)
    for number, lane in server.core.lanes.items():
        update = lane.update

        def noted(plan, result, expected, number=number, update=update):  # type: ignore[no-untyped-def]
            spent[number] += result.seconds
            assert (result.encoding > 0) == bool(plan.parts)
            return update(plan, result, expected)

        lane.update = noted  # type: ignore[method-assign]
    courses = server.run(loads, 1.0)
    assert sum(spent.values()) == pytest.approx(server.clock.now, rel=0.05), "it is hardly idle"
    assert sum(spent.values()) <= server.clock.now
    assert min(spent.values()) > 0
    assert [len(one.requests) > 0 for one in courses] == [True] * 3
    assert not [one.left for one in courses if one.left]
    assert not server.core.has_work
    server.close()


def test_a_request_begins_while_a_step_of_others_runs(text: Served, sounds: Served) -> None:
    """What it waits for that step is its time, too."""
    load = Load(0, prompt=4, tokens=1, every=0.9)
    (alone,) = run([text], [load])
    beside, _ = run([text, sounds], [load, Load(1, 4, 2, units=1500)], 3.0)
    assert max(beside.requests) > 2 * max(alone.requests)


def test_a_machine_that_was_not_measured_is_refused(text: Served) -> None:
    calibration_path().unlink()
    with pytest.raises(OptionError, match="--calibrate"):
        ModelsAtOnce([text])


def test_the_command_shows_each_alone_and_together(
    text: Served, vectors: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_beside, "SECONDS", 2.0)
    (one, _), (other, _) = text, vectors
    given = [one.model, "--beside", f"{other.model}:input=9,at_once=2,share=0.5", "--json"]
    made = CliRunner().invoke(command, [*given, "--input", "10", "--output", "20"])
    assert made.exit_code == 0, made.output
    texts, others = json.loads(made.stdout)["models"]
    assert texts["together"]["p99"] > texts["alone"]["p99"]
    assert others["together"]["count"] == pytest.approx(0.5 * others["alone"]["count"], abs=2)
    asked = [one.model, "--beside", one.model, "--input", "10", "--output", "50"]
    shown = CliRunner().invoke(command, asked)
    assert "×2.0" in shown.stdout or "×1.9" in shown.stdout


@pytest.mark.parametrize("wrong", ["share=2", "share=x", "input=0", "inputs=3", "output=nan"])
def test_a_wrong_load_is_refused_by_name(text: Served, wrong: str) -> None:
    asked = [text[0].model, "--beside", f"{text[0].model}:{wrong}"]
    with pytest.raises(OptionError, match=wrong.partition("=")[0]):
        CliRunner().invoke(command, asked, catch_exceptions=False)


def test_sizes_beside_others_are_numbers(text: Served) -> None:
    asked = [text[0].model, "--beside", text[0].model, "--input", "uniform:1:9"]
    with pytest.raises(OptionError, match="number of tokens"):
        CliRunner().invoke(command, asked, catch_exceptions=False)
