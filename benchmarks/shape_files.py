"""Files with the sizes of published models, fewer layers of them, and weights by chance.

A model of 30 billion parameters does not fit on every machine that measures, but a few of its
layers do, and a layer is read as fast as its neighbours. Each shape is a GGUF of one to two
gigabytes whose keys and tensors are those of the published model's; blocks of codes are random,
their scales small. Matrices that the format of a file does not fit (rows that are no multiple of
256) are of the type that llama.cpp's own quantiser falls back to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType
Tensor = tuple[str, tuple[int, ...], Type]
"""Name, shape as numpy says it, type."""
HEADS: dict[Type, np.ndarray] = {
    # What a block begins with: scales of such a size that weights are about a fiftieth.
    Type.Q4_K: np.array([1.4e-4, 1e-3], np.float16).view(np.uint8),
    Type.Q5_0: np.array([2e-3], np.float16).view(np.uint8),
    Type.Q8_0: np.array([2.5e-4], np.float16).view(np.uint8),
    Type.MXFP4: np.array([119], np.uint8),
}
WIDE = 256
"""Inputs of a block of the K types."""


def packed(width: int, kind: Type = Type.Q4_K, narrow: Type = Type.Q5_0) -> Type:
    return narrow if kind is Type.Q4_K and width % WIDE else kind


@dataclass(frozen=True)
class Shape:
    """A published model's sizes with some of its layers."""

    architecture: str
    layers: int
    hidden: int
    keys: dict[str, Any]
    """Metadata below the architecture's name, but layers, width and context."""
    layer: Callable[[Shape, int], Iterator[Tensor]]
    matrices: Type = Type.Q4_K
    """What the table and the head are."""
    tied: bool = False
    vocabulary: int = 32_768
    state_bytes: int = 0
    """What the states of a sequence hold in fp32: a token reads all of it."""
    config: dict[str, Any] = field(default_factory=dict)
    """config.json, where the shape is a folder of safetensors, too."""

    def tensors(self) -> Iterator[Tensor]:
        yield "token_embd.weight", (self.vocabulary, self.hidden), self.matrices
        norm = "token_embd_norm" if self.architecture == "lfm2" else "output_norm"
        yield f"{norm}.weight", (self.hidden,), Type.F32
        if not self.tied:
            yield "output.weight", (self.vocabulary, self.hidden), self.matrices
        for layer in range(self.layers):
            for name, shape, kind in self.layer(self, layer):
                yield f"blk.{layer}.{name}", shape, kind

    def token_bytes(self) -> int:
        """Bytes that one token has to read: of a mixture the experts that it chooses."""
        total = self.state_bytes
        for name, shape, kind in self.tensors():
            size = size_of(shape, kind)
            if name.startswith("token_embd.") and not self.tied:
                size //= self.vocabulary
            if "_exps" in name:
                size = size * self.keys["expert_used_count"] // self.keys["expert_count"]
            total += size
        return total


def size_of(shape: tuple[int, ...], kind: Type) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block * size


def matrix(name: str, outputs: int, inputs: int, kind: Type = Type.Q4_K) -> Tensor:
    return f"{name}.weight", (outputs, inputs), packed(inputs, kind)


def vector(name: str, size: int) -> Tensor:
    return name, (size,), Type.F32


def norms(shape: Shape, *names: str) -> Iterator[Tensor]:
    for name in names:
        yield vector(f"{name}.weight", shape.hidden)


