"""Configs of the families become architectures, each key of another family a refusal or another
architecture."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

from headrace.base.arch import Caps, Chunks, Rope, Uneven
from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.models.common import NEUTRAL
from headrace.models.reader import from_hf
from headrace.models.registry import TYPES as FAMILIES
from headrace.models.registry import describe
from headrace.roofline.known import KNOWN

FLIPS: dict[str, Any] = {
    "partial_rotary_factor": 0.75,
    "rotary_pct": 0.5,
    "clip_qkv": 8.0,
    "alibi": True,
    "logits_scaling": 2.5,
    "logit_scale": 0.3,
    "residual_multiplier": 0.6,
    "embedding_multiplier": 2.5,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 20.0,
    "mlp_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 3,
    "num_nextn_predict_layers": 2,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "cross_attention_layers": [1],
    "use_parallel_residual": True,
    "no_rope_layers": [1, 0, 1, 1],
    "attention_chunk_size": 64,
    "attn_temperature_tuning": True,
    "num_kv_shared_layers": 1,
    "use_bidirectional_attention": True,
    "altup_num_inputs": 4,
    "hidden_size_per_layer_input": 128,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "use_double_wide_mlp": True,
    "per_layer_config": {"3": {"head_dim": 64}},
    "global_head_dim": 64,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
    "shared_expert_intermediate_size": 24,
    "use_bias": True,
    "attention_out_bias": True,
    "use_parallel_block": True,
    "rotary_dim": 8,
    "qk_norm_type": "per_head",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "n_group": 16,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
    "swiglu_limit": 7.0,
    "index_topk": 64,
    "lm_head_bias": True,
    "attn_output_gate": True,
    "linear_num_value_heads": 4,
    "mamba_d_state": 16,
    "mamba_num_heads": 16,
    "conv_L_cache": 5,
}
"""Keys that some family reads or nobody does, with a value that changes the result."""
_V3 = ("deepseek_v3", "kimi_k2")
SAME: dict[str, tuple[str, ...]] = {
    "n_routed_experts": ("nemotron_h",),
    "n_shared_experts": ("nemotron_h",),
    "use_bias": ("starcoder2",),
    "use_parallel_block": ("cohere", "cohere2"),
    "use_qk_norm": ("minimax_m2", "llama4_text"),
    "use_routing_bias": ("minimax_m2",),
    "scoring_func": ("minimax_m2", *_V3),
    "num_nextn_predict_layers": ("glm4_moe", "deepseek_v2", *_V3, "nemotron_h"),
    "routed_scaling_factor": (*_V3, "nemotron_h"),
    "n_group": ("deepseek_v2", "nemotron_h"),
    "topk_group": ("deepseek_v2", "nemotron_h"),
    "swiglu_limit": ("gpt_oss",),
    "attn_temperature_tuning": ("llama4_text",),
    "enable_moe_block": ("gemma4_text",),
    "use_double_wide_mlp": ("gemma4_text",),
    "global_head_dim": ("gemma4_text",),
    "attn_output_gate": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
}
"""Families whose own value is the flipped one, or that do not read the key's count. Also
families that first ask for a key next to it (experts without a number) or believe one (sizes of
each layer)."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def small(kind: str) -> dict[str, Any]:
    """A config as transformers 5 writes it, with the share of a rotated head outside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING

        like = "deepseek_v3" if kind == "kimi_k2" else kind
        config: dict[str, Any] = CONFIG_MAPPING[like](**SMALL).to_dict()
        if kind == "nemotron_h":
            config["layers_block_type"] = ["linear_attention", "mlp", "full_attention", "mlp"]
        if kind == "gemma4_text":
            config["vocab_size_per_layer_input"] = SMALL["vocab_size"]
        config["model_type"] = kind
    rope = config.get("rope_parameters") or {}
    rope.pop("partial_rotary_factor", None)
    if "_vl_" in kind:
        rope["mrope_section"] = [sum(divmod(config.get("head_dim", 16), 2)) - 4, 2, 2]
    return config


def test_every_key_of_others_is_flipped() -> None:
    assert set(FLIPS) == set(NEUTRAL)


WRAPPERS = {
    "gemma3", "gemma4", "idefics3", "llama4", "llava", "mistral3", "qwen2_audio", "qwen3_5",
    "qwen3_5_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "internvl",
}  # fmt: skip
"""Configs around a text model's, which is a family of its own."""
OURS = {"dit", "pixart", "unet", "dlrm_dcnv2"}
"""Configs of our own, and of pipelines: `tests/engine/test_ranker.py`, `test_denoiser.py`,
`test_pipelines.py`, `test_unets.py`."""


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - WRAPPERS - OURS))
def test_a_key_of_another_family_is_refused_or_heard(kind: str) -> None:
    config = small(kind)
    read = from_hf(config)
    deaf = []
    for key, value in FLIPS.items():
        if kind in SAME.get(key, ()):
            continue
        try:
            if from_hf({**config, key: value}) == read:
                deaf.append(key)
        except HeadraceError as error:
            if key not in str(error):
                deaf.append(f"{key}: {error}")
    assert not deaf


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - WRAPPERS - OURS))
def test_scores_that_no_family_has_are_refused_by_name(kind: str) -> None:
    """DeepSeek-V4's are computed, but its other layers are not."""
    with pytest.raises(UnsupportedModel) as caught:
        from_hf({**small(kind), "scoring_func": "sqrtsoftplus"})
    assert caught.value.param == "scoring_func"


def published(name: str) -> dict[str, Any]:
    return dict(KNOWN[name]["config"])


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_model_has_the_parameters_that_its_authors_count(name: str) -> None:
    """Rounded or cut off, as the number is written."""
    stated = KNOWN[name]["parameters"].removesuffix("B")
    unit = 10.0 ** -len(stated.partition(".")[2])
    counted = sum(map(math.prod, describe(from_hf(published(name))).tensors().values())) / 1e9
    assert float(stated) - unit / 2 <= counted < float(stated) + unit


class Heard(dict[str, Any]):
    """A config that notes which of its keys are asked for, those of the text model within too."""

    def __init__(self, config: dict[str, Any], asked: set[str]) -> None:
        inner = {k: Heard(v, asked) for k, v in config.items() if k == "text_config"}
        super().__init__({**config, **inner})
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


INERT = """
    attention_dropout aux_loss_alpha block_mlp_init_scale block_out_init_scale block_use_xavier_init
    bos_token_id cache_implementation chunk_size conv_use_xavier_init dtype embd_pdrop eos_token_id
    ep_size expert_intermediate_size hidden_dropout
    image_token_id initializer_range mamba_chunk_size mamba_ssm_dtype
    num_logits_to_keep output_router_logits pad_token_id pretraining_tp quantization_config
    rescale_prenorm_residual resid_pdrop residual_in_fp32 router_aux_loss_coef seq_aux
    time_step_floor time_step_max time_step_min torch_dtype transformers_version use_cache
    use_mamba_kernels video_token_id vision_end_token_id vision_start_token_id
"""
"""Keys of training, of generation and of the loader, which no architecture depends on."""
TOLD_ELSEWHERE = """
    block_dim block_norm_eps block_use_swiglu conv_dim conv_dim_out expand experts_per_token
    full_attention_interval full_attn_mod hidden_act initial_context_length intermediate_size
    interpolate_factor layer_switch max_window_layers mtp_num_hidden_layers mtp_transformer_layers
    mtp_use_dedicated_embeddings num_experts top_k_experts
    no_rope_layer_interval sliding_window norm_type num_experts_per_tok num_heads
    num_hidden_layers num_key_value_heads num_mtp_modules num_nextn_predict_layers rms_norm_eps
    sliding_window_pattern time_step_rank use_mtp use_pos_enc use_sliding_window
"""
"""Keys that say once more what another of the same config says, or that their own family's code
does not read."""


@pytest.mark.parametrize("name", KNOWN)
def test_no_key_of_a_published_config_is_unknown(name: str) -> None:
    asked = {*INERT.split(), *TOLD_ELSEWHERE.split()}
    config = published(name)
    from_hf(Heard(config, asked))
    assert {*config, *config.get("text_config", ())} <= asked


