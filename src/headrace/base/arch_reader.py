"""Reader of a Hugging Face `config.json` into a `ModelArch`, key by key.

Each key is one of three things: used; harmless to inference (training, tooling, generation:
ignored); or a feature that would change the result, which must be absent or neutral (`NEUTRAL` and
the `expect` lines). Unknown keys are ignored too: configs carry the keys of every tool that touched
them. If such a key did change the structure, the loader's check of tensor names and shapes refuses
the model. `from_gguf` lives in `arch_gguf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from .arch import Activation, ModelArch, Rope
from .arch_encoder import ENCODERS, encoder_arch
from .arch_families import FAMILIES, Family
from .arch_fields import Fields
from .arch_gguf import GGUF_ARCHITECTURES, from_gguf
from .arch_states import RECURRENT, blocks, inner_size, recurrence
from .arch_traits import LATENT, NORMED, latent, mixture, traits, yarn_growth
from .arch_uneven import chunked_layers, chunks, two_ropes, uneven
from .errors import ModelFileError, UnsupportedModel

__all__ = ["FAMILIES", "GGUF_ARCHITECTURES", "MAX_CONTEXT", "from_gguf", "from_hf", "rope_of"]

MAX_CONTEXT = 2**27
WINDOW_KEY = "sliding_window"


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "clip_qkv": (),
    "alibi": (False,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "residual_multiplier": (1.0,),
    "embedding_multiplier": (1.0,),
    "attention_multiplier": (),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "attn_output_gate": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "qk_nope_head_dim": (),
    "qk_rope_head_dim": (),
    "v_head_dim": (),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_layers": (),
    "use_parallel_residual": (False,),
    "no_rope_layers": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False, 0),
    "num_kv_shared_layers": (0,),
    "use_bidirectional_attention": (False,),
    "altup_num_inputs": (),
    "hidden_size_per_layer_input": (0,),
    "attention_k_eq_v": (False,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
    "per_layer_config": ({},),
    "global_head_dim": (),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "shared_expert_intermediate_size": (0,),
    "use_bias": (False,),
    "attention_out_bias": (False,),
    "use_parallel_block": (False,),
    "rotary_dim": (),
    "qk_norm_type": (),
    "use_routing_bias": (False,),
    "scoring_func": ("softmax",),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "routed_scaling_factor": (1.0,),
    "first_k_dense_replace": (0,),
    "swiglu_limit": (),
    "index_topk": (),
    "linear_num_value_heads": (),
    "mamba_d_state": (),
    "mamba_num_heads": (),
    "conv_L_cache": (),
}
"""Keys of other architectures that finetunes and forks copy, with allowed values; others are
refused."""

_EPSILONS = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "nemotron_h": "layer_norm_epsilon",
    "lfm2": "norm_eps",
}
_UNWINDOWED = frozenset(
    """
    llama mixtral olmoe olmo2 glm4 glm4_moe granite granitemoe minimax_m2 glm seed_oss ernie4_5
    gemma cohere deepseek_v2 deepseek_v3
    """.split()  # noqa: SIM905
)
_PATTERNED = {"gemma2", "gemma3", "gemma4", "cohere2", "exaone4", "gpt_oss", "olmo3"}
"""Families in which every n-th layer has full attention."""
TWO_ROPES = ("gemma3", "olmo3")
"""Families whose windowed layers have a rope of their own, whatever the window."""
_UNBIASED = ("mistral", "mixtral", "phi3", "exaone4", "minimax_m2")
_MULTIMODAL = ("gemma3", "gemma4", "llama4", "qwen2_audio", "qwen3_5", "qwen3_5_moe")
"""Types whose text model has a nested config."""
_UNCAPPED = {"attn_logit_softcapping": (), "final_logit_softcapping": ()}
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def from_hf(config: Mapping[str, Any]) -> ModelArch:
    """Read the architecture that a `config.json` describes.

    Raises `UnsupportedModel` (unknown architecture or value: names it, lists supported ones) or
    `ModelFileError` (a key is missing or of the wrong type). For a multimodal Gemma 3 the text
    model is read: images are not supported.
    """
    outer = Fields(config, "config.json")
    kind = outer.raw("model_type")
    if isinstance(kind, str) and kind in ENCODERS:
        return encoder_arch(outer)
    family = _family(outer)
    text = outer.mapping("text_config") if outer.raw("model_type") in _MULTIMODAL else None
    fields = Fields(config if text is None else text, "config.json", defaults=family.defaults)
    for key, allowed in NEUTRAL.items():
        if key not in family.own:
            fields.expect(key, *allowed)
    hidden = fields.integer("hidden_size", 1, 2**17)
    heads = fields.integer("num_attention_heads", 1, 2**12)
    if family.family == "nemotron_h":
        layers = len(blocks(fields))
    else:
        layers = fields.integer("num_hidden_layers", 1, 2**10)
    mla = latent(fields) if "kv_lora_rank" in family.own else None
    if mla is None:
        head_dim = fields.integer("head_dim", 2, 2**12, max(hidden // heads, 1))
    else:
        head_dim = mla.nope_dim + mla.rope_dim
    kv_heads = heads if mla else fields.integer("num_key_value_heads", 1, heads, heads)
    max_context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads is {heads}; "
            f"must be a multiple of num_key_value_heads ({kv_heads})"
        )
    if head_dim % 2:
        raise UnsupportedModel(f"config.json: head_dim is {head_dim}; must be even")
    bias = _bias(fields, family.family)
    gemma = family.family in ("gemma2", "gemma3", "gemma4")
    extra = traits(fields, family.family, hidden, layers)
    if not gemma:
        for key, allowed in _UNCAPPED.items():
            fields.expect(key, *allowed)
    rope, local_rope = _ropes(fields, family, head_dim, max_context)
    if family.family == "gemma":
        fields.expect("hidden_act", "gelu", "gelu_pytorch_tanh")  # The former means the latter.
    gemma = gemma or family.family == "gemma"
    act_key = "hidden_activation" if gemma else "hidden_act"
    windows, unrotated = _windows(fields, family.family, layers, max_context)
    known = _ACTIVATIONS
    if family.family == "nemotron_h":
        act_key, known = "mlp_hidden_act", {"relu2": "relu2"}
    activation = known[fields.word(act_key, known, "gelu_pytorch_tanh" if gemma else "silu")]
    # The key of a multimodal config lies outside its text_config.
    tied = outer.raw("tie_word_embeddings")
    if tied is None or fields.raw("tie_word_embeddings") is not None:
        tied = fields.flag("tie_word_embeddings", False)
    return ModelArch(
        family=family.family,
        vocab_size=fields.integer("vocab_size", 1, 2**24),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=inner_size(fields, family.family),
        max_context=max_context,
        norm_eps=fields.number(_EPSILONS.get(family.family, "rms_norm_eps"), 1e-12, 1e-1, 1e-6),
        activation=activation,
        rope=rope,
        local_rope=local_rope,
        windows=windows,
        qkv_bias=bias[0],
        output_bias=bias[1],
        qk_norm=family.family in NORMED
        or (
            "use_qk_norm" in family.own
            and family.family != "llama4"
            and fields.flag("use_qk_norm", False)
        ),
        tied_embedding=bool(tied),
        moe=mixture(fields, family.family, layers),
        mla=mla,
        recurrence=recurrence(fields, family.family, layers, hidden),
        chunks=chunks(fields) if family.family == "llama4" else None,
        uneven=uneven(fields, windows, kv_heads) if family.family == "gemma4" else None,
        **{"nope": unrotated, **extra},
    )


def _family(fields: Fields) -> Family:
    named = fields.raw("architectures") or []
    if not isinstance(named, list):
        raise ModelFileError("config.json: architectures must be a list", param="architectures")
    kind = fields.raw("model_type")
    if kind is None:
        kind = next((k for k, f in FAMILIES.items() if named and named[0] in f.architectures), None)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        what = kind or (named[0] if named else "nothing")
        raise UnsupportedModel(
            f"config.json: model_type is {what!r:.80}; supported: "
            f"{', '.join(sorted([*FAMILIES, *ENCODERS]))}",
            param="model_type",
        )
    if named and named[0] not in family.architectures:
        raise UnsupportedModel(
            f"config.json: architectures is {named!r:.120}; supported for model_type {kind}: "
            f"{', '.join(family.architectures)}",
            param="architectures",
        )
    return family


def _bias(fields: Fields, family: str) -> tuple[bool, bool]:
    """Return (whether q, k and v have a bias, whether the output projection has one)."""
    if family == "qwen2":
        fields.expect("attention_bias", True)
        return True, False
    if family == "qwen2_moe":
        return fields.flag("qkv_bias", True), False
    if family in (*_UNBIASED, *RECURRENT, *LATENT):
        fields.expect("attention_bias", False)
        return False, False
    if family == "starcoder2":
        bias = fields.flag("use_bias", True)
        return bias, bias
    bias = fields.flag("attention_bias", family in ("glm", "glm4", "gpt_oss", "seed_oss"))
    if family == "seed_oss":
        return bias, fields.flag("attention_out_bias", False)
    return bias, bias and family not in ("glm", "glm4", "glm4_moe")


def _windows(
    fields: Fields, family: str, layers: int, max_context: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return (windows, unrotated), both per layer.

    Windows are () if no layer has one that matters. A layer is unrotated if it has no window
    (Command R7B, EXAONE 4).
    """
    if family in RECURRENT:
        fields.expect(WINDOW_KEY)
        return (), ()
    if family == "llama4":
        return chunked_layers(fields, layers, max_context)
    window = fields.raw(WINDOW_KEY)
    if family in ("mistral", "exaone4") and not fields.present(WINDOW_KEY):
        window = 4096  # as in transformers: only an explicit null means none
    if family in _UNWINDOWED or (
        family.startswith(("qwen", "smollm")) and not fields.flag("use_sliding_window", False)
    ):
        if family == "mixtral":
            fields.expect(WINDOW_KEY, max_context)
        window = None
    if window is not None:
        window = Fields({WINDOW_KEY: window}, fields.where).integer(WINDOW_KEY, 1, MAX_CONTEXT)
    slides = _sliding_layers(fields, family, layers)
    if (
        any(slides)
        and window is None
        and fields.raw("layer_types") is not None
        and (family in ("gemma2", "gemma3", "cohere2", "gpt_oss", "olmo3", "mistral"))
    ):
        raise ModelFileError(
            f"{fields.where}: layer_types has sliding_attention but sliding_window is absent",
            param=WINDOW_KEY,
        )
    unrotated: tuple[bool, ...] = ()
    if family == "cohere2" or (family == "exaone4" and window is not None):
        unrotated = tuple(not slide for slide in slides)
    if family == "gemma4":
        slides[-1] = False
    elif window is None or not any(slides) or (window >= max_context and family not in TWO_ROPES):
        return (), unrotated
    return tuple(window if slide else None for slide in slides), unrotated


