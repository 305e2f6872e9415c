"""gpt-oss (OpenAI 2025): sinks in attention's softmax, windows in every second layer, experts with
biases and a special gate."""

from __future__ import annotations

from .common import LOCAL_APART
from .family import Config, Family, Names
from .llama import llama
from .ropes import rope
from .windows import WINDOW, every


def _truncate(config: Config) -> bool:
    """Read whether the ramp of YaRN has whole bounds. llama.cpp rounds them; the model was trained
    without rounding."""
    return not config.gguf and rope(config).truncate


FAMILIES = (
    Family(
        "gpt_oss", llama, {"gpt_oss": ("GptOssForCausalLM",)}, "gpt-oss",
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        fields={
            **LOCAL_APART, "moe.clamped": True, "sinks": True, "rope.truncate": _truncate,
            "_window": WINDOW, "_slides": every(2),
        },
        allowed={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        gguf_allowed={"expert_gating_func": (0, 3)},  # A softmax over the chosen.
        names=Names(
            {
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks.weight": "self_attn.sinks",
            },
            transposed="interleaved",
        ),
    ),
)  # fmt: skip
