"""DeepSeek V2 and V3 (DeepSeek-AI 2024), Kimi K2: attention over latents, and experts in groups."""

from __future__ import annotations

import math

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.graph import Graph, Value
from ..layers.attention import latent_attention
from ..layers.description import Description
from .common import MIXTURE, SCORED_NAMES, SHARED_NAMES, UNBIASED, choice_bias, even
from .family import REQUIRED, Config, Family, Field, Names, flag, integer, number, word
from .llama import llama
from .ropes import FACTOR, GGUF_KIND, parameters, yarn_growth


def deepseek(arch: ModelArch) -> Graph:
    """Describe the pre-norm decoder with attention over latents."""

    def mixing(to: Description, layer: int, x: Value, at: str) -> Value:
        assert arch.mla is not None
        return latent_attention(to, layer, x, f"{at}.self_attn", arch.mla)

    return llama(arch, mixing)


GROUPED_KEYS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "first_k_dense_replace",
    "expert_shared_count",
    "nextn_predict_layers",
)
_SHARED = integer("n_shared_experts", "expert_shared_count", 0, 2**8, 0)
_GROUPS = integer("n_group", "expert_group_count", 1, 64, 1, zero=True)
_ACTIVE_GROUPS = integer(
    "topk_group",
    "expert_group_used_count",
    1,
    "moe.groups",
    lambda config: REQUIRED if config.gguf and config["moe.groups"] > 1 else 1,
)
_ACTIVE = integer("num_experts_per_tok", "expert_used_count", 1, 2**12)


def _active(config: Config) -> int:
    """Read the number of experts per row, at most those in the groups chosen from."""
    experts, groups = config["moe.experts"], config["moe.groups"]
    if experts % groups:
        key, whole = config.key(_GROUPS), config.key(GROUPED["moe.experts"])
        raise UnsupportedModel(
            f"{config.fields.where}: {key} is {groups}; {whole} ({experts}) must be a multiple",
            param=key,
        )
    most = experts // groups * config["moe.active_groups"]
    return int(config.read(_ACTIVE._replace(high=most)))


def _shared(config: Config) -> int:
    return int(config["moe.intermediate"] * config.read(_SHARED))


GROUPED = {
    **MIXTURE,
    "moe.experts": integer("n_routed_experts", "expert_count", 1, 2**12),
    "moe.active": _active,
    "moe.shared_intermediate": _shared,
    "moe.dense_layers": integer("first_k_dense_replace", "leading_dense_block_count", 0, 2**10, 0),
    "moe.scores": "sigmoid",
    "moe.scale": number("routed_scaling_factor", "expert_weights_scale", 1e-6, 1e6, 1.0, zero=True),
    "moe.groups": _GROUPS,
    "moe.active_groups": _ACTIVE_GROUPS,
}
"""The routing of DeepSeek-V3 (section 2.1.2), also used by GLM-4.5."""
_METHOD = word(
    "topk_method", "", {name: name for name in ("greedy", "group_limited_greedy")}, "greedy"
)


def _limited(field: Field) -> object:
    """Make a reader of V2's groups, which its greedy method lacks."""

    def read(config: Config) -> int:
        greedy = not config.gguf and config.read(_METHOD) == "greedy"
        found = config.read(field._replace(high=64) if greedy else field)
        return 1 if greedy else int(found)

    return read


_ROPE_DIM = integer("qk_rope_head_dim", "rope.dimension_count", 2, 2**12)
_NOPE_DIM = integer("qk_nope_head_dim", "", 1, 2**12)
_V_DIM = integer("v_head_dim", "", 1, 2**12)


def _rope_dim(config: Config) -> int:
    return even(config, config.key(_ROPE_DIM), config.read(_ROPE_DIM))


def _head_size(config: Config, part: str, low: int) -> int:
    """Read the size of a head of a GGUF. A file for the latent cache has it in a separate key
    (`…_mla`) next to the cache's size; an older file has only this size."""
    key = f"attention.{part}_length"
    own = f"{key}_mla" if config.fields.present(f"{key}_mla") else key
    return config.fields.integer(own, low, 2**13)


