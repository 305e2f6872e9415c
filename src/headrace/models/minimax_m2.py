"""MiniMax-M2 (MiniMax 2025): experts chosen by a sigmoid with a bias, half of each head rotated."""

from __future__ import annotations

from .common import LOCAL_APART, SCORED_NAMES, UNBIASED, choice_bias
from .family import Family, Names
from .llama import llama
from .ropes import share

FAMILIES = (
    Family(
        "minimax_m2", llama, {"minimax_m2": ("MiniMaxM2ForCausalLM",)}, "minimax-m2",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
            "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8,
        },
        fields={
            **LOCAL_APART, "moe.scores": "sigmoid", "moe.bias": choice_bias, "qk_norm": True,
            "whole_qk_norm": True, "rope.share": share,
        },
        allowed={
            **UNBIASED, "qk_norm_type": ("per_layer",), "use_qk_norm": (True,),
            "scoring_func": ("sigmoid",), "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
        },
        gguf_allowed={"expert_gating_func": (2,)},
        own=("partial_rotary_factor", "rotary_dim"),
        names=Names(SCORED_NAMES),
    ),
)  # fmt: skip