def _sliding_layers(fields: Fields, family: str, layers: int) -> list[bool]:
    kinds = fields.raw("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ModelFileError(
                f"{fields.where}: layer_types must be a list of {layers} names", param="layer_types"
            )
        allowed = ("full_attention", "sliding_attention")
        for kind in kinds:
            if kind not in allowed:
                raise UnsupportedModel(
                    f"{fields.where}: layer_types has {kind!r:.60}; supported: "
                    f"{', '.join(allowed)}",
                    param="layer_types",
                )
        return [kind == "sliding_attention" for kind in kinds]
    if family in _PATTERNED:
        # Every n-th layer has full attention; transformers 5 writes the key with an underscore.
        key = "_sliding_window_pattern"
        key = key if fields.raw(key) is not None else key[1:]
        if family == "exaone4" and isinstance(fields.raw(key), str):
            return _spelt(fields, key, layers)
        pattern = fields.integer(key, 1, 2**10)
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if family in ("qwen3_moe", "smollm3"):
        return [True] * layers  # transformers ignores max_window_layers for these.
    if family.startswith("qwen"):
        first = fields.integer("max_window_layers", 0, 2**10, 28)
        return [layer >= first for layer in range(layers)]
    return [True] * layers


def _spelt(fields: Fields, key: str, layers: int) -> list[bool]:
    """Expand EXAONE's repeated pattern of L (windowed) and G (full); its last layer is full."""
    pattern = str(fields.raw(key))
    if not pattern or set(pattern) - set("LG"):
        raise ModelFileError(
            f"{fields.where}: {key} is {pattern!r:.40}; must be a number or letters L and G",
            param=key,
        )
    return [layer + 1 < layers and pattern[layer % len(pattern)] == "L" for layer in range(layers)]


