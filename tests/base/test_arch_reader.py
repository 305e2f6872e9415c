"""Foreign configs become the right numbers, or a refusal that names the key."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.arch import Caps, ModelArch, Moe, Rope
from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.models.reader import from_gguf, from_hf
from headrace.models.registry import TYPES as FAMILIES
from headrace.models.ropes import llama3_divisor

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"hidden_size": 1152},
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "hidden_act": "silu",
}


def hf(name: str, **values: Any) -> dict[str, Any]:
    """A config as transformers 5 writes it: small, of one of its own classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        small = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
        }
        config: dict[str, Any] = getattr(transformers, name)(**{**small, **values}).to_dict()
        return config


def test_qwen25() -> None:
    arch = from_hf(QWEN25)
    assert arch == ModelArch(
        family="qwen2",
        vocab_size=151936,
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=4864,
        max_context=32768,
        norm_eps=1e-6,
        rope=Rope(theta=1e6),
        qkv_bias=True,
        tied_embedding=True,
    )


def test_llama32_rope_scaling_old_and_new_form() -> None:
    arch = from_hf(LLAMA32)
    assert arch.rope == Rope(
        theta=5e5,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=8192,
    )
    new = {**LLAMA32, "rope_parameters": {**LLAMA32["rope_scaling"], "rope_theta": 5e5}}  # type: ignore[dict-item]
    del new["rope_scaling"], new["rope_theta"]
    assert from_hf(new) == arch


def test_multimodal_gemma3_reads_its_text_model_with_defaults() -> None:
    arch = from_hf(GEMMA3_4B)
    assert (arch.family, arch.heads, arch.kv_heads, arch.head_dim) == ("gemma3", 8, 4, 256)
    assert arch.vocab_size == 262208
    assert arch.tied_embedding
    assert arch.rope == Rope(theta=1e6, kind="linear", factor=8.0)
    assert arch.local_rope == Rope(theta=1e4)
    assert arch.windows[:7] == (1024,) * 5 + (None, 1024)
    assert arch.scale == 256**-0.5
    assert arch.embedding_scale == math.sqrt(2560)
    assert arch.norm_offset == 1.0
    assert arch.qk_norm
    assert arch.activation == "gelu_tanh"


def test_gemma3_text_old_keys() -> None:
    old = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "max_position_embeddings": 32768,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 168,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-6,
    }
    arch = from_hf(old)
    assert arch.windows == (512, 512, None)
    assert arch.local_rope == Rope(theta=2e4)
    assert arch.caps == Caps(scores=50.0, logits=30.0)
    assert arch.scale == 168**-0.5


@pytest.mark.parametrize(
    ("name", "extra", "expected"),
    [
        ("Qwen2Config", {}, {"family": "qwen2", "qkv_bias": True}),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            {"windows": (None, None, 8, 8)},
        ),
        ("Qwen3Config", {"head_dim": 32}, {"family": "qwen3", "qk_norm": True, "head_dim": 32}),
        (
            "LlamaConfig",
            {"attention_bias": True},
            {"family": "llama", "qkv_bias": True, "output_bias": True, "head_dim": 16},
        ),
        ("MistralConfig", {"sliding_window": 32}, {"family": "mistral", "windows": (32,) * 4}),
        ("MistralConfig", {"sliding_window": None}, {"family": "mistral", "windows": ()}),
        (
            "Gemma3TextConfig",
            {"sliding_window": 64, "num_hidden_layers": 7, "head_dim": 16},
            {
                "family": "gemma3",
                "windows": (64,) * 5 + (None, 64),
                "local_rope": Rope(theta=1e4),
                "rope": Rope(theta=1e6),
            },
        ),
        (
            "Qwen3MoeConfig",
            {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "head_dim": 16,
            },
            {"family": "qwen3_moe"},
        ),
        (
            "Qwen3MoeConfig",
            {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "head_dim": 16,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 2,
            },
            {"windows": (8,) * 4},
        ),
        (
            "Qwen2MoeConfig",
            {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 80,
            },
            {
                "family": "qwen2_moe",
                "qkv_bias": True,
                "moe": Moe(6, 2, 48, False, shared_intermediate=80, shared_gate=True),
            },
        ),
        (
            "MixtralConfig",
            {"num_local_experts": 4, "sliding_window": None},
            {"family": "mixtral", "head_dim": 16},
        ),
    ],
)
def test_what_transformers_writes(name: str, extra: dict[str, Any], expected: Any) -> None:
    arch = from_hf(hf(name, **extra))
    assert {key: getattr(arch, key) for key in expected} == expected
    assert (arch.hidden, arch.kv_heads, arch.vocab_size) == (64, 2, 300)


