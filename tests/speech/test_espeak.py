"""Phonemes by espeak-ng: its marks, and texts that mean harm."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from headrace.base.errors import EngineFault, InvalidRequest, PackageAbsent
from headrace.speech import espeak
from headrace.speech.espeak import phonemes

installed = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")


def program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program in espeak-ng's place."""
    path = folder / "espeak-ng"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(path))


@installed
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The water turns, and the wheel?", "ðə wˈɔːɾɚ tˈɜːnz, ænd ðə wˈiːl?"),
        ("Dr. Smith, then he said: go!", "dˈɑːktɚ smˈɪθ, ðˈɛn hiː sˈɛd: ɡˈoʊ!"),
        ("\x01\x02\x1b", ""),
        ("...", ""),
        ("", ""),
    ],
)
def test_phonemes_keep_their_marks(text: str, found: str) -> None:
    assert phonemes(text, "en-us") == found


@installed
def test_commands_in_a_text_are_text() -> None:
    """Phonemes in brackets, embedded commands and markup are spoken, or left out."""
    plain = phonemes("hello water", "en-us")
    assert phonemes("hello \x0150S water", "en-us") != plain  # Spoken as a number, not obeyed.
    assert phonemes("[[wˈɔ]] a", "en-us") != "wˈɔ ɐ"
    assert "ˈɔːdɪˌoʊ" in phonemes('<audio src="/etc/passwd"/>', "en-us")
    assert phonemes("--version", "en-us") == phonemes("version", "en-us") != ""


@installed
def test_a_voice_that_is_not_there_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="xx-none"):
        phonemes("hello", "xx-none")


def test_its_absence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PackageAbsent, match="apt install espeak-ng"):
        phonemes("hello", "en-us")


def test_no_end_of_time_or_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espeak, "SECONDS", 1)
    program(tmp_path, "exec sleep 60", monkeypatch)
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="does not get done"):
        phonemes("hello", "en-us")
    assert time.monotonic() - begun < 30
    program(tmp_path, "exec yes", monkeypatch)
    with pytest.raises(InvalidRequest, match="bytes of phonemes"):
        phonemes("hello", "en-us")


def test_it_can_write_no_file_and_is_killed_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = f"read a; read b; echo x > {tmp_path}/made; echo between; echo said"
    program(tmp_path, wrote, monkeypatch)
    assert phonemes("hello", "en-us") == "said"
    assert not (tmp_path / "made").read_text()
    program(tmp_path, "exec sleep 60", monkeypatch)

    def kill(child: subprocess.Popen[bytes]) -> None:
        child.kill()

    with pytest.raises(EngineFault, match="status -9"):
        phonemes("hello", "en-us", on_child=kill)
