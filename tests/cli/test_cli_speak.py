"""`headrace speak` on a tiny model that speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import application
from tiny.speaking import make

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")


def run(*words: str) -> Any:
    return CliRunner().invoke(application, ["speak", *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("speaking")))


def test_a_file(folder: str, tmp_path: Path) -> None:
    sounds = []
    for name in ("a.wav", "b.wav", "c.flac"):
        given = ["--max-tokens", "70", "--seed", "3", "--threads", "1"]
        done = run(folder, "Hello.", "--out", str(tmp_path / name), "--voice", "leo", *given)
        assert done.exit_code == 0, done.output
        assert f"{name}: 0.85 s, cut at the limit" in done.stderr
        sounds.append(soundfile.read(tmp_path / name, dtype="int16")[0].tolist())
    assert len(sounds[0]) == 10 * 2048
    assert sounds[0] == sounds[1] == sounds[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Hello.", "--out", "a.aac"], "must end in one of"),
        (["Hello.", "--voice", "bob"], "tara, leo"),
        ([" ", "--out", "{}/a.wav"], "characters"),
        (["Hello.", "--out", "{}/none/a.wav"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_said(folder: str, tmp_path: Path, words: list[str], message: str) -> None:
    done = run(folder, *(word.format(tmp_path) for word in words), "--threads", "1")
    assert done.exit_code
    assert message in str(done.exception or "") + done.output


def test_a_folder_without_voices(tmp_path: Path) -> None:
    done = run(str(tmp_path), "Hello.")
    assert done.exit_code
    assert "speech.json" in str(done.exception or "") + done.output
