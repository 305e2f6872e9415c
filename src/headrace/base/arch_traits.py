"""Keys of `config.json` that only one family of decoders has, and its mixture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from .arch import Caps, Mla, Moe
from .arch_fields import Fields
from .errors import ModelFileError, UnsupportedModel

_LOCAL = ("mixtral", "granitemoe", "granitemoehybrid", "minimax_m2", "gpt_oss")
"""Mixtures whose number of experts is `num_local_experts` and whose routing weights sum to one."""
_MIXTURES = (*_LOCAL, "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "olmoe")
LATENT = ("deepseek_v2", "deepseek_v3")
"""Families of latent attention."""
NORMED = frozenset(
    """
    qwen3 qwen3_moe gemma3 gemma4 olmoe olmo2 olmo3 exaone4 minimax_m2 lfm2 qwen3_next qwen3_5
    qwen3_5_moe
    """.split()  # noqa: SIM905
)
"""Families with norms on q and k."""
_DENSE_ONLY = {"num_experts": (0, 1), "num_local_experts": (0, 1)}


def traits(fields: Fields, family: str, hidden: int, layers: int) -> dict[str, Any]:
    """Read the fields of `ModelArch` that only one family has."""
    match family:
        case "gemma2" | "gemma3":
            return _gemma(fields, hidden)
        case "gemma4":
            cap = fields.optional_number("final_logit_softcapping", 1e-3, 1e6)
            scale = math.sqrt(hidden)
            return {"embedding_scale": scale, "attention_scale": 1.0, "caps": Caps(logits=cap)}
        case "olmoe" | "olmo2" | "olmo3":
            return {"whole_qk_norm": True}
        case "qwen3_next" | "qwen3_5" | "qwen3_5_moe":
            fields.expect("attn_output_gate", True)
            return {"norm_offset": 1.0}
        case "smollm3":
            return {"nope": _nope(fields, layers)}
        case "phi3":
            return {"fused": ("qkv", "gate_up")}
        case "gemma":
            return {"embedding_scale": math.sqrt(hidden), "norm_offset": 1.0}
        case "glm" | "glm4":
            return {"fused": ("gate_up",)}
        case "cohere" | "cohere2":
            fields.expect("use_parallel_block", True)
            return {"logits_scale": fields.number("logit_scale", 1e-6, 1e6)}
        case "minimax_m2":
            fields.expect("qk_norm_type", "per_layer")
            fields.expect("use_qk_norm", True)
            return {"whole_qk_norm": True}
        case "granite" | "granitemoe":
            return _granite(fields)
        case "granitemoehybrid":
            rotated = fields.word("position_embedding_type", ("rope", "nope"), "nope") == "rope"
            own = {"fused": ("gate_up",), "nope": (not rotated,) * layers}
            return {**_granite(fields), **own}
        case "nemotron_h":
            fields.expect("attention_head_dim", fields.integer("head_dim", 2, 2**12))
            return {"nope": (True,) * layers}
        case "gpt_oss":
            fields.expect("swiglu_limit", 7.0)
            fields.expect("swiglu_alpha", 1.702)
            return {"sinks": True}
        case "deepseek_v2" | "deepseek_v3":
            return _stretched(fields)
    return {}


def latent(fields: Fields) -> Mla:
    """Read the sizes of latent attention (DeepSeek-V2, section 2.1)."""
    rank = fields.raw("q_lora_rank") if fields.present("q_lora_rank") else 1536
    rotary = fields.integer("qk_rope_head_dim", 2, 2**12)
    if rotary % 2:
        raise UnsupportedModel(
            f"{fields.where}: qk_rope_head_dim is {rotary}; must be even", param="qk_rope_head_dim"
        )
    return Mla(
        kv_rank=fields.integer("kv_lora_rank", 1, 2**14),
        q_rank=None if rank is None else fields.integer("q_lora_rank", 1, 2**16, 1536),
        rope_dim=rotary,
        nope_dim=fields.integer("qk_nope_head_dim", 1, 2**12),
        v_dim=fields.integer("v_head_dim", 1, 2**12),
    )


def _stretched(fields: Fields) -> dict[str, Any]:
    """Read DeepSeek's attention scale: it includes YaRN's temperature, not the rotation alone."""
    given = dict(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
    inner = Fields(given, f"{fields.where} rope_parameters")
    over = inner.number("mscale_all_dim", 0.0, 1e3, 0.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if not over or kind == "default":
        return {}
    grown = yarn_growth(inner.number("factor", 1.0, 1e4), over)
    sizes = latent(fields)
    return {"attention_scale": (sizes.nope_dim + sizes.rope_dim) ** -0.5 * grown**2}


def yarn_growth(factor: float, scale: float | None) -> float:
    """Return the growth of attention's temperature with the stretch (Peng et al. 2023, section
    3.4)."""
    return 0.1 * (scale or 1.0) * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _granite(fields: Fields) -> dict[str, Any]:
    """Read Granite's four multipliers; the logits are divided by theirs."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        "residual_scale": fields.number("residual_multiplier", 1e-6, 1e6, 1.0),
        "attention_scale": fields.number("attention_multiplier", 1e-6, 1e6, 1.0),
        "logits_scale": 1.0 / fields.number("logits_scaling", 1e-6, 1e6, 1.0),
    }