def test_what_is_particular_to_a_published_model() -> None:
    read = {name: from_hf(published(name)) for name in KNOWN}
    phi = read["phi-4-mini"]
    assert phi.rope.rotated(phi.head_dim) == 96
    assert (phi.rope.kind, len(phi.rope.long), phi.windows) == ("long", 48, ())
    assert phi.rope.attention_factor == pytest.approx(math.sqrt(1 + 5 / 12))
    glm = read["glm-4-9b-0414"]
    assert (glm.rope.interleaved, glm.rope.rotated(128), glm.qkv_bias) == (True, 64, False)
    assert read["olmo-2-7b"].whole_qk_norm
    gemma = read["gemma-2-2b"]
    assert gemma.windows == (4096, None) * 13
    assert (gemma.caps, gemma.qk_norm) == (Caps(50.0, 30.0), False)
    command = read["command-r7b"]
    assert command.windows == (4096, 4096, 4096, None) * 8
    assert command.nope == (False, False, False, True) * 8
    assert (command.logits_scale, command.rope.interleaved) == (0.25, True)
    exaone = read["exaone-4-32b"]
    assert exaone.windows == (4096, 4096, 4096, None) * 16
    assert exaone.nope == tuple(window is None for window in exaone.windows)
    assert read["starcoder2-3b"].windows == (4096,) * 30
    granite = read["granite-3-1b-a400m"]
    assert granite.moe is not None
    assert (granite.moe.experts, granite.logits_scale) == (32, 1 / 6)
    oss = read["gpt-oss-20b"]
    assert oss.windows == (128, None) * 12
    assert (oss.sinks, oss.qkv_bias, oss.output_bias) == (True, True, True)
    assert oss.moe is not None
    assert (oss.moe.experts, oss.moe.clamped, oss.moe.normalise) == (32, True, True)
    assert (oss.rope.kind, oss.rope.factor, oss.rope.truncate) == ("yarn", 32.0, False)
    gemma = read["gemma-4-31b"]
    assert gemma.windows == (*[1024] * 5, None) * 10
    assert [gemma.kv_shape(layer) for layer in (0, 5)] == [(16, 256), (4, 512)]
    assert gemma.uneven == Uneven(512, 4, one_product=True)
    assert (gemma.rope.kind, gemma.rope.share, gemma.scale) == ("proportional", 0.25, 1.0)
    minimax = read["minimax-m2.5"]
    assert minimax.moe is not None
    assert (minimax.moe.scores, minimax.moe.bias, minimax.rope.share) == ("sigmoid", True, 0.5)


SCOUT = published("llama-4-scout")["text_config"]


def test_llama_4_as_it_is_published() -> None:
    scout = from_hf(SCOUT)
    assert scout.windows == (8192, 8192, 8192, None) * 12
    assert scout.nope == (False, False, False, True) * 12
    assert scout.chunks == Chunks(normed=True, growth=0.1, every=8192)
    assert scout.moe is not None
    assert (scout.moe.inside, scout.moe.shared_intermediate, scout.moe.dense_at) == (True, 8192, ())
    maverick = {**SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2}
    found = from_hf({"model_type": "llama4", "text_config": {**maverick, "use_qk_norm": False}})
    assert found.moe is not None
    assert found.moe.dense_at == tuple(range(0, 48, 2))
    assert found.chunks == Chunks(normed=False, growth=0.1)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"no_rope_layers": [2] * 48}, "no_rope_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        ({"moe_layers": "all"}, "moe_layers"),
        ({"attention_chunk_size": 0}, "attention_chunk_size"),
        ({"floor_scale": 0}, "floor_scale"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_a_llama_4_that_is_not_run_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError)) as caught:
        from_hf({**SCOUT, **values})
    assert caught.value.param == key


def test_the_text_model_within_mistral3_is_ministral_3_or_mistral() -> None:
    text = small("ministral3")
    arch = from_hf({"model_type": "mistral3", "text_config": text})
    assert (arch.growth, arch.rope.kind, arch.rope.attention_factor) == ((0.1, 16384), "yarn", 1.0)
    with pytest.raises(UnsupportedModel) as caught:
        from_hf({"model_type": "mistral3", "text_config": {**text, "model_type": "mistral"}})
    assert caught.value.param == "llama_4_scaling_beta"
    plain = from_hf({"model_type": "mistral3", "text_config": small("mistral")})
    assert plain == from_hf(small("mistral"))
    with pytest.raises(UnsupportedModel) as caught:
        from_hf({"model_type": "mistral3", "text_config": small("llama")})
    assert caught.value.param == "model_type"


