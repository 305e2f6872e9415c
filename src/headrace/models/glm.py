"""GLM-4 and GLM-4.5 (Zhipu AI 2024, 2025): half of each head is rotated, in adjacent pairs."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from .common import SCORED_NAMES, SHARED_NAMES, choice_bias
from .deepseek import GROUPED, GROUPED_KEYS
from .family import Config, Family, Names, flag
from .gemma import both_sides
from .llama import llama
from .ropes import share


def glm4(arch: ModelArch) -> Graph:
    """Describe GLM-4 of 2025: norms on both sides of each block. `post_attention_layernorm` is the
    norm before the feed-forward here."""
    return both_sides(arch, "post_self_attn", "post_attention", "post_mlp")


def _fused(config: Config) -> tuple[str, ...]:
    """Return the products stored as one tensor; in a GGUF of GLM-4 of 2024 also q, k, v."""
    one = config.gguf and "blk.0.attn_qkv.weight" in config.tensors
    return ("qkv", "gate_up") if one else ("gate_up",)


_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_FIELDS = {
    "rope.share": share,
    "output_bias": flag("", "", False, tensors="blk.0.attn_output.bias"),
}
_FUSED = {**_FIELDS, "fused": _fused, "rope.interleaved": True}
_OWN = ("partial_rotary_factor",)
FAMILIES = (
    Family(
        "glm", llama, {"glm": ("GlmForCausalLM",)}, "chatglm",
        defaults=_DEFAULTS,
        fields=_FUSED,
        own=_OWN,
        names=Names({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    ),
    Family(
        "glm4", glm4, {"glm4": ("Glm4ForCausalLM",)}, "glm4",
        defaults=_DEFAULTS,
        fields={**_FUSED, "fused": ("gate_up",)},
        own=_OWN,
        names=Names(
            {
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm", "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            },
        ),
    ),
    Family(
        "glm4_moe", llama, {"glm4_moe": ("Glm4MoeForCausalLM",)}, "glm4moe",
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        fields={
            **_FIELDS, **GROUPED, "moe.groups": GROUPED["moe.groups"]._replace(gguf=""),
            "moe.active_groups": GROUPED["moe.active_groups"]._replace(gguf=""),
            "moe.bias": choice_bias,
            "qk_norm": flag("use_qk_norm", "", False, tensors="blk.0.attn_q_norm.weight"),
        },
        gguf_allowed={"expert_gating_func": (0, 2)},
        own=(*_OWN, *GROUPED_KEYS),
        names=Names(
            {**SCORED_NAMES, **SHARED_NAMES, "post_attention_norm": "post_attention_layernorm"},
            predicts=True,
        ),
    ),
)  # fmt: skip