def test_experts() -> None:
    moe = from_hf(
        hf("Qwen3MoeConfig", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
    ).moe
    assert moe is not None
    assert (moe.experts, moe.active, moe.intermediate, moe.normalise) == (6, 2, 48, False)
    moe = from_hf(hf("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)).moe
    assert moe is not None
    assert (moe.experts, moe.active, moe.intermediate, moe.normalise) == (4, 2, 96, True)


def test_yarn_in_both_forms() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = from_hf({**QWEN25, "rope_scaling": scaling}).rope
    assert rope.kind == "yarn"
    assert (rope.factor, rope.original_context) == (4.0, 32768)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model_type", "mamba", "model_type is 'mamba'; supported: arcee, bert, cohere, cohere2"),
        ("architectures", ["Qwen2ForSequenceClassification"], "Qwen2ForCausalLM"),
        ("hidden_act", "relu", "hidden_act is 'relu'; supported: silu"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}, "rope_type is 'longrope'"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "type is 'dynamic'"),
        ("rope_scaling", {"type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ("rope_scaling", {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ("rope_scaling", {"type": "linear", "factor": 0.5}, "factor is 0.5; must be from 1"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5; supported: 1.0"),
        ("num_attention_heads", 15, "multiple of num_key_value_heads"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; must be from 1 to 1024"),
        ("vocab_size", -1, "vocab_size is -1"),
        ("head_dim", 63, "head_dim is 63; must be even"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("kv_lora_rank", 512, "kv_lora_rank is 512"),
        ("num_experts", 8, "num_experts is 8"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("layer_types", ["linear_attention"] * 24, "linear_attention"),
    ],
)
def test_an_unexpected_value_is_named(key: str, value: Any, says: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_hf({**QWEN25, key: value})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "896"),
        ("hidden_size", None),
        ("hidden_size", True),
        ("rope_scaling", [1]),
        ("use_sliding_window", 1),
        ("layer_types", ["full_attention"]),
        ("architectures", "Qwen2"),
    ],
)
def test_a_damaged_key_is_a_damaged_file(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=key):
        from_hf({**QWEN25, key: value})


def test_harmless_keys_are_ignored() -> None:
    assert from_hf({**QWEN25, "unsloth_fixed": True, "attention_dropout": 0.1}) == from_hf(QWEN25)


def test_every_family_lists_its_class() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_hf({})
    for kind in FAMILIES:
        assert kind in str(caught.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([QWEN25, LLAMA32, GEMMA3_4B, MISTRAL]),
    data=st.data(),
)
def test_junk_is_refused_with_a_typed_error(base: dict[str, Any], data: st.DataObject) -> None:
    keys = data.draw(
        st.lists(st.sampled_from([*base, "rope_parameters", "layer_types"]), max_size=3)
    )
    config = {**base, **{key: data.draw(JUNK) for key in keys}}
    try:
        arch = from_hf(config)
    except HeadraceError:
        return
    assert 1 <= arch.layers <= 1024
    assert arch.heads % arch.kv_heads == 0
    assert len(arch.windows) in (0, arch.layers)


QWEN_GGUF: dict[str, Any] = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 24,
    "qwen2.context_length": 32768,
    "qwen2.embedding_length": 896,
    "qwen2.feed_forward_length": 4864,
    "qwen2.attention.head_count": 14,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.rope.freq_base": 1e6,
    "qwen2.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "qwen2.vocab_size": 151936,
}


def test_gguf_equals_the_config_it_came_from() -> None:
    assert from_gguf(QWEN_GGUF, {"blk.0.attn_q.bias"}) == from_hf(QWEN25)
    untied = from_gguf(QWEN_GGUF, {"blk.0.attn_q.bias", "output.weight"})
    assert not untied.tied_embedding


def llama_gguf() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 16,
        "llama.context_length": 131072,
        "llama.embedding_length": 2048,
        "llama.feed_forward_length": 8192,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 128256,
    }


