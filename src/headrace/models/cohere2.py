"""Command R, R7B and A (Cohere 2024, 2025): attention and feed-forward in parallel."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from .family import Family, number
from .windows import WINDOW, every, unwindowed


def cohere2(arch: ModelArch) -> Graph:
    """Describe x + attention(norm(x)) + feed_forward(norm(x)). Layer norms have no bias; the full
    layers of R7B and A have no positions."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.layer_norm(x, f"{at}.input_layernorm", bias=False)
        x = to.add(x, attention(to, layer, normed, f"{at}.self_attn"))
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.layer_norm(x, "model.norm", bias=False)
    return to.graph(hidden=hidden, logits=head(to, hidden))


_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_SCALE = number("logit_scale", "logit_scale", 1e-6, 1e6)
_FIELDS = {
    "norm_eps": number("layer_norm_eps", "attention.layer_norm_epsilon", 1e-12, 1e-1),
    "rope.interleaved": True,
    "logits_scale": _SCALE,
}
FAMILIES = (
    Family(
        "cohere", cohere2, {"cohere": ("CohereForCausalLM",)}, "command-r",
        defaults={**_DEFAULTS, "rope_theta": 5e5},
        fields={**_FIELDS, "logits_scale": _SCALE._replace(default=1.0, zero=True)},
        allowed={"use_parallel_block": (True,)},
    ),
    Family(
        "cohere2", cohere2, {"cohere2": ("Cohere2ForCausalLM",)}, "cohere2",
        defaults={**_DEFAULTS, "sliding_window": 4096},
        fields={**_FIELDS, "_window": WINDOW, "_slides": every(4), "nope": unwindowed},
        allowed={"use_parallel_block": (True,)},
    ),
)  # fmt: skip
