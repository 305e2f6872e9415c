"""Llama (Touvron et al. 2023): the pre-norm decoder that most families share.

They differ by numbers in `ModelArch`: sliding windows (Mistral), a mixture of experts (Mixtral),
layers without positions (SmolLM3).
"""

from __future__ import annotations

from collections.abc import Callable

from ..base.arch import ModelArch
from ..base.graph import Graph, Value
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from .common import LOCAL, UNBIASED
from .family import Config, Family, Names, flag
from .windows import WINDOW, no_window, sliding, stated_window, unrotated

Mixing = Callable[[Description, int, Value, str], Value]
"""Description of a layer's mixing of a sequence's rows: (to, layer, x, names of the layer)."""


def _attention(to: Description, layer: int, x: Value, at: str) -> Value:
    return attention(to, layer, x, f"{at}.self_attn")


def llama(arch: ModelArch, mixing: Mixing = _attention) -> Graph:
    """Describe x + mixing(norm(x)), then x + feed_forward(norm(x))."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        x = to.add(x, mixing(to, layer, normed, at))
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


def hybrid(arch: ModelArch, state: Mixing, name: str, attend: Mixing = attention) -> Graph:
    """Describe Llama with `state`, whose tensors lie below `name`, in place of attention in the
    layers that keep a state."""
    assert arch.recurrence is not None, "the architecture says nothing of states"
    own = arch.recurrence.layers

    def mixing(to: Description, layer: int, x: Value, at: str) -> Value:
        if layer in own:
            return state(to, layer, x, f"{at}.{name}")
        return attend(to, layer, x, f"{at}.self_attn")

    return llama(arch, mixing)


PERMUTED = Names(permuted=True)
_UNDER_PICTURES = Names(
    hf={"model.text_model.": "model."},
    unread=r"model\.(vision_model|connector)\..*",
    permuted=True,
)
"""Names of Llama's tensors, also within Idefics3 and SmolVLM, next to the encoder's."""
_DEFAULTS = {"max_position_embeddings": 2048}
USED = flag("use_sliding_window", "", False)


def switched_window(config: Config) -> int | None:
    """Read the window if the config enables windows; GGUF has none."""
    no_window(config)
    found: int | None = config.read(WINDOW) if not config.gguf and config.read(USED) else None
    return found


def _mixtral_window(config: Config) -> None:
    config.fields.expect(config.key(WINDOW), *([0] if config.gguf else []), config["max_context"])


FAMILIES = (
    Family(
        "llama", llama, {"llama": ("LlamaForCausalLM",)}, "llama",
        defaults=_DEFAULTS,
        names=_UNDER_PICTURES,
    ),
    Family(
        "llama", llama,
        {
            "idefics3": ("Idefics3ForConditionalGeneration",),
            "smolvlm": ("SmolVLMForConditionalGeneration",),
        },
        defaults={
            **_DEFAULTS, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 11_008, "vocab_size": 32_000,
        },
    ),
    Family(
        "mistral", llama,
        {"mistral": ("MistralForCausalLM",), "llava": ("LlavaForConditionalGeneration",)},
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
        fields={"_window": stated_window},
        allowed=UNBIASED,
        names=Names(unread=r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    ),
    Family(
        "mixtral", llama, {"mixtral": ("MixtralForCausalLM",)}, "llama",
        lambda fields: bool(fields.raw("expert_count")),
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 1e6,
            "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        fields={**LOCAL, "_window": _mixtral_window},
        allowed=UNBIASED,
        names=PERMUTED,
    ),
    Family(
        "ernie4_5", llama, {"ernie4_5": ("Ernie4_5ForCausalLM",)}, "ernie4_5",
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
        },
        fields={"rope.interleaved": True},
    ),
    Family(
        "seed_oss", llama, {"seed_oss": ("SeedOssForCausalLM",)}, "seed_oss",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288,
            "attention_bias": True,
        },
        fields={
            "output_bias": flag("attention_out_bias", "", False, tensors="blk.0.attn_output.bias"),
        },
        names=Names({"post_attention_norm": "post_attention_layernorm"}),
    ),
    Family(
        "smollm3", llama, {"smollm3": ("SmolLM3ForCausalLM",)}, "smollm3",
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        fields={
            "_window": switched_window, "nope": unrotated,
            "_slides": sliding(lambda config: list(config["nope"])),
        },
        own=("no_rope_layers",),
        names=PERMUTED,
    ),
)  # fmt: skip
