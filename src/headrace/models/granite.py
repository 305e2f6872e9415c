"""Granite 3 and 4 (IBM 2024, 2025): four multipliers; Granite 4 has Mamba 2 in most layers."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.errors import UnsupportedModel
from ..base.graph import Graph
from ..layers.states import state_space
from .common import INTERMEDIATE, LOCAL, NO_WINDOW, SHARED_NAMES, UNBIASED
from .family import Config, Family, Names, integer, number
from .llama import PERMUTED, hybrid, llama
from .states import LINEAR, conv_bias, renamed, state_fields, state_names, without_attention
from .windows import layer_kinds, no_windows


def granite_hybrid(arch: ModelArch) -> Graph:
    """Describe the pre-norm decoder with Mamba 2 in place of attention in most layers."""
    return hybrid(arch, state_space, "mamba")


_EXPAND = integer("mamba_expand", "", 1, 64)
_VALUE_SIZE = "mamba_d_head"
_SHARED_KEY = "shared_intermediate_size"
_SHARED = integer(_SHARED_KEY, "expert_shared_feed_forward_length", 0, 2**20)
_MULTIPLIERS = {
    "embedding_scale": number("embedding_multiplier", "embedding_scale", 1e-6, 1e6, 1.0),
    "residual_scale": number("residual_multiplier", "residual_scale", 1e-6, 1e6, 1.0),
    "attention_scale": number(
        "attention_multiplier", "attention.scale", 1e-6, 1e6, None, zero=True
    ),
    "_divisor": number("logits_scaling", "logit_scale", 1e-6, 1e6),
    "logits_scale": lambda config: 1.0 / config["_divisor"],
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


def _kinds(config: Config) -> tuple[int, ...]:
    """Return the layers with a state: all, if a `config.json` does not list them."""
    if config.gguf:
        return without_attention(config)
    named = renamed(config, "layer_types")
    if named is None:
        return tuple(range(config["layers"]))
    kinds = layer_kinds(config, ("full_attention", LINEAR), named)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def _value_size(config: Config) -> int:
    """Read the numbers of a value; "auto" is the width divided by the heads."""
    heads, groups = config["recurrence.value_heads"], config["recurrence.key_heads"]
    inner = config.read(_EXPAND) * config["hidden"]
    size = inner // heads
    if config.fields.raw(_VALUE_SIZE) != "auto":
        size = config.fields.integer(_VALUE_SIZE, 1, 2**12, size)
    if size * heads != inner or heads % groups:
        raise UnsupportedModel(
            f"{config.fields.where}: mamba_n_heads is {heads}; must be a multiple of "
            f"mamba_n_groups ({groups}), and times mamba_d_head ({size}) mamba_expand · "
            f"hidden_size ({inner})",
            param="mamba_n_heads",
        )
    return int(size)


def _inner(config: Config) -> int:
    """Read the width of the dense feed-forward; without experts a `config.json` has it under
    another key."""
    dense = not config.gguf and not config["moe.experts"]
    return config.fields.integer(_SHARED_KEY, 1, 2**20) if dense else int(config.read(INTERMEDIATE))


def _nope(config: Config) -> tuple[bool, ...]:
    """Return whether no layer is rotated. In GGUF the key for a trained rope scaling switches all
    rotation."""
    if config.gguf:
        turned = config.fields.flag("rope.scaling.finetuned", True)
    else:
        kinds = ("rope", "nope")
        turned = config.fields.word("position_embedding_type", kinds, "nope") == "rope"
    return (not turned,) * int(config["layers"])


FAMILIES = (
    Family(
        "granite", llama, {"granite": ("GraniteForCausalLM",)}, "granite",
        defaults=_DEFAULTS,
        fields=_MULTIPLIERS,
        names=PERMUTED,
    ),
    Family(
        "granitemoe", llama, {"granitemoe": ("GraniteMoeForCausalLM",)}, "granitemoe",
        defaults={**_DEFAULTS, **_EXPERTS},
        fields={**_MULTIPLIERS, **LOCAL},
        names=PERMUTED,
    ),
    Family(
        "granitemoehybrid", granite_hybrid, {"granitemoehybrid": ("GraniteMoeHybridForCausalLM",)},
        "granitehybrid",
        defaults={
            **_DEFAULTS, **_EXPERTS, _SHARED_KEY: 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        },
        fields={
            **_MULTIPLIERS, **LOCAL,
            "moe.experts": integer("num_local_experts", "expert_count", 0, 2**12, 0),
            "moe.shared_intermediate": _SHARED, "intermediate": _inner, "windows": no_windows,
            "nope": _nope, "fused": lambda config: () if config.gguf else ("gate_up",),
            "recurrence.kind": "ssm", "recurrence.layers": _kinds,
            "recurrence.bias": conv_bias("mamba_conv_bias"),
            **state_fields(
                "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", _value_size,
            ),
        },
        allowed={**UNBIASED, **NO_WINDOW, "mamba_proj_bias": (False,)},
        names=Names(
            {**SHARED_NAMES, **state_names("mamba")},
            {
                ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
                ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
            },
            permuted=True,
        ),
    ),
)  # fmt: skip
