"""Fields of the plain decoder in both formats, and keys that would change the computation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.arch import Activation
from ..base.errors import ModelFileError, UnsupportedModel
from .family import REQUIRED, Config, flag, integer, number, word
from .ropes import MAX_CONTEXT, rope
from .windows import no_window, sliding, windowed

DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6}
"""Values of absent keys of a `config.json`, for all families."""


def _alike(keys: str, *allowed: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(keys.split(), allowed)


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **_alike(
        """altup_num_inputs attention_chunk_size attention_multiplier attn_logit_softcapping
        clip_qkv conv_L_cache cross_attention_layers final_logit_softcapping global_head_dim
        index_topk kv_lora_rank linear_num_value_heads mamba_d_state mamba_num_heads
        no_rope_layers q_lora_rank qk_nope_head_dim qk_norm_type qk_rope_head_dim rotary_dim
        swiglu_limit v_head_dim"""
    ),
    **_alike(
        """add_cross_attention alibi attention_k_eq_v attention_out_bias attn_output_gate
        attn_temperature_tuning enable_moe_block is_encoder_decoder lm_head_bias mlp_bias
        qk_layernorm use_bias use_bidirectional_attention use_double_wide_mlp use_parallel_block
        use_parallel_residual use_qk_norm use_routing_bias""",
        False,
    ),
    **_alike(
        """first_k_dense_replace hidden_size_per_layer_input n_routed_experts n_shared_experts
        num_kv_shared_layers num_nextn_predict_layers shared_expert_intermediate_size""",
        0,
    ),
    **_alike(
        """embedding_multiplier logit_scale logits_scaling partial_rotary_factor
        residual_multiplier rotary_pct routed_scaling_factor""",
        1.0,
    ),
    **_alike("n_group topk_group", 0, 1),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "per_layer_config": ({},),
    "scoring_func": ("softmax",),
}
"""Keys of a `config.json` that only some families or none read, with their neutral values. Any
other value is refused for families that do not read the key."""
GGUF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **_alike(
        """attention.clamp_kqv attention.kv_lora_rank attention.max_alibi_bias attention.q_lora_rank
        attention.scale attention.shared_kv_layers attention.temperature_scale
        attn_logit_softcapping embedding_length_per_layer_input expert_shared_count
        final_logit_softcapping leading_dense_block_count nextn_predict_layers""",
        0,
    ),
    **_alike(
        "embedding_scale expert_weights_scale logit_scale residual_scale rope.scale_linear",
        0.0,
        1.0,
    ),
    **_alike("expert_gating_func expert_group_count interleave_moe_layer_step", 0, 1),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
"""Neutral values of such keys in GGUF metadata."""
DENSE: Mapping[str, tuple[Any, ...]] = {"num_experts": (0, 1), "num_local_experts": (0, 1)}
GGUF_DENSE: Mapping[str, tuple[Any, ...]] = {"expert_count": (0,)}
"""Neutral values of such keys for families without experts."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu": "gelu",
}
UNBIASED: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False,)}
"""Families whose attention never has a bias."""
NO_WINDOW: Mapping[str, tuple[Any, ...]] = {"sliding_window": ()}

MAX_LAYERS = 2**10
_BLOCKS = integer("num_hidden_layers", "block_count", 1, MAX_LAYERS)
_HEAD_DIM = integer("head_dim", "attention.key_length", 2, 2**12)


def _tokens(config: Config) -> Any:
    """Return the number of tokens of a GGUF's vocabulary."""
    tokens = config.fields.values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        return REQUIRED
    return len(tokens)


def layers(config: Config) -> int:
    """Read the number of layers. GGUF also counts those that predict a second token, which are not
    read."""
    found = int(config.read(_BLOCKS))
    if config.gguf:
        found -= config.fields.integer("nextn_predict_layers", 0, found - 1, 0)
    return found


