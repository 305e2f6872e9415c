"""Absent keys, nulls and old spellings mean what they mean to transformers, or are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from headrace.base.arch import ModelArch
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.models.reader import from_gguf, from_hf

BASE = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 256,
}
STRETCH = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
HYBRID = {"mamba_n_heads": 32, "mamba_d_head": 64}
WIDE = {"num_attention_heads": 32}
NEMOTRON = {"hybrid_override_pattern": "M-*-", "mamba_num_heads": 16}


def theirs(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The config as the class in transformers completes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING

        completed: dict[str, Any] = CONFIG_MAPPING[kind](**{**BASE, **values}).to_dict()
    return completed


def slides(config: dict[str, Any]) -> list[bool]:
    return ["sliding" in kind or "chunked" in kind for kind in config["layer_types"]]


def windows(arch: ModelArch) -> list[bool]:
    return [arch.window(layer) is not None for layer in range(arch.layers)]


def yarn(config: dict[str, Any]) -> tuple[Any, ...]:
    rope = config["rope_parameters"]
    return rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]


def stretched(arch: ModelArch) -> tuple[Any, ...]:
    return arch.rope.theta, arch.rope.factor, arch.rope.original_context


def caps(config: dict[str, Any]) -> tuple[Any, ...]:
    return config["attn_logit_softcapping"], config["final_logit_softcapping"]


def kv_heads(config: dict[str, Any]) -> Any:
    return config["num_key_value_heads"]


def states(arch: ModelArch) -> tuple[Any, ...]:
    assert arch.recurrence is not None
    return arch.recurrence.key_heads, arch.recurrence.taps, arch.recurrence.bias


@pytest.mark.parametrize(
    ("kind", "values", "expected", "read"),
    [
        ("ministral3", {"rope_theta": 5e5, "rope_scaling": STRETCH}, yarn, stretched),
        ("ministral3", {}, yarn, stretched),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}, slides, windows),
        (
            "gemma2",
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            caps,
            lambda arch: (arch.caps.scores, arch.caps.logits),
        ),
        ("gemma2", {}, caps, lambda arch: (arch.caps.scores, arch.caps.logits)),
        ("llama4_text", {"attention_chunk_size": None}, slides, windows),
        (
            "cohere2",
            {"sliding_window": None, "layer_types": ["full_attention"] * 8},
            slides,
            windows,
        ),
        (
            "granitemoehybrid",
            HYBRID,
            lambda config: [kind == "linear_attention" for kind in config["layer_types"]],
            lambda arch: [layer in arch.recurrence.layers for layer in range(8)],
        ),
        ("gemma", WIDE, kv_heads, lambda arch: arch.kv_heads),
        ("qwen2_moe", WIDE, kv_heads, lambda arch: arch.kv_heads),
        ("qwen2", {**WIDE, "num_key_value_heads": None}, kv_heads, lambda arch: arch.kv_heads),
        (
            "nemotron_h",
            {**NEMOTRON, "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_conv_bias": False},
            lambda config: (config["n_groups"], config["conv_kernel"], config["use_conv_bias"]),
            states,
        ),
        (
            "lfm2",
            {"tie_embedding": False, "full_attn_idxs": [2]},
            lambda config: config["tie_word_embeddings"],
            lambda arch: arch.tied_embedding,
        ),
    ],
)
def test_a_config_means_what_transformers_makes_of_it(
    kind: str, values: dict[str, Any], expected: Any, read: Any
) -> None:
    arch = from_hf({"model_type": kind, **BASE, **values})
    assert read(arch) == expected(theirs(kind, values))


@pytest.mark.parametrize(
    ("kind", "values", "key"),
    [
        *(
            (kind, {"sliding_window": None}, "sliding_window")  # transformers cannot run it either.
            for kind in ("gemma2", "gemma3_text", "olmo3", "cohere2", "gpt_oss")
        ),
        (
            "llama4_text",
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 8},
            "attention_chunk_size",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "M" * 1025}, "hybrid_override_pattern"),
        ("nemotron_h", {**NEMOTRON, "mamba_dt_limit": [0.0, 1.0]}, "mamba_dt_limit"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("smollm3", {"no_rope_layers": [{}, []] * 4}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 1.0, 2] * 2}, "no_rope_layers"),
        ("qwen3_moe", {"mlp_only_layers": [99, -1]}, "mlp_only_layers"),
        ("llama4_text", {"moe_layers": [99]}, "moe_layers"),
        ("lfm2", {"full_attn_idxs": [99]}, "full_attn_idxs"),
        (
            "gemma3",
            {"text_config": {**BASE, "model_type": "gemma2"}},
            "model_type",
        ),
        (
            "mistral3",
            {"text_config": BASE, "tie_word_embeddings": "false"},
            "tie_word_embeddings",
        ),
    ],
)
def test_a_value_outside_is_refused_by_name(kind: str, values: dict[str, Any], key: str) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError)) as caught:
        from_hf({"model_type": kind, **BASE, **values})
    assert caught.value.param == key


@pytest.mark.parametrize("tied", [False, True])
def test_a_multimodal_config_says_outside_whether_its_head_is_tied(tied: bool) -> None:
    config = {"model_type": "gemma3", "text_config": BASE, "tie_word_embeddings": tied}
    assert from_hf(config).tied_embedding == tied


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 8,
    "llama.context_length": 4096,
    "llama.embedding_length": 1024,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": [2] * 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"rope.scaling.factor": 4.0}, "linear"),
        ({"rope.scaling.factor": 1.0}, "plain"),
        ({"rope.scaling.factor": 0.0}, "plain"),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, "plain"),
        ({"rope.scale_linear": 1.0}, "plain"),
    ],
)
def test_a_factor_without_a_type_is_linear(values: dict[str, Any], kind: str) -> None:
    """`llama_model::load_hparams` of llama.cpp."""
    rope = from_gguf({**GGUF, **{f"llama.{key}": value for key, value in values.items()}}, ()).rope
    assert (rope.kind, rope.factor) == (kind, 4.0 if kind == "linear" else 1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scale_linear", 4.0),
        ("attention.head_count_kv", [2] * 7),
        ("attention.head_count_kv", [2] * 7 + [0]),
        ("attention.head_count_kv", [2] * 7 + [[]]),
        ("attention.head_count_kv", [0] * 8),
    ],
)
def test_a_gguf_value_outside_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError)) as caught:
        from_gguf({**GGUF, f"llama.{key}": value}, ())
    assert caught.value.param == key
