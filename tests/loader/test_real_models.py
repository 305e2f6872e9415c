"""The catalog's GGUF models: opened, complete, and decoded as the reference package does."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.kernels.weights import BlockWeight
from headrace.loader import open_model
from headrace.loader.gguf import GgufFile
from headrace.loader.weights import load_weights
from headrace.models.registry import describe
from headrace.quant import dequantise, unpack
from headrace.quant.rows import weights_of

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("name", "family", "kinds", "ends"),
    [
        (
            "qwen2.5-coder-0.5b",
            "qwen2",
            {"Q5_0", "Q8_0", "Q6_K", "Q4_K"},
            ("<|im_end|>", "<|endoftext|>"),
        ),
        ("smollm2-135m", "llama", {"Q4_1", "Q8_0"}, ("<|im_end|>", "<|endoftext|>")),
        ("gemma-3-270m", "gemma3", {"Q5_0", "Q8_0", "Q6_K", "Q4_K"}, ("<eos>", "<end_of_turn>")),
    ],
)
def test_a_catalog_model(name: str, family: str, kinds: set[str], ends: tuple[str, ...]) -> None:
    files = open_model(name)
    assert files.arch.family == family
    assert isinstance(files.tokenizer, dict)
    tokens = files.tokenizer["tokenizer.ggml.tokens"]
    assert len(tokens) == files.arch.vocab_size
    assert tuple(tokens[i] for i in files.eos_ids) == ends
    assert (files.chat_template is None) == (family == "gemma3")
    weights = dict(load_weights(files))
    assert set(weights) == set(describe(files.arch).tensors())
    seen: set[str] = set()
    for weight in weights.values():
        if isinstance(weight, BlockWeight) and weight.kind not in seen:
            seen.add(weight.kind)
            rows = min(500, weight.shape[0])
            part = BlockWeight(weight.kind, weight.data[:rows], (rows, weight.shape[1]))
            kind = gguf.GGMLQuantizationType[weight.kind]
            reference = gguf.quants.dequantize(part.data, kind)
            assert np.array_equal(dequantise(part).numpy(), reference)
            assert torch.equal(weights_of(unpack(part)), torch.from_numpy(reference))
    assert seen == kinds


def test_gemma_norms_lose_their_one() -> None:
    files = open_model("gemma-3-270m")
    stored = GgufFile(files.path).view("blk.0.attn_norm.weight")
    found = dict(load_weights(files))["model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(found, stored - np.float32(1))
