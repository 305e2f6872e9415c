"""Gemma 4 (Gemma team 2026), text: layers with different heads, and per-layer embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..base.arch import ModelArch, Moe, Rope
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import (
    ActivationSpec,
    AddSpec,
    AttentionSpec,
    EmbedSpec,
    Graph,
    NormSpec,
    RouteSpec,
    ScaleSpec,
    Value,
)
from ..layers.description import Description, matrix, vector
from ..layers.embedding import embedding, head
from ..layers.feed_forward import experts, gated_linear
from .common import GELU, INTERMEDIATE, MIXTURE, UNBIASED, embedding_scale
from .family import Config, Family, Field, Names, flag, integer, number
from .gemma import NAMES, VISION, cap
from .ropes import MAX_CONTEXT, ROPE_FACTORS, THETA, parameters, within
from .windows import Windows, every

_HALF = math.sqrt(0.5)
"""Factor by which the sum of two parts of one variance keeps that variance."""


def gemma4(arch: ModelArch) -> Graph:
    """Describe norms on both sides of each block. After them each layer adds a product of its
    embedding of the token, and scales the result by a factor of its own."""
    to, uneven = Description(arch), arch.uneven
    assert uneven is not None
    x = embedding(to)
    own = _own_numbers(to, x, uneven.embedded) if uneven.embedded else []
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        mixed = _attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, to.rms_norm(mixed, f"{at}.post_attention_layernorm"))
        normed = to.rms_norm(x, f"{at}.pre_feedforward_layernorm")
        reads = uneven.wide and arch.kept_by(layer) != layer
        inner = gated_linear(to, normed, f"{at}.mlp", arch.intermediate * (2 if reads else 1))
        if arch.moe is not None:
            inner = to.rms_norm(inner, f"{at}.post_feedforward_layernorm_1")
            inner = to.add(inner, _mixture(to, x, at, arch.moe))
        x = to.add(x, to.rms_norm(inner, f"{at}.post_feedforward_layernorm"))
        if own:
            gate = to.linear(
                x, f"{at}.per_layer_input_gate", outputs=uneven.embedded, purpose="per_layer"
            )
            act = ActivationSpec(arch.activation)
            gated = to.node("multiply", (own[layer], gate), uneven.embedded, spec=act)
            wide = to.linear(
                gated, f"{at}.per_layer_projection", outputs=arch.hidden, purpose="per_layer"
            )
            x = to.add(x, to.rms_norm(wide, f"{at}.post_per_layer_input_norm"))
        x = _scaled(to, x, 1.0, f"{at}.layer_scalar")
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


def _scaled(to: Description, x: Value, factor: float, *names: str) -> Value:
    return to.node("scale", (x,), x.width, [vector([n], [1]) for n in names], ScaleSpec(factor))


def _own_numbers(to: Description, x: Value, size: int) -> list[Value]:
    """Return each layer's embedding [N, size]: a look-up by token, plus the norm of a product of
    the token's main embedding."""
    arch = to.arch
    all_layers = arch.layers * size
    table = matrix(
        ["model.embed_tokens_per_layer"], [arch.vocab_size], all_layers, "embed", purpose="embed"
    )
    spec = EmbedSpec(scale=math.sqrt(size) * _HALF)
    looked_up = to.parts(to.node("embed", (), all_layers, [table], spec), [size] * arch.layers)
    product = to.linear(
        x, "model.per_layer_model_projection", outputs=all_layers, purpose="per_layer"
    )
    # Scaled by hidden ** -0.5 before the norm, which equals a larger epsilon.
    norm = NormSpec("rms", arch.norm_eps * arch.hidden, arch.norm_offset)
    gain = vector(["model.per_layer_projection_norm.weight"], [size])
    found = []
    for each, made in zip(looked_up, to.parts(product, [size] * arch.layers), strict=True):
        normed = to.node("norm", (made,), size, [gain], norm)
        found.append(to.node("add", (each, normed), size, spec=AddSpec(_HALF)))
    return found


