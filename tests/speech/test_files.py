"""CTranslate2's format: the same tensors as in safetensors, and nothing but errors of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.kernels.arrays import mapped
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.weights import DenseWeight
from headrace.loader.ctranslate import BinaryModel
from headrace.loader.whisper_files import _LAYER, _TOP, WhisperFiles, _floating, open_whisper
from headrace.speech.rules import rules_of
from headrace.worker.time_rules import RulesOfRow

from .conftest import write_ctranslate


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The folder of `folder` as CTranslate2 has it."""
    where, files = tmp_path_factory.mktemp("binary"), open_whisper(folder)
    variables = {}
    for part in ("encoder", "decoder"):
        positions = files.tensor(f"model.{part}.embed_positions.weight")
        variables[f"{part}/position_encodings/encodings"] = positions
        for theirs, mine in _TOP.items():
            if theirs.startswith("conv") and part == "decoder":
                continue
            if theirs == "embed_tokens" and part == "encoder":
                continue
            variables |= named(files, f"model.{part}.{theirs}", f"{part}/{mine}")
        for layer in range(2):
            for theirs, mine in _LAYER.items():
                if theirs.startswith("encoder_attn") and part == "encoder":
                    continue
                name = f"model.{part}.layers.{layer}.{theirs}"
                variables |= named(files, name, f"{part}/layer_{layer}/{mine}")
    write_ctranslate(where / "model.bin", variables)
    (where / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (where / "config.json").write_text('{"suppress_ids": [1, 2], "suppress_ids_begin": [220, 256]}')
    return where


def named(files: WhisperFiles, theirs: str, mine: str) -> dict[str, np.ndarray]:
    norm = theirs.endswith("norm")
    found = {f"{mine}/{'gamma' if norm else 'weight'}": files.tensor(f"{theirs}.weight")}
    if not theirs.endswith("embed_tokens"):
        found[f"{mine}/{'beta' if norm else 'bias'}"] = files.tensor(f"{theirs}.bias")
    return found


def test_a_head_of_its_own_is_refused_and_a_copy_is_not(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_whisper(tmp_path).vocab == open_whisper(folder).vocab
    tensors["proj_out.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"proj_out\.weight is not equal to the embedding"):
        open_whisper(tmp_path)


def test_both_layouts_are_one_model(folder: Path, binary: Path) -> None:
    one, other = open_whisper(folder), open_whisper(binary)
    for field in (
        "width",
        "heads",
        "encoder_layers",
        "decoder_layers",
        "mels",
        "vocab",
        "positions",
        "frames",
        "suppressed",
        "suppressed_first",
        "special",
    ):
        assert getattr(one, field) == getattr(other, field)
    for name in (
        "model.encoder.conv2.weight",
        "model.encoder.layers.1.self_attn.qkv_proj.bias",
        "model.decoder.layers.0.encoder_attn.kv_proj.weight",
        "model.decoder.layers.1.final_layer_norm.weight",
        "model.decoder.layer_norm.bias",
    ):
        assert np.array_equal(one.tensor(name), other.tensor(name))


def test_mutated_files_are_errors_of_ours(binary: Path, tmp_path: Path) -> None:
    whole = (binary / "model.bin").read_bytes()
    draw, path = np.random.default_rng(7), tmp_path / "model.bin"
    heads = np.flatnonzero(np.frombuffer(whole, np.uint8)[:4000])
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for at in draw.choice(heads[:200], 2):
            data[at] = draw.integers(0, 256)
        if draw.random() < 0.3:
            data = data[: draw.integers(0, len(data))]
        path.write_bytes(data)
        try:
            BinaryModel(path)
        except HeadraceError as error:
            refused += 1
            assert isinstance(error, ModelFileError | UnsupportedModel)  # noqa: PT017
    assert refused > 50


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d[:100], "beyond the end"),
        (lambda d: b"\5" + d[1:], "version 5"),
        (lambda d: d + b"\0", "behind the last"),
        (lambda d: d.replace(b"WhisperSpec", b"Transformer"), "only WhisperSpec"),
        (lambda d: d.replace(b"decoder/layer_norm/beta", b"encoder/layer_norm/beta"), "twice"),
    ],
)
def test_each_lie_is_named(binary: Path, tmp_path: Path, change: object, why: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(change((binary / "model.bin").read_bytes()))  # type: ignore[operator]
    with pytest.raises((ModelFileError, UnsupportedModel), match=why):
        BinaryModel(path)


@pytest.mark.parametrize(
    "config", ['{"alignment_heads": [[0, 9]]}', '{"suppress_ids": ["a"]}', "[]", "{"]
)
def test_a_wrong_config_is_one_error(binary: Path, tmp_path: Path, config: str) -> None:
    for name in ("model.bin", "tokenizer.json"):
        (tmp_path / name).symlink_to(binary / name)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelFileError):
        open_whisper(tmp_path)


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ({"suppress_ids": [*range(256)]}, False),
        ({"suppress_ids": [*range(200)], "suppress_ids_begin": [*range(200, 257)]}, False),
        ({"suppress_ids_begin": [*range(266, 317)]}, False),
        ({"suppress_ids": [*range(255)], "suppress_ids_begin": [256, *range(266, 316)]}, True),
    ],
)
def test_a_text_has_a_first_token(
    binary: Path, tmp_path: Path, config: dict[str, object], right: bool
) -> None:
    for name in ("model.bin", "tokenizer.json"):
        (tmp_path / name).symlink_to(binary / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not right:
        with pytest.raises(ModelFileError, match="no first token"):
            open_whisper(tmp_path)
        return
    files = open_whisper(tmp_path)
    for times in (True, False):
        row = RulesOfRow(rules_of(files, times=times, begin=0))
        shares = row.log_shares(np.zeros(files.vocab, np.float32), [])
        assert np.flatnonzero(shares > -np.inf).tolist() == [316 if times else 255]


def test_no_aligning_heads_are_those_of_the_upper_layers(binary: Path, tmp_path: Path) -> None:
    for name in ("model.bin", "tokenizer.json"):
        (tmp_path / name).symlink_to(binary / name)
    (tmp_path / "config.json").write_text('{"alignment_heads": []}')
    assert open_whisper(tmp_path).alignment == ((1, 0), (1, 1))


@pytest.mark.parametrize("kind", ["stored", "binary"])
def test_the_embedding_is_a_view_of_its_file(kind: str, folder: Path, binary: Path) -> None:
    files = open_whisper(folder if kind == "stored" else binary)
    assert np.array_equal(files.table, files.tensor("model.decoder.embed_tokens.weight"))
    assert mapped(files.table)


@pytest.mark.parametrize(("name", "even"), [("n", True), ("nn", False)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_arrays_lie_wherever_the_names_before_them_end(
    tmp_path: Path, dtype: str, name: str, even: bool
) -> None:
    """The first array lies 43 bytes and its name behind the begin."""
    matrix = np.arange(288).astype(dtype).reshape(9, 32)
    arrays = {name: matrix, "decoder/embeddings/weight": matrix}
    write_ctranslate(tmp_path / "model.bin", arrays)
    found = BinaryModel(tmp_path / "model.bin")
    assert np.array_equal(found.mapped(name), matrix)
    assert mapped(found.mapped(name))
    assert found.mapped(name).flags.aligned == even
    ids = np.array([8, 2, 2])
    rows = CpuOperators(1).embed(ids, DenseWeight(found.mapped(name)), 1.0)
    assert np.array_equal(rows, matrix[ids].astype(np.float32))
    with pytest.raises(ModelFileError, match="other is missing"):
        found.mapped("other")


@pytest.mark.parametrize("where", ["startofprev", "en", None])
def test_ids_beyond_the_embedding_are_refused(folder: Path, tmp_path: Path, where: str) -> None:
    """The network would read memory that is not its own."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(folder / name)
    said = json.loads((folder / "tokenizer.json").read_text())
    if where is None:
        said["model"]["vocab"]["zz"] = 2_000_000_000
    else:
        (token,) = (one for one in said["added_tokens"] if one["content"] == f"<|{where}|>")
        token["id"] = 2_000_000_000
        said["model"]["vocab"][token["content"]] = 2_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: .* larger than the embedding"):
        open_whisper(tmp_path)


def test_a_tokenizer_does_not_pad(folder: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(folder / name)
    said = json.loads((folder / "tokenizer.json").read_text())
    said["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2_000_000_000,
        "pad_type_id": 0,
        "pad_token": "z",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    assert len(open_whisper(tmp_path).tokenizer.encode("abc").ids) == 3


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("shape", [(), (5,), (128, 129)])
def test_parts_of_other_shapes_are_one_error(
    folder: Path, tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(folder / name)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.encoder.layers.0.self_attn.v_proj.{kind}"] = np.zeros(shape, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_whisper(tmp_path)
    with pytest.raises(ModelFileError, match="must have one shape"):
        files.tensor(f"model.encoder.layers.0.self_attn.qkv_proj.{kind}")


def test_scales_of_eight_bits_are_of_the_outputs(tmp_path: Path) -> None:
    codes = np.arange(18, dtype=np.int8).reshape(3, 3, 2)
    arrays = {
        "a": codes,
        "a_scale": np.array([1, 2, 4], np.float32),
        "b": codes,
        "b_scale": np.array([[1, 2, 4]], np.float32),
        "c": np.int8(4).reshape(()),
        "c_scale": np.float32(2).reshape(()),
    }
    write_ctranslate(tmp_path / "model.bin", arrays | {"decoder/embeddings/weight": codes})
    binary = BinaryModel(tmp_path / "model.bin")
    assert np.array_equal(_floating(binary, "a"), codes / np.array([1, 2, 4])[:, None, None])
    for name in "bc":
        with pytest.raises(ModelFileError, match=f"{name}_scale is"):
            _floating(binary, name)