def _nope(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return SmolLM3's layers without positions: zeros of its list, or every n-th layer."""
    rotated = fields.raw("no_rope_layers")
    if rotated is None:
        every = fields.integer("no_rope_layer_interval", 1, 2**10, 4)
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    if not isinstance(rotated, list) or len(rotated) != layers or set(rotated) - {0, 1}:
        raise ModelFileError(
            f"{fields.where}: no_rope_layers must be a list of {layers} zeros and ones",
            param="no_rope_layers",
        )
    return tuple(not one for one in rotated)


def _gemma(fields: Fields, hidden: int) -> dict[str, Any]:
    """Read Gemma's own fields: its norms, its embedding scale, its attention scale and caps."""
    scalar = fields.number("query_pre_attn_scalar", 1e-3, 1e6)
    return {
        "embedding_scale": math.sqrt(hidden),
        "norm_offset": 1.0,
        "attention_scale": scalar**-0.5,
        "caps": Caps(
            fields.optional_number("attn_logit_softcapping", 1e-3, 1e6),
            fields.optional_number("final_logit_softcapping", 1e-3, 1e6),
        ),
    }


def mixture(fields: Fields, family: str, layers: int) -> Moe | None:
    """Read the experts of a family that has some."""
    if family == "glm4_moe":
        return _grouped(fields)
    if family in LATENT:
        return _deepseek(fields, family)
    if family == "gemma4":
        return _beside(fields)
    if family == "llama4":
        return _inside(fields, layers)
    if family not in _MIXTURES:
        for key, allowed in _DENSE_ONLY.items():
            fields.expect(key, *allowed)
        return None
    if family == "granitemoehybrid" and fields.integer("num_local_experts", 0, 2**12) == 0:
        return None
    # transformers 5 writes Qwen3-MoE's number of experts under Mixtral's key.
    local = family in _LOCAL
    own = "num_experts" if not local and fields.present("num_experts") else ""
    experts = fields.integer(
        own or "num_local_experts", 1, 2**12, fields.defaults.get("num_experts")
    )
    if family == "minimax_m2":
        fields.expect("scoring_func", "sigmoid")
        fields.expect("use_routing_bias", True)
        fields.expect("shared_intermediate_size", 0)
    narrow = family.startswith("qwen")
    shared = "shared_expert_intermediate_size"
    if family == "granitemoehybrid":
        shared = "shared_intermediate_size"
    width = "moe_intermediate_size" if narrow else "intermediate_size"
    return Moe(
        experts=experts,
        active=fields.integer("num_experts_per_tok", 1, experts),
        intermediate=fields.integer(width, 1, 2**20),
        normalise=local or fields.flag("norm_topk_prob", False),
        shared_intermediate=fields.integer(shared, 0, 2**20, 0),
        shared_gate=family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"),
        dense_at=_dense(fields, layers) if narrow else (),
        scores="sigmoid" if family == "minimax_m2" else "softmax",
        bias=family == "minimax_m2",
        clamped=family == "gpt_oss",
    )


def _beside(fields: Fields) -> Moe | None:
    """Read Gemma 4's experts, which run parallel to a dense feed-forward."""
    if not fields.flag("enable_moe_block", False):
        return None
    experts = fields.integer("num_experts", 1, 2**12)
    active = fields.integer("top_k_experts", 1, experts)
    return Moe(experts, active, fields.integer("moe_intermediate_size", 1, 2**20))


def _inside(fields: Fields, layers: int) -> Moe:
    """Read Llama 4's experts, in every layer or every second; a shared one sees every row."""
    experts = fields.integer("num_local_experts", 1, 2**12)
    inner = fields.integer("intermediate_size", 1, 2**20)
    named = fields.raw("moe_layers")
    step = fields.integer("interleave_moe_layer_step", 1, 2**10, 1)
    mixing = list(range(step - 1, layers, step)) if named is None else named
    if not isinstance(mixing, list) or not all(type(one) is int for one in mixing):
        raise ModelFileError(
            f"{fields.where}: moe_layers must be a list of numbers", param="moe_layers"
        )
    return Moe(
        experts,
        fields.integer("num_experts_per_tok", 1, experts),
        inner,
        normalise=False,
        shared_intermediate=inner,
        dense_at=tuple(layer for layer in range(layers) if layer not in mixing),
        scores="sigmoid",
        inside=True,
    )


def _dense(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without experts: those that the config names, and all but every n-th."""
    named = fields.raw("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise ModelFileError(
            f"{fields.where}: mlp_only_layers must be a list of numbers", param="mlp_only_layers"
        )
    step = fields.integer("decoder_sparse_step", 1, 2**10, 1)
    return tuple(at for at in range(layers) if at in named or (at + 1) % step)


def _deepseek(fields: Fields, family: str) -> Moe:
    """Read DeepSeek's routing: V3 by `_grouped`; V2 by a softmax, without bias, with groups ranked
    by their best expert."""
    fields.expect("moe_layer_freq", 1)
    if family == "deepseek_v3":
        fields.expect("scoring_func", "sigmoid")
        fields.expect("topk_method", "noaux_tc")
        return _grouped(fields)
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)  # transformers does not read it.
    methods = ("greedy", "group_limited_greedy")
    found = replace(_grouped(fields), scores="softmax", bias=False, best_of_group=1)
    if fields.word("topk_method", methods, "greedy") == "greedy":
        found = replace(found, groups=1, active_groups=1)
    return found


def _grouped(fields: Fields) -> Moe:
    """Read the routing of DeepSeek-V3 (section 2.1.2), which GLM-4.5 has too."""
    experts = fields.integer("n_routed_experts", 1, 2**12)
    groups = fields.integer("n_group", 1, 64, 1)
    best = fields.integer("topk_group", 1, groups, 1)
    if experts % groups:
        raise UnsupportedModel(
            f"{fields.where}: n_group is {groups}; n_routed_experts ({experts}) must be a multiple",
            param="n_group",
        )
    inner = fields.integer("moe_intermediate_size", 1, 2**20)
    return Moe(
        experts=experts,
        active=fields.integer("num_experts_per_tok", 1, experts // groups * best),
        intermediate=inner,
        normalise=fields.flag("norm_topk_prob", True),
        shared_intermediate=inner * fields.integer("n_shared_experts", 0, 2**8),
        dense_layers=fields.integer("first_k_dense_replace", 0, 2**10, 1),
        scores="sigmoid",
        bias=True,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        groups=groups,
        active_groups=best,
    )
