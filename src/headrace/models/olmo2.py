"""OLMo 2 and 3 (OLMo team 2024, 2025), EXAONE 4 (LG AI Research 2025): norms after the blocks."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.errors import ModelFileError
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from .common import INTERMEDIATE, MIXTURE, UNBIASED
from .family import Config, Family, Names, number
from .llama import llama
from .ropes import THETA, full_rope, local_rope
from .windows import WINDOW, every, sliding, stated_window, unwindowed


def olmo2(arch: ModelArch) -> Graph:
    """Describe x + norm(attention(x)), then x + norm(feed_forward(x))."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        mixed = attention(to, layer, x, f"{at}.self_attn")
        x = to.add(x, to.rms_norm(mixed, f"{at}.post_attention_layernorm"))
        inner = feed_forward(to, layer, x, f"{at}.mlp")
        x = to.add(x, to.rms_norm(inner, f"{at}.post_feedforward_layernorm"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


def _letters(config: Config) -> list[bool]:
    """Expand EXAONE's repeated pattern of L (windowed) and G (full); its last layer is full."""
    key, fields, layers = "sliding_window_pattern", config.fields, config["layers"]
    key = key if config.gguf or fields.raw(f"_{key}") is None else f"_{key}"
    pattern = fields.raw(key)
    if config.gguf or not isinstance(pattern, str):
        return every(4)(config)
    if not pattern or set(pattern) - set("LG"):
        raise ModelFileError(
            f"{fields.where}: {key} is {pattern!r:.40}; must be a number or letters L and G",
            param=key,
        )
    return [layer + 1 < layers and pattern[layer % len(pattern)] == "L" for layer in range(layers)]


def _nope(config: Config) -> tuple[bool, ...]:
    """Return EXAONE's layers without positions: those without a window, if others have one."""
    return () if config["_window"] is None else unwindowed(config)


_AFTER = Names(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_NORMED = {"qk_norm": True, "whole_qk_norm": True}
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = (
    Family(
        "olmoe", llama, {"olmoe": ("OlmoeForCausalLM",)}, "olmoe",
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        fields={**_NORMED, **MIXTURE, "moe.intermediate": INTERMEDIATE},
    ),
    Family(
        "olmo2", olmo2, {"olmo2": ("Olmo2ForCausalLM",)}, "olmo2",
        defaults=_DEFAULTS,
        fields=_NORMED,
        names=_AFTER,
    ),
    Family(
        "olmo3", olmo2, {"olmo3": ("Olmo3ForCausalLM",)}, "olmo2",
        lambda fields: bool(fields.raw("attention.sliding_window")),
        defaults={**_DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096},
        fields={
            **_NORMED, "_window": WINDOW, "_slides": every(4), "_theta": THETA,
            "_local_theta": number(
                "rope_local_base_freq", "rope.freq_base", 1.0, 1e12, lambda c: c.read(THETA),
            ),
            "rope": full_rope, "local_rope": local_rope,
        },
        names=_AFTER,
    ),
    Family(
        "exaone4", olmo2, {"exaone4": ("Exaone4ForCausalLM",)}, "exaone4",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        fields={
            "qk_norm": True, "_window": stated_window, "_slides": sliding(_letters), "nope": _nope,
        },
        allowed=UNBIASED,
        names=_AFTER,
    ),
)  # fmt: skip
