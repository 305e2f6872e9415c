"""`speech.json`: what it may say, and what tokens become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import InvalidRequest, ModelFileError
from headrace.speech.voices import FrameReader, open_voices
from tiny.snac import make_codec
from tiny.speaking import CODES, FIRST, SAID, STOP, VOCAB, silent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_codec(tmp_path / "snac", silent)
    (tmp_path / "speech.json").write_text(json.dumps(SAID))
    return tmp_path


def test_a_prompt(folder: Path) -> None:
    voices = open_voices(folder, VOCAB)
    ids = voices.ids(lambda text: list(text.encode()), "leo", "a {voice} {text}")
    assert ids == [*b"leo: a {voice} {text}", *SAID["prompt"][1:]]  # type: ignore[misc]
    with pytest.raises(InvalidRequest, match="tara, leo"):
        voices.ids(lambda text: [], "zoe", "a")


def test_tokens_become_frames(folder: Path) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, CODES, (5, 7))
    tokens = (codes + FIRST + CODES * np.arange(7)).reshape(-1).tolist()
    reader = FrameReader(open_voices(folder, VOCAB))
    found = [reader.take(tokens[i : i + 3]) for i in range(0, len(tokens), 3)]
    assert np.array_equal(np.concatenate(found), codes)
    assert reader.dropped == 0


def test_a_token_out_of_place_is_left_out(folder: Path) -> None:
    reader = FrameReader(open_voices(folder, VOCAB))
    places = [FIRST + CODES * place for place in range(7)]
    # A word, a code of the third place, one of the first again, and the end.
    tokens = [*places[:1], 65, places[2], places[0], *places[1:], STOP]
    assert reader.take(tokens).tolist() == [[0] * 7]
    assert reader.dropped == 3


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "../snac"},
        {"codec": ".."},
        {"codec": 3},
        {"codec": "absent"},
        {"voices": []},
        {"voices": ["a b"]},
        {"voices": "tara"},
        {"prompt": [3, 4]},
        {"prompt": ["{text}{text}"]},
        {"prompt": [VOCAB, "{text}"]},
        {"prompt": [True, "{text}"]},
        {"first_code": VOCAB - 7},
        {"first_code": -1},
        {"end": None},
        {"sampling": {"temperature": -2}},
        {"sampling": {"n": 3}},
        {"speed": 2},
    ],
)
def test_what_is_wrong_is_named(folder: Path, change: dict[str, Any]) -> None:
    (folder / "speech.json").write_text(json.dumps({**SAID, **change}))
    name = "config.json" if change == {"codec": "absent"} else next(iter(change))
    with pytest.raises(ModelFileError, match=name):
        open_voices(folder, VOCAB)
