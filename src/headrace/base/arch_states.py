"""Layers of a family that keep a state, and their sizes: keys of `config.json`."""

from __future__ import annotations

import math

from .arch import Recurrence
from .arch_fields import Fields
from .errors import ModelFileError, UnsupportedModel

DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
RECURRENT = ("lfm2", "granitemoehybrid", "nemotron_h", *DELTA)
"""Families with layers that keep a state."""
_LINEAR = "linear_attention"
_KINDS = {"lfm2": "conv", **dict.fromkeys(("granitemoehybrid", *DELTA), _LINEAR)}
"""Name of such a layer in `layer_types`."""
_LETTERS = {"M": _LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD = {"mamba": _LINEAR, "attention": "full_attention"}
"""Names before transformers 5."""
_UNLIMITED = ([0.0, math.inf], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}])
"""Spellings of an unbounded time step."""


def recurrence(fields: Fields, family: str, layers: int, hidden: int) -> Recurrence | None:
    """Read the layers that keep a state; None if the family has none."""
    if family not in RECURRENT:
        return None
    if family == "nemotron_h":
        return _nemotron(fields)
    own = _layers(fields, family, layers)
    if family in DELTA:
        return _delta(fields, own)
    if family == "granitemoehybrid":
        return _mamba(fields, own, hidden)
    return Recurrence(
        "conv",
        own,
        taps=fields.integer("conv_L_cache", 2, 16),
        channels=hidden,
        bias=fields.flag("conv_bias", False),
    )


def _layers(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Return the layers with a state, by `layer_types` or by the family's rule."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return _by_rule(fields, family, layers)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(
            f"{fields.where}: layer_types must be a list of {layers} names", param="layer_types"
        )
    own = _KINDS[family]
    if family == "granitemoehybrid":
        kinds = [_OLD.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in ("full_attention", own):
            raise UnsupportedModel(
                f"{fields.where}: layer_types has {kind!r:.60}; supported: full_attention, {own}",
                param="layer_types",
            )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == own)


def _delta(fields: Fields, layers: tuple[int, ...]) -> Recurrence:
    """Read the sizes of the gated delta rule."""
    keys = fields.integer("linear_num_key_heads", 1, 2**12)
    values = fields.integer("linear_num_value_heads", 1, 2**12)
    if values % keys:
        raise UnsupportedModel(
            f"{fields.where}: linear_num_value_heads is {values}; must be a multiple of "
            f"linear_num_key_heads ({keys})",
            param="linear_num_value_heads",
        )
    size, value_size = (
        fields.integer(f"linear_{part}_head_dim", 2, 2**10) for part in ("key", "value")
    )
    return Recurrence(
        "delta",
        layers,
        taps=fields.integer("linear_conv_kernel_dim", 2, 16),
        channels=2 * keys * size + values * value_size,
        key_heads=keys,
        value_heads=values,
        key_size=size,
        value_size=value_size,
    )


def blocks(fields: Fields) -> list[str]:
    """Return the kind of each layer of Nemotron-H: from its pattern of letters, or from names."""
    key = "hybrid_override_pattern"
    given = fields.raw(key)
    if given is None:
        key = "layers_block_type"
        given = fields.raw(key)
    if not isinstance(given, str | list) or not given:
        raise ModelFileError(
            f"{fields.where}: {key} must be letters or names, one a layer", param=key
        )
    kinds = [_LETTERS.get(one) or _OLD.get(one, one) for one in map(str, given)]
    for kind in kinds:
        if kind not in ("full_attention", _LINEAR, "mlp"):
            raise UnsupportedModel(
                f"{fields.where}: {key} has {kind!r:.60}; supported: full_attention (*), "
                f"{_LINEAR} (M), mlp (-)",
                param=key,
            )
    return kinds


