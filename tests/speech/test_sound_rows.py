"""Sounds before a language model, against transformers in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.cpu.library import LibraryAbsent, Team
from headrace.loader import open_model
from headrace.speech.sound_rows import SoundRows, open_sound_files
from tiny.hearing_chat import MELS, PLACE, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hearing_chat")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make(folder)


def sound(seed: int, seconds: float) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(seed)
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return (0.3 * tone + 0.02 * draw.normal(size=len(t))).astype(np.float32)


def features(samples: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    extractor = WhisperFeatureExtractor(feature_size=MELS)
    made = extractor(
        samples,
        sampling_rate=16_000,
        return_tensors="pt",
        padding="max_length",
        return_attention_mask=True,
    )
    return {
        "input_features": made["input_features"].float(),
        "feature_attention_mask": made["attention_mask"],
    }


def rows_of(folder: Path, precision: Any = "exact") -> SoundRows:
    files = open_model(str(folder))
    try:
        team = Team(2)
    except LibraryAbsent as absent:
        pytest.skip(f"the CPU library is not built: {absent}")
    opened = open_sound_files(files.path, files.weights, files.arch.hidden)
    return SoundRows(opened, team, precision)


@pytest.mark.parametrize("count", [1_600, 1_601, 1_760, 16_000, 41_237, 320_333, 480_000])
def test_rows_are_those_of_transformers(folder: Path, oracle: Any, count: int) -> None:
    samples = sound(2, 30.0)[:count]
    rows = rows_of(folder)(samples)
    prompt = torch.tensor([[1, *[PLACE] * len(rows), 2]])
    with torch.no_grad():
        seen: dict[str, torch.Tensor] = {}

        def keep(module: Any, given: Any, out: torch.Tensor) -> None:
            seen["rows"] = out

        held = oracle.model.multi_modal_projector.register_forward_hook(keep)
        # It asserts that there are as many tokens as rows.
        oracle(input_ids=prompt, attention_mask=torch.ones_like(prompt), **features(samples))
        held.remove()
    wanted = seen["rows"][0, : len(rows)].numpy()
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_rows_in_eight_bits_are_near(folder: Path, oracle: Any) -> None:
    del oracle
    samples = sound(3, 4.0)
    exact, coded = rows_of(folder)(samples), rows_of(folder, "int8")(samples)
    assert np.abs(exact - coded).max() < 0.2 * np.abs(exact).max()


def test_a_sound_does_not_depend_on_the_one_before(folder: Path, oracle: Any) -> None:
    del oracle
    rows = rows_of(folder)
    first = rows(sound(1, 2.0))
    rows(sound(2, 9.0))
    assert np.array_equal(rows(sound(1, 2.0)), first)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"d_model": 130}, UnsupportedModel),
        ({"encoder_ffn_dim": 500}, UnsupportedModel),
        ({"activation_function": "relu"}, UnsupportedModel),
        ({"scale_embedding": True}, UnsupportedModel),
        ({"max_source_positions": 750}, UnsupportedModel),
        ({"encoder_layers": 3}, ModelFileError),
        ({"num_mel_bins": 80}, ModelFileError),
    ],
)
def test_what_is_not_run_is_named(
    folder: Path, oracle: Any, tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    del oracle
    files = open_model(str(folder))
    said = json.loads((folder / "config.json").read_text())
    said["audio_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(error):
        open_sound_files(tmp_path, files.weights, files.arch.hidden)
