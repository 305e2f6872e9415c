"""Gemma 4 in GGUF: sizes of two kinds of layers, distinguished by a key's ending or by a list."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .arch import Caps, ModelArch, Moe, Rope, Uneven
from .arch_fields import Fields
from .arch_gguf_traits import plain
from .errors import ModelFileError, UnsupportedModel

_FAR = 1e10
"""Frequency divisors from which on a pair counts as not rotated."""


def gemma4(
    fields: Fields,
    vocabulary: int,
    max_context: int,
    tensor_names: Collection[str],
    factors: Sequence[float] | None,
) -> ModelArch:
    """Read the architecture; `factors` are the frequency divisors of layers without a window.
    Raises as `arch_gguf.from_gguf` does."""
    hidden, heads = (
        fields.integer(key, 1, 2**17) for key in ("embedding_length", "attention.head_count")
    )
    layers = fields.integer("block_count", 1, 2**10)
    window = fields.integer("attention.sliding_window", 1, 2**27)
    pattern = _each(fields, "attention.sliding_window_pattern", layers, 0, 1)
    windows = tuple(window if slides else None for slides in pattern)
    shared = fields.integer("attention.shared_kv_layers", 0, layers - 1, 0)
    if set(windows[layers - shared :]) - set(windows[: layers - shared]):
        raise ModelFileError(
            f"GGUF: {fields.prefix}attention.shared_kv_layers is {shared}; the layers before them "
            "must be of every kind that those are",
            param="attention.shared_kv_layers",
        )
    kv_heads = _by_kind(fields, "attention.head_count_kv", windows, heads)
    sizes = [fields.integer(f"attention.key_length{end}", 2, 2**12) for end in ("_swa", "")]
    for end, size, count in zip(("_swa", ""), sizes, kv_heads, strict=True):
        fields.expect(f"attention.value_length{end}", size)
        fields.expect(f"rope.dimension_count{end}", size)
        if heads % count or size % 2:
            raise UnsupportedModel(
                f"GGUF: {fields.prefix}attention.head_count is {heads}; must be a multiple of "
                f"head_count_kv ({count}), and key_length{end} ({size}) even"
            )
    inner = _each(fields, "feed_forward_length", layers, 1, 2**20)
    own, last = set(inner[: layers - shared]), set(inner[layers - shared :])
    wide = bool(last) and last == {2 * size for size in own}
    if len(own) != 1 or not (wide or last <= own):
        raise UnsupportedModel(
            f"GGUF: {fields.prefix}feed_forward_length must be one number, or twice as much in all "
            "layers that keep no K and V",
            param="feed_forward_length",
        )
    full = [layer for layer in range(layers - shared) if windows[layer] is None]
    cap = fields.number("final_logit_softcapping", 0.0, 1e6, 0.0)
    local = plain(fields.number("rope.freq_base_swa", 1.0, 1e12, 1e4))
    return ModelArch(
        family="gemma4",
        vocab_size=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads[0],
        head_dim=sizes[0],
        intermediate=own.pop(),
        max_context=max_context,
        norm_eps=plain(fields.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-1)),
        activation="gelu_tanh",
        rope=_turned(plain(fields.number("rope.freq_base", 1.0, 1e12, 1e6)), factors, sizes[1]),
        local_rope=Rope(local),
        windows=windows,
        qk_norm=True,
        tied_embedding="output.weight" not in tensor_names,
        attention_scale=1.0,
        caps=Caps(logits=cap or None),
        embedding_scale=math.sqrt(hidden),
        moe=_mixture(fields),
        uneven=Uneven(
            sizes[1],
            kv_heads[1],
            one_product=all(f"blk.{layer}.attn_v.weight" not in tensor_names for layer in full),
            shared=shared,
            wide=wide,
            embedded=fields.integer("embedding_length_per_layer_input", 0, 2**14, 0),
        ),
    )


def _mixture(fields: Fields) -> Moe | None:
    experts = fields.integer("expert_count", 0, 2**12, 0)
    if not experts:
        return None
    active = fields.integer("expert_used_count", 1, experts)
    return Moe(experts, active, fields.integer("expert_feed_forward_length", 1, 2**20))


def _each(fields: Fields, key: str, layers: int, low: int, high: int) -> list[int]:
    """Read one number per layer, or one for all."""
    given = fields.raw(key)
    if not isinstance(given, list):
        return [fields.integer(key, low, high)] * layers
    if len(given) != layers or not all(
        isinstance(one, int) and low <= one <= high for one in given
    ):
        raise ModelFileError(
            f"GGUF: {fields.prefix}{key} must be a number or {layers} of them, from {low} to "
            f"{high}",
            param=key,
        )
    return [int(one) for one in given]


def _by_kind(fields: Fields, key: str, windows: Sequence[int | None], high: int) -> tuple[int, int]:
    """Return (number of the layers with a window, number of those without)."""
    each = _each(fields, key, len(windows), 1, high)
    kinds = [
        {one for one, window in zip(each, windows, strict=True) if (window is None) is full}
        for full in (False, True)
    ]
    if any(len(kind) > 1 for kind in kinds):
        raise UnsupportedModel(
            f"GGUF: {fields.prefix}{key} must be the same in all layers with a window, and in all "
            "without",
            param=key,
        )
    some = next(iter(kinds[0] | kinds[1]))
    return next(iter(kinds[0]), some), next(iter(kinds[1]), some)


def _turned(theta: float, factors: Sequence[float] | None, size: int) -> Rope:
    """Return a rope of the whole head, or of its first pairs: the others have huge divisors."""
    if factors is None:
        return Rope(theta)
    turning = sum(one == 1.0 for one in factors)
    if len(factors) != size // 2 or any(
        one != (1.0 if pair < turning else one) or (pair >= turning and one < _FAR)
        for pair, one in enumerate(factors)
    ):
        raise UnsupportedModel(
            f"GGUF: rope_freqs.weight must hold {size // 2} numbers, ones and then at least "
            f"{_FAR:g}",
            param="rope_freqs.weight",
        )
    return Rope(theta, "proportional", share=2 * turning / size)
