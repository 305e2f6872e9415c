"""SNAC's decoder: torch's samples, and the same bits however the codes come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.kernels.cpu.library import Team, load
from headrace.speech.codec import Codec, noise
from headrace.speech.codec_files import open_codec
from tiny.snac import make_codec


def drawn(place: int, count: int) -> torch.Tensor:
    return torch.from_numpy(noise(11, place, 0, count))[None, None]


def ours(folder: Path) -> Codec:
    load()
    return Codec(open_codec(folder), Team(2))


def frames_of(codec: Codec, count: int, seed: int) -> np.ndarray[Any, Any]:
    files = codec.files
    random = np.random.default_rng(seed)
    return random.integers(0, files.codes, (count, len(files.levels)), np.int64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise": False},
        {"decoder_rates": [3, 5, 2], "encoder_rates": [2, 3, 5]},
        {"vq_strides": [8, 4, 2, 1]},
        {"decoder_dim": 1024, "encoder_dim": 48, "codebook_size": 4096},
    ],
)
def test_samples_are_those_of_torch(tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = make_codec(tmp_path, drawn, **changes)
    codec = ours(tmp_path)
    frames = frames_of(codec, 5, 1)
    levels = np.array(codec.files.levels)
    codes = [
        torch.from_numpy(frames[:, levels == level].reshape(-1))
        for level in range(len(codec.files.strides))
    ]
    wanted = oracle(codes).numpy()
    got = codec.stream(11).push(frames, last=True)
    assert got.shape == wanted.shape == (5 * codec.files.hop,)
    assert np.abs(wanted).max() > 0.01
    assert np.abs(got - wanted).max() < 2e-5 * max(1, np.abs(wanted).max())


def test_codes_in_pieces_give_the_same_bits(tmp_path: Path) -> None:
    make_codec(tmp_path, drawn)
    codec = ours(tmp_path)
    frames = frames_of(codec, 23, 2)
    whole = codec.stream(7).push(frames, last=True)
    random = np.random.default_rng(3)
    for _ in range(6):
        # Two sounds in turns: neither has anything of the other's.
        streams = [codec.stream(7), codec.stream(8)]
        cuts = np.sort(random.integers(0, 23, 5)).tolist()
        parts = []
        for begin, end in zip([0, *cuts], [*cuts, 23], strict=True):
            parts.append(streams[0].push(frames[begin:end], last=end == 23))
            streams[1].push(frames[begin:end])
        assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(codec.stream(8).push(frames, last=True), whole)


def test_samples_come_before_the_last_code(tmp_path: Path) -> None:
    """All but what three frames more can change."""
    make_codec(tmp_path, drawn)
    codec = ours(tmp_path)
    frames = frames_of(codec, 12, 4)
    stream = codec.stream()
    early = stream.push(frames[:8])
    assert len(early) > 5 * codec.files.hop
    other = frames.copy()
    other[8:] = (other[8:] + 1) % codec.files.codes
    for end in (frames, other):
        assert np.array_equal(codec.stream().push(end, last=True)[: len(early)], early)


def test_the_order_of_a_frame(tmp_path: Path) -> None:
    make_codec(tmp_path, drawn)
    assert open_codec(tmp_path).levels == (0, 1, 2, 2, 1, 2, 2)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("attn_window_size", 32, UnsupportedModel),
        ("depthwise", False, UnsupportedModel),
        ("vq_strides", [4, 3, 1], UnsupportedModel),
        ("vq_strides", [4, 2], UnsupportedModel),
        ("decoder_rates", [], ModelFileError),
        ("decoder_rates", [8, 8, 8, 8, 8, 8], HeadraceError),
        ("decoder_dim", 10**9, ModelFileError),
        ("codebook_size", True, ModelFileError),
        ("codebook_dim", "8", ModelFileError),
        ("encoder_dim", 1 << 30, ModelFileError),
    ],
)
def test_a_wrong_config_names_its_field(
    tmp_path: Path, field: str, value: Any, kind: type[Exception]
) -> None:
    make_codec(tmp_path, drawn)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(kind, match=field):
        ours(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    make_codec(tmp_path, drawn)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"codebook_size": 65}))
    with pytest.raises(ModelFileError, match=r"codebook\.weight"):
        ours(tmp_path)


def test_old_names_of_weight_normalisation(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_codec(tmp_path, drawn)
    codec = ours(tmp_path)
    frames = frames_of(codec, 3, 9)
    before = codec.stream().push(frames, last=True)
    file = tmp_path / "model.safetensors"
    renamed = {
        key.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): value
        for key, value in load_file(file).items()
    }
    save_file(renamed, file)
    assert np.array_equal(ours(tmp_path).stream().push(frames, last=True), before)
