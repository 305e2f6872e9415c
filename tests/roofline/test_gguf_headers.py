"""Any GGUF header can be planned with: families that are not served, files cut off and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.cli.roofline import command
from headrace.engine.simulator.described import describe_model
from headrace.quant.ggml_types import BY_NAME
from headrace.roofline.config import read_config
from headrace.roofline.formats import WEIGHT_BITS
from headrace.roofline.gguf import Stored, read_gguf
from headrace.roofline.known import KNOWN
from headrace.roofline.weights import parameters, total_bytes
from loader.fake_sources import FakeHub, serving
from tiny.gguf_files import write_gguf

DEEPSEEK, GLM_AIR, GPT_OSS = (
    KNOWN[name]["config"] for name in ("deepseek-v3", "glm-4.5-air", "gpt-oss-120b")
)

Q4 = 4.5 / 8
TOKENS = {"tokenizer.ggml.tokens": ["a", "b"]}


def stored(name: str, rows: int, columns: int) -> tuple[str, Stored]:
    return name, Stored("Q4_K", rows, int(rows * columns * Q4))


def glm() -> tuple[dict[str, Any], dict[str, Stored]]:
    """GLM 4.5 Air as its converter names it: a dense layer, 45 of 128 experts, one of MTP."""
    own = {
        "embedding_length": 4096,
        "block_count": 47,
        "nextn_predict_layers": 1,
        "attention.head_count": 96,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "feed_forward_length": 10_944,
        "expert_feed_forward_length": 1408,
        "expert_count": 128,
        "expert_used_count": 8,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "context_length": 131_072,
        "vocab_size": 151_552,
    }
    tensors = [stored("token_embd.weight", 151_552, 4096), stored("output.weight", 151_552, 4096)]
    for layer in range(47):
        block = f"blk.{layer}."
        tensors += [
            stored(block + "attn_q.weight", 96 * 128, 4096),
            stored(block + "attn_k.weight", 8 * 128, 4096),
            stored(block + "attn_v.weight", 8 * 128, 4096),
            stored(block + "attn_output.weight", 4096, 96 * 128),
        ]
        if layer == 0:
            tensors += [
                stored(block + f"ffn_{part}.weight", 10_944, 4096) for part in ("gate", "up")
            ]
            tensors.append(stored(block + "ffn_down.weight", 4096, 10_944))
        else:
            tensors.append(stored(block + "ffn_gate_inp.weight", 128, 4096))
            for part in ("gate", "up", "down"):
                tensors += [
                    stored(block + f"ffn_{part}_exps.weight", 128 * 1408, 4096),
                    stored(block + f"ffn_{part}_shexp.weight", 1408, 4096),
                ]
    metadata = {f"glm4moe.{key}": value for key, value in own.items()}
    return {"general.architecture": "glm4moe", **metadata}, dict(tensors)


def test_a_header_is_what_the_config_is() -> None:
    arch, weights = read_gguf(*glm())
    config, _ = read_config(GLM_AIR)
    assert parameters(arch) == parameters(config)
    assert total_bytes(arch, weights) == pytest.approx(sum(parameters(config).values()) * Q4)
    assert weights.format == "Q4_K"


def test_latent_attention_old_and_new() -> None:
    own = {
        "embedding_length": 7168,
        "block_count": 61,
        "attention.head_count": 128,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": 512,
        "attention.q_lora_rank": 1536,
        "rope.dimension_count": 64,
        "feed_forward_length": 18_432,
        "expert_feed_forward_length": 2048,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_shared_count": 1,
        "leading_dense_block_count": 3,
        "context_length": 163_840,
        "vocab_size": 129_280,
    }
    old = {"attention.key_length": 192, "attention.value_length": 128}
    new = {"attention.key_length": 576, "attention.value_length": 512}
    new |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    head = dict([stored("output.weight", 129_280, 7168)])
    expected, _ = read_config(DEEPSEEK)
    for lengths in (old, new):
        metadata = {f"deepseek2.{key}": value for key, value in {**own, **lengths}.items()}
        arch, _ = read_gguf({"general.architecture": "deepseek2", **metadata}, head)
        assert parameters(arch) == parameters(expected)
        assert arch.mla == expected.mla


def test_layers_with_a_window() -> None:
    own = {
        "embedding_length": 2880,
        "block_count": 36,
        "attention.head_count": 64,
        "attention.head_count_kv": [8] * 36,
        "attention.key_length": 64,
        "attention.sliding_window": 128,
        "feed_forward_length": 2880,
        "expert_feed_forward_length": 2880,
        "expert_count": 128,
        "expert_used_count": 4,
        "context_length": 131_072,
        "vocab_size": 201_088,
    }
    metadata = {f"gpt-oss.{key}": value for key, value in own.items()}
    tensors = dict([stored("output.weight", 201_088, 2880)])
    tensors["blk.0.ffn_gate_exps.weight"] = Stored("MXFP4", 1, 10**9)
    arch, weights = read_gguf({"general.architecture": "gpt-oss", **metadata}, tensors)
    expected, _ = read_config(GPT_OSS)
    assert arch.windows == expected.windows
    assert weights.format == "mxfp4"
    metadata["gpt-oss.attention.sliding_window_pattern"] = [True, True, False] * 12
    arch, _ = read_gguf({"general.architecture": "gpt-oss", **metadata}, tensors)
    assert arch.windows == (128, 128, None) * 12


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ssm.state_size", 128),
        ("attention.indexer.top_k", 2048),
        ("wkv.head_size", 64),
        ("full_attention_interval", 4),
        ("shortconv.l_cache", 3),
        ("attention.head_count_kv", [8, 0] * 23 + [8]),
    ],
)
def test_what_is_not_priced_is_named(key: str, value: Any) -> None:
    metadata, tensors = glm()
    with pytest.raises(UnsupportedModel, match=key):
        read_gguf({**metadata, f"glm4moe.{key}": value}, tensors)


def test_a_feed_forward_without_a_gate_is_named() -> None:
    metadata, tensors = glm()
    without = {name: one for name, one in tensors.items() if "ffn_gate.weight" not in name}
    with pytest.raises(UnsupportedModel, match="without a gate"):
        read_gguf(metadata, without)
    # Phi-3 has gate and up in one tensor.
    fused = without | dict([stored("blk.0.ffn_up.weight", 2 * 10_944, 4096)])
    read_gguf(metadata, fused)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "context_length"])
def test_a_damaged_header_is_an_error(key: str) -> None:
    metadata, tensors = glm()
    with pytest.raises(ModelFileError, match=key):
        read_gguf({name: v for name, v in metadata.items() if not name.endswith(key)}, tensors)
    with pytest.raises(HeadraceError):
        read_gguf({**metadata, f"glm4moe.{key}": "many"}, tensors)


def write(path: Path, part: tuple[int, int] | None = None) -> Path:
    """A tiny file of a family that is not served."""
    metadata: dict[str, Any] = {}
    if part is None or part[0] == 1:
        metadata = {
            "stablelm.block_count": 2,
            "stablelm.context_length": 512,
            "stablelm.embedding_length": 32,
            "stablelm.feed_forward_length": 64,
            "stablelm.attention.head_count": 4,
            "stablelm.attention.head_count_kv": 2,
            "stablelm.vocab_size": 40,
        }
    if part is not None:
        metadata["split.count"] = part[1]
    shapes = {"token_embd.weight": (40, 32), "output.weight": (40, 32)}
    for layer in range(2):
        for name, shape in (
            ("attn_q", (32, 32)),
            ("attn_k", (16, 32)),
            ("attn_v", (16, 32)),
            ("attn_output", (32, 32)),
            ("ffn_gate", (64, 32)),
            ("ffn_up", (64, 32)),
            ("ffn_down", (32, 64)),
        ):
            shapes[f"blk.{layer}.{name}.weight"] = shape
    tensors = {
        name: np.zeros(shape, np.float32)
        for number, (name, shape) in enumerate(shapes.items())
        if part is None or number % part[1] == part[0] - 1
    }
    return write_gguf(path, "stablelm", metadata, tensors)


def test_files_whole_cut_off_and_in_parts(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf")
    found = describe_model(str(whole))
    assert found.source == "GGUF header"
    assert total_bytes(found.arch, found.weights) == 4 * (2 * 40 * 32 + 2 * (9 * 32 * 32))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-20_000])
    parts = [write(tmp_path / f"m-{n:05}-of-00003.gguf", (n, 3)) for n in (1, 2, 3)]
    for file in (cut, parts[0]):
        other = describe_model(str(file))
        assert (other.arch, other.weights) == (found.arch, found.weights), file
    with pytest.raises(ModelFileError, match="name the first"):
        describe_model(str(parts[1]))
    parts[2].unlink()
    with pytest.raises(ModelFileError, match="00003-of-00003"):
        describe_model(str(parts[0]))
    done = CliRunner().invoke(
        command,
        [str(whole), "--hardware", "L4", "--context", "64", "--prompt", "64"],
    )
    assert done.exit_code == 0, done.output


def test_of_a_hub_id_the_config_alone_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    files = {
        "config.json": json.dumps(GLM_AIR).encode(),
        "model-00001-of-00002.safetensors": b"not asked for",
        "tokenizer.json": b"not asked for",
    }
    with serving(FakeHub("org/air", files)) as hub:
        monkeypatch.setattr("headrace.loader.hub.constants.ENDPOINT", hub.url)
        for _ in range(2):
            done = CliRunner().invoke(command, ["org/air", "--hardware", "B300", "--json"])
            assert done.exit_code == 0, done.output
        assert [name for name, _ in hub.requests] == ["config.json"]
    assert json.loads(done.output)


def test_sizes_of_blocks_are_those_of_the_reader() -> None:
    for name, bits in WEIGHT_BITS.items():
        if name in BY_NAME:
            assert bits == BY_NAME[name].nbytes * 8 / BY_NAME[name].block, name