def _ropes(
    fields: Fields, family: Family, head_dim: int, max_context: int
) -> tuple[Rope, Rope | None]:
    """Return (rope of the full layers, rope of the windowed ones if it differs)."""
    theta = fields.number("rope_theta", 1.0, 1e12, 1e4)
    if family.family == "gemma4":
        return two_ropes(fields)
    new = fields.mapping("rope_parameters")
    old = fields.mapping("rope_scaling")
    if family.family not in TWO_ROPES:
        given = dict(new or old or {})
        if family.family.startswith("qwen3_5"):
            # Positions of a text are the same along all three axes.
            given.pop("mrope_section", None)
        share = _share(fields, given, head_dim) if "partial_rotary_factor" in family.own else 1.0
        if family.family == "phi3":
            rope = _phi_rope(fields, given, theta, int(head_dim * share), max_context)
        else:
            rope = rope_of(given, theta, max_context)
        pairs = family.family in ("llama4", "glm", "glm4", "cohere", "cohere2", "ernie4_5") or (
            "kv_lora_rank" in family.own and fields.flag("rope_interleave", True)
        )
        return replace(rope, share=share, interleaved=pairs), None
    local = fields.number("rope_local_base_freq", 1.0, 1e12, theta)
    nested = Fields(new or {}, "config.json rope_parameters")
    full, sliding = nested.mapping("full_attention"), nested.mapping("sliding_attention")
    if full is not None or sliding is not None:
        return (rope_of(full or {}, theta, max_context), rope_of(sliding or {}, local, max_context))
    return rope_of(new or old or {}, theta, max_context), Rope(theta=local)


