"""GGUF keys that only one family of decoders has, and its mixture.

If the format is silent, llama.cpp's knowledge of the family decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from .arch import Activation, Caps, Chunks, Mla, Moe, Rope
from .arch_fields import Fields
from .arch_states import DELTA
from .arch_traits import LATENT
from .errors import ModelFileError, UnsupportedModel

_MAX_WINDOW = 2**27
_CHUNK = 8192
LAYER_NORMED = {"cohere", "cohere2", "starcoder2"}
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "starcoder2"), "gelu_tanh"),
    "nemotron_h": "relu2",
}
PARTLY_ROTATED = {"phi3", "glm", "glm4", "glm4_moe", "minimax_m2", *DELTA}
_SCALES = ("logit_scale", "embedding_scale", "residual_scale", "attention.scale")
LATENT_KEYS = (
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "expert_shared_count",
    "expert_weights_scale",
    "nextn_predict_layers",
    "leading_dense_block_count",
    "expert_gating_func",
    "expert_group_count",
)
OWN: Mapping[str, tuple[str, ...]] = {
    "cohere": ("logit_scale",),
    "cohere2": ("logit_scale",),
    "granite": _SCALES,
    "granitemoe": _SCALES,
    "granitemoehybrid": _SCALES,
    "gemma2": ("attn_logit_softcapping",),
    "glm4_moe": (
        "expert_shared_count",
        "expert_weights_scale",
        "nextn_predict_layers",
        "leading_dense_block_count",
        "expert_gating_func",
    ),
    "minimax_m2": ("expert_gating_func",),
    **dict.fromkeys(DELTA, ("nextn_predict_layers",)),
    "deepseek_v2": LATENT_KEYS,
    "deepseek_v3": LATENT_KEYS,
    "gpt_oss": ("expert_gating_func",),
    "llama4": ("interleave_moe_layer_step",),
    "gemma4": ("attention.shared_kv_layers", "embedding_length_per_layer_input"),
}
"""Keys that a family reads and others must not have."""
_EXPERTS = {
    "llama": True, "qwen3_moe": True, "granitemoe": True, "granitemoehybrid": True,
    "minimax_m2": True, "gpt_oss": True, "glm4_moe": False, "deepseek_v2": False,
    "deepseek_v3": True, "olmoe": False, "qwen2_moe": False, "qwen3_5_moe": True,
    "qwen3_next": True,
}  # fmt: skip
"""Families with experts → whether their routing weights are scaled to one if the file does not
say."""


def plain(value: float) -> float:
    """Return a number stored in fp32 as its author wrote it: 1e-06, not 9.99999997e-07."""
    return float(f"{value:.7g}")


def mixture(fields: Fields, family: str, tensor_names: Collection[str]) -> Moe | None:
    """Read the experts of a file that has some."""
    experts = fields.integer("expert_count", 0, 2**12, 0)
    if not experts:
        return None
    if family == "llama4":
        return _inside(fields, experts)
    if family not in _EXPERTS:
        raise UnsupportedModel(
            f"GGUF: {fields.prefix}expert_count is {experts}; "
            "experts are supported for llama and the mixtures among general.architecture",
            param="expert_count",
        )
    dense = family in ("llama", "granitemoe", "granitemoehybrid", "olmoe")
    width = "feed_forward_length" if dense else "expert_feed_forward_length"
    inner = fields.integer(width, 1, 2**20)
    sigmoid = family in ("glm4_moe", "minimax_m2", "deepseek_v3")
    shared = 0
    if family == "gpt_oss":
        fields.expect("expert_gating_func", 0, 3)  # A softmax over the chosen.
    if sigmoid:
        fields.expect("expert_gating_func", *((0, 2) if family == "glm4_moe" else (2,)))
    if family in ("glm4_moe", *LATENT):
        shared = inner * fields.integer("expert_shared_count", 0, 2**8, 0)
    elif family in ("qwen2_moe", *DELTA, "granitemoehybrid"):
        shared = fields.integer("expert_shared_feed_forward_length", 1, 2**20)
    groups, best = _groups(fields, experts, family)
    return Moe(
        experts=experts,
        active=fields.integer("expert_used_count", 1, experts),
        intermediate=inner,
        normalise=fields.flag("expert_weights_norm", _EXPERTS[family]),
        shared_intermediate=shared,
        shared_gate=family in ("qwen2_moe", *DELTA),
        dense_layers=fields.integer("leading_dense_block_count", 0, 2**10, 0),
        scores="sigmoid" if sigmoid else "softmax",
        bias=sigmoid and any(".exp_probs_b." in name for name in tensor_names),
        scale=plain(fields.number("expert_weights_scale", 0.0, 1e6, 1.0)) or 1.0,
        clamped=family == "gpt_oss",
        best_of_group=1 if family == "deepseek_v2" else 2,
        groups=groups,
        active_groups=best,
    )


def _inside(fields: Fields, experts: int) -> Moe:
    """Read Llama 4's experts; a shared one of the same width sees every row."""
    inner = fields.integer("expert_feed_forward_length", 1, 2**20)
    step = fields.integer("interleave_moe_layer_step", 1, 2**10)
    layers = fields.integer("block_count", 1, 2**10)
    return Moe(
        experts,
        fields.integer("expert_used_count", 1, experts),
        inner,
        normalise=False,
        shared_intermediate=inner,
        dense_at=tuple(layer for layer in range(layers) if (layer + 1) % step),
        scores="sigmoid",
        inside=True,
    )


