"""Moonshine against transformers in fp32: rows of the encoder, and tokens of greedy decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from headrace.engine.hearing.opening import open_transcriber
from headrace.kernels.cpu.library import Team
from headrace.speech.decoding import DecodingOptions
from headrace.speech.finding import hears
from headrace.speech.moonshine import MoonshineNetwork
from headrace.speech.moonshine_files import open_moonshine
from tiny.moonshine import make


def sound(seed: int, seconds: float) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(seed)
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return (0.3 * tone + 0.02 * draw.normal(size=len(t))).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("moonshine")
    make(where)
    return where


@pytest.mark.parametrize("changes", [{}, {"decoder_num_attention_heads": 8}, {"hidden_size": 104}])
@pytest.mark.parametrize("seconds", [0.07, 1.3, 5.0])
def test_rows_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], seconds: float
) -> None:
    oracle = make(tmp_path, **changes)
    network = MoonshineNetwork(open_moonshine(tmp_path), Team(2), "exact")
    samples = sound(1, seconds)
    with torch.no_grad():
        wanted = oracle.model.encoder(torch.from_numpy(samples)[None]).last_hidden_state[0].numpy()
    *_, found = network.encode(samples)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("tied", "said"), [(True, True), (False, False), (False, True)])
def test_tokens_are_those_of_transformers(
    tmp_path: Path, seed: int, tied: bool, said: bool
) -> None:
    """The head of the file is used, also where the config ties it."""
    oracle = make(tmp_path, tie_word_embeddings=tied)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": said}))
    network = MoonshineNetwork(open_moonshine(tmp_path), Team(2), "exact")
    samples = sound(seed, 2.0 + seed)
    most = 8 + int(6.5 * (2 + seed))
    with torch.no_grad():
        given = torch.from_numpy(samples)[None]
        found = oracle.generate(given, max_new_tokens=most, do_sample=False)[0].tolist()
    wanted = [token for token in found[1:] if token != 2]
    for _ in network.hear(samples, 0):
        pass
    heard = network.heard[0]
    assert len({one.token for one in heard}) > 3
    assert [one.token for one in heard] == wanted
    assert all(one.log_share <= 0 for one in heard)


def test_eight_bits_are_near(folder: Path) -> None:
    rows = []
    for precision in ("exact", "int8"):
        network = MoonshineNetwork(open_moonshine(folder), Team(1), precision)  # type: ignore[arg-type]
        *_, last = network.encode(sound(2, 3))
        rows.append(last)
    assert 0.98 < np.corrcoef(rows[0].ravel(), rows[1].ravel())[0, 1] < 1 - 1e-9


def test_a_transcript(folder: Path) -> None:
    assert hears(str(folder))
    made = open_transcriber(str(folder), 2, "exact")
    samples = np.concatenate([sound(1, 12), np.zeros(48_000, np.float32), sound(2, 30)])
    found = made.transcribe(samples)
    assert len(found.segments) > 1
    ends = [0.0, *(time for one in found.segments for time in (one.start, one.end)), 45.0]
    assert ends == sorted(ends)
    assert found == made.transcribe(samples)
    for segment in found.segments:
        assert segment.text.strip()
        assert len(segment.tokens) == len(segment.log_shares)
    assert made.transcribe(np.zeros(16_000, np.float32)).left_out[0].reason == "inaudible"
    assert made.transcribe(sound(1, 0.01)).seconds == pytest.approx(0.01)


def test_what_it_cannot_be_asked_is_named(folder: Path) -> None:
    made = open_transcriber(str(folder), 1, "exact")
    with pytest.raises(InvalidRequest, match="times of words"):
        made.transcribe(sound(1, 1), words=True)
    with pytest.raises(InvalidRequest, match="prompt"):
        made.transcribe(sound(1, 1), DecodingOptions(prompt="A name."))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden_size": 97}, "num_attention_heads"),
        ({"encoder_num_key_value_heads": 2}, "encoder_num_key_value_heads"),
        ({"decoder_hidden_act": "gelu"}, "decoder_hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"vocab_size": 65}, "embed_tokens"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"tie_word_embeddings": False}, "proj_out"),
    ],
)
def test_a_wrong_folder_is_named(
    folder: Path, tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((ModelFileError, UnsupportedModel), match=what):
        MoonshineNetwork(open_moonshine(tmp_path), Team(1), "exact")