def _share(fields: Fields, given: dict[str, Any], head_dim: int) -> float:
    """Return the rotated share of a head; remove its key from the rope's parameters."""
    key = "partial_rotary_factor"
    inner = given.pop(key, None)
    rotary = fields.raw("rotary_dim")
    if inner is None and rotary is not None:
        share = fields.integer("rotary_dim", 2, head_dim) / head_dim
    else:
        named = Fields({key: fields.raw(key) if inner is None else inner}, fields.where)
        share = named.number(key, 0.01, 1.0, 1.0)
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise UnsupportedModel(
            f"{fields.where}: {key} is {share:g}; {rotated} of a head's {head_dim} numbers would "
            "be rotated, which must be even",
            param=key,
        )
    return share


def _phi_rope(
    fields: Fields, given: Mapping[str, Any], theta: float, rotated: int, max_context: int
) -> Rope:
    """Read Phi's rope: plain, or LongRoPE (Ding et al. 2024), whose original context lies
    outside."""
    inner = Fields(given, "config.json rope_parameters")
    key = "rope_type" if inner.raw("rope_type") is not None else "type"
    if inner.word(key, ("default", "longrope", "su", "yarn"), "default") == "default":
        return rope_of(given, theta, max_context)
    own = "original_max_position_embeddings"
    where = inner if inner.raw(own) is not None else fields
    original = where.integer(own, 2, MAX_CONTEXT, 4096)
    stretch = inner.number("factor", 1.0, 1e4, max(max_context / original, 1.0))
    attention = inner.optional_number("attention_factor", 1e-3, 1e3)
    if attention is None:
        attention = math.sqrt(1 + math.log(stretch) / math.log(original))
    return Rope(
        theta=inner.number("rope_theta", 1.0, 1e12, theta),
        kind="long",
        original_context=original,
        attention_factor=attention,
        short=_factors(inner, "short_factor", rotated // 2),
        long=_factors(inner, "long_factor", rotated // 2),
    )


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    """Read `count` divisors of frequencies."""
    given = fields.raw(key)
    if not isinstance(given, list) or len(given) != count:
        raise ModelFileError(f"{fields.where}: {key} must be a list of {count} numbers", param=key)
    return tuple(Fields({key: one}, fields.where).number(key, 1e-3, 1e5) for one in given)


def rope_of(params: Mapping[str, Any], theta: float, max_context: int) -> Rope:
    """Read `rope_parameters` of transformers 5 or the earlier `rope_scaling`: the same keys but
    theta."""
    fields = Fields(params, "config.json rope_parameters")
    kinds = ("default", "linear", "llama3", "yarn")
    key = "rope_type" if fields.raw("rope_type") is not None else "type"
    kind = fields.word(key, kinds, "default")
    fields.expect("partial_rotary_factor", 1.0)
    fields.expect("mrope_section")
    if kind != "yarn":
        fields.expect("truncate", True)
    theta = fields.number("rope_theta", 1.0, 1e12, theta)
    if kind == "default":
        return Rope(theta=theta)
    factor = fields.number("factor", 1.0, 1e4)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    original = fields.integer(
        "original_max_position_embeddings",
        1,
        MAX_CONTEXT,
        None if kind == "llama3" else max_context,
    )
    if kind == "llama3":
        low = fields.number("low_freq_factor", 1e-3, 1e3)
        high = fields.number("high_freq_factor", 1e-3, 1e3)
        if high < low:
            raise UnsupportedModel(
                f"config.json: high_freq_factor ({high:g}) must not be below low_freq_factor "
                f"({low:g})"
            )
        return Rope(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=original,
        )
    return _yarn(fields, theta, factor, original)


def _yarn(fields: Fields, theta: float, factor: float, original: int) -> Rope:
    kind: Literal["yarn"] = "yarn"
    attention = fields.optional_number("attention_factor", 0.0, 1e3)
    if attention is None:
        scale, over = (fields.optional_number(k, 0.0, 1e3) for k in ("mscale", "mscale_all_dim"))
        if scale and over:
            attention = yarn_growth(factor, scale) / yarn_growth(factor, over)
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=fields.number("beta_fast", 1e-3, 1e5, 32.0),
        beta_slow=fields.number("beta_slow", 1e-3, 1e5, 1.0),
        attention_factor=yarn_growth(factor, 1.0) if attention is None else attention,
        truncate=fields.flag("truncate", True),
    )