def _nope_dim(config: Config) -> int:
    if not config.gguf:
        return int(config.read(_NOPE_DIM))
    rotated = config["mla.rope_dim"]
    return int(_head_size(config, "key", rotated + 1) - rotated)


def _v_dim(config: Config) -> int:
    return _head_size(config, "value", 1) if config.gguf else int(config.read(_V_DIM))


def _attention_scale(config: Config) -> float | None:
    """Read the scale of attention under YaRN, which includes the temperature; None for the plain
    scale."""
    if config.gguf:
        by = config["_log_multiplier"]
        if not by or config.read(GGUF_KIND) != "yarn":
            return None
        growth = by * math.log(config.read(FACTOR)) + 1.0
    else:
        given = parameters(config)
        inner = Fields(given, f"{config.fields.where} rope_parameters")
        over = inner.number("mscale_all_dim", 0.0, 1e3, 0.0)
        if not over or given.get("rope_type", given.get("type", "default")) == "default":
            return None
        growth = yarn_growth(inner.number("factor", 1.0, 1e4), over)
    return float(config["head_dim"] ** -0.5 * growth**2)


_FIELDS = {
    **GROUPED,
    "mla.kv_rank": integer("kv_lora_rank", "attention.kv_lora_rank", 1, 2**14),
    "mla.q_rank": integer(
        "q_lora_rank", "attention.q_lora_rank", 1, 2**16, None, zero=True, null=True
    ),
    "mla.rope_dim": _rope_dim,
    "mla.nope_dim": _nope_dim,
    "mla.v_dim": _v_dim,
    "head_dim": lambda c: even(c, "head_dim", c["mla.nope_dim"] + c["mla.rope_dim"]),
    "_log_multiplier": number("", "rope.scaling.yarn_log_multiplier", 0.0, 10.0, 0.0),
    "kv_heads": lambda config: config["heads"],
    "attention_scale": _attention_scale,
    "rope.interleaved": flag("rope_interleave", "", True),
}
_OWN = (
    *GROUPED_KEYS,
    "n_group",
    "topk_group",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "attention.q_lora_rank",
    "expert_group_count",
)
_NAMES = Names(
    {
        **SCORED_NAMES, **SHARED_NAMES, "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj.*", "attn_v_b": "self_attn.v_b_proj.*",
    },
    predicts=True,
)  # fmt: skip
_V3 = {
    "max_position_embeddings": 4096, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
}  # fmt: skip
_V2 = {
    **_V3, "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1407, "norm_topk_prob": False,
}  # fmt: skip
FAMILIES = (
    Family(
        "deepseek_v2", deepseek, {"deepseek_v2": ("DeepseekV2ForCausalLM",)}, "deepseek2",
        defaults=_V2,
        fields={
            **_FIELDS, "moe.scores": "softmax", "moe.best_of_group": 1,
            "moe.groups": _limited(_GROUPS), "moe.active_groups": _limited(_ACTIVE_GROUPS),
        },
        allowed={
            **UNBIASED, "moe_layer_freq": (1,), "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),  # transformers does not read it.
        },
        gguf_allowed={"expert_gating_func": (0, 1)},
        own=_OWN,
        names=_NAMES,
    ),
    Family(
        "deepseek_v3", deepseek,
        {"deepseek_v3": ("DeepseekV3ForCausalLM",), "kimi_k2": ("DeepseekV3ForCausalLM",)},
        "deepseek2", lambda fields: fields.raw("expert_gating_func") == 2,
        defaults=_V3,
        fields={
            **_FIELDS, "moe.normalise": MIXTURE["moe.normalise"]._replace(default=True),
            "moe.bias": choice_bias,
        },
        allowed={
            **UNBIASED, "moe_layer_freq": (1,), "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        gguf_allowed={"expert_gating_func": (2,)},
        own=_OWN,
        names=_NAMES,
    ),
)  # fmt: skip