def head_dim(config: Config) -> int:
    """Read the size of a head; without the key, the model's width divided by the heads."""
    size = int(config.read(_HEAD_DIM, max(config["hidden"] // config["heads"], 1)))
    if config.gguf:
        config.fields.expect("attention.value_length", size)
    key = config.key(_HEAD_DIM)
    return even(config, key, size)


def even(config: Config, key: str, size: int) -> int:
    """Return a size whose halves are pairs. Raises `UnsupportedModel` for an odd one."""
    if size % 2:
        where = f"{config.fields.where}: {config.fields.prefix}{key}"
        raise UnsupportedModel(f"{where} is {size}; must be even", param=key)
    return size


def kv_heads(config: Config) -> int:
    """Read the KV heads of the layers with attention: one number, or in GGUF one per layer, zero
    without attention. A null in a `config.json` means the number of heads."""
    field, heads = _KV_HEADS, config["heads"]
    key, fields = config.key(field), config.fields
    given = fields.raw(key)
    if config.gguf and isinstance(given, list):
        stateful = "recurrence.layers" in config.table
        allowed = len(given) == config["layers"] and all(
            type(one) is int and (one > 0 or (one == 0 and stateful)) for one in given
        )
        found = {one for one in given if one} if allowed else set()
        if len(found) != 1:
            raise ModelFileError(
                f"{fields.where}: {fields.prefix}{key} must be a number, or one number"
                f"{' or zero' * stateful} for each of {config['layers']} layers",
                param=key,
            )
        count = int(found.pop())
    else:
        count = int(config.read(field, heads) or heads)
    if not 1 <= count <= heads or heads % count:
        raise config.refuse("heads", f"must be a multiple of {key} ({count})")
    return count


_KV_HEADS = integer("num_key_value_heads", "attention.head_count_kv", 1, "heads", null=True)


def _expert_width(config: Config) -> Any:
    """Return the width of experts for a GGUF without a separate key."""
    has_experts = config.gguf and "moe.experts" in config.table and config["moe.experts"]
    return config["moe.intermediate"] if has_experts else REQUIRED


def tied(config: Config) -> bool:
    """Read whether the embedding is the head. A multimodal config may have the key outside of the
    text model's part."""
    if config.gguf:
        return "output.weight" not in config.tensors
    key = "tie_word_embeddings"
    stated = (each for each in (config.fields, config.outer) if each.values.get(key) is not None)
    return next(stated, config.fields).flag(key, False)


INTERMEDIATE = integer("intermediate_size", "feed_forward_length", 1, 2**20)
FIELDS: Mapping[str, Any] = {
    "vocab_size": integer("vocab_size", "vocab_size", 1, 2**24, _tokens),
    "hidden": integer("hidden_size", "embedding_length", 1, 2**17),
    "layers": layers,
    "heads": integer("num_attention_heads", "attention.head_count", 1, 2**12),
    "kv_heads": kv_heads,
    "head_dim": head_dim,
    "intermediate": INTERMEDIATE._replace(default=_expert_width),
    "max_context": integer("max_position_embeddings", "context_length", 1, MAX_CONTEXT),
    "norm_eps": number("rms_norm_eps", "attention.layer_norm_rms_epsilon", 1e-12, 1e-1),
    "activation": word("hidden_act", "", ACTIVATIONS, "silu"),
    "rope": rope,
    "_window": no_window,
    "_slides": sliding(lambda config: [True] * config["layers"]),
    "windows": windowed,
    "qkv_bias": flag(
        "attention_bias", default=False, tensors=("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    ),
    "output_bias": flag("attention_bias", default=False, tensors="blk.0.attn_output.bias"),
    "tied_embedding": tied,
}
"""Field of `ModelArch` → its keys in both formats."""
GELU = word("hidden_activation", "", ACTIVATIONS, "gelu_pytorch_tanh")
MIXTURE: Mapping[str, Any] = {
    "moe.experts": integer(("num_experts", "num_local_experts"), "expert_count", 1, 2**12),
    "moe.active": integer("num_experts_per_tok", "expert_used_count", 1, "moe.experts"),
    "moe.intermediate": integer("moe_intermediate_size", "expert_feed_forward_length", 1, 2**20),
    "moe.normalise": flag("norm_topk_prob", "expert_weights_norm", False),
}
"""Experts (`Moe`)."""
LOCAL: Mapping[str, Any] = {
    **MIXTURE,
    "moe.experts": integer("num_local_experts", "expert_count", 1, 2**12),
    "moe.intermediate": INTERMEDIATE,
    "moe.normalise": flag("", "expert_weights_norm", True),
}
"""Experts as Mixtral's: as wide as a dense feed-forward, their routing weights sum to one."""
LOCAL_APART: Mapping[str, Any] = {
    **LOCAL,
    "moe.intermediate": INTERMEDIATE._replace(gguf="expert_feed_forward_length"),
}
"""Such experts, with a separate key for their width in GGUF."""


def embedding_scale(config: Config) -> float:
    """Return the factor of Gemma's embeddings."""
    return math.sqrt(config["hidden"])


def choice_bias(config: Config) -> bool:
    """Return whether the choice of experts has a bias; in a GGUF, whether the file has it."""
    return not config.gguf or any(".exp_probs_b." in name for name in config.tensors)


SHARED_NAMES = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
SCORED_NAMES = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
