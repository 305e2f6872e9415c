"""Rotary frequencies, bit for bit those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.base.arch import Rope
from headrace.layers.rope import inverse_frequencies, rope_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    ("kind", "values", "original"),
    [("linear", {"factor": 8.0}, 8192), ("llama3", LLAMA3, 8192), ("yarn", YARN, 4096)],
)
def test_scaled(kind: str, values: dict, original: int, theta: float, head_dim: int) -> None:
    parameters = {"rope_type": kind, "rope_theta": theta, **values}
    if kind != "linear":
        parameters["original_max_position_embeddings"] = original
    config = LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim,
        max_position_embeddings=32768, rope_parameters=parameters,
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    rope = Rope(theta, kind, original_context=original, **values)
    assert torch.equal(inverse_frequencies(rope, head_dim), expected)
    if kind == "yarn":
        assert factor == pytest.approx(1.1386294, abs=1e-6)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_plain_table(theta: float) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    table = rope_table(Rope(theta), 64, 4096, torch.device("cpu"))
    assert torch.equal(table.cos, cos[0, :, :32])
    assert torch.equal(table.sin, sin[0, :, :32])


def test_attention_factor_scales_both() -> None:
    plain = rope_table(Rope(), 8, 4, torch.device("cpu"))
    scaled = rope_table(Rope(attention_factor=2.0), 8, 4, torch.device("cpu"))
    assert torch.equal(scaled.cos, plain.cos * 2)
    assert torch.equal(scaled.sin, plain.sin * 2)
