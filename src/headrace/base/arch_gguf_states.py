"""Layers of a GGUF that keep a state, and their sizes."""

from __future__ import annotations

from collections.abc import Collection

from .arch import Recurrence
from .arch_fields import Fields
from .arch_states import DELTA, RECURRENT
from .errors import ModelFileError, UnsupportedModel

_KV_HEADS = "attention.head_count_kv"


def kv_heads_of(fields: Fields, heads: int) -> int:
    """Read the KV heads of the layers that attend: one number, or one per layer, zero without
    attention."""
    given = fields.raw(_KV_HEADS)
    if not isinstance(given, list):
        return fields.integer(_KV_HEADS, 1, heads, heads)
    found = {one for one in given if one != 0}
    if len(found) != 1 or not all(type(one) is int for one in given):
        raise ModelFileError(
            f"{fields.where}: {fields.prefix}{_KV_HEADS} must be a number, or one number or zero "
            "for each layer",
            param=_KV_HEADS,
        )
    return Fields({_KV_HEADS: found.pop()}, fields.where).integer(_KV_HEADS, 1, heads)


def gguf_recurrence(
    fields: Fields, family: str, layers: int, hidden: int, tensor_names: Collection[str]
) -> Recurrence | None:
    """Read the layers that keep a state; None if the family has none."""
    if family not in RECURRENT:
        return None
    if family in DELTA:
        return _delta(fields, layers, turning=family != "qwen3_next")
    given = fields.raw(_KV_HEADS)
    if not isinstance(given, list) or len(given) != layers:
        raise ModelFileError(
            f"{fields.where}: {fields.prefix}{_KV_HEADS} must be a list of {layers} numbers",
            param=_KV_HEADS,
        )
    own = tuple(layer for layer, heads in enumerate(given) if heads == 0)
    bare: tuple[int, ...] = ()
    if family == "nemotron_h":
        inner = inner_sizes(fields, layers)
        bare = tuple(layer for layer in own if inner[layer])
        own = tuple(layer for layer in own if not inner[layer])
    if family == "lfm2":
        return Recurrence("conv", own, fields.integer("shortconv.l_cache", 2, 16), hidden)
    heads, groups, values, keys = _sizes(fields)
    return Recurrence(
        "ssm",
        own,
        taps=fields.integer("ssm.conv_kernel", 2, 16),
        channels=values + 2 * groups * keys,
        bias=any(name.endswith("ssm_conv1d.bias") for name in tensor_names),
        key_heads=groups,
        value_heads=heads,
        key_size=keys,
        value_size=values // heads,
        bare=bare,
    )


def inner_sizes(fields: Fields, layers: int) -> list[int]:
    """Read the width of each layer's feed-forward; 0 without one."""
    given = fields.raw("feed_forward_length")
    sizes = given if isinstance(given, list) and len(given) == layers else []
    if not any(sizes) or not all(one in (0, max(sizes)) for one in sizes):
        raise ModelFileError(
            f"{fields.where}: {fields.prefix}feed_forward_length must be one number or zero for "
            f"each of {layers} layers",
            param="feed_forward_length",
        )
    return sizes


def _delta(fields: Fields, layers: int, *, turning: bool) -> Recurrence:
    """Read the gated delta rule: in all layers but every n-th, or in those that the file names.
    `turning`: value heads take key heads in turn."""
    every = fields.integer("full_attention_interval", 1, 2**10, 4)
    named = fields.raw("attention.recurrent_layers")
    flags = [bool((layer + 1) % every) for layer in range(layers)]
    if named is not None:
        # Layers that predict a second token come after the last layer, and attend.
        flags = list(named)[:layers] if isinstance(named, list) else []
    if len(flags) != layers or not all(one in (0, 1) for one in flags):
        raise ModelFileError(
            f"{fields.where}: {fields.prefix}attention.recurrent_layers must be a flag for each of "
            f"{layers} layers",
            param="attention.recurrent_layers",
        )
    heads, groups, inner, keys = _sizes(fields)
    return Recurrence(
        "delta",
        tuple(layer for layer, own in enumerate(flags) if own),
        taps=fields.integer("ssm.conv_kernel", 2, 16),
        channels=inner + 2 * groups * keys,
        key_heads=groups,
        value_heads=heads,
        key_size=keys,
        value_size=inner // heads,
        tiled=turning and heads > groups,
    )


def _sizes(fields: Fields) -> tuple[int, int, int, int]:
    """Return (heads, groups of them that share keys, numbers of all heads, numbers of a key)."""
    heads = fields.integer("ssm.time_step_rank", 1, 2**12)
    groups = fields.integer("ssm.group_count", 1, heads)
    inner = fields.integer("ssm.inner_size", 1, 2**20)
    if inner % heads or heads % groups:
        raise UnsupportedModel(
            f"{fields.where}: {fields.prefix}ssm.time_step_rank is {heads}; must divide "
            f"ssm.inner_size ({inner}) and be a multiple of ssm.group_count ({groups})",
            param="ssm.time_step_rank",
        )
    return heads, groups, inner, fields.integer("ssm.state_size", 1, 2**12)