def attention(
    shape: Shape, heads: int, kv_heads: int, head: int, *, kind: Type = Type.Q4_K, wide: int = 1
) -> Iterator[Tensor]:
    """Products of q, k, v and the output; `wide`: 2 where q has a gate beside it."""
    for part, rows in (("q", wide * heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
        yield matrix(f"attn_{part}", rows, shape.hidden, kind)
    yield matrix("attn_output", shape.hidden, heads * head, kind)


def dense(shape: Shape, inner: int, end: str = "", kind: Type = Type.Q4_K) -> Iterator[Tensor]:
    for part in ("gate", "up"):
        yield matrix(f"ffn_{part}{end}", inner, shape.hidden, kind)
    yield matrix(f"ffn_down{end}", shape.hidden, inner, kind)


def experts(shape: Shape, inner: int, kind: Type = Type.Q4_K) -> Iterator[Tensor]:
    count = shape.keys["expert_count"]
    yield "ffn_gate_inp.weight", (count, shape.hidden), Type.F32
    for name, (outputs, inputs), own in dense(shape, inner, "_exps", kind):
        yield name, (count, outputs, inputs), own


def qwen3_moe(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "ffn_norm")
    yield from attention(shape, 32, 4, 128)
    yield from (vector(f"attn_{part}_norm.weight", 128) for part in "qk")
    yield from experts(shape, 768)


def gpt_oss(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "post_attention_norm")
    yield from attention(shape, 64, 8, 64, kind=Type.Q8_0)
    for part, rows in (("q", 4096), ("k", 512), ("v", 512), ("output", shape.hidden)):
        yield vector(f"attn_{part}.bias", rows)
    yield vector("attn_sinks.weight", 64)
    yield from experts(shape, 2880, Type.MXFP4)
    yield vector("ffn_gate_inp.bias", 32)
    for part in ("gate", "up", "down"):
        yield f"ffn_{part}_exps.bias", (32, 2880), Type.F32


def deepseek_lite(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "ffn_norm")
    yield matrix("attn_q", 16 * 192, shape.hidden)
    yield matrix("attn_kv_a_mqa", 512 + 64, shape.hidden)
    yield vector("attn_kv_a_norm.weight", 512)
    # Of one type, which llama.cpp leaves where it is: its AMX buffers take no stacks of matrices.
    yield "attn_k_b.weight", (16, 512, 128), Type.Q5_0
    yield "attn_v_b.weight", (16, 128, 512), Type.Q5_0
    yield matrix("attn_output", shape.hidden, 16 * 128)
    if layer == 0:
        yield from dense(shape, 10_944)
        return
    yield from experts(shape, 1408)
    yield from dense(shape, 2 * 1408, "_shexp")


def qwen35(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "post_attention_norm")
    yield from dense(shape, 9216)
    if layer % 4 == 3:
        yield from attention(shape, 16, 4, 256, wide=2)
        yield from (vector(f"attn_{part}_norm.weight", 256) for part in "qk")
        return
    yield matrix("attn_qkv", 2 * 2048 + 4096, shape.hidden)
    yield matrix("attn_gate", 4096, shape.hidden)
    yield matrix("ssm_alpha", 32, shape.hidden)
    yield matrix("ssm_beta", 32, shape.hidden)
    yield matrix("ssm_out", shape.hidden, 4096)
    yield "ssm_conv1d.weight", (2 * 2048 + 4096, 4), Type.F32
    yield vector("ssm_a", 32)
    yield vector("ssm_dt.bias", 32)
    yield vector("ssm_norm.weight", 128)


def granite4(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "ffn_norm")
    yield from experts(shape, 512)
    yield from dense(shape, 1024, "_shexp")
    if layer == 5:
        yield from attention(shape, 12, 4, 128)
        return
    inner, states = 3072, 128
    yield matrix("ssm_in", 2 * inner + 2 * states + 48, shape.hidden)
    yield matrix("ssm_out", shape.hidden, inner)
    yield "ssm_conv1d.weight", (inner + 2 * states, 4), Type.F32
    yield vector("ssm_conv1d.bias", inner + 2 * states)
    yield "ssm_a", (48, 1), Type.F32
    yield "ssm_d", (48, 1), Type.F32
    yield vector("ssm_dt.bias", 48)
    yield "ssm_norm.weight", (1, inner), Type.F32


CONVOLUTIONS = tuple(layer not in (2, 5, 8, 10, 12, 14) for layer in range(16))
"""LFM2's layers that are short convolutions."""


def lfm2(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "ffn_norm")
    yield from dense(shape, 8192)
    if not CONVOLUTIONS[layer]:
        yield from attention(shape, 32, 8, 64)
        yield from (vector(f"attn_{part}_norm.weight", 64) for part in "qk")
        return
    yield "shortconv.conv.weight", (shape.hidden, 3), Type.F32
    yield matrix("shortconv.in_proj", 3 * shape.hidden, shape.hidden)
    yield matrix("shortconv.out_proj", shape.hidden, shape.hidden)


def qwen2(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from norms(shape, "attn_norm", "ffn_norm")
    yield from attention(shape, 14, 2, 64, kind=Type.BF16)
    yield from (vector(f"attn_{part}.bias", 64 * n) for part, n in (("q", 14), ("k", 2), ("v", 2)))
    yield from dense(shape, 4864, kind=Type.BF16)


def heads(count: int, kv_heads: Any, size: int, rope: float = 1e6) -> dict[str, Any]:
    return {
        "attention.head_count": count,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": rope,
    }


def mixture(count: int, chosen: int, inner: int) -> dict[str, Any]:
    return {
        "expert_count": count,
        "expert_used_count": chosen,
        "expert_feed_forward_length": inner,
        "feed_forward_length": inner,
    }


SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 4, 2048, {**heads(32, 4, 128), **mixture(128, 8, 768)}, qwen3_moe
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        4,
        2880,
        {
            **heads(64, 8, 64, 1.5e5),
            **mixture(32, 4, 2880),
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        gpt_oss,
        matrices=Type.Q8_0,
    ),
    # All of its layers, since llama.cpp knows the small DeepSeek by their number; an eighth of its
    # experts, from which a token takes as many.
    "deepseek-v2-lite": Shape(
        "deepseek2",
        27,
        2048,
        {
            **heads(16, 1, 576, 1e4),
            **mixture(8, 6, 1408),
            "feed_forward_length": 10_944,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "attention.kv_lora_rank": 512,
            "rope.dimension_count": 64,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
            "expert_gating_func": 1,
        },
        deepseek_lite,
    ),
    "qwen3.5-4b": Shape(
        "qwen35",
        12,
        2560,
        {
            **heads(16, 4, 256, 1e7),
            "feed_forward_length": 9216,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
            "attention.recurrent_layers": [layer % 4 != 3 for layer in range(12)],
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
        },
        qwen35,
        tied=True,
        state_bytes=9 * 32 * 128 * 128 * 4,
    ),
    "granite-4-h-tiny": Shape(
        "granitehybrid",
        10,
        1536,
        {
            **heads(12, [4 if layer == 5 else 0 for layer in range(10)], 128, 1e4),
            **mixture(64, 6, 512),
            "expert_shared_feed_forward_length": 1024,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.inner_size": 3072,
            "ssm.time_step_rank": 48,
            "rope.scaling.finetuned": False,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention.scale": 0.0078125,
            "logit_scale": 6.0,
        },
        granite4,
        tied=True,
        state_bytes=9 * 48 * 64 * 128 * 4,
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        16,
        2048,
        {
            **heads(32, [0 if conv else 8 for conv in CONVOLUTIONS], 64),
            "feed_forward_length": 8192,
            "shortconv.l_cache": 3,
        },
        lfm2,
        tied=True,
    ),
    "qwen2.5-0.5b bf16": Shape(
        "qwen2",
        24,
        896,
        {**heads(14, 2, 64), "feed_forward_length": 4864},
        qwen2,
        matrices=Type.BF16,
        tied=True,
        vocabulary=151_936,
        config={
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "torch_dtype": "bfloat16",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151_936,
            "eos_token_id": 151_935,
            "bos_token_id": None,
        },
    ),
}


def numbers(name: str, shape: tuple[int, ...], kind: Type, rng: np.random.Generator) -> np.ndarray:
    """What a tensor holds: norms about one, matrices of about the same size in every format."""
    if kind is Type.F32:
        if name.endswith("ssm_a"):
            return -rng.uniform(0.5, 8.0, shape).astype(np.float32)
        centre = 1.0 if "norm" in name or name.endswith("ssm_d") else 0.0
        return rng.normal(centre, 0.02, shape).astype(np.float32)
    if kind is Type.BF16:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    blocks[..., : len(HEADS[kind])] = HEADS[kind]
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(path: Path, shape: Shape) -> Path:
    writer = gguf.GGUFWriter(path, shape.architecture)
    keys = {
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "vocab_size": shape.vocabulary,
        **shape.keys,
    }
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](f"{shape.architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    words = [f"t{at}" for at in range(shape.vocabulary - 2)]
    writer.add_token_list([*words, "t0t1", "<|endoftext|>"])
    writer.add_token_merges(["t0 t1"])
    writer.add_eos_token_id(shape.vocabulary - 1)
    rng = np.random.default_rng(0)
    for name, size, kind in shape.tensors():
        writer.add_tensor(name, numbers(name, size, kind, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""Names of Qwen2's tensors in GGUF and in a folder."""


def write_folder(folder: Path, shape: Shape) -> Path:
    """The numbers of `write_gguf` as a hub holds them: bf16 in safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    header: dict[str, Any] = {}
    blobs, at = [], 0
    for name, size, kind in shape.tensors():
        values = numbers(name, size, kind, rng)
        if kind is Type.F32:
            values = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        stem, end = name.rsplit(".", 1)
        layer = stem.startswith("blk.") and stem.split(".")[1]
        stem = PARTS[stem.rsplit(".", 1)[-1]]
        full = f"model.layers.{layer}.{stem}.{end}" if layer else f"{stem}.{end}"
        blobs.append(values.tobytes())
        header[full] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for blob in blobs:
            file.write(blob)
    (folder / "config.json").write_text(json.dumps(shape.config))
    words = {f"t{index}": index for index in range(shape.vocabulary)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder
