"""Names of weights: mapping from a file's names, and comparison with the model's graph.

Canonical names are Hugging Face's, `model.layers.N.self_attn.q_proj.weight` and so on. Experts are
`model.layers.N.mlp.experts.E.{gate,up,down}_proj.weight` with the router at `mlp.gate`, whatever
the checkpoint calls them. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..base.arch import ModelArch
from ..base.arch_states import DELTA
from ..base.errors import ModelFileError
from ..models.registry import describe

if TYPE_CHECKING:
    from .safetensors_file import StoredTensor

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_PLAIN = {"ffn_norm": "post_attention_layernorm"}
_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = {**_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_UNEVEN = {
    **_GEMMA,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.*.gate_up_proj",
    "ffn_gate_exps": "experts.*.gate_proj",
    "ffn_up_exps": "experts.*.up_proj",
    "ffn_down_exps": "experts.*.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_SHORT = {
    **_PLAIN,
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_STATE = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_STATE_VECTORS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_UNEVEN_VECTORS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_STATES = {
    "granitemoehybrid": "mamba",
    "nemotron_h": "mixer",
    **dict.fromkeys(DELTA, "linear_attn"),
}
"""Family → prefix of the tensors of a layer's state."""


def _state(family: str) -> dict[str, str]:
    return {part: f"{_STATES[family]}.{name}" for part, name in _STATE.items()}


_DELTA = {
    **_state("qwen3_5"),
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_GATED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXER = {
    **_state("nemotron_h"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_SCORED = {"exp_probs_b": "mlp.gate.e_score_correction"}
_SECOND = ("glm4_moe", "deepseek_v2", "deepseek_v3", *DELTA)
"""Families that may have layers after the last one, which predict a second token."""
_LATENT = {
    **_PLAIN,
    **_SCORED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.*",
    "attn_v_b": "self_attn.v_b_proj.*",
    **_SHARED,
}
_GGUF_FAMILY: Mapping[str, Mapping[str, str]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _UNEVEN,
    "granitemoehybrid": {**_PLAIN, **_SHARED, **_state("granitemoehybrid")},
    "lfm2": _SHORT,
    "nemotron_h": _MIXER,
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
    "glm": {**_PLAIN, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "exaone4": _BEHIND,
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "phi3": {**_PLAIN, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {**_PLAIN, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "minimax_m2": {**_PLAIN, **_SCORED},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
    "llama4": {**_PLAIN, **_SHARED},
    "glm4_moe": {**_SCORED, **_SHARED, "post_attention_norm": "post_attention_layernorm"},
    "qwen2_moe": {**_PLAIN, **_GATED},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_DELTA, **_GATED},
    "qwen3_next": {
        **_DELTA,
        **_GATED,
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_in": "linear_attn.in_proj_qkvz",
    },
}
"""Meanings of a layer's names in single families; all others use `_PLAIN`."""
_GGUF_HARMLESS = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"
)
"""Tensors read by `open` (the rope's parameters), or recomputed from the architecture."""

_HF_HARMLESS = re.compile(r".*rotary_emb\.inv_freq|.*rotary_emb\.(cos|sin)_cached")
_KV_SCALE = re.compile(r".+\.([qkv]|kv|prob)_scale|.+\.[kv]_proj\.output_scale")
"""Scales of an FP8 cache or of its products: calibrated, but needed by no computation here."""
_ENCODER_HARMLESS = re.compile(r"embeddings\.(position|token_type)_ids")
_ENCODER_POOLER = re.compile(r"pooler\.dense\.(weight|bias)")
"""Head of the pre-training: embeddings do not read it, a classifier does."""
_HF_VISION = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|embed_audio|audio_tower"
    r"|vision_model)\..*"
)
_HF_SOUND = re.compile(r"(audio_tower|multi_modal_projector)\..*")
"""Audio encoder before a language model: `speech.sound_rows` reads it."""
_HF_BESIDE = re.compile(r"mtp\.|model\.visual\.")
"""Qwen3.5's head that predicts a second token, and its image encoder."""
_MIXTRAL_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERTS = {
    ".mlp.input_linear.weight": ".mlp.experts.*.gate_up_proj.weight",
    ".mlp.output_linear.weight": ".mlp.experts.*.down_proj.weight",
    ".mlp.experts.gate_up_proj": ".mlp.experts.*.gate_up_proj.weight",
    ".mlp.experts.down_proj": ".mlp.experts.*.down_proj.weight",
    ".mlp.router.layer.weight": ".mlp.gate.weight",
    ".mlp.router.weight": ".mlp.gate.weight",
    ".mlp.router.bias": ".mlp.gate.bias",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}
"""Stacks of experts (Granite's, those of transformers 5), routers, MiniMax's bias of the choice."""
_OWN: Mapping[str, Mapping[str, str]] = {
    "lfm2": {
        "model.embedding_norm.": "model.norm.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.w2.": ".mlp.down_proj.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".q_layernorm.": ".q_norm.",
        ".k_layernorm.": ".k_norm.",
    },
    "gemma4": {
        ".experts.gate_up_proj": ".experts.*.gate_up_proj.weight",
        ".experts.down_proj": ".experts.*.down_proj.weight",
    },
    "llama4": {
        ".feed_forward.": ".mlp.",
        ".mlp.router.": ".mlp.gate.",
        ".mlp.shared_expert.": ".mlp.shared_experts.",
    },
    "nemotron_h": {
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
    },
    "granitemoehybrid": {
        ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
    },
}
"""Part of a name in one family's files → in ours."""
_GGUF_VECTOR = re.compile(r"blk\.(\d{1,4})\.(ssm_a|ssm_d|ssm_dt\.bias)")
_GGUF_UNEVEN = re.compile(rf"blk\.(\d{{1,4}})\.({'|'.join(map(re.escape, _UNEVEN_VECTORS))})")
_GGUF_BLOCK = re.compile(r"blk\.(\d{1,4})\.([\w.]+)\.(weight|bias)")


def from_gguf_name(name: str, arch: ModelArch) -> str | None:
    """Return the canonical name, with `*` for all experts at once; None if the tensor is not
    needed.

    An unknown name raises `ModelFileError`: no tensor is silently left out.
    """
    if _GGUF_HARMLESS.fullmatch(name):
        return None
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP and suffix in ("weight", "bias"):
        return f"{_GGUF_TOP[stem]}.{suffix}"
    vector = _GGUF_VECTOR.fullmatch(name)
    if vector and arch.family in _STATES:
        return f"model.layers.{int(vector[1])}.{_STATES[arch.family]}.{_STATE_VECTORS[vector[2]]}"
    vector = _GGUF_UNEVEN.fullmatch(name)
    if vector and arch.family == "gemma4":
        return f"model.layers.{int(vector[1])}.{_UNEVEN_VECTORS[vector[2]]}"
    match = _GGUF_BLOCK.fullmatch(name)
    if match:
        own = _GGUF_FAMILY.get(arch.family, _PLAIN)
        layer, part, suffix = match.groups()
        if arch.family in _SECOND and int(layer) >= arch.layers:
            return None  # The head that predicts a second token.
        canonical = own.get(part) or _GGUF_LAYER.get(part)
        if part == "exp_probs_b" and canonical:
            return f"model.layers.{int(layer)}.{canonical}_{suffix}"
        if part == "attn_sinks" and canonical:
            return f"model.layers.{int(layer)}.{canonical}"
        if canonical is not None:
            return f"model.layers.{int(layer)}.{canonical}.{suffix}"
    raise ModelFileError(f"tensor {name!r:.100} is not part of a {arch.family} model")


def from_hf_name(name: str, arch: ModelArch) -> str | None:
    """Return the canonical name (`*` for all experts at once), or None if the tensor is not needed.

    An unknown name is returned unchanged: `check` refuses it.
    """
    if _HF_HARMLESS.fullmatch(name) or (
        arch.family in ("gemma3", "gemma4", "llama4") and _HF_VISION.fullmatch(name)
    ):
        return None
    if arch.family == "qwen2" and _HF_SOUND.match(name):
        return None
    if arch.attention_gate and _HF_BESIDE.match(name):
        return None
    if arch.family == "bert":
        name = name.removeprefix("bert.")
        pooled = "labels" in describe(arch).outputs
        unread = _ENCODER_HARMLESS.fullmatch(name) or (
            not pooled and _ENCODER_POOLER.fullmatch(name)
        )
        return None if unread else name
    if arch.tied_embedding and name.endswith(HEAD):
        return None  # A copy of the embedding: see `headers.hold`.
    if arch.family in _SECOND and name.startswith(f"model.layers.{arch.layers}."):
        return None  # The head that predicts a second token comes after the last layer.
    for prefix, plain in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            name = plain + name[len(prefix) :]
    for foreign, own in _OWN.get(arch.family, {}).items():
        name = name.replace(foreign, own, 1)
    if arch.family == "granitemoehybrid" and arch.moe is None:
        name = name.replace(".mlp.shared_experts.", ".mlp.", 1)
    if arch.moe is not None:
        name = name.replace(".block_sparse_moe.", ".mlp.", 1)
        for foreign, own in _EXPERTS.items():
            if name.endswith(foreign):
                return name.removesuffix(foreign) + own
        match = re.fullmatch(r"(.*\.mlp\.experts\.\d+\.)(w[123])\.weight", name)
        if match:
            name = f"{match[1]}{_MIXTRAL_EXPERT[match[2]]}.weight"
    return name


def kv_scales(stored: Mapping[str, StoredTensor]) -> list[str]:
    """List names of a KV cache's scales, each one number; the model is loaded without them."""
    return [
        name
        for name, tensor in stored.items()
        if tensor.shape in ((), (1,)) and _KV_SCALE.fullmatch(name)
    ]


def each_expert(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Yield (name, shape, (expert, its first row)) of the tensors that a file's tensor becomes.

    A stack [experts, rows, width] becomes one for each expert, with gate above up two. A
    convolution's kernels [channels, 1, kernel size] lose the dimension of one.
    """
    if len(shape) == 3 and shape[1] == 1 and name.endswith(("conv.weight", "conv1d.weight")):
        yield name, (shape[0], shape[2]), (0, 0)
        return
    if "*" not in name:
        yield name, shape, (0, 0)
        return
    parts = ("gate_proj", "up_proj") if ".gate_up_proj." in name else ("",)
    if len(shape) != 3 or shape[1] % len(parts):
        raise no_stack(name, shape, 3)
    experts, rows, width = shape
    inner = rows // len(parts)
    for expert in range(experts):
        own = name.replace("*", str(expert))
        for index, part in enumerate(parts):
            named = own.replace("gate_up_proj", part) if part else own
            yield named, (inner, width), (expert, index * inner)


def no_stack(name: str, shape: tuple[int, ...], wanted: int) -> ModelFileError:
    """Make the error for a tensor of all experts or heads (`*`) that is no stack of them."""
    return ModelFileError(
        f"{name} has shape {list(shape)}; must be a stack of {wanted} dimensions, the first of "
        "them for *"
    )


def check(found: Mapping[str, tuple[int, ...]], arch: ModelArch, where: str) -> None:
    """Check that every tensor of the architecture is there, in its shape, and no other. Raises
    `ModelFileError`."""
    wanted = describe(arch).tensors()
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelFileError(
            f"{where} lacks {some(missing)}, which a {arch.family} model of {arch.layers} layers "
            "needs"
        )
    extra = [name for name in found if name not in wanted]
    if extra:
        raise ModelFileError(
            f"{where} has {some(extra)}, which is not part of the {arch.family} model that its "
            "config describes"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{where}: {name} has shape {list(found[name])}; its config says {list(shape)}"
            )


def some(names: list[str]) -> str:
    """List the first three names, and count the others."""
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
