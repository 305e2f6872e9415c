"""Ministral 3 (Mistral AI 2025), text: Mistral with a stretched rope and queries scaled up with
their position, so that attention stays sharp in long contexts (Nakanishi 2025, arXiv
2501.19399)."""

from __future__ import annotations

from .common import UNBIASED
from .family import Config, Family, Names, integer, number
from .gemma import VISION
from .llama import llama
from .ropes import GROWTH, MAX_CONTEXT, parameters, within
from .windows import WINDOW

_BETA = number(GROWTH, "", 0.0, 1e3, 0.0)
_EVERY = integer("original_max_position_embeddings", "", 1, MAX_CONTEXT)


def _growth(config: Config) -> tuple[float, int] | None:
    inner = within(config, parameters(config))
    beta = inner.read(_BETA)
    return (beta, inner.read(_EVERY)) if beta else None


FAMILIES = (
    Family(
        "ministral3", llama,
        {
            "ministral3": ("Ministral3ForCausalLM",),
            "mistral3": ("Mistral3ForConditionalGeneration",),
        },
        defaults={
            "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16_384, GROWTH: 0.1,
            },
        },
        fields={"_window": WINDOW, "growth": _growth},
        allowed=UNBIASED,
        names=Names(unread=VISION),
        guests=("mistral",),
    ),
)  # fmt: skip
