"""The families of decoders that a `config.json` may name, and their defaults for absent keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One value of `model_type`: the classes it may name and its defaults for absent keys."""

    family: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    own: tuple[str, ...] = ()
    """Keys that it reads and that other families must not have: see `arch_reader.NEUTRAL`."""


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_SPARSE = ("mlp_only_layers", "decoder_sparse_step")
_MULTIPLIERS = (
    "logits_scaling",
    "residual_multiplier",
    "embedding_multiplier",
    "attention_multiplier",
)
_GROUPED = (
    "n_routed_experts", "n_shared_experts", "num_nextn_predict_layers", "n_group", "topk_group",
    "routed_scaling_factor", "first_k_dense_replace",
)  # fmt: skip
_EXPERTLESS = tuple(key for key in _GROUPED if key != "first_k_dense_replace")
"""Keys of experts in Nemotron-H's configs, even if no layer has experts."""
_LATENT = (
    *_GROUPED, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "scoring_func",
)  # fmt: skip
_DEEPSEEK3 = {
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_DEEPSEEK2 = {
    **_DEEPSEEK3,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1407,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}
_GEMMA2 = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}
_GEMMA4 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
_LLAMA4 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
_LLAMA4_OWN = ("no_rope_layers", "attention_chunk_size", "attn_temperature_tuning", "use_qk_norm")
_GEMMA4_OWN = (
    "num_kv_shared_layers",
    "use_bidirectional_attention",
    "hidden_size_per_layer_input",
    "attention_k_eq_v",
    "enable_moe_block",
    "use_double_wide_mlp",
    "per_layer_config",
    "global_head_dim",
)
_DELTA = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_OWN = ("linear_num_value_heads", "partial_rotary_factor", "attn_output_gate")
_QWEN35 = Family(
    "qwen3_5",
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    {**_DELTA, "num_key_value_heads": 4},
    _DELTA_OWN,
)
_QWEN35_MOE = Family(
    "qwen3_5_moe",
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    {
        **_DELTA,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    (*_DELTA_OWN, "shared_expert_intermediate_size"),
)
FAMILIES: Mapping[str, Family] = {
    "qwen2": Family("qwen2", ("Qwen2ForCausalLM",), _QWEN),
    "qwen2_audio": Family(
        "qwen2",
        ("Qwen2AudioForConditionalGeneration",),
        {
            **_QWEN,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 22_016,
            "vocab_size": 151_936,
        },
    ),
    "qwen3": Family("qwen3", ("Qwen3ForCausalLM",), {**_QWEN, "head_dim": 128}),
    "llama": Family("llama", ("LlamaForCausalLM",), {"max_position_embeddings": 2048}),
    "mistral": Family(
        "mistral",
        ("MistralForCausalLM",),
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
    "gemma3_text": Family("gemma3", ("Gemma3ForCausalLM",), _GEMMA3_TEXT),
    "gemma3": Family("gemma3", ("Gemma3ForConditionalGeneration",), _GEMMA3_TEXT),
    "qwen3_moe": Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        _SPARSE,
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        {
            **_QWEN,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        ("shared_expert_intermediate_size", *_SPARSE),
    ),
    "mixtral": Family(
        "mixtral",
        ("MixtralForCausalLM",),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "olmoe": Family(
        "olmoe",
        ("OlmoeForCausalLM",),
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "glm4_moe": Family(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
        },
        ("partial_rotary_factor", "use_qk_norm", *_GROUPED),
    ),
    "smollm3": Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        ("no_rope_layers",),
    ),
    "granite": Family(
        "granite", ("GraniteForCausalLM",), {"max_position_embeddings": 2048}, _MULTIPLIERS
    ),
    "granitemoe": Family(
        "granitemoe",
        ("GraniteMoeForCausalLM",),
        {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
        _MULTIPLIERS,
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        ("GraniteMoeHybridForCausalLM",),
        {
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (*_MULTIPLIERS, "mamba_d_state"),
    ),
    "phi3": Family(
        "phi3",
        ("Phi3ForCausalLM",),
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ("partial_rotary_factor",),
    ),
    "glm4": Family("glm4", ("Glm4ForCausalLM",), _GLM, ("partial_rotary_factor",)),
    "olmo2": Family(
        "olmo2", ("Olmo2ForCausalLM",), {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    ),
    "olmo3": Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "glm": Family("glm", ("GlmForCausalLM",), _GLM, ("partial_rotary_factor",)),
    "seed_oss": Family(
        "seed_oss",
        ("SeedOssForCausalLM",),
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288},
        ("attention_out_bias",),
    ),
    "ernie4_5": Family(
        "ernie4_5",
        ("Ernie4_5ForCausalLM",),
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": Family(
        "gemma",
        ("GemmaForCausalLM",),
        {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    ),
    "cohere": Family(
        "cohere",
        ("CohereForCausalLM",),
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        ("logit_scale",),
    ),
    "llama4_text": Family("llama4", ("Llama4ForCausalLM",), _LLAMA4, _LLAMA4_OWN),
    "llama4": Family("llama4", ("Llama4ForConditionalGeneration",), _LLAMA4, _LLAMA4_OWN),
    "gemma4_text": Family("gemma4", ("Gemma4ForCausalLM",), _GEMMA4, _GEMMA4_OWN),
    "gemma4": Family("gemma4", ("Gemma4ForConditionalGeneration",), _GEMMA4, _GEMMA4_OWN),
    "gemma2": Family("gemma2", ("Gemma2ForCausalLM",), _GEMMA2),
    "cohere2": Family(
        "cohere2",
        ("Cohere2ForCausalLM",),
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        ("logit_scale", "use_parallel_block"),
    ),
    "exaone4": Family(
        "exaone4",
        ("Exaone4ForCausalLM",),
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window_pattern": 4,
        },
    ),
    "starcoder2": Family(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        {
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        ("use_bias",),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        ("swiglu_limit",),
    ),
    "qwen3_next": Family(
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        {
            **_DELTA,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        (*_DELTA_OWN, "shared_expert_intermediate_size", *_SPARSE),
    ),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "lfm2": Family(
        "lfm2",
        ("Lfm2ForCausalLM",),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
        ("conv_L_cache",),
    ),
    "nemotron_h": Family(
        "nemotron_h",
        ("NemotronHForCausalLM",),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
        ("mamba_num_heads", *_EXPERTLESS),
    ),
    "deepseek_v2": Family("deepseek_v2", ("DeepseekV2ForCausalLM",), _DEEPSEEK2, _LATENT),
    "deepseek_v3": Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _DEEPSEEK3, _LATENT),
    "kimi_k2": Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _DEEPSEEK3, _LATENT),
    "minimax_m2": Family(
        "minimax_m2",
        ("MiniMaxM2ForCausalLM",),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196_608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        (
            "partial_rotary_factor",
            "rotary_dim",
            "use_qk_norm",
            "qk_norm_type",
            "use_routing_bias",
            "scoring_func",
        ),
    ),
}
