"""Features, encoder and decoder against transformers in fp32; and one answer whoever is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from headrace.base.errors import UnsupportedModel
from headrace.base.groups import group_bytes
from headrace.kernels.cpu.pieces import LoweredPieces
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.in_pieces import InterpretedPieces
from headrace.loader.q8_0 import q8_0
from headrace.loader.whisper import open_transcription
from headrace.loader.whisper_files import open_whisper
from headrace.speech.features import log_mel

from .whisper_parts import WhisperParts, sound

TOKENS = [257, 258, 261, 265, 40, 41, 42, 300]


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("samples", [0, 1, 159, 100_000, 480_000])
def test_features_are_those_of_transformers(mels: int, samples: int) -> None:
    given = sound(1, 30.0)[:samples]
    padded = np.zeros((1, 480_000), np.float32)
    padded[0, :samples] = given
    extract = WhisperFeatureExtractor(feature_size=mels)
    wanted = extract._np_extract_fbank_features(padded, "cpu")[0].T
    assert np.abs(log_mel(given, mels) - wanted).max() < 1e-5
    if samples:
        # Where torch is there it is asked, whose transform is in fp32.
        nearly = extract(given, sampling_rate=16_000, return_tensors="np").input_features[0].T
        assert np.abs(log_mel(given, mels) - nearly).max() < 1e-4


@pytest.mark.parametrize("samples", [0, 1, 119, 120, 121, 16_000, 479_639, 479_799])
def test_silence_after_a_sound_has_the_features_of_zeros(samples: int) -> None:
    """No frame that holds a sample is taken for silence."""
    given, whole = sound(2, 30.0)[:samples], np.zeros(480_000, np.float32)
    whole[:samples] = given
    assert np.array_equal(log_mel(given, 80), log_mel(whole, 80))


def expected(oracle: Any, mel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the encoder and logits of `TOKENS`, by transformers."""
    with torch.no_grad():
        features = torch.from_numpy(mel.T[None].copy())
        encoded = oracle.model.encoder(features).last_hidden_state
        ids = torch.tensor([TOKENS])
        logits = oracle(encoder_outputs=(encoded,), decoder_input_ids=ids).logits
    return encoded[0].numpy(), logits[0].numpy()


@pytest.mark.parametrize("kernels", ["auto", "ref"])
def test_keys_and_logits_are_those_of_transformers(
    folder: Path, parts: WhisperParts, oracle: Any, kernels: str
) -> None:
    """The library's records and the reference, node by node; slices of any size."""
    if kernels == "ref":
        parts = WhisperParts(open_transcription(folder, coded=False), kernels="ref", windows=2)
        assert isinstance(parts.encoder._run, InterpretedPieces)
    else:
        assert isinstance(parts.encoder._run, LoweredPieces)
        assert isinstance(parts.worker.text.program, CpuProgram)
    mel = parts.encode(sound(1), 1, cuts=(1, 2))
    encoded, wanted = expected(oracle, mel)
    item = parts.encoder._items[1]
    for layer, keys in item.keys.items():
        weight = oracle.model.decoder.layers[layer].encoder_attn.k_proj.weight.detach().numpy()
        products = encoded @ weight.T
        assert np.abs(keys - products).max() < 1e-4 * np.abs(products).max()
    found = parts.logits(0, 1, TOKENS)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_no_bit_depends_on_chunks_or_on_others(parts: WhisperParts) -> None:
    parts.encode(sound(1), 0)
    alone = parts.logits(1, 0, TOKENS)[-1]
    parts.encode(sound(2), 2, cuts=(2, 1))
    parts.encode(sound(1), 0, cuts=(1, 1, 1))
    parts.logits(2, 0, TOKENS[:2])
    parts.together([(2, 0, TOKENS[2:5], 2), (3, 2, TOKENS, 0)])
    others = [(3, 2, [77], 8), (2, 0, TOKENS[5:], 5), (4, 0, [257], 0)]
    assert np.array_equal(parts.together(others)[1][-1], alone)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_eight_bits_are_near(folder: Path, parts: WhisperParts, kv: str) -> None:
    """Codes of eight bits leave the order of the likely tokens nearly as it is."""
    small = WhisperParts(open_transcription(folder, coded=True), kv, windows=1, rows=1)
    parts.encode(sound(1), 0)
    small.encode(sound(1), 0)
    exact, coded = parts.logits(5, 0, TOKENS)[-1], small.logits(0, 0, TOKENS)[-1]
    assert np.corrcoef(exact, coded)[0, 1] > 0.98


def test_a_file_of_another_kind_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="holds no Whisper"):
        open_whisper(tmp_path)


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_the_cross_group_is_what_is_kept(folder: Path, parts: WhisperParts, kv: str) -> None:
    if kv == "int8":
        parts = WhisperParts(open_transcription(folder, coded=True), kv, windows=2, rows=1)
    pool = parts.worker._pool
    layers = [parts.worker.cache.layers[layer] for layer in pool.cross[0].layers]
    arrays = [(one.k, one.v, one.k_scale, one.v_scale) for one in layers]
    kept = sum(one.nbytes for each in arrays for one in each if one is not None)
    assert kept == group_bytes(pool.cross, pool.block_size)


def test_codes_are_those_of_the_format() -> None:
    """One block after the other, by the definition of Q8_0."""
    random = np.random.default_rng(2)
    matrix = random.normal(0, 0.1, (200, 1056)).astype(np.float32)
    matrix[3] = 0
    matrix[4] *= 1e-8  # Scales that fp16 can hardly hold.
    data = q8_0(matrix).data.reshape(200, 33, 34)
    scale = data[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    blocks = matrix.reshape(200, 33, 32)
    assert np.array_equal(scale, (np.abs(blocks).max(axis=2) / 127).astype(np.float16))
    codes = data[..., 2:].view(np.int8)
    by = np.where(scale > 0, scale, np.inf)[..., None]
    assert np.array_equal(codes, np.clip(np.rint(blocks / by), -127, 127))
    assert not codes[3].any()
