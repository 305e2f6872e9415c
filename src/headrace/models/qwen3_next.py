"""Qwen3-Next and Qwen3.5 (Qwen team 2025, 2026): three of four layers have a gated delta rule in
place of attention, and attention has a gate."""

from __future__ import annotations

from ..base.arch import ModelArch, Rope
from ..base.errors import ModelFileError
from ..base.graph import ActivationSpec, Graph, Value
from ..base.recurrent import ConvSpec, DeltaSpec
from ..layers.attention import attended, output
from ..layers.description import Description, vector
from ..layers.states import taps
from .common import MIXTURE, NO_WINDOW, UNBIASED
from .family import Config, Family, Names, integer
from .llama import hybrid
from .qwen import GATED_NAMES, SHARED_EXPERT, SPARSE, dense_layers
from .ropes import parameters, rope_of, share
from .states import LINEAR, multiple, state_fields, state_names
from .windows import layer_kinds, no_windows


def qwen3_next(arch: ModelArch) -> Graph:
    """Describe the pre-norm decoder with the delta rule in most layers."""
    return hybrid(arch, _delta_net, "linear_attn", _gated_attention)


def _gated_attention(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe attention whose result a sigmoid of `{at}.gate_proj` multiplies."""
    mixed = attended(to, layer, x, at)
    gate = to.linear(x, f"{at}.gate_proj", outputs=mixed.width, purpose="qkv")
    gated = to.node("multiply", (mixed, gate), mixed.width, spec=ActivationSpec("sigmoid"))
    return output(to, gated, at)


def _delta_net(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe a Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): `{at}.in_proj_{qkv,z,b,a}`, a
    convolution over q, k and v, the delta rule, and `{at}.out_proj`."""
    arch, of = to.arch, to.arch.recurrence
    assert of is not None
    sizes = of.key_heads, of.value_heads, of.key_size, of.value_size
    spec = DeltaSpec(layer, *sizes, arch.norm_eps, of.tiled)
    widths = [spec.mixed, spec.values, of.value_heads, of.value_heads]
    names = [f"{at}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    all_four = to.linear(x, *names, outputs=widths, purpose="state_in")
    mixed, *gates = to.parts(all_four, widths)
    kernels, conv = taps(to, f"{at}.conv1d", spec.mixed), ConvSpec(layer, of.taps, "silu")
    mixed = to.node("short_conv", (mixed,), spec.mixed, kernels, conv)
    heads = of.value_heads
    vectors = [vector([f"{at}.{name}"], [heads]) for name in ("A_log", "dt_bias")]
    vectors.append(vector([f"{at}.norm.weight"], [of.value_size]))
    out = to.node("delta_rule", (mixed, *gates), spec.values, vectors, spec)
    return to.linear(out, f"{at}.out_proj", outputs=arch.hidden, purpose="state_out")


_DEFAULTS = {
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_EVERY = integer("full_attention_interval", "full_attention_interval", 1, 2**10, 4)
_VALUE_SIZE = integer("linear_value_head_dim", "", 2, 2**10)


def _value_size(config: Config) -> int:
    multiple(config, "recurrence.value_heads", "recurrence.key_heads", "linear_num_value_heads")
    return int(config.read(_VALUE_SIZE))


def _layers(config: Config) -> tuple[int, ...]:
    """Return the layers with the delta rule: those listed, or all except every n-th."""
    fields, layers = config.fields, config["layers"]
    key = "attention.recurrent_layers" if config.gguf else "layer_types"
    named, flags = fields.raw(key), []
    if named is None:
        every = config.read(_EVERY)
        flags = [bool((layer + 1) % every) for layer in range(layers)]
    elif not config.gguf:
        flags = [kind == LINEAR for kind in layer_kinds(config, ("full_attention", LINEAR))]
    elif isinstance(named, list):
        # Layers that predict a second token come after the last layer and have attention.
        flags = named[:layers]
    if len(flags) != layers or not all(one in (0, 1) for one in flags):
        raise ModelFileError(
            f"{fields.where}: {fields.prefix}{key} must be a flag for each of {layers} layers",
            param=key,
        )
    return tuple(layer for layer, own in enumerate(flags) if own)


def _rope(config: Config) -> Rope:
    """Read the rope. Positions of a text are the same along all three axes of an image."""
    given = parameters(config)
    given.pop("partial_rotary_factor", None)
    if config.family.name != "qwen3_next":
        given.pop("mrope_section", None)
    return rope_of(config, given)


def _tiled(config: Config) -> bool:
    """Return whether value heads use key heads in turn, as in GGUF of Qwen3.5."""
    several = config["recurrence.value_heads"] > config["recurrence.key_heads"]
    return config.gguf and config.family.name != "qwen3_next" and several


_FIELDS = {
    "rope": _rope,
    "rope.share": share,
    "windows": no_windows,
    "norm_offset": 1.0,
    "qk_norm": True,
    "recurrence.kind": "delta",
    "recurrence.layers": _layers,
    **state_fields(
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_conv_kernel_dim",
        _value_size,
    ),
    "recurrence.tiled": _tiled,
}
_MIXTURE = {
    **_FIELDS,
    **MIXTURE,
    "moe.normalise": MIXTURE["moe.normalise"]._replace(default=True),
    **SHARED_EXPERT,
    "moe.dense_at": dense_layers,
}
_ALLOWED = {**UNBIASED, **NO_WINDOW, "attn_output_gate": (True,)}
_OWN = ("partial_rotary_factor", "nextn_predict_layers")
_NAMES = {
    **state_names("linear_attn"), "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
}  # fmt: skip
_NEXT_NAMES = {
    **_NAMES,
    **GATED_NAMES,
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
}
_UNREAD = r"(mtp\.|model\.visual\.).*"
"""The head that predicts a second token, and an image encoder."""
_CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_MOE_CLASSES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
FAMILIES = (
    Family(
        "qwen3_next", qwen3_next, {"qwen3_next": ("Qwen3NextForCausalLM",)}, "qwen3next",
        defaults={
            **_DEFAULTS, **_EXPERTS, "num_key_value_heads": 2, "intermediate_size": 5632,
            "num_experts": 512, "num_experts_per_tok": 10,
        },
        fields=_MIXTURE,
        allowed=_ALLOWED,
        own=(*_OWN, *SPARSE),
        names=Names(_NEXT_NAMES, unread=_UNREAD, predicts=True),
    ),
    Family(
        "qwen3_5", qwen3_next, {"qwen3_5": _CLASSES, "qwen3_5_text": _CLASSES}, "qwen35",
        defaults={**_DEFAULTS, "num_key_value_heads": 4},
        fields=_FIELDS,
        allowed=_ALLOWED,
        own=_OWN,
        names=Names(_NAMES, unread=_UNREAD, predicts=True),
    ),
    Family(
        "qwen3_5_moe", qwen3_next, {"qwen3_5_moe": _MOE_CLASSES, "qwen3_5_moe_text": _MOE_CLASSES},
        "qwen35moe",
        defaults={
            **_DEFAULTS, **_EXPERTS, "num_key_value_heads": 2, "intermediate_size": 512,
            "num_experts": 256, "num_experts_per_tok": 8,
        },
        fields=_MIXTURE,
        allowed=_ALLOWED,
        own=_OWN,
        names=Names({**_NAMES, **GATED_NAMES}, unread=_UNREAD, predicts=True),
    ),
)  # fmt: skip
