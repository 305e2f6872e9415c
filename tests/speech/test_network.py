"""Features, encoder and decoder against transformers in fp32; and one answer whoever is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from headrace.kernels.interpret import Interpreter
from headrace.kernels.operators import GroupBatch, KvCache, KvLayer, StepBatch
from headrace.kernels.prepared import Prepared
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import DenseWeight, PanelWeight
from headrace.models.whisper import describe_decoder, describe_encoder
from headrace.roofline.hearing import hearing_memory
from headrace.speech.features import log_mel
from headrace.speech.files import WhisperFiles, open_whisper
from headrace.speech.network import Chunk, Network, Team
from headrace.speech.weights import q8_0


def sound(seed: int, seconds: float = 9.0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed) * t) * np.sin(t)
    return (0.2 * tone + 0.02 * draw.normal(size=len(t))).astype(np.float32)


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


def heard(network: Network, seed: int, window: int) -> np.ndarray:
    mel = log_mel(sound(seed), network.files.mels)
    for _ in network.encode(mel, window):
        pass
    return mel


def test_encoder_and_logits_are_those_of_transformers(network: Network, oracle: Any) -> None:
    mel = heard(network, 1, 0)
    tokens = [257, 258, 261, 265, 40, 41, 42, 300]
    with torch.no_grad():
        features = torch.from_numpy(mel.T[None].copy())
        encoded = oracle.model.encoder(features).last_hidden_state
        wanted = oracle(encoder_outputs=(encoded,), decoder_input_ids=torch.tensor([tokens])).logits
    encoded = encoded[0].numpy()
    assert np.abs(network.encoded - encoded).max() < 1e-4 * np.abs(encoded).max()
    logits = network.decode([Chunk(0, 0, 0, tokens, range(8))])
    scale = np.abs(wanted.numpy()).max()
    assert np.abs(logits - wanted[0].numpy()).max() < 1e-4 * scale


def in_tensors(files: WhisperFiles) -> Prepared:
    """Every weight of both graphs for the reference."""
    made = Prepared()
    for graph in (describe_encoder(files.arch), describe_decoder(files.arch)):
        for ref in graph.weights():
            data = files.tensor(ref.names[0]).astype(np.float32)
            if data.ndim == 3:
                data = np.ascontiguousarray(data.transpose(0, 2, 1)).reshape(len(data), -1)
            whole = torch.from_numpy(data)
            made.by_key[ref.key] = whole if ref.role == "vector" else DenseWeight(whole)
    return made


def test_the_graphs_mean_the_same_to_the_reference(network: Network, oracle: Any) -> None:
    """Node by node on tensors, in a cache of one window, against the records."""
    files, tokens, rows = network.files, torch.tensor([257, 258, 261, 265, 40]), 1_500
    mel = heard(network, 1, 0)
    ops, weights = ReferenceOperators(torch.float32), in_tensors(files)
    encoder, decoder = describe_encoder(files.arch), describe_decoder(files.arch)
    blocks, shape = 94, (94, files.heads, 16, 64)
    layers = {
        spec.layer: KvLayer(*(torch.zeros(shape) for _ in "kv")) for spec in decoder.attentions()
    }
    tables, places = torch.arange(blocks, dtype=torch.int32)[None], torch.arange(rows)
    none = torch.zeros(0, dtype=torch.int64)

    def step(ids: torch.Tensor, at: torch.Tensor, length: int, **more: Any) -> StepBatch:
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        lengths = torch.tensor([length], dtype=torch.int32)
        groups = [GroupBatch(tables, at, None)]
        return StepBatch(ids, at, bounds, lengths, groups, none, len(ids), length, **more)

    with torch.inference_mode():
        cache = KvCache(layers, dict.fromkeys(layers, 0))
        given = torch.zeros(2 * rows + 1, files.mels)
        given[:-1] = torch.from_numpy(mel)
        hidden = encoder.outputs["hidden"]
        run = Interpreter(encoder.nodes, weights, [hidden])
        run.run(ops, step(places, places, rows), cache, {encoder.inputs[0]: given})
        seen = step(tokens, torch.full((5,), rows - 1), rows)
        batch = step(tokens, torch.arange(5), 5, across=seen)
        run = Interpreter(decoder.nodes, weights, [decoder.outputs["logits"]])
        (logits,) = run.run(ops, batch, cache, {})
    found = network.decode([Chunk(0, 0, 0, tokens.tolist(), range(5))])
    assert np.abs(found - logits.numpy()).max() < 1e-4 * np.abs(found).max()


def test_no_bit_depends_on_chunks_or_on_others(network: Network) -> None:
    heard(network, 1, 0)
    heard(network, 2, 1)
    tokens = [257, 258, 261, 265, 40, 41]
    alone = network.decode([Chunk(0, 0, 0, tokens, [5])]).copy()
    network.decode([Chunk(3, 0, 0, tokens[:2], [])])
    network.decode([Chunk(3, 0, 2, tokens[2:5], []), Chunk(4, 1, 0, tokens, [5])])
    others = [
        Chunk(4, 1, 6, [77], [0]),
        Chunk(3, 0, 5, tokens[5:], [0]),
        Chunk(5, 0, 0, [257], [0]),
    ]
    assert np.array_equal(network.decode(others)[1], alone[0])


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_a_copy_goes_on_as_its_source(folder: Path, network: Network, precision: Any) -> None:
    if precision == "int8":  # K and V have scales beside them.
        network = Network(open_whisper(folder), Team(1), precision, windows=1, sequences=7)
    heard(network, 1, 0)
    network.decode([Chunk(0, 0, 0, list(range(30, 50)), [])])
    network.copy(0, 6, 20)
    logits = network.decode([Chunk(6, 0, 20, [9], [0]), Chunk(0, 0, 20, [9], [0])])
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_eight_bits_are_near(folder: Path, network: Network, kv: str) -> None:
    """Codes of eight bits leave the order of the likely tokens nearly as it is."""
    files = network.files
    small = Network(files, Team(2), "int8", kv, windows=1, sequences=1)
    heard(network, 1, 0)
    heard(small, 1, 0)
    chunk = [Chunk(0, 0, 0, [257, 258, 261, 265, 40, 41], [5])]
    exact, coded = network.decode(chunk)[0].copy(), small.decode(chunk)[0]
    assert np.corrcoef(exact, coded)[0, 1] > 0.98


def test_a_file_of_another_kind_is_refused(tmp_path: Path, folder: Path) -> None:
    from headrace.base.errors import UnsupportedModel

    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="holds no Whisper"):
        open_whisper(tmp_path)


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_the_memory_plan_is_what_is_kept(folder: Path, precision: Any) -> None:
    """Its parts against the arrays of a network; all it keeps beside is vectors and rows."""
    kv = "float32" if precision == "exact" else "int8"
    network = Network(open_whisper(folder), Team(1), precision, windows=3, sequences=5)
    plan = [
        size
        for _, size in hearing_memory(network.files.arch, 3, 5, coded=precision == "int8", kv=kv)
    ]
    kept = network.weights.by_key.values()
    packed = sum(one.nbytes for one in kept if isinstance(one, PanelWeight))
    vocab, width = network.files.vocab, network.files.width
    padding = -vocab % 16 * width * (34 / 32 if precision == "int8" else 4)
    assert abs(packed - padding - plan[0]) <= 64

    def room(layers: list[KvLayer]) -> int:
        arrays = [(one.k, one.v, one.k_scale, one.v_scale) for one in layers]
        return sum(one.nbytes for each in arrays for one in each if one is not None)

    assert room(network._cross) == plan[1]
    assert room(network._own) == plan[2]


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