def _attention(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe attention: heads of q and k have norms with a gain, those of v without one; scores
    are not scaled."""
    arch, uneven = to.arch, to.arch.uneven
    assert uneven is not None
    window, source = arch.window(layer), arch.kept_by(layer)
    kv_heads, size = arch.kv_shape(layer)
    rope = arch.rope if window is None else arch.local_rope
    one = uneven.one_product and window is None
    spec = AttentionSpec(source, arch.heads, kv_heads, size, arch.scale, rope, window)
    spec = spec._replace(eps=arch.norm_eps, values="keys" if one else "normed")
    if source != layer:
        spec = spec._replace(values="elsewhere")
    names = [f"{at}.{part}_proj" for part in "qkv"[: 1 + spec.kept]]
    outputs = [spec.queries, *[kv_heads * size] * spec.kept]
    qkv = to.linear(x, *names, outputs=outputs, purpose="qkv")
    norms = [vector([f"{at}.{part}_norm.weight"], [size]) for part in "qk"[: 1 + (spec.kept > 0)]]
    q = to.node("write", (qkv,), spec.queries, norms, spec)
    mixed = to.node("attend", (q,), spec.queries, spec=spec)
    return to.linear(mixed, f"{at}.o_proj", outputs=arch.hidden, purpose="output")


def _mixture(to: Description, x: Value, at: str, moe: Moe) -> Value:
    """Describe experts in parallel to the dense feed-forward. Their input and their router have
    separate norms."""
    gain = vector([f"{at}.router.scale"], [x.width])
    norm = NormSpec("rms", to.arch.norm_eps)
    routed = to.node("norm", (x,), x.width, [gain], norm)
    logits = to.linear(routed, f"{at}.router.proj", outputs=moe.experts, purpose="router")
    logits = _scaled(to, logits, to.arch.hidden**-0.5)
    route = RouteSpec(moe.active, gained=True)
    gains = [f"{at}.router.per_expert_scale"]
    normed = to.rms_norm(x, f"{at}.pre_feedforward_layernorm_2")
    mixed = experts(to, normed, logits, f"{at}.experts.*", moe.intermediate, route, gains)
    return to.rms_norm(mixed, f"{at}.post_feedforward_layernorm_2")


_NESTED = "per_layer_config"
_FAR = 1e10
"""Frequency divisors from which on a pair counts as not rotated."""
_KV_HEADS = integer("num_key_value_heads", "attention.head_count_kv", 1, "heads")
_SIZE = integer("head_dim", "attention.key_length_swa", 2, 2**12)
_GLOBAL_SIZE = integer("global_head_dim", "attention.key_length", 2, 2**12)
_SHARED = integer("num_kv_shared_layers", "attention.shared_kv_layers", 0, 2**10, 0)
_ONE_PRODUCT = flag("attention_k_eq_v", "", False)
_DOUBLE = flag("use_double_wide_mlp", "", False)
_MIXES = flag("enable_moe_block", "", False)
_EXPERTS = integer("num_experts", "expert_count", 1, 2**12, zero=True)
_LOCAL_THETA = number("rope_theta", "rope.freq_base_swa", 1.0, 1e12, 1e4)
_GLOBAL_THETA = THETA._replace(default=1e6)
_SHARE = number("partial_rotary_factor", "", 0.0, 1.0, 0.25)


def _slides(config: Config) -> list[bool]:
    slides = every(6)(config)
    return slides if config.gguf else [*slides[:-1], False]


def _windows(config: Config) -> Windows:
    return tuple(config["_window"] if slides else None for slides in config["_slides"])


def _each(config: Config, field: Field) -> list[int]:
    """Read a GGUF's number per layer, or one for all."""
    fields, layers, key = config.fields, config["layers"], config.key(field)
    given = fields.raw(key)
    if not isinstance(given, list):
        return [config.read(field)] * layers
    high: Any = config[field.high] if isinstance(field.high, str) else field.high
    if len(given) != layers or not all(type(one) is int and 1 <= one <= high for one in given):
        raise ModelFileError(
            f"GGUF: {fields.prefix}{key} must be a number or {layers} of them, from 1 to {high}",
            param=key,
        )
    return given


def _kv_heads(config: Config) -> tuple[int, int]:
    """Return the KV heads of (layers with a window, those without)."""
    if config.gguf:
        both = zip(_each(config, _KV_HEADS), config["_slides"], strict=True)
        kinds = tuple(sorted(set(both), key=lambda one: not one[1]))
        if len(kinds) != len({slides for _, slides in kinds}):
            raise UnsupportedModel(
                f"GGUF: {config.fields.prefix}{_KV_HEADS.gguf} must be the same in all layers with "
                "a window, and in all without",
                param=_KV_HEADS.gguf,
            )
        counts = kinds[0][0], kinds[-1][0]
    else:
        own = int(config.read(_KV_HEADS, config["heads"]))
        full = config["_full"].integer("num_key_value_heads", 1, config["heads"], own)
        counts = own, full
    key = config.key(_KV_HEADS)
    places = (key, config["head_dim"]), (key if config.gguf else _NESTED, config["uneven.size"])
    for count, (place, size) in zip(counts, places, strict=True):
        if config["heads"] % count or size % 2:
            raise UnsupportedModel(
                f"{config.fields.where}: {config.fields.prefix}{place} says {count} KV heads of "
                f"{size} numbers; {config.key(config.table['heads'])} ({config['heads']}) must be "
                "a multiple, and the size even",
                param=place,
            )
    return counts


def _sized(field: Field, end: str) -> Callable[[Config], int]:
    """Make a reader of the size of heads; a GGUF's keys of one kind of layers end in `end`."""

    def read(config: Config) -> int:
        if not config.gguf:
            fields: Fields = config.fields if end else config["_full"]
            return fields.integer("head_dim", 2, 2**12)
        size = int(config.read(field))
        for key in ("attention.value_length", "rope.dimension_count"):
            config.fields.expect(f"{key}{end}", size)
        return size

    return read


def _full(config: Config) -> Fields:
    """Return the values of a `config.json` for layers without a window: transformers 5's entry,
    common values, or separate keys."""
    fields = config.fields
    nested = fields.mapping(_NESTED)
    if nested is None:
        first: dict[str, Any] = {"head_dim": config.read(_GLOBAL_SIZE)}
        if config.read(_ONE_PRODUCT) and fields.present("num_global_key_value_heads"):
            first["num_key_value_heads"] = fields.raw("num_global_key_value_heads")
    else:
        full = {str(layer) for layer, slides in enumerate(config["_slides"]) if not slides}
        found = [nested.get(layer) for layer in sorted(full)]
        first = found[0] if found and isinstance(found[0], dict) else {"": None}
        alike = all(one == first for one in found)
        if set(nested) != full or not alike or set(first) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModel(
                f"{fields.where}: {_NESTED} must say head_dim and num_key_value_heads of the "
                "layers of full attention, the same for all of them",
                param=_NESTED,
            )
    return Fields(first, f"{fields.where} {_NESTED}", defaults=fields.values)


def _one_product(config: Config) -> bool:
    """Read whether full layers have no product of V; then a GGUF lacks the tensors."""
    if not config.gguf:
        return bool(config.read(_ONE_PRODUCT))
    keeping = config["windows"][: config["layers"] - config["uneven.shared"]]
    full = [layer for layer, window in enumerate(keeping) if window is None]
    return all(f"blk.{layer}.attn_v.weight" not in config.tensors for layer in full)


def _shared(config: Config) -> int:
    """Read the number of last layers without their own K and V."""
    windows = config["windows"]
    shared = int(config.read(_SHARED._replace(high=len(windows) - 1)))
    keeping = len(windows) - shared
    if set(windows[keeping:]) - set(windows[:keeping]):
        key = config.key(_SHARED)
        raise ModelFileError(
            f"{config.fields.where}: {config.fields.prefix}{key} is {shared}; the layers before "
            "them must be of every kind that those are",
            param=key,
        )
    return shared


def _inner(config: Config) -> tuple[int, bool]:
    """Return (width of the feed-forward, whether layers without their own K and V double it)."""
    shared = config["uneven.shared"]
    if not config.gguf:
        config.fields.expect("vocab_size_per_layer_input", config["vocab_size"])
        return config.read(INTERMEDIATE), config.read(_DOUBLE) and shared > 0
    inner = _each(config, INTERMEDIATE)
    own, last = set(inner[: len(inner) - shared]), set(inner[len(inner) - shared :])
    wide = bool(last) and last == {2 * size for size in own}
    if len(own) != 1 or not (wide or last <= own):
        raise UnsupportedModel(
            f"GGUF: {config.fields.prefix}{INTERMEDIATE.gguf} must be one number, or twice as much "
            "in all layers that keep no K and V",
            param=INTERMEDIATE.gguf,
        )
    return own.pop(), wide


def _experts(config: Config) -> int:
    if config.gguf:
        return int(config.read(_EXPERTS._replace(default=0)))
    return int(config.read(_EXPERTS)) if config.read(_MIXES) else 0


def _parameters(config: Config, kind: str) -> Config:
    """Return a reader of the rope of full or sliding layers."""
    outer = within(config, parameters(config))
    return within(config, outer.fields.mapping(f"{kind}_attention") or {})


def _rope(config: Config) -> Rope:
    """Read the rope of layers without a window: a part of each head is rotated. GGUF has huge
    divisors for the other pairs."""
    full = _parameters(config, "full")
    theta = full.read(_GLOBAL_THETA)
    if not config.gguf:
        kinds = ("proportional", "default")
        if full.fields.word("rope_type", kinds, "proportional") == "default":
            return Rope(theta)
        full.fields.expect("factor", 1.0)
        return Rope(theta, "proportional", share=full.read(_SHARE))
    if ROPE_FACTORS in config.tensors and ROPE_FACTORS not in config.factors:
        raise ModelFileError(f"GGUF: the content of {ROPE_FACTORS} was not read")
    factors, pairs = config.factors.get(ROPE_FACTORS), config["uneven.size"] // 2
    if factors is None:
        return Rope(theta)
    turning = sum(one == 1.0 for one in factors)
    ordered = all(one == 1.0 if pair < turning else one >= _FAR for pair, one in enumerate(factors))
    if len(factors) != pairs or not ordered:
        raise UnsupportedModel(
            f"GGUF: {ROPE_FACTORS} must hold {pairs} numbers, ones and then at least {_FAR:g}",
            param=ROPE_FACTORS,
        )
    return Rope(theta, "proportional", share=turning / pairs)


def _local_rope(config: Config) -> Rope:
    local = _parameters(config, "sliding")
    if not config.gguf:
        local.fields.word("rope_type", ("default",), "default")
    return Rope(local.read(_LOCAL_THETA))


FAMILIES = (
    Family(
        "gemma4", gemma4,
        {"gemma4": ("Gemma4ForConditionalGeneration",), "gemma4_text": ("Gemma4ForCausalLM",)},
        "gemma4",
        defaults={
            "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
            "max_position_embeddings": 131_072, "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "tie_word_embeddings": True,
        },
        fields={
            "activation": GELU, "embedding_scale": embedding_scale,
            "attention_scale": 1.0, "caps.logits": cap("final_logit_softcapping"),
            "_window": integer("sliding_window", "attention.sliding_window", 1, MAX_CONTEXT),
            "_slides": _slides, "windows": _windows, "qk_norm": True,
            "rope": _rope, "local_rope": _local_rope,
            "_full": _full, "_kv": _kv_heads, "_inner": _inner,
            "head_dim": _sized(_SIZE, "_swa"), "uneven.size": _sized(_GLOBAL_SIZE, ""),
            "kv_heads": lambda config: config["_kv"][0],
            "uneven.kv_heads": lambda config: config["_kv"][1],
            "intermediate": lambda config: config["_inner"][0],
            "uneven.wide": lambda config: config["_inner"][1],
            "uneven.one_product": _one_product, "uneven.shared": _shared,
            "uneven.embedded": integer(
                "hidden_size_per_layer_input", "embedding_length_per_layer_input", 0, 2**14, 0,
            ),
            **MIXTURE, "moe.experts": _experts,
            "moe.active": integer("top_k_experts", "expert_used_count", 1, "moe.experts"),
            "moe.normalise": True,
        },
        allowed={**UNBIASED, "use_bidirectional_attention": ("vision",)},
        own=(
            "attention_k_eq_v", "enable_moe_block", "global_head_dim", "num_kv_shared_layers",
            "per_layer_config", "use_double_wide_mlp", "attention.shared_kv_layers",
            "embedding_length_per_layer_input",
        ),
        names=Names(
            {
                **NAMES, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
                "ffn_gate_up_exps": "experts.*.gate_up_proj",
                "ffn_gate_exps": "experts.*.gate_proj", "ffn_up_exps": "experts.*.up_proj",
                "ffn_down_exps": "experts.*.down_proj",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
            },
            {
                ".experts.gate_up_proj": ".experts.*.gate_up_proj.weight",
                ".experts.down_proj": ".experts.*.down_proj.weight",
            },
            VISION,
        ),
    ),
)  # fmt: skip
