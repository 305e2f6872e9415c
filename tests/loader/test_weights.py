"""Weights come out under Hugging Face's names, with its values, from both formats."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels import arrays
from headrace.kernels.weights import BlockWeight
from headrace.loader import open_model
from headrace.loader.interleaved_experts import ExpertPart
from headrace.loader.latent_heads import Transposed
from headrace.loader.safetensors_file import StoredTensor, read_header
from headrace.loader.weights import load_weights
from headrace.loader.weights_gguf import original_rows
from headrace.quant import dequantise
from tiny.checkpoints import hf_model, save_folder
from tiny.gguf_files import permuted, save_gguf

FAMILIES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen2 tied": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", {}),
    "llama": ("Llama", "llama", {}),
    "llama bias": ("Llama", "llama", {"attention_bias": True}),
    "mistral": ("Mistral", "llama", {"sliding_window": None}),
    "gemma3": ("Gemma3Text", "gemma3", {"sliding_window": 64, "query_pre_attn_scalar": 16}),
    "mixtral": ("Mixtral", "llama", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        "qwen3moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}


def canonical(model: Any) -> dict[str, torch.Tensor]:
    """The model's own tensors, experts apart, as the loader must yield them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out[f"{stem}{expert}.gate_proj.weight"] = gate
                out[f"{stem}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                out[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return out


def loaded(path: Path) -> dict[str, Any]:
    return {
        name: weight if isinstance(weight, BlockWeight) else tensor_of(weight)
        for name, weight in load_weights(open_model(str(path)))
    }


def tensor_of(weight: Any) -> torch.Tensor:
    if isinstance(weight, ExpertPart):
        weight = weight.read()
        if isinstance(weight, BlockWeight):
            return arrays.tensor(dequantise(weight))
    stored = isinstance(weight, StoredTensor | Transposed)
    return arrays.tensor(weight.read() if stored else weight)


def assert_equal(found: dict[str, Any], wanted: dict[str, torch.Tensor], exact: bool) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        # The converter's + 1 rounds Gemma's norms once; nothing else may change a bit.
        if exact or not name.endswith("norm.weight"):
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors(family: str, tmp_path: Path) -> None:
    kind, _, values = FAMILIES[family]
    model = hf_model(kind, **values)
    assert_equal(loaded(save_folder(model, tmp_path)), canonical(model), exact=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf(family: str, tmp_path: Path) -> None:
    kind, arch, values = FAMILIES[family]
    assert arch is not None
    model = hf_model(kind, **values)
    path = save_gguf(model, tmp_path / "m.gguf", arch)
    assert_equal(loaded(path), canonical(model), exact="gemma" not in family)


def test_both_formats_describe_the_same_model(tmp_path: Path) -> None:
    for family, (kind, arch, values) in FAMILIES.items():
        if "moe" in family or family in ("mixtral", "mistral"):
            continue
        assert arch is not None
        model = hf_model(kind, **values)
        folder = save_folder(model, tmp_path / family)
        path = save_gguf(model, tmp_path / f"{family}.gguf", arch)
        assert open_model(str(folder)).arch == open_model(str(path)).arch, family


def test_quantised_llama_rows_are_put_back_without_decoding(tmp_path: Path) -> None:
    model = hf_model("Llama")
    plain = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    path = save_gguf(model, tmp_path / "m.gguf", "llama", quantise={"attn_q.weight": "Q8_0"})
    found = loaded(path)["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(found, BlockWeight)
    assert found.kind == "Q8_0"
    assert np.abs(dequantise(found).numpy() - plain).max() < 0.01


def test_original_rows_undo_the_converter() -> None:
    rows = np.arange(4 * 16)
    assert original_rows(4, 16).tolist() == np.argsort(permuted(rows, 4)).tolist()


def test_half_precision_stays_as_it_is(tmp_path: Path) -> None:
    model = hf_model("Qwen2").to(torch.bfloat16)
    found = loaded(save_folder(model, tmp_path))
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert_equal(found, canonical(model), exact=True)


def test_bf16_in_gguf(tmp_path: Path) -> None:
    model = hf_model("Qwen2")
    path = save_gguf(model, tmp_path / "m.gguf", "qwen2", quantise={"ffn_up.weight": "BF16"})
    found = loaded(path)["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(found, model.model.layers[1].mlp.up_proj.weight.to(torch.bfloat16))


def test_sharded_by_an_index(tmp_path: Path) -> None:
    model = hf_model("Qwen2")
    save_folder(model, tmp_path)
    split(tmp_path)
    files = open_model(str(tmp_path))
    assert [path.name for path in files.weights] == ["a.safetensors", "b.safetensors"]
    assert_equal(loaded(tmp_path), canonical(model), exact=True)


def split(folder: Path) -> None:
    """The folder's one safetensors file, in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, keys in halves.items():
        save_file({key: tensors[key].clone() for key in keys}, folder / shard)
    index = {"weight_map": {key: shard for shard, keys in halves.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_weights_stay_mapped_until_they_are_read(tmp_path: Path) -> None:
    """Opening the weights of a file does not read them: views of the mapping, not copies."""
    model = hf_model("Qwen2")
    path = save_gguf(model, tmp_path / "m.gguf", "qwen2")
    embedding = loaded(path)["model.embed_tokens.weight"]
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(path) in line
    ]
    assert any(first <= embedding.data_ptr() < last for first, last in ranges)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": ("blk.1.ffn_up.weight",)}, r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"extra": {"blk.0.mystery.weight": np.zeros((4, 4), np.float32)}}, "mystery"),
        ({"extra": {"blk.9.attn_q.weight": np.zeros((64, 64), np.float32)}}, r"layers\.9"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}}, "q_norm"),
        ({"extra": {"blk.0.ffn_up.weight": np.zeros((96, 32), np.float32)}}, r"shape \[96, 32\]"),
    ],
)
def test_gguf_tensors_that_do_not_fit_the_model(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = save_gguf(hf_model("Qwen2"), tmp_path / "m.gguf", "qwen2", **change)
    with pytest.raises(ModelFileError, match=says):
        next(load_weights(open_model(str(path))))


def test_gguf_type_that_is_not_read(tmp_path: Path) -> None:
    path = save_gguf(hf_model("Qwen2"), tmp_path / "m.gguf", "qwen2")
    content = bytearray(path.read_bytes())
    # TQ2_0 needs rows of 256; Q8_1 fits: 32 values in 40 bytes.
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", content, at) == (0,)
    struct.pack_into("<I", content, at, 9)
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"Q8_1; supported: F32.*Q6_K"):
        next(load_weights(open_model(str(path))))


def test_safetensors_that_do_not_fit_the_model(tmp_path: Path) -> None:
    save_folder(hf_model("Qwen2"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for says, change in (
        ("lacks lm_head.weight", {"lm_head.weight": None}),
        ("mystery", {"model.mystery": torch.zeros(2)}),
        (r"shape \[3\]", {"model.norm.weight": torch.zeros(3)}),
        ("F64", {"model.norm.weight": torch.zeros(64, dtype=torch.float64)}),
        ("I64; supported", {"model.norm.weight": torch.zeros(64, dtype=torch.int64)}),
    ):
        new = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        save_file(new, file)
        with pytest.raises((ModelFileError, UnsupportedModel), match=says):
            list(load_weights(open_model(str(tmp_path))))
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, file)
    assert len(list(load_weights(open_model(str(tmp_path))))) == len(tensors)


def header(entries: dict[str, Any], data: int = 64, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data


def plain(text: bytes) -> bytes:
    """A file whose header is this, whatever it says."""
    return struct.pack("<Q", len(text.rstrip(b"\0"))) + text


F32 = {"dtype": "F32", "shape": [4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        header({}, length=2**62),
        header({}, length=10**6),
        struct.pack("<Q", 4) + b"oops",
        header({"a": {**F32, "data_offsets": [0, 1 << 40]}}),
        header({"a": {**F32, "data_offsets": [-16, 0]}}),
        header({"a": {**F32, "data_offsets": [0, 12]}}),
        header({"a": {**F32, "data_offsets": [0, 16]}, "b": {**F32, "data_offsets": [8, 24]}}),
        header({"a": {**F32, "data_offsets": [0, 16]}}, data=8),
        header({"a": {**F32, "data_offsets": [0, 16]}}, data=1000),
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}}),
        header({"a": {**F32, "data_offsets": [16, 32]}}, data=32),
        header({"a": {**F32, "data_offsets": [0, 16.0]}}, data=16),
        header({"a": {**F32, "data_offsets": [0]}}, data=16),
        header({"a": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}, data=16),
        header({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, data=16),
        header({"a": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, data=4),
        header({"a": [1]}, data=0),
        plain(b"[]"),
        plain(b"[" * 100_000),
        plain(b'{"a": 1' + b"0" * 5_000 + b"}"),
        plain(b'{"a": "\xff"}'),
        plain(
            b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
            b' "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}' + b"\0" * 16
        ),
    ],
)
def test_a_lying_safetensors_header(tmp_path: Path, content: bytes) -> None:
    save_folder(hf_model("Qwen2"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: not a sound safetensors file"):
        list(load_weights(open_model(str(tmp_path))))


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    save_folder(hf_model("Qwen2"), tmp_path)
    said = {"a": {"dtype": "F64", "shape": [4], "data_offsets": [0, 32]}}
    (tmp_path / "model.safetensors").write_bytes(header(said, data=32))
    with pytest.raises(ModelFileError, match=r"tensor 'a' is 'F64'; read are F32, F16, BF16"):
        list(load_weights(open_model(str(tmp_path))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_those_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = {
        "a": torch.randn(5, 7).to(dtype),
        "b": torch.randn(3).to(dtype),
        "c": torch.zeros(0, 4).to(dtype),
    }
    save_file(wanted, tmp_path / "x.safetensors", metadata={"format": "pt"})
    for name, stored in read_header(tmp_path / "x.safetensors").items():
        assert stored.shape == tuple(wanted[name].shape)
        assert torch.equal(arrays.tensor(stored.read()), wanted[name])


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100_000)}, file)
    stored = read_header(file)["a"]
    with file.open("r+b") as opened:
        opened.truncate(50_000)
    with pytest.raises(ModelFileError, match=r"x\.safetensors: ends \d+ bytes before .* truncated"):
        stored.read()


def test_dense_matrices_are_views_of_their_file(tmp_path: Path) -> None:
    """A tensor that begins between two numbers is read, and so is one that is not there any more,
    which is an error."""
    file = tmp_path / "x.safetensors"
    wanted = {"b": torch.randn(3, 4), "a": torch.randn(4).half(), "c": torch.randn(5, 2).bfloat16()}
    save_file(wanted, file)
    header = read_header(file)
    for name, stored in header.items():
        view = stored.mapped()
        assert torch.equal(arrays.tensor(view), wanted[name])
        assert arrays.mapped(view)
    odd = replace(header["c"], begin=header["c"].begin + 1, shape=(4, 2))
    assert np.array_equal(odd.mapped(), odd.read())
    assert not arrays.mapped(odd.mapped())
    shrunk = read_header(file)["b"]
    with file.open("r+b") as opened:
        opened.truncate(shrunk.begin + 4)
    with pytest.raises(ModelFileError, match="truncated"):
        shrunk.mapped()


def test_a_truncated_shard(tmp_path: Path) -> None:
    save_folder(hf_model("Qwen2"), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="not a sound"):
        list(load_weights(open_model(str(tmp_path))))


def test_two_shards_with_one_name(tmp_path: Path) -> None:
    save_folder(hf_model("Qwen2"), tmp_path)
    split(tmp_path)
    extra = {**load_file(tmp_path / "b.safetensors"), **load_file(tmp_path / "a.safetensors")}
    save_file(extra, tmp_path / "b.safetensors")
    with pytest.raises(ModelFileError, match=r"in a\.safetensors and in b\.safetensors"):
        list(load_weights(open_model(str(tmp_path))))