def _groups(fields: Fields, experts: int, family: str) -> tuple[int, int]:
    """Return (groups of experts, number of them to choose from) of DeepSeek."""
    if family not in LATENT:
        return 1, 1
    fields.expect("expert_gating_func", *((2,) if family == "deepseek_v3" else (0, 1)))
    groups = fields.integer("expert_group_count", 0, 64, 0) or 1
    if groups == 1:
        return 1, 1
    if experts % groups:
        raise UnsupportedModel(
            f"GGUF: {fields.prefix}expert_group_count is {groups}; expert_count ({experts}) must "
            "be a multiple",
            param="expert_group_count",
        )
    return groups, fields.integer("expert_group_used_count", 1, groups)


def latent(fields: Fields) -> Mla:
    """Read the sizes of latent attention. A file for the latent cache states the heads' own sizes
    in addition to those of the cache (`…_mla`); an older file states the heads' sizes alone."""
    rotary = fields.integer("rope.dimension_count", 2, 2**12)
    sizes = {}
    for part, low in (("key", rotary + 1), ("value", 1)):
        key = f"attention.{part}_length"
        own = f"{key}_mla" if fields.present(f"{key}_mla") else key
        sizes[part] = fields.integer(own, low, 2**13)
    rank = fields.integer("attention.q_lora_rank", 0, 2**16, 0)
    return Mla(
        kv_rank=fields.integer("attention.kv_lora_rank", 1, 2**14),
        q_rank=rank or None,
        rope_dim=rotary,
        nope_dim=sizes["key"] - rotary,
        v_dim=sizes["value"],
    )


def grown(fields: Fields, head_dim: int) -> float | None:
    """Return DeepSeek's attention scale under YaRN, which includes its temperature; None for the
    plain one."""
    by = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 10.0, 0.0)
    if not by or fields.word("rope.scaling.type", ("none", "linear", "yarn"), "none") != "yarn":
        return None
    growth = plain(by) * math.log(plain(fields.number("rope.scaling.factor", 1.0, 1e4))) + 1.0
    return float(head_dim**-0.5 * growth**2)


