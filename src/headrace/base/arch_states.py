"""Which layers of a family keep a state, and of which sizes: keys of `config.json`."""

from __future__ import annotations

from .arch import Recurrence
from .arch_fields import Fields
from .errors import ModelFileError, UnsupportedModel

RECURRENT = ("lfm2",)
"""Families with layers that keep a state."""
_KINDS = {"lfm2": "conv"}
"""What such a layer is called in `layer_types`."""


def recurrence(fields: Fields, family: str, layers: int, hidden: int) -> Recurrence | None:
    """The layers that keep a state; None where the family has none."""
    if family not in RECURRENT:
        return None
    own = _layers(fields, family, layers)
    return Recurrence(
        "conv",
        own,
        taps=fields.integer("conv_L_cache", 2, 16),
        channels=hidden,
        bias=fields.flag("conv_bias", False),
    )


def _layers(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """By `layer_types`, or by the family's rule."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return _by_rule(fields, layers)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(
            f"{fields.where}: layer_types must be a list of {layers} names", param="layer_types"
        )
    own = _KINDS[family]
    for kind in kinds:
        if kind not in ("full_attention", own):
            raise UnsupportedModel(
                f"{fields.where}: layer_types has {kind!r:.60}; supported: full_attention, {own}",
                param="layer_types",
            )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == own)


def _by_rule(fields: Fields, layers: int) -> tuple[int, ...]:
    """LFM2 lists the layers that attend."""
    full = fields.raw("full_attn_idxs")
    if full is None:
        return ()
    if not isinstance(full, list) or not all(type(one) is int for one in full):
        raise ModelFileError(
            f"{fields.where}: full_attn_idxs must be a list of numbers", param="full_attn_idxs"
        )
    return tuple(layer for layer in range(layers) if layer not in full)


def inner_size(fields: Fields, family: str) -> int:
    """The width of the feed-forward, as LFM2 says it: two thirds of a number, times a factor,
    rounded up to a multiple."""
    old = "block_ff_dim" if fields.present("block_ff_dim") else "intermediate_size"
    inner = fields.integer(old, 1, 2**20)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(fields.number("block_ffn_dim_multiplier", 0.01, 100.0, 1.0) * int(2 * inner / 3))
    multiple = fields.integer("block_multiple_of", 1, 2**16, 256)
    return -(-inner // multiple) * multiple
