"""Differences between the layers of Gemma 4 and Llama 4, and their ropes: keys of `config.json`."""

from __future__ import annotations

from typing import Any

from .arch import Chunks, Rope, Uneven
from .arch_fields import Fields
from .errors import ModelFileError, UnsupportedModel

_NESTED = "per_layer_config"


def uneven(fields: Fields, windows: tuple[int | None, ...], kv_heads: int) -> Uneven:
    """Read the sizes of layers without a window, and the parts that the last layers lack.
    `kv_heads` are those of the windowed layers."""
    fields.expect("use_bidirectional_attention", "vision")
    fields.expect("attention_bias", False)
    fields.expect("vocab_size_per_layer_input", fields.raw("vocab_size"))
    one = fields.flag("attention_k_eq_v", False)
    given = _of_full_layers(fields, windows)
    if given is None:
        given = {"head_dim": fields.integer("global_head_dim", 2, 2**12)}
        if one and fields.present("num_global_key_value_heads"):
            given["num_key_value_heads"] = fields.raw("num_global_key_value_heads")
    inner = Fields(given, f"{fields.where} {_NESTED}", defaults=fields.values)
    heads = fields.integer("num_attention_heads", 1, 2**12)
    size = inner.integer("head_dim", 2, 2**12)
    own = inner.integer("num_key_value_heads", 1, heads, kv_heads)
    if heads % own or size % 2:
        raise UnsupportedModel(
            f"{fields.where}: layers of full attention have {own} KV heads of {size} numbers; "
            f"num_attention_heads ({heads}) must be a multiple, and the size even",
            param=_NESTED,
        )
    shared = fields.integer("num_kv_shared_layers", 0, len(windows) - 1, 0)
    keeping = len(windows) - shared
    if set(windows[keeping:]) - set(windows[:keeping]):
        raise ModelFileError(
            f"{fields.where}: num_kv_shared_layers is {shared}; the layers before them must be of "
            "every kind that those are",
            param="num_kv_shared_layers",
        )
    return Uneven(
        size,
        own,
        one_product=one,
        shared=shared,
        wide=fields.flag("use_double_wide_mlp", False) and shared > 0,
        embedded=fields.integer("hidden_size_per_layer_input", 0, 2**14),
    )


def _of_full_layers(fields: Fields, windows: tuple[int | None, ...]) -> dict[str, Any] | None:
    """Return transformers 5's entry for layers without a window, the same for all; None without
    one."""
    nested = fields.mapping(_NESTED)
    if nested is None:
        return None
    full = {str(layer) for layer, window in enumerate(windows) if window is None}
    found = [nested.get(layer) for layer in sorted(full)]
    first = found[0] if found and isinstance(found[0], dict) else {"": None}
    alike = all(one == first for one in found)
    if set(nested) != full or not alike or set(first) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(
            f"{fields.where}: {_NESTED} must say head_dim and num_key_value_heads of the layers of "
            "full attention, of all the same",
            param=_NESTED,
        )
    return dict(first)


def chunks(fields: Fields) -> Chunks:
    """Read Llama 4's attention."""
    fields.expect("attention_bias", False)
    tuned = fields.flag("attn_temperature_tuning", True)
    growth = fields.number("attn_scale", 0.0, 1e3, 0.1) if tuned else 0.0
    every = fields.integer("floor_scale", 1, 2**27, 8192)
    return Chunks(fields.flag("use_qk_norm", True), growth, every)


def chunked_layers(
    fields: Fields, layers: int, max_context: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return (chunks, unrotated) of Llama 4, both per layer.

    Its layers with positions attend within chunks. Chunks are () if none matters. An unrotated
    layer has no positions.
    """
    turned = fields.raw("no_rope_layers") or []
    if not turned:
        every = fields.integer("no_rope_layer_interval", 1, 2**10, 4)
        turned = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(turned, list) or len(turned) != layers or set(turned) - {0, 1}:
        raise ModelFileError(
            f"{fields.where}: no_rope_layers must be a list of {layers} zeros and ones",
            param="no_rope_layers",
        )
    size = fields.integer("attention_chunk_size", 1, 2**27)
    kinds = fields.raw("layer_types")
    if kinds is None:
        kinds = ["chunked_attention" if one else "full_attention" for one in turned]
    allowed = ("chunked_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or set(map(str, kinds)) - {*allowed}:
        raise UnsupportedModel(
            f"{fields.where}: layer_types must be {layers} of {', '.join(allowed)}",
            param="layer_types",
        )
    unrotated = tuple(not one for one in turned)
    if size >= max_context:
        return (), unrotated
    return tuple(size if kind == "chunked_attention" else None for kind in kinds), unrotated


def two_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Return (rope of the layers without a window, which rotates a part of each head; rope of the
    windowed layers)."""
    given = Fields(fields.mapping("rope_parameters") or {}, f"{fields.where} rope_parameters")
    full, local = (
        Fields(given.mapping(f"{kind}_attention") or {}, f"{given.where} {kind}_attention")
        for kind in ("full", "sliding")
    )
    local.word("rope_type", ("default",), "default")
    if full.word("rope_type", ("proportional", "default"), "proportional") == "default":
        rope = Rope(full.number("rope_theta", 1.0, 1e12, 1e6))
    else:
        full.expect("factor", 1.0)
        share = full.number("partial_rotary_factor", 0.0, 1.0, 0.25)
        theta = full.number("rope_theta", 1.0, 1e12, 1e6)
        rope = Rope(theta, "proportional", share=share)
    return rope, Rope(local.number("rope_theta", 1.0, 1e12, 1e4))
