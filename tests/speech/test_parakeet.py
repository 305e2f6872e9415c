"""Parakeet against transformers in fp32: features, frames, tokens of CTC, RNN-T and TDT."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ParakeetFeatureExtractor

from headrace.base.errors import HeadraceError, InvalidRequest, ModelFileError, UnsupportedModel
from headrace.engine.hearing.opening import open_transcriber
from headrace.kernels.cpu.library import Team
from headrace.speech.decoding import DecodingOptions
from headrace.speech.finding import hears
from headrace.speech.parakeet import ParakeetNetwork, features
from headrace.speech.parakeet_files import open_parakeet
from headrace.speech.transcript import Transcriber
from headrace.speech.transducers import ctc
from tiny.parakeet import BLANK, KINDS, make


def sound(seed: int, seconds: float) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(seed)
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return (0.3 * tone + 0.02 * draw.normal(size=len(t))).astype(np.float32)


def inputs(samples: np.ndarray[Any, Any], mels: int = 80) -> Any:
    return ParakeetFeatureExtractor(feature_size=mels)(
        samples, sampling_rate=16_000, return_tensors="pt"
    )


def heard(network: ParakeetNetwork, samples: np.ndarray[Any, Any], window: int = 0) -> list[Any]:
    for _ in network.hear(samples, window):
        pass
    return network.heard[window]


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("count", [1_600, 16_001, 99_999])
def test_features_are_those_of_transformers(mels: int, count: int) -> None:
    samples = sound(1, 8)[:count]
    wanted = inputs(samples, mels)["input_features"][0].numpy()
    mine = features(samples, mels)
    # The frame behind the last is masked there.
    assert mine.shape == (len(wanted) - 1, mels)
    assert np.abs(mine - wanted[:-1]).max() < 2e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str, seed: int) -> None:
    oracle = make(kind, tmp_path)
    network = ParakeetNetwork(open_parakeet(tmp_path), Team(2), "exact")
    samples = sound(seed, 3 + 2.13 * seed)
    given = inputs(samples)
    with torch.no_grad():
        room = {} if kind == "parakeet_ctc" else {"max_new_tokens": 2_000}
        said = oracle.generate(**given, **room)
    wanted = (said if kind == "parakeet_ctc" else said.sequences)[0].tolist()
    found = heard(network, samples)
    if kind == "parakeet_ctc":
        valid = int(given["attention_mask"].sum())
        for _ in range(3):
            valid = (valid - 1) // 2 + 1
        runs = [t for i, t in enumerate(wanted[:valid]) if not i or t != wanted[i - 1]]
        expected = [token for token in runs if token != BLANK]
    else:
        expected = [token for token in wanted[1:] if token != BLANK]
    assert len(expected) > 1
    assert [one.token for one in found] == expected
    if kind == "parakeet_tdt":
        frames = np.cumsum(said.durations[0].numpy()) - said.durations[0].numpy()
        places = [int(f) for t, f in zip(wanted[1:], frames[1:], strict=True) if t != BLANK]
        assert [one.frame for one in found] == places
    assert all(one.log_share <= 0 for one in found)


@pytest.mark.parametrize(
    "changes", [{"mels": 128}, {"biases": False, "convolution": False}, {"scaled": False}]
)
def test_frames_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = make("parakeet_ctc", tmp_path, **changes)
    network = ParakeetNetwork(open_parakeet(tmp_path), Team(2), "exact")
    samples = sound(5, 4.7)
    given = inputs(samples, network.files.mels)
    with torch.no_grad():
        wanted = oracle(**given).logits[0].numpy()
    seen: list[Any] = []
    real = network._head

    def keep(x: Any) -> Any:
        seen.append(real(x))
        return seen[-1]

    network._head = keep  # type: ignore[assignment]
    heard(network, samples)
    (mine,) = seen
    assert np.abs(mine - wanted[: len(mine)]).max() < 1e-3 * np.abs(wanted).max()


def test_eight_bits_are_near(tmp_path: Path) -> None:
    make("parakeet_ctc", tmp_path)
    files = open_parakeet(tmp_path)
    logits = []
    for precision in ("exact", "int8"):
        network = ParakeetNetwork(files, Team(2), precision)  # type: ignore[arg-type]
        real = network._head
        network._head = lambda x, real=real: logits.append(real(x)) or logits[-1]  # type: ignore
        heard(network, sound(2, 4))
    assert 0.98 < np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1] < 1 - 1e-9


def test_ctc_says_what_repeats_once() -> None:
    logits = np.full((7, 4), -5, np.float32)
    for frame, token in enumerate([3, 1, 1, 3, 1, 2, 2]):
        logits[frame, token] = 5
    assert [(e.token, e.frame, e.frames) for e in ctc(logits, 3)] == [
        (1, 1, 2),
        (1, 4, 1),
        (2, 5, 2),
    ]
    assert ctc(logits[:0], 3) == []


@pytest.fixture(scope="module")
def tdt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parakeet")
    make("parakeet_tdt", folder)
    return folder


def test_a_transcript(tdt: Path) -> None:
    assert hears(str(tdt))
    made = open_transcriber(str(tdt), 2, "exact")
    samples = np.concatenate([sound(1, 12), np.zeros(48_000, np.float32), sound(2, 30)])
    told: list[float] = []
    found = made.transcribe(samples, words=True, told=lambda new, upto: told.append(upto))
    assert found.seconds == pytest.approx(45)
    assert len(found.segments) > 1
    assert told == sorted(told)
    for segment in found.segments:
        assert segment.text == "".join(word.text for word in segment.words)
        assert len(segment.tokens) == len(segment.log_shares)
        assert 0 <= segment.start < segment.end <= 45
    starts = [word.start for one in found.segments for word in one.words]
    assert starts == sorted(starts)
    alone = made.transcribe(samples, words=True)
    assert alone == found
    pieces = made.files.bytes_of(found.segments[0].tokens)
    assert b"".join(pieces).decode().split() == found.segments[0].text.split()


def test_sounds_side_by_side_are_as_alone(tdt: Path) -> None:
    made = open_transcriber(str(tdt), 2, "exact")
    sounds = [sound(seed, 3 + seed) for seed in range(1, 5)]
    alone = [made.transcribe(one) for one in sounds]
    walks = [
        made.sequential(one, DecodingOptions(), words=False, told=lambda new, upto: None)
        for one in sounds
    ]
    found: dict[int, Any] = {}
    begin = time.monotonic()
    while len(found) < len(walks):
        assert time.monotonic() - begin < 60
        for i, walk in enumerate(walks):
            if i not in found:
                try:
                    next(walk)
                except StopIteration as end:
                    found[i] = end.value
        made.jobs.turn()
    assert [found[i] for i in range(len(sounds))] == alone


def test_a_fault_in_one_window_is_of_its_sound(tdt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_transcriber(str(tdt), 2, "exact")
    sounds = [sound(1, 4), sound(2, 3)]
    wanted = made.transcribe(sounds[1])
    network = made.jobs.network
    real = network.hear

    def hear(samples: np.ndarray[Any, Any], window: int) -> Iterator[None]:
        for slice in real(samples, window):
            yield slice
            if len(samples) == len(sounds[0]):
                raise ValueError("broken")

    monkeypatch.setattr(network, "hear", hear)
    broken, whole = (
        made.sequential(one, DecodingOptions(), words=False, told=lambda new, upto: None)
        for one in sounds
    )
    ends: list[Any] = []
    begin = time.monotonic()
    walks = [broken, whole]
    while walks:
        assert time.monotonic() - begin < 60
        for walk in list(walks):
            try:
                next(walk)
            except (StopIteration, ValueError) as end:
                walks.remove(walk)
                ends.append(end.value if isinstance(end, StopIteration) else str(end))
        made.jobs.turn()
    assert sorted(ends, key=str) == sorted(["broken", wanted], key=str)
    assert len(made.jobs.free_windows) == network.windows


def test_silence_is_left_out(tdt: Path) -> None:
    made = open_transcriber(str(tdt), 1, "exact")
    found = made.transcribe(np.zeros(80_000, np.float32))
    assert not found.segments
    assert [one.reason for one in found.left_out] == ["inaudible"]
    assert made.transcribe(np.zeros(0, np.float32)).text == ""
    assert isinstance(made, Transcriber)
    assert made.transcribe(sound(1, 0.01)).seconds == pytest.approx(0.01)


def test_what_it_cannot_be_asked_is_named(tdt: Path) -> None:
    made = open_transcriber(str(tdt), 1, "exact")
    for options, param in (
        (DecodingOptions(task="translate"), "model"),
        (DecodingOptions(prompt="Names."), "prompt"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            made.transcribe(sound(1, 1), options)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model_type": "parakeet"}, "model_type"),
        ({"durations": []}, "durations"),
        ({"durations": [-1]}, "durations"),
        ({"blank_token_id": 64}, "blank"),
        ({"decoder_hidden_size": "32"}, "decoder_hidden_size"),
        ({"vocab_size": 65}, "decoder.embedding"),
        ({"encoder_config": None}, "encoder_config"),
        ({"max_symbols_per_step": 10**6}, "max_symbols_per_step"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_wrong_folder_is_named(
    tdt: Path, tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).symlink_to(tdt / name)
    config = json.loads((tdt / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((ModelFileError, UnsupportedModel), match=what):
        ParakeetNetwork(open_parakeet(tmp_path), Team(1), "exact")


def test_other_features_are_refused(tdt: Path, tmp_path: Path) -> None:
    for path in tdt.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "preprocessor_config.json").write_text('{"n_fft": 1024}')
    with pytest.raises(HeadraceError, match="n_fft"):
        open_parakeet(tmp_path)
