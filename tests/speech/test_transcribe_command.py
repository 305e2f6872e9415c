"""`headrace transcribe`: output as it comes, a run that is stopped, names of languages."""

from __future__ import annotations

import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.base.errors import PackageAbsent
from headrace.cli import transcribe
from headrace.cli.transcribe import _Written, command
from headrace.speech.captions import srt, vtt
from headrace.speech.languages import code_of, language_names
from headrace.speech.transcript import Segment, Transcriber, Transcript

SEGMENTS = [Segment(0.0, 1.5, " One.", []), Segment(1.5, 3.0, " Two --> three.", [])]


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    t = np.arange(16_000 * 40) / 16_000
    tone = 0.2 * np.sin(2 * np.pi * 300 * t) * np.sin(t) + 0.02 * draw.normal(size=len(t))
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((tone * 32_767).astype("<i2").tobytes())
    return path


@pytest.fixture
def run(folder: Path, sound: Path, built: None, tmp_path: Path) -> Iterator[Any]:
    """The command with the small Whisper of random weights."""

    def call(*arguments: str) -> Any:
        common = [str(sound), "--model", str(folder), "--threads", "2", "--exact"]
        return CliRunner().invoke(command, [*common, "--cache-dir", str(tmp_path), *arguments])

    return call


def test_captions_are_written_by_segment(capsys: pytest.CaptureFixture[str]) -> None:
    for form, whole in (("srt", srt), ("vtt", vtt)):
        written = _Written(3.0, form, sys.stdout)
        written.told(SEGMENTS[:1], 1.5)
        assert capsys.readouterr().out == whole(SEGMENTS[:1])
        written.told(SEGMENTS[1:], 3.0)
        assert capsys.readouterr().out == whole(SEGMENTS)[len(whole(SEGMENTS[:1])) :]
        written.end(Transcript("en", 3.0, SEGMENTS), complete=True)
        assert capsys.readouterr().out == ""
    written = _Written(3.0, "vtt", sys.stdout)
    written.end(Transcript("en", 3.0, []), complete=True)
    assert capsys.readouterr().out == "WEBVTT\n\n"


def test_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("headrace.cli.transcribe.time.monotonic", lambda: clock[0])
    written = _Written(3600.0, "text", sys.stdout)
    for clock[0], upto in ((110.0, 60.0), (131.0, 120.0), (140.0, 180.0), (165.0, 240.0)):
        written.told([], upto)
    assert capsys.readouterr().err == (
        "00:02:00.000 of 01:00:00.000\n00:04:00.000 of 01:00:00.000\n"
    )


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit(143)])
def test_a_run_that_is_stopped_keeps_what_it_had(
    run: Any, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    def transcribe(self: Transcriber, samples: Any, options: Any, **more: Any) -> Transcript:
        more["told"](SEGMENTS, 3.0)
        raise stop

    monkeypatch.setattr(Transcriber, "transcribe", transcribe)
    done = run("--format", "json")
    record = json.loads(done.stdout)
    assert record["complete"] is False
    assert record["text"] == "One. Two --> three."
    assert done.exit_code in (130, 143, 1)
    assert run("--format", "srt").stdout == srt(SEGMENTS)
    assert run().stdout == "One.\nTwo --> three.\n"


def test_the_whole_is_what_the_parts_are(run: Any) -> None:
    record = json.loads(run("--format", "json", "--language", "German").stdout)
    assert record["complete"] is True
    assert record["language"] == "de"
    segments = [Segment(**{**one, "words": []}) for one in record["segments"]]
    captions = run("--format", "srt", "--language", "de").stdout
    assert captions == srt(segments)


def test_captions_lie_beside_the_files_of_a_folder(
    folder: Path, built: None, sound: Path, tmp_path: Path
) -> None:
    talks = tmp_path / "talks"
    talks.mkdir()
    for name in ("a.wav", "b.WAV"):
        (talks / name).write_bytes(sound.read_bytes())
    (talks / "broken.mp3").write_text("no sound")
    (talks / "notes.md").write_text("not asked for")
    (talks / "b.srt").write_text("mine")

    def call(*paths: Path) -> Any:
        flags = ["--model", str(folder), "--threads", "2", "--exact", "--format", "srt"]
        return CliRunner().invoke(command, [*map(str, paths), *flags])

    done = call(talks)
    assert done.exit_code != 0
    assert done.stdout == f"{talks / 'a.srt'}\n"
    assert f"{talks / 'b.srt'} is there: left as it is" in done.stderr
    assert str(talks / "broken.mp3") in done.stderr
    assert (talks / "a.srt").read_text() == call(sound).stdout
    assert (talks / "b.srt").read_text() == "mine"
    assert not list(talks.glob("*.partial"))
    done = call(talks / "a.wav", talks / "b.WAV")
    assert (done.exit_code, done.stdout) == (0, "")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no sound" in call(empty).exception.message


def test_a_missing_package_is_said_once(
    folder: Path, built: None, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for one in talks:
        one.write_bytes(sound.read_bytes())

    def absent(*_: Any) -> Any:
        raise PackageAbsent("reading wav needs soundfile")

    monkeypatch.setattr(transcribe, "decode", absent)
    done = CliRunner().invoke(command, [*map(str, talks), "--model", str(folder), "--exact"])
    assert isinstance(done.exception, PackageAbsent)
    assert "soundfile" not in done.stderr  # The command line says it, as every error.


def test_a_language_that_is_unknown(run: Any) -> None:
    done = run("--language", "germn")
    assert done.exit_code != 0
    assert done.exception.message == (
        "language 'germn' is not known; it is a code such as de, or an English name such as "
        "German; did you mean german?"
    )


@pytest.mark.parametrize(
    ("given", "code"),
    [("German", "de"), ("de-DE", "de"), ("EN", "en"), ("mandarin", "zh"), ("Castilian", "es")],
)
def test_names_of_languages(given: str, code: str) -> None:
    assert code_of(given) == code
    assert {"de", "german", "en", "english"} == language_names(["de", "en"])