def _nemotron(fields: Fields) -> Recurrence:
    """Read Mamba 2 with the width of its heads, independent of the model's."""
    fields.expect("mamba_hidden_act", "silu")
    _verify_steps(fields)
    heads, size = (fields.integer(f"mamba_{key}", 1, 2**12) for key in ("num_heads", "head_dim"))
    groups = fields.integer("n_groups", 1, heads)
    keys = fields.integer("ssm_state_size", 1, 2**12)
    if heads % groups:
        raise UnsupportedModel(
            f"{fields.where}: n_groups is {groups}; must divide mamba_num_heads ({heads})",
            param="n_groups",
        )
    kinds = blocks(fields)
    own, bare = (
        tuple(layer for layer, kind in enumerate(kinds) if kind == wanted)
        for wanted in (_LINEAR, "mlp")
    )
    return Recurrence(
        "ssm",
        own,
        taps=fields.integer("conv_kernel", 2, 16),
        channels=heads * size + 2 * groups * keys,
        bias=fields.flag("use_conv_bias", True),
        key_heads=groups,
        value_heads=heads,
        key_size=keys,
        value_size=size,
        bare=bare,
    )


def _verify_steps(fields: Fields) -> None:
    fields.expect("mamba_proj_bias", False)
    limit = fields.raw("time_step_limit")
    if limit is not None and limit not in _UNLIMITED:
        fields.expect("time_step_limit", *_UNLIMITED)


def _mamba(fields: Fields, layers: tuple[int, ...], hidden: int) -> Recurrence:
    """Read the sizes of Mamba 2."""
    _verify_steps(fields)
    heads = fields.integer("mamba_n_heads", 1, 2**12)
    groups = fields.integer("mamba_n_groups", 1, heads)
    inner = fields.integer("mamba_expand", 1, 64) * hidden
    if fields.raw("mamba_d_head") == "auto":
        size = inner // heads
    else:
        size = fields.integer("mamba_d_head", 1, 2**12, inner // heads)
    if size * heads != inner or heads % groups:
        raise UnsupportedModel(
            f"{fields.where}: mamba_n_heads is {heads}; must be a multiple of mamba_n_groups "
            f"({groups}), and times mamba_d_head ({size}) mamba_expand · hidden_size ({inner})",
            param="mamba_n_heads",
        )
    keys = fields.integer("mamba_d_state", 1, 2**12)
    return Recurrence(
        "ssm",
        layers,
        taps=fields.integer("mamba_d_conv", 2, 16),
        channels=inner + 2 * groups * keys,
        bias=fields.flag("mamba_conv_bias", True),
        key_heads=groups,
        value_heads=heads,
        key_size=keys,
        value_size=size,
    )


def _by_rule(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Apply the family's rule: Qwen attends in every n-th layer, LFM2 lists the layers that
    attend."""
    if family in DELTA:
        every = fields.integer("full_attention_interval", 1, 2**10, 4)
        return tuple(layer for layer in range(layers) if (layer + 1) % every)
    full = fields.raw("full_attn_idxs")
    if full is None:
        return ()
    if not isinstance(full, list) or not all(type(one) is int for one in full):
        raise ModelFileError(
            f"{fields.where}: full_attn_idxs must be a list of numbers", param="full_attn_idxs"
        )
    return tuple(layer for layer in range(layers) if layer not in full)


def inner_size(fields: Fields, family: str) -> int:
    """Read the width of the dense feed-forward. Granite 4 without experts has it in another key.
    LFM2's is two thirds of a number, times a factor, rounded up to a multiple."""
    if family == "granitemoehybrid" and fields.raw("num_local_experts") == 0:
        return fields.integer("shared_intermediate_size", 1, 2**20)
    if family == "llama4":
        return fields.integer("intermediate_size_mlp", 1, 2**20, 16384)
    if family != "lfm2":
        return fields.integer("intermediate_size", 1, 2**20)
    old = "block_ff_dim" if fields.present("block_ff_dim") else "intermediate_size"
    inner = fields.integer(old, 1, 2**20)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(fields.number("block_ffn_dim_multiplier", 0.01, 100.0, 1.0) * int(2 * inner / 3))
    multiple = fields.integer("block_multiple_of", 1, 2**16, 256)
    return -(-inner // multiple) * multiple
