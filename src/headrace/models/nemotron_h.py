"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624): Mamba 2, attention or a feed-forward, one a layer."""

from __future__ import annotations

from collections.abc import Callable

from ..base.arch import ModelArch
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import ActivationSpec, Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import two_products
from ..layers.states import state_space
from .common import INTERMEDIATE, MAX_LAYERS, NO_WINDOW, UNBIASED, head_dim, layers
from .family import Config, Family, Names, integer, number, word
from .states import (
    LINEAR,
    OLD_KINDS,
    conv_bias,
    kv_heads_by_layer,
    multiple,
    state_fields,
    state_names,
)
from .windows import no_windows


def nemotron_h(arch: ModelArch) -> Graph:
    """Describe x + mixer(norm(x)); attention has no positions, the feed-forward no gate: relu
    squared."""
    assert arch.recurrence is not None, "the architecture says nothing of states"
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}.mixer"
        normed = to.rms_norm(x, f"model.layers.{layer}.norm")
        if layer in arch.recurrence.layers:
            mixed = state_space(to, layer, normed, at)
        elif layer in arch.recurrence.bare:
            products = f"{at}.up_proj", f"{at}.down_proj"
            activation = ActivationSpec(arch.activation)
            mixed = two_products(to, normed, *products, activation, bias=False)
        else:
            mixed = attention(to, layer, normed, at)
        x = to.add(x, mixed)
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


_LETTERS = {"M": LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}
_VALUE_SIZE = integer("mamba_head_dim", "", 1, 2**12)
_GROUPS = ("mamba_n_groups", "n_groups")
_TAPS = ("mamba_d_conv", "conv_kernel")
_CONV_BIAS = ("mamba_conv_bias", "use_conv_bias")
"""Old spellings, which precede the current ones, as in transformers."""


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer: from a pattern of letters, or from names; in GGUF from the
    sizes of each layer."""
    fields, key = config.fields, "hybrid_override_pattern"
    if config.gguf:
        inner = _inner_sizes(config)
        attends = ["full_attention" if heads else "" for heads in kv_heads_by_layer(config)]
        return [
            one or ("mlp" if width else LINEAR) for one, width in zip(attends, inner, strict=True)
        ]
    given = fields.raw(key)
    if given is None:
        key = "layers_block_type"
        given = fields.raw(key)
    if not isinstance(given, str | list) or not given:
        raise ModelFileError(
            f"{fields.where}: {key} must be letters or names, one a layer", param=key
        )
    if len(given) > MAX_LAYERS:
        raise UnsupportedModel(
            f"{fields.where}: {key} has {len(given)} layers; must be at most {MAX_LAYERS}",
            param=key,
        )
    kinds = [_LETTERS.get(one) or OLD_KINDS.get(one, one) for one in map(str, given)]
    for kind in kinds:
        if kind not in ("full_attention", LINEAR, "mlp"):
            raise UnsupportedModel(
                f"{fields.where}: {key} has {kind!r:.60}; supported: full_attention (*), "
                f"{LINEAR} (M), mlp (-)",
                param=key,
            )
    return kinds


def _inner_sizes(config: Config) -> list[int]:
    """Read the width of each layer's feed-forward in a GGUF; 0 without one."""
    key, layers = "feed_forward_length", config["layers"]
    given = config.fields.raw(key)
    sizes = given if isinstance(given, list) and len(given) == layers else []
    if not any(sizes) or not all(one in (0, max(sizes)) for one in sizes):
        raise ModelFileError(
            f"GGUF: {config.fields.prefix}{key} must be one number or zero for each of {layers} "
            "layers",
            param=key,
        )
    return sizes


def _of(kind: str) -> Callable[[Config], tuple[int, ...]]:
    return lambda config: tuple(at for at, one in enumerate(config["_kinds"]) if one == kind)


def _value_size(config: Config) -> int:
    groups = config.key(config.table["recurrence.key_heads"])
    multiple(config, "recurrence.value_heads", "recurrence.key_heads", groups)
    return int(config.read(_VALUE_SIZE))


def _head_dim(config: Config) -> int:
    size = head_dim(config)
    if not config.gguf:
        config.fields.expect("attention_head_dim", size)
    return size


FAMILIES = (
    Family(
        "nemotron_h", nemotron_h, {"nemotron_h": ("NemotronHForCausalLM",)}, "nemotron_h",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128, "mamba_head_dim": 64,
            _GROUPS[0]: 8, "ssm_state_size": 128, _TAPS[0]: 4,
        },
        fields={
            "_kinds": _kinds,
            "layers": lambda config: layers(config) if config.gguf else len(config["_kinds"]),
            "head_dim": _head_dim,
            "intermediate": lambda config: (
                max(_inner_sizes(config)) if config.gguf else config.read(INTERMEDIATE)
            ),
            "norm_eps": number(
                "layer_norm_epsilon", "attention.layer_norm_rms_epsilon", 1e-12, 1e-1,
            ),
            "activation": word("mlp_hidden_act", "", {"relu2": "relu2"}, "relu2"),
            "windows": no_windows, "nope": lambda config: (True,) * config["layers"],
            "recurrence.kind": "ssm", "recurrence.layers": _of(LINEAR),
            "recurrence.bare": _of("mlp"), "recurrence.bias": conv_bias(_CONV_BIAS),
            **state_fields(
                "mamba_num_heads", _GROUPS, "ssm_state_size", _TAPS, _value_size,
            ),
        },
        allowed={
            **UNBIASED, **NO_WINDOW, "mamba_hidden_act": ("silu",), "mamba_proj_bias": (False,),
        },
        # Its configs have keys of experts even without experts.
        own=(
            "n_routed_experts", "n_shared_experts", "num_nextn_predict_layers", "n_group",
            "topk_group", "routed_scaling_factor",
        ),
        names=Names(
            {
                **state_names("mixer"), "attn_norm": "norm", "attn_q": "mixer.q_proj",
                "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj",
                "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
            },
            {
                "backbone.": "model.", "model.embeddings.": "model.embed_tokens.",
                "model.norm_f.": "model.norm.",
            },
        ),
    ),
)  # fmt: skip
