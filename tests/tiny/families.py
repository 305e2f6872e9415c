"""Small random models of each family, saved as a hub would hold them, in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 1000
CONTEXT = 4096
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN2 = {**_COMMON, "hidden_size": 192}
"""Qwen2 has no head_dim of its own: 192 / 6."""
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
_SLIDING = {"sliding_window": 48, "num_hidden_layers": 4}
_OLMO3_ROPE = {
    "full_attention": {"rope_theta": 5e5, **_YARN},
    "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
}
_FULL = ["full_attention"] * 3
_MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
_LATENT = {
    **{key: value for key, value in _COMMON.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
}
_SHARED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
}
_HYBRID = {
    **{key: value for key, value in _COMMON.items() if key != "head_dim"},
    **_MULTIPLIERS,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}
_GEMMA = {"sliding_window": 48, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}

_GEMMA4 = {
    **_COMMON,
    "global_head_dim": 64,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 48,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", _QWEN2),
    "qwen2-tied": ("Qwen2", {**_QWEN2, "tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {**_QWEN2, "rope_parameters": {"rope_theta": 1e4, **_YARN}}),
    "qwen3": ("Qwen3", {**_COMMON, "tie_word_embeddings": True}),
    "llama": ("Llama", _COMMON),
    "llama-scaled": ("Llama", {**_COMMON, "rope_parameters": {"rope_theta": 5e5, **_LLAMA3}}),
    "llama-linear": (
        "Llama",
        {**_COMMON, "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
    ),
    "llama-heads": (
        "Llama",
        {**_COMMON, "hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "mistral": ("Mistral", {**_COMMON, "sliding_window": None}),
    "mistral-window": ("Mistral", {**_COMMON, "sliding_window": 80}),
    "ministral3": (
        "Ministral3",
        {
            **_COMMON,
            "rope_parameters": {
                "rope_theta": 1e4,
                **_YARN,
                "factor": 64.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {**_COMMON, **_GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "gemma3-capped": (
        "Gemma3Text",
        {
            **_COMMON,
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 0, 1],
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "attention_chunk_size": 48,
            "floor_scale": 20,
            "attn_scale": 0.5,
        },
    ),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma4-mixture": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 20.0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN2, **_MOE, "shared_expert_intermediate_size": 96}),
    "qwen3_moe": ("Qwen3Moe", {**_COMMON, **_MOE, "norm_topk_prob": True}),
    "qwen3_moe-raw": ("Qwen3Moe", {**_COMMON, **_MOE, "norm_topk_prob": False}),
    "olmoe": ("Olmoe", {**_QWEN2, "num_experts": 8, "num_experts_per_tok": 3}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_COMMON,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "smollm3": ("SmolLM3", {**_QWEN2, "no_rope_layers": [1, 0, 1]}),
    "granite": ("Granite", {**_QWEN2, **_MULTIPLIERS}),
    "mixtral": ("Mixtral", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe-sparse": ("Qwen3Moe", {**_COMMON, **_MOE, "mlp_only_layers": [1]}),
    "phi3": ("Phi3", {**_QWEN2, "sliding_window": 80, "partial_rotary_factor": 0.75}),
    "phi3-long": (
        "Phi3",
        {
            **_QWEN2,
            "max_position_embeddings": 2 * CONTEXT,
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.05 * pair for pair in range(16)],
                "long_factor": [1.0 + 0.9 * pair for pair in range(16)],
            },
        },
    ),
    "glm4": ("Glm4", _COMMON),
    "olmo2": ("Olmo2", _QWEN2),
    "olmo3": ("Olmo3", {**_QWEN2, **_SLIDING, "rope_parameters": _OLMO3_ROPE}),
    "glm": ("Glm", _COMMON),
    "seed_oss": ("SeedOss", {**_COMMON, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5", _COMMON),
    "gemma": ("Gemma", {**_COMMON, "hidden_act": "gelu"}),
    "cohere": ("Cohere", {**_QWEN2, "logit_scale": 0.25}),
    "gemma2": ("Gemma2", {**_COMMON, **_GEMMA}),
    "cohere2": ("Cohere2", {**_QWEN2, **_SLIDING, "logit_scale": 0.25}),
    "exaone4": ("Exaone4", {**_COMMON, **_SLIDING}),
    "exaone4-full": ("Exaone4", {**_COMMON, "sliding_window": None, "layer_types": _FULL}),
    "arcee": ("Arcee", {**_QWEN2, "rope_parameters": {"rope_theta": 1e4, **_YARN}}),
    "starcoder2": ("Starcoder2", {**_QWEN2, "sliding_window": 80}),
    "granitemoe": (
        "GraniteMoe",
        {
            **_QWEN2,
            **_MULTIPLIERS,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_COMMON,
            **_SLIDING,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 15e4, "truncate": False, **_YARN},
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, **_SHARED, "q_lora_rank": None}),
    "deepseek_v2-groups": (
        "DeepseekV2",
        {
            **_LATENT,
            **_SHARED,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": {"rope_theta": 1e4, **_YARN, **_MSCALE},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            **_SHARED,
            "n_group": 4,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_theta": 1e4, **_YARN, **_MSCALE, "mscale": 0.707},
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            **{key: value for key, value in _QWEN2.items() if key != "head_dim"},
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_multiple_of": 32,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_HYBRID,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        {**_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **_COMMON,
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 48,
            "n_groups": 2,
            "ssm_state_size": 32,
            # transformers 5.24 bounds steps from below by this, of prompts alone.
            "time_step_min": 1e-9,
            "time_step_floor": 0.05,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_COMMON, **_DELTA, **_MOE, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_5": ("Qwen3_5Text", {**_COMMON, **_DELTA}),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {**_COMMON, **_DELTA, **_MOE, "shared_expert_intermediate_size": 48},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**_COMMON, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 16},
    ),
}
"""Name → (transformers class stem, config): every family, and every switch that changes sums."""


_VECTORS = ("norm", "bias", "sinks", "router.scale", "per_expert_scale")


def make(folder: Path, name: str, **more: Any) -> Path:
    """Save the model `name` to `folder`, the same weights each time; `more` goes to its config."""
    import transformers

    stem, values = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(**{**values, **more})
    torch.manual_seed(7)
    causal = stem.removesuffix("Text")
    model = getattr(transformers, f"{causal}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        if stem.startswith("Gemma"):
            # Scaled and tied as it is, the embedding would drown the layers: one token for ever.
            model.get_input_embeddings().weight *= 0.15
        for key, parameter in model.named_parameters():
            # Norms and biases start as ones and zeros: a mistake in them would not be seen.
            if parameter.dim() == 1 or key.endswith("_proj_bias"):
                parameter += torch.randn_like(parameter) * 0.2
                assert any(part in key for part in (*_VECTORS, "A_log", ".D"))
            if stem == "GptOss" and key.endswith("gate_up_proj"):
                parameter *= 2  # Or no gate would reach its bound.
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                buffer += torch.randn_like(buffer) * 0.3
            if "layer_scalar" in key:
                buffer += torch.randn_like(buffer) * 0.2
    model.save_pretrained(folder)
    return with_words(folder, VOCAB)


def with_words(folder: Path, vocabulary: int) -> Path:
    """Give it a tokenizer, as opening a folder wants one; these tests speak in token ids."""
    words = {f"t{index}": index for index in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
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
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
