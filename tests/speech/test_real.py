"""Whisper base: the tokens of transformers' own generation, on speech that espeak-ng makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.word_errors import word_errors
from headrace.engine.hearing.opening import open_transcriber
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog
from headrace.loader.whisper_files import open_whisper
from headrace.media import decode
from headrace.speech.decoding import DecodingOptions
from headrace.speech.features import RATE, WINDOW

from .whisper_oracle import in_transformers, long_form

TEXT = (
    "The committee met on Tuesday to discuss the annual budget. Several members asked how the new "
    "library would be paid for. The chair answered that a third of the money comes from the county."
)


GERMAN = (
    "Die alte Mühle steht am Fluss, einige Kilometer vor der Stadt. Jeden Sommer öffnet der "
    "Besitzer die Tore, damit die Kinder sehen können, wie das Wasser das Rad dreht."
)
FRENCH = (
    "Le vieux moulin se trouve au bord de la rivière, à quelques kilomètres de la ville. Chaque "
    "été, le propriétaire ouvre les portes pour que les enfants voient comment l'eau fait tourner "
    "la roue."
)
LONG = (
    " In the autumn the river often floods the lower meadows, so farmers move their cattle to the "
    "hills before the first heavy rain. The road along the valley is closed for a week or two, and "
    "the children go to school by boat. Please remember to bring your tickets, because without "
    "them nobody will be allowed to enter the theatre this evening."
)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng to speak")
@pytest.mark.parametrize(
    ("voice", "text"),
    [
        ("en-us", TEXT),
        ("en-gb", TEXT),
        ("de", GERMAN),
        ("fr-fr", FRENCH),
        # Two windows, of which the second hears what was said in the first.
        ("en-us", TEXT + LONG),
        ("en-gb", TEXT + LONG),
    ],
)
def test_tokens_are_those_of_transformers(tmp_path: Path, voice: str, text: str) -> None:
    files = open_whisper(fetch_catalog(CATALOG["whisper-base"]))
    oracle, language = in_transformers(files), voice[:2]
    transcriber = open_transcriber("whisper-base", 2, "exact")
    subprocess.run(
        ["espeak-ng", "-v", voice, "-s", "150", "-w", tmp_path / "a.wav", text], check=True
    )
    samples = decode((tmp_path / "a.wav").read_bytes()).samples
    assert (len(samples) > WINDOW) == (LONG in text)
    wanted = [token for token in long_form(oracle, samples, language) if token < files.special.end]
    options = DecodingOptions(language=language, temperatures=(0.0,))
    found = transcriber.transcribe(samples, options)
    said = [token for one in found.segments for token in one.tokens if token < files.special.end]
    assert said == wanted
    assert len(said) > 20
    # Eight bits, the default, hear nearly the same words.
    coded = open_transcriber("whisper-base", 2)
    wrong = word_errors(found.text, coded.transcribe(samples, options).text)
    assert wrong.rate < 0.1


def spoken(text: str, path: Path, share: float = 1.0) -> np.ndarray:
    subprocess.run(["espeak-ng", "-w", path, text], check=True)
    return decode(path.read_bytes()).samples * np.float32(share)


def tone(hertz: float, seconds: int, level: float) -> np.ndarray:
    time = np.arange(seconds * RATE) / RATE
    return (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng to speak")
def test_words_are_heard_only_where_they_are_spoken(tmp_path: Path) -> None:
    """Whisper says "you" to a tone; short real words, quiet ones too, are as sure as that."""
    transcriber = open_transcriber("whisper-base", 2, "exact")
    noise = np.random.default_rng(0).standard_normal(10 * RATE).astype(np.float32)
    options = DecodingOptions(language="en")
    for sound in (tone(1000, 5, 0.1), tone(440, 10, 0.3), tone(50, 10, 0.05), 1e-3 * noise):
        found = transcriber.transcribe(sound, options)
        assert found.text == ""
        assert found.left_out == [(0.0, len(sound) / RATE, "no speech")]
    for text, share in (("Yes.", 1.0), ("No.", 0.03), ("Thank you.", 1.0), ("You.", 0.03)):
        found = transcriber.transcribe(spoken(text, tmp_path / "a.wav", share), options)
        assert found.text != ""
        assert found.left_out == []
