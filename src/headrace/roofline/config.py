"""An architecture and its formats from any `config.json`, to be planned with though not served.

`models.reader` reads served models and refuses every key that would change a result. Here only
sizes matter: a key that changes no size is ignored. One that changes them in a way that is not
priced is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.arch import Mla, ModelArch, Moe
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..models.reader import from_hf
from .weights import PARTS, WIDE_ENDS, WeightBytes

WHERE = "config.json"
NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate": ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "num_shared_expert"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
}
"""The same size under the names of different families, by priority."""
UNPRICED: Mapping[str, tuple[Any, ...]] = {
    "linear_num_value_heads": (),
    "linear_attn_config": (),
    "mamba_d_state": (),
    "ssm_cfg": (),
    "mamba_num_heads": (),
    "rwkv_version": (),
    "index_topk": (),
    "altup_num_inputs": (),
    "num_kv_shared_layers": (0,),
    "is_encoder_decoder": (False,),
    "cross_attention_layers": ([],),
    "hybrid_override_pattern": (),
    "attn_layer_period": (),
    "block_types": (),
}
"""Keys of parts whose work is not priced, with their values if the part is absent."""
UNGATED = frozenset(
    """
    gpt2 gpt_neo gpt_neox gptj bloom opt mpt falcon phi starcoder2 nemotron gpt_bigcode
    """.split()  # noqa: SIM905
)
"""`model_type`s whose feed-forward has two matrices instead of three."""
CHUNKS = 4
"""One of this many layers of Llama 4 sees everything, the others a chunk."""


def read_config(config: Mapping[str, Any]) -> tuple[ModelArch, WeightBytes]:
    """Return (architecture, formats of its weights as they are published).

    Raises `UnsupportedModel` for a part that is not priced, `ModelFileError` for a damaged config.
    """
    text = next(
        (
            inner
            for key in ("text_config", "llm_config", "language_config")
            if isinstance(inner := config.get(key), dict)
        ),
        config,
    )
    try:
        arch = from_hf(config)
    except UnsupportedModel:
        arch = architecture(text)
    return arch, stored_format({**text, **config})


def architecture(config: Mapping[str, Any], where: str = WHERE) -> ModelArch:
    """Read the sizes of any decoder; raise as `read_config` does, naming `where` the key was."""
    fields = Fields(config, where)
    kind = str(fields.raw("model_type"))
    for key, absent in UNPRICED.items():
        fields.expect(key, *absent)
    if kind in UNGATED:
        raise UnsupportedModel(
            f"{where}: model_type is {kind}: a feed-forward without a gate is not priced"
        )
    hidden, heads = _size(fields, "hidden"), _size(fields, "heads")
    layers, context = _size(fields, "layers"), _size(fields, "context")
    mla = _latent(fields)
    size = mla.nope_dim + mla.rope_dim if mla else _size(fields, "head_dim", hidden // heads)
    return ModelArch(
        family="deepseek_v3" if mla else "llama",
        vocab_size=_size(fields, "vocab"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if mla else _size(fields, "kv_heads", heads),
        head_dim=size,
        intermediate=_size(fields, "intermediate"),
        max_context=context,
        norm_eps=1e-6,
        windows=() if mla else _windows(fields, layers, context),
        tied_embedding=bool(fields.raw("tie_word_embeddings")),
        moe=_mixture(fields, kind, layers),
        qkv_bias=bool(fields.raw("attention_bias")),
        mla=mla,
        qk_norm=bool(fields.raw("use_qk_norm")),
    )


def _size(fields: Fields, name: str, default: int | None = None) -> int:
    keys = NAMES[name]
    key = next((key for key in keys if fields.raw(key) is not None), keys[0])
    return fields.integer(key, 1, 2**27, default)


def _latent(fields: Fields) -> Mla | None:
    if fields.raw("kv_lora_rank") is None:
        return None
    sizes = [
        fields.integer(key, 1, 2**16)
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    ]
    rank = None if fields.raw("q_lora_rank") is None else fields.integer("q_lora_rank", 1, 2**16)
    return Mla(sizes[0], rank, *sizes[1:])


def _mixture(fields: Fields, kind: str, layers: int) -> Moe | None:
    if all(not fields.raw(key) for key in NAMES["experts"]):
        return None
    width = _size(fields, "expert_width")
    shared = 0
    if kind.startswith("llama4"):
        shared = width  # One shared expert, without any key for it.
    elif any(fields.raw(key) for key in NAMES["shared_width"]):
        shared = _size(fields, "shared_width")
    elif any(fields.raw(key) for key in NAMES["shared"]):
        shared = _size(fields, "shared") * width
    # The sums depend only on the number of dense layers, not on their places.
    dense = fields.raw("first_k_dense_replace") or len(fields.raw("mlp_only_layers") or ())
    every = fields.raw("interleave_moe_layer_step") or fields.raw("decoder_sparse_step") or 1
    if isinstance(chosen := fields.raw("moe_layers"), list):
        dense = layers - len(chosen)
    elif every > 1:
        dense = layers - layers // every
    return Moe(
        _size(fields, "experts"),
        _size(fields, "active"),
        width,
        shared_intermediate=shared,
        dense_layers=int(dense),
    )


def _windows(fields: Fields, layers: int, context: int) -> tuple[int | None, ...]:
    """Return each layer's window; a chunk (Llama 4) is priced as a window of its size."""
    chunk = fields.raw("attention_chunk_size")
    key = "sliding_window" if chunk is None else "attention_chunk_size"
    if fields.raw(key) is None or fields.raw("use_sliding_window") is False:
        return ()
    window = fields.integer(key, 1, 2**27)
    kinds, roped = fields.raw("layer_types"), fields.raw("no_rope_layers")
    if isinstance(kinds, list) and len(kinds) == layers:
        if odd := set(map(str, kinds)) - {
            "full_attention",
            "sliding_attention",
            "chunked_attention",
        }:
            raise UnsupportedModel(
                f"{fields.where}: layer_types has {min(odd)}, which is not priced"
            )
        narrow = [kind != "full_attention" for kind in kinds]
    elif chunk is not None and isinstance(roped, list) and len(roped) == layers:
        narrow = [bool(one) for one in roped]
    elif chunk is not None:
        narrow = [(layer + 1) % CHUNKS != 0 for layer in range(layers)]
    else:
        narrow = [True] * layers
    if window >= context or not any(narrow):
        return ()
    return tuple(window if one else None for one in narrow)