def test_only_full_layers_of_olmo3_are_stretched() -> None:
    arch = from_hf(published("olmo-3-7b"))
    assert arch.windows == (4096, 4096, 4096, None) * 8
    assert (arch.rope.kind, arch.rope.factor) == ("yarn", 8.0)
    assert arch.local_rope == Rope(theta=5e5)


LONG = published("phi-4-mini")["rope_scaling"]
SPELT = {"layer_types": None}
ALIKE = {str(layer): {"head_dim": 64, "hidden_size": 8} for layer in range(5, 60, 6)}
TURNED = {"full_attention": {"rope_type": "proportional", "factor": 2.0}}
OSS_ROPE = published("gpt-oss-20b")["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [
        ("phi-4-mini", {"rope_scaling": {**LONG, "long_factor": [1.0]}}, "long_factor"),
        ("phi-4-mini", {"rope_scaling": {**LONG, "short_factor": "x"}}, "short_factor"),
        ("phi-4-mini", {"rope_scaling": {**LONG, "short_factor": [0] * 48}}, "short_factor"),
        ("phi-4-mini", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
        ("phi-4-mini", {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
        ("phi-4-mini", {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ("glm-4-9b-0414", {"partial_rotary_factor": 0.001}, "partial_rotary_factor"),
        ("command-r7b", {"use_parallel_block": False}, "use_parallel_block"),
        ("command-r7b", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("exaone-4-32b", {**SPELT, "sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ("exaone-4-32b", {**SPELT, "sliding_window_pattern": ""}, "sliding_window_pattern"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("gemma-2b", {"hidden_act": "silu"}, "hidden_act"),
        ("ernie-4.5-0.3b", {"use_bias": True}, "use_bias"),
        ("seed-oss-36b", {"mlp_bias": True}, "mlp_bias"),
        ("starcoder2-3b", {"norm_epsilon": 0.0}, "norm_epsilon"),
        ("granite-3-1b-a400m", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("minimax-m2.5", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek-v3", {"scoring_func": "entmax"}, "scoring_func"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("minimax-m2.5", {"use_routing_bias": False}, "use_routing_bias"),
        ("minimax-m2.5", {"rotary_dim": 63}, "partial_rotary_factor"),
        ("gpt-oss-20b", {"swiglu_limit": 8.0}, "swiglu_limit"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("gpt-oss-20b", {"rope_scaling": {**OSS_ROPE, "truncate": 1}}, "truncate"),
        ("gpt-oss-20b", {"sliding_window": 0}, "sliding_window"),
        ("gpt-oss-20b", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3-next-80b-a3b", {"attn_output_gate": False}, "attn_output_gate"),
        ("phi-4-mini", {"lm_head_bias": True}, "lm_head_bias"),
        ("gemma-4-31b", {"num_kv_shared_layers": 60}, "num_kv_shared_layers"),
        ("gemma-4-31b", {"num_kv_shared_layers": 55}, "num_kv_shared_layers"),
        ("gemma-4-31b", {"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config"),
        ("gemma-4-31b", {"per_layer_config": ALIKE}, "per_layer_config"),
        ("gemma-4-31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma-4-31b", {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input"),
        ("gemma-4-31b", {"rope_parameters": TURNED}, "factor"),
        ("gemma-4-26b-a4b", {"top_k_experts": 129}, "top_k_experts"),
        ("nemotron-h-56b", {"hybrid_override_pattern": "ME*E"}, "hybrid_override_pattern"),
        ("nemotron-h-56b", {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        ("nemotron-h-56b", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron-h-56b", {"n_groups": 3}, "n_groups"),
        ("nemotron-h-56b", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ("nemotron-h-56b", {"attention_head_dim": 64}, "attention_head_dim"),
    ],
)
def test_a_value_that_is_not_run_is_named(name: str, values: dict[str, Any], key: str) -> None:
    config = published(name)
    if name.startswith("gemma-4"):
        config = {**config["text_config"], "model_type": "gemma4_text"}
    with pytest.raises((UnsupportedModel, ModelFileError)) as caught:
        from_hf({**config, **values})
    assert caught.value.param == key


def test_which_layers_of_qwen3_mixtures_are_dense() -> None:
    config = published("qwen3-30b-a3b")
    values = {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 3}
    moe = from_hf({**config, **values}).moe
    assert moe is not None
    assert [moe.mixes(layer) for layer in range(6)] == [False, False, True, False, False, True]