def test_llama3_scaling_is_found_again_from_its_divisors() -> None:
    wanted = from_hf(LLAMA32)
    factors = [llama3_divisor(wanted.rope, i, 64) for i in range(32)]
    assert factors[0] == 1.0
    assert factors[-1] == 32.0
    assert any(1.0 < factor < 32.0 for factor in factors)
    assert from_gguf(llama_gguf(), {"rope_freqs.weight"}, {"rope_freqs.weight": factors}) == wanted


def test_llama3_divisors_are_those_of_transformers() -> None:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = hf("LlamaConfig", **{k: v for k, v in LLAMA32.items() if k != "architectures"})
    from transformers import LlamaConfig

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    plain = 1.0 / (5e5 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    rope = from_hf(LLAMA32).rope
    ours = torch.tensor([llama3_divisor(rope, i, 64) for i in range(32)], dtype=torch.float64)
    assert torch.allclose(plain / ours, scaled.double(), rtol=1e-5)


def test_other_rope_factors_are_refused() -> None:
    factors = [1.0 + i for i in range(32)]
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        from_gguf(llama_gguf(), {"rope_freqs.weight"}, {"rope_freqs.weight": factors})
    for bad in ([1.0] * 31, [0.0] * 32, [float("inf")] * 32):
        with pytest.raises(ModelFileError, match="rope_freqs"):
            from_gguf(llama_gguf(), {"rope_freqs.weight"}, {"rope_freqs.weight": bad})


def test_mixtral_calls_itself_llama() -> None:
    arch = from_gguf({**llama_gguf(), "llama.expert_count": 8, "llama.expert_used_count": 2}, set())
    assert arch.family == "mixtral"
    assert arch.moe is not None
    assert (arch.moe.experts, arch.moe.active, arch.moe.intermediate) == (8, 2, 8192)


def test_gemma3_gguf() -> None:
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 18,
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": 640,
        "gemma3.feed_forward_length": 2048,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.vocab_size": 262144,
    }
    ours = from_gguf(metadata, set())
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "query_pre_attn_scalar": 256,
    }
    assert ours == from_hf(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "mamba"),
        ("qwen2.rope.scaling.type", "longrope"),
        ("qwen2.block_count", 0),
        ("qwen2.expert_count", 4),
        ("qwen2.rope.dimension_count", 32),
        ("qwen2.attention.value_length", 32),
        ("qwen2.attention.causal", False),
        ("qwen2.attention.sliding_window", 100),
        ("qwen2.attention.kv_lora_rank", 512),
    ],
)
def test_gguf_values_that_are_not_run(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key.rpartition(".")[2]):
        from_gguf({**QWEN_GGUF, key: value}, set())


def test_gguf_per_layer_heads_and_missing_keys() -> None:
    with pytest.raises(ModelFileError, match="head_count"):
        from_gguf({**QWEN_GGUF, "qwen2.attention.head_count": [14] * 24}, set())
    with pytest.raises(ModelFileError, match=r"qwen2\.embedding_length"):
        from_gguf({k: v for k, v in QWEN_GGUF.items() if "embedding" not in k}, set())


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [
        ("SmolLM3Config", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3Config", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ("Glm4MoeConfig", {"n_group": 3}, "n_group"),
        ("Glm4MoeConfig", {"n_group": 64, "topk_group": 1}, "num_experts_per_tok"),
        ("Qwen3MoeConfig", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("OlmoeConfig", {"clip_qkv": 8.0}, "clip_qkv"),
        ("GraniteConfig", {"logits_scaling": 0.0}, "logits_scaling"),
    ],
)
def test_what_a_younger_family_has_and_nobody_reads(
    name: str, values: dict[str, Any], key: str
) -> None:
    read = from_hf(hf(name))
    assert read.family in FAMILIES
    with pytest.raises((UnsupportedModel, ModelFileError)) as caught:
        from_hf({**hf(name), **values})
    assert caught.value.param == key


def test_granite_without_multipliers_has_those_of_its_class() -> None:
    """Its attention is scaled by its own number, which is 1 and no root where none is given."""
    arch = from_hf(hf("GraniteConfig"))
    assert (arch.scale, arch.residual_scale, arch.logits_scale) == (1.0, 1.0, 1.0)


def test_every_fourth_layer_of_smollm3_is_not_rotated() -> None:
    assert from_hf(hf("SmolLM3Config")).nope == (False, False, False, True)
