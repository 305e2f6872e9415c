"""Qwen2 and Qwen3 (Qwen team 2024, 2025), dense and as mixtures; Qwen2-Audio's text model."""

from __future__ import annotations

from .common import MIXTURE, UNBIASED
from .family import Config, Family, Names, flag, integer
from .llama import llama, switched_window
from .ropes import rope_by_axes
from .windows import layer_numbers, sliding

_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_FIRST = integer("max_window_layers", "", 0, 2**10, 28)
SPARSE = ("mlp_only_layers", "decoder_sparse_step")
"""Keys that name layers without experts."""
GATED_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def dense_layers(config: Config) -> tuple[int, ...]:
    """Return the layers without experts: those that the config lists, and all except every n-th."""
    fields, key = config.fields, SPARSE[0]
    if config.gguf:
        return ()
    named = layer_numbers(config, key, fields.raw(key) or [])
    step = fields.integer(SPARSE[1], 1, 2**10, 1)
    return tuple(at for at in range(config["layers"]) if at in named or (at + 1) % step)


SHARED_EXPERT = {
    "moe.shared_intermediate": integer(
        "shared_expert_intermediate_size", "expert_shared_feed_forward_length", 1, 2**20
    ),
    "moe.shared_gate": True,
}
"""A shared expert with a gate (Qwen2-MoE)."""
_MIXTURE = {**MIXTURE, "moe.dense_at": dense_layers, "_window": switched_window}
_LATER = {
    "_window": switched_window,
    "_slides": sliding(
        lambda config: [at >= config.read(_FIRST) for at in range(config["layers"])]
    ),
}
_BIASED = flag("attention_bias", "", True, tensors="blk.0.attn_q.bias")
_UNBIASED = flag("", "", False, tensors="blk.0.attn_output.bias")
_UNDER_PICTURES = Names(unread=r"(model\.)?visual\..*")
"""Names of tensors next to an encoder of pictures."""
_BY_AXES = {"rope": rope_by_axes, "_interleaved": False}
_SEEING = {
    "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 32_768, "max_window_layers": 80, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}  # fmt: skip
_QWEN2 = Family(
    "qwen2",
    llama,
    {"qwen2": ("Qwen2ForCausalLM",)},
    "qwen2",
    defaults=_DEFAULTS,
    fields={**_LATER, "qkv_bias": _BIASED, "output_bias": _UNBIASED},
    allowed={"attention_bias": (True,)},
    names=Names(unread=r"(audio_tower|vision_tower|multi_modal_projector)\..*"),
)
FAMILIES = (
    _QWEN2,
    _QWEN2._replace(
        types={
            "qwen2_audio": ("Qwen2AudioForConditionalGeneration",),
            "internvl": ("InternVLForConditionalGeneration",),
        },
        gguf="",
        defaults={
            **_DEFAULTS, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 22_016, "vocab_size": 151_936,
        },
    ),
    _QWEN2._replace(
        name="qwen2_vl",
        types={"qwen2_vl": ("Qwen2VLForConditionalGeneration",), "qwen2_vl_text": ()},
        gguf="qwen2vl",
        defaults=_SEEING,
        fields={**_QWEN2.fields, **_BY_AXES},
        names=_UNDER_PICTURES,
    ),
    _QWEN2._replace(
        name="qwen2_5_vl",
        types={"qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",), "qwen2_5_vl_text": ()},
        gguf="",
        defaults=_SEEING,
        fields={**_QWEN2.fields, **_BY_AXES},
        names=_UNDER_PICTURES,
    ),
    Family(
        "qwen3", llama, {"qwen3": ("Qwen3ForCausalLM",)}, "qwen3",
        defaults={**_DEFAULTS, "head_dim": 128},
        fields={**_LATER, "qk_norm": True},
    ),
    Family(
        "qwen3_vl", llama,
        {"qwen3_vl": ("Qwen3VLForConditionalGeneration",), "qwen3_vl_text": ()}, "qwen3vl",
        defaults={
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 5e5,
        },
        fields={"qk_norm": True, "rope": rope_by_axes, "_interleaved": True},
        allowed=UNBIASED,
        names=_UNDER_PICTURES,
    ),
    Family(
        "qwen3_moe", llama, {"qwen3_moe": ("Qwen3MoeForCausalLM",)}, "qwen3moe",
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        },
        fields={
            **_MIXTURE, "moe.normalise": MIXTURE["moe.normalise"]._replace(default=True),
            "qk_norm": True,
        },
        own=SPARSE,
    ),
    Family(
        "qwen3_vl_moe", llama,
        {"qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",), "qwen3_vl_moe_text": ()},
        "qwen3vlmoe",
        defaults={
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
            "max_position_embeddings": 128_000, "rope_theta": 5e5, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        },
        fields={
            **MIXTURE, "moe.normalise": True, "moe.dense_at": dense_layers, "qk_norm": True,
            "rope": rope_by_axes, "_interleaved": True,
        },
        allowed=UNBIASED,
        own=SPARSE,
        names=_UNDER_PICTURES._replace(transposed="perhaps"),
    ),
    Family(
        "qwen2_moe", llama, {"qwen2_moe": ("Qwen2MoeForCausalLM",)}, "qwen2moe",
        defaults={
            **_DEFAULTS, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
        fields={
            **_MIXTURE, **_LATER, **SHARED_EXPERT,
            "qkv_bias": flag("qkv_bias", "", True, tensors="blk.0.attn_q.bias"),
            "output_bias": _UNBIASED,
        },
        own=SPARSE,
        names=Names(GATED_NAMES),
    ),
)  # fmt: skip