def traits(
    fields: Fields,
    family: str,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    max_context: int,
) -> dict[str, Any]:
    """Read the fields of `ModelArch` that only one family has."""
    if family == "llama4":
        return _chunked(fields, layers, max_context)
    slides = _slides(fields, family, layers)
    window = fields.integer("attention.sliding_window", 0, _MAX_WINDOW, 0)
    if slides is None:
        fields.expect("attention.sliding_window", 0, max_context)
        window, slides = 0, []
    if family == "gemma2":
        window = window or 4096
    given: dict[str, Any] = {}
    if window and any(slides) and (window < max_context or family in ("gemma3", "olmo3")):
        given["windows"] = tuple(window if slide else None for slide in slides)
    match family:
        case "gemma2" | "gemma3":
            # Only the 27B model of each scales by hidden / heads instead of the head's size.
            largest = layers == (62 if family == "gemma3" else 46)
            given |= _gemma(fields, hidden / heads if largest else head_dim)
            if family == "gemma3":
                base = plain(fields.number("rope.freq_base_swa", 1.0, 1e12, 1e4))
                given["local_rope"] = Rope(theta=base)
        case "gemma":
            given |= {"embedding_scale": math.sqrt(hidden), "norm_offset": 1.0}
        case "cohere":
            given["logits_scale"] = plain(fields.number("logit_scale", 0.0, 1e6, 0.0)) or 1.0
        case "cohere2":
            scale = plain(fields.number("logit_scale", 1e-6, 1e6))
            given |= {"logits_scale": scale, "nope": tuple(not slide for slide in slides)}
        case "exaone4" if window:
            given["nope"] = tuple(not slide for slide in slides)
        case "smollm3":
            given["nope"] = tuple((layer + 1) % 4 == 0 for layer in range(layers))
        case "phi3":
            given["fused"] = ("qkv", "gate_up")
        case "glm" | "glm4":
            given["fused"] = ("gate_up",)
        case "olmoe" | "olmo2" | "olmo3" | "minimax_m2":
            given["whole_qk_norm"] = True
            if family == "olmo3":
                base = plain(fields.number("rope.freq_base", 1.0, 1e12, 1e4))
                given["local_rope"] = Rope(theta=base)  # Windowed layers are not stretched.
        case "granite" | "granitemoe":
            given |= _granite(fields)
        case "granitemoehybrid":
            # This file uses the key for a trained rope scaling as the switch of all rope.
            turned = fields.flag("rope.scaling.finetuned", True)
            given |= {**_granite(fields), "nope": (not turned,) * layers}
        case "nemotron_h":
            given["nope"] = (True,) * layers
        case "gpt_oss":
            given["sinks"] = True
        case "qwen3_5" | "qwen3_5_moe" | "qwen3_next":
            given["norm_offset"] = 1.0
        case "deepseek_v2" | "deepseek_v3":
            given["attention_scale"] = grown(fields, head_dim)
    return given


def _chunked(fields: Fields, layers: int, max_context: int) -> dict[str, Any]:
    """Read Llama 4, for which llama.cpp fixes everything but the sizes."""
    chunk = fields.integer("attention.chunk_size", 1, _MAX_WINDOW, _CHUNK)
    fields.expect("attention.sliding_window", chunk)
    nope = tuple((layer + 1) % 4 == 0 for layer in range(layers))
    found: dict[str, Any] = {"nope": nope}
    if chunk < max_context:
        found["windows"] = tuple(None if one else chunk for one in nope)
    # Maverick, with 128 experts, has no norms.
    normed = fields.integer("expert_count", 1, 2**12) != 128
    return {**found, "chunks": Chunks(normed, 0.1, _CHUNK)}


def _slides(fields: Fields, family: str, layers: int) -> list[bool] | None:
    """Return whether each layer would have a window; None if the family has none."""
    if family in ("phi3", "starcoder2"):
        return [True] * layers
    four = dict.fromkeys(("cohere2", "exaone4", "olmo3"), 4)
    period = {"gemma2": 2, "gemma3": 6, "gpt_oss": 2, **four}.get(family)
    if period is None:
        return None
    key = "attention.sliding_window_pattern"
    stated = fields.raw(key)
    if stated is None or isinstance(stated, int):
        period = fields.integer(key, 1, 2**10, period)
        return [(layer + 1) % period != 0 for layer in range(layers)]
    each = list(stated) if hasattr(stated, "__len__") and not isinstance(stated, str) else []
    if len(each) != layers or not all(one in (0, 1) for one in each):
        raise ModelFileError(
            f"GGUF: {fields.prefix}{key} must be a number or {layers} flags", param=key
        )
    return [bool(one) for one in each]


def _gemma(fields: Fields, scalar: float) -> dict[str, Any]:
    """Return the fields of Gemma 2 and 3 that the format leaves to its reader."""
    hidden = fields.integer("embedding_length", 1, 2**17)
    found: dict[str, Any] = {
        "embedding_scale": math.sqrt(hidden),
        "norm_offset": 1.0,
        "attention_scale": scalar**-0.5,
    }
    caps = []
    for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        absent = default if fields.prefix == "gemma2." else 0.0
        caps.append(fields.number(key, 0.0, 1e6, absent) or None)
    return {**found, "caps": Caps(*caps)}


def _granite(fields: Fields) -> dict[str, Any]:
    """Read Granite's four multipliers; the logits are divided by theirs."""
    scale = plain(fields.number("attention.scale", 0.0, 1e6, 0.0))
    return {
        "embedding_scale": plain(fields.number("embedding_scale", 1e-6, 1e6, 1.0)),
        "residual_scale": plain(fields.number("residual_scale", 1e-6, 1e6, 1.0)),
        "attention_scale": scale or None,
        "logits_scale": 1.0 / plain(fields.number("logit_scale", 1e-6, 1e6)),
    }