def stored_format(config: Mapping[str, Any]) -> WeightBytes:
    """Return the formats in which a checkpoint with this config is published."""
    quantised = config.get("quantization_config")
    plain = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    plain = plain.removeprefix("torch.")
    if not isinstance(quantised, dict) or _only_kv(quantised):
        return WeightBytes(plain if plain in ("float32", "float16") else "bfloat16")
    narrow = _narrow(quantised)
    if narrow == "mxfp4":
        return WeightBytes("bfloat16", formats={"experts": "mxfp4"})
    wide = dict(WIDE_ENDS)
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        for name in quantised.get(key) or ():
            parts = [part for mark, part in _UNCONVERTED.items() if mark in str(name)]
            wide |= {role: "bfloat16" for part in parts for role in PARTS[part]}
    return WeightBytes(narrow, formats=wide)


def _only_kv(quantised: Mapping[str, Any]) -> bool:
    """Return whether a config quantises the KV cache and no weights."""
    keys = ("quant_method", "kv_cache_scheme", "config_groups")
    method, scheme, groups = (quantised.get(key) for key in keys)
    return method == "compressed-tensors" and scheme is not None and not groups


_UNCONVERTED = {
    "self_attn": "attention",
    "shared_expert": "shared",
    "mlp.gate": "router",
    "router": "router",
}


def _narrow(quantised: Mapping[str, Any]) -> str:
    """Return the format of most weights."""
    method = str(quantised.get("quant_method") or quantised.get("quant_algo")).lower()
    if method == "compressed-tensors":
        groups = quantised.get("config_groups")
        first: Any = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        if isinstance(weights, dict):
            found = str(weights.get("type")), weights.get("num_bits")
            named = {
                ("float", 8): "fp8",
                ("float", 4): "nvfp4",
                ("int", 8): "int8",
                ("int", 4): "int4",
            }.get(found)  # type: ignore[arg-type]
            if named is not None:
                return named
    if method == "modelopt":
        method = str(quantised.get("quant_algo")).lower()
    if method in ("gptq", "awq", "auto-round", "bitsandbytes"):
        bits = quantised.get("bits", 4 if quantised.get("load_in_8bit") is not True else 8)
        if bits in (4, 8):
            return f"int{bits}"
    for mark, format in (("mxfp4", "mxfp4"), ("fp8", "fp8"), ("nvfp4", "nvfp4")):
        if mark in method:
            return format
    raise ModelFileError(
        f"{WHERE}: quantization_config of {method!r:.60} is not understood; say --format",
        param="quantization_config",
    )
