"""GGUF of every family says what its folder of safetensors says: the same architecture, and the
same numbers under the same names. The names of the files' tensors are gguf's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.arch import ModelArch
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.loader import open_model
from headrace.loader.gguf import GgufFile
from headrace.models.reader import GGUF_ARCHITECTURES, from_gguf
from tiny.checkpoints import hf_model, save_folder
from tiny.gguf_files import save_gguf
from tiny.kept import Kept

from .test_weights import loaded

Both = Callable[[str], tuple[Path, Path]]

FOUR = {"num_hidden_layers": 4, "sliding_window": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 6.0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [1.0 + 3 * pair for pair in range(6)],
}
MAMBA = {
    **MULTIPLIERS,
    "logits_scaling": 0.25,
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "position_embedding_type": "nope",
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
HALF_STRETCHED = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
UNEVEN = {
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 64,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
INSIDE = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
}
BESIDE = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 20.0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3": ("Phi3", "phi3", {"sliding_window": 64}),
    "phi3 long": (
        "Phi3",
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.75,
            "rope_parameters": LONG,
        },
    ),
    "glm4": ("Glm4", "glm4", {}),
    "glm4 without bias": ("Glm4", "glm4", {"attention_bias": False}),
    "olmo2": ("Olmo2", "olmo2", {}),
    "olmo3": ("Olmo3", "olmo2", {**FOUR, "rope_parameters": HALF_STRETCHED}),
    "glm": ("Glm", "chatglm", {}),
    "lfm2": ("Lfm2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "gemma2": ("Gemma2", "gemma2", {**FOUR, "query_pre_attn_scalar": 16}),
    "gemma4": ("Gemma4Text", "gemma4", UNEVEN),
    "llama4": ("Llama4Text", "llama4", INSIDE),
    "gemma4 mixture": ("Gemma4Text", "gemma4", {**UNEVEN, **BESIDE}),
    "cohere2": ("Cohere2", "cohere2", FOUR),
    "exaone4": ("Exaone4", "exaone4", FOUR),
    "exaone4 full": (
        "Exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "arcee": ("Arcee", "arcee", {}),
    "starcoder2": ("Starcoder2", "starcoder2", {"sliding_window": 64}),
    "gemma": ("Gemma", "gemma", {}),
    "cohere": ("Cohere", "command-r", {}),
    "seed_oss": ("SeedOss", "seed_oss", {}),
    "ernie4_5": ("Ernie4_5", "ernie4_5", {}),
    "granite": ("Granite", "granite", MULTIPLIERS),
    "granitemoe": ("GraniteMoe", "granitemoe", {**LOCAL, **MULTIPLIERS}),
    "smollm3": ("SmolLM3", "smollm3", {"num_hidden_layers": 4}),
    "olmoe": ("Olmoe", "olmoe", {**EXPERTS, "num_key_value_heads": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        "qwen2moe",
        {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "glm4_moe": (
        "Glm4Moe",
        "glm4moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "deepseek_v2": ("DeepseekV2", "deepseek2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        "deepseek2",
        {**LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": STRETCHED},
    ),
    "minimax_m2": ("MiniMaxM2", "minimax-m2", {**LOCAL, "rotary_dim": 8}),
    "gpt_oss": ("GptOss", "gpt-oss", {**FOUR, **LOCAL, "max_position_embeddings": 16_384}),
}


def write_both(folder: Path, family: str) -> None:
    """Write the same model as a folder and as GGUF."""
    kind, arch, values = FAMILIES[family]
    model = hf_model(kind, **values)
    for buffer in model.buffers():
        if buffer.shape == (4,):  # The bias of the choice of four experts.
            buffer.copy_(torch.randn(4))
    save_folder(model, folder / "hf")
    save_gguf(model, folder / "m.gguf", arch)


@pytest.fixture
def both(kept: Kept) -> Both:
    """`both(family)`: the folder and the GGUF of one model."""

    def get(family: str) -> tuple[Path, Path]:
        folder = kept(write_both, family)
        return folder / "hf", folder / "m.gguf"

    return get


def rounded(arch: ModelArch) -> dict[str, Any]:
    """Its fields, numbers to seven digits: GGUF keeps them in fp32."""

    def to(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, tuple):
            return tuple(map(to, value))
        return {k: to(v) for k, v in value.items()} if isinstance(value, dict) else value

    return {key: to(value) for key, value in asdict(arch).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_file_say_the_same(family: str, both: Both) -> None:
    folder, path = both(family)
    assert rounded(open_model(str(path)).arch) == rounded(open_model(str(folder)).arch)
    theirs, ours = loaded(folder), loaded(path)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        # Gemma's + 1 rounds its norms once.
        torch.testing.assert_close(ours[name], tensor, atol=1e-6 if "norm" in name else 0, rtol=0)


def test_every_architecture_of_gguf_has_a_file_here() -> None:
    elsewhere = {"qwen2", "qwen3", "qwen3moe", "llama", "gemma3", "granitehybrid"}
    elsewhere |= {"qwen35", "qwen35moe", "qwen3next", "nemotron_h"}
    elsewhere |= {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
    assert {arch for _, arch, _ in FAMILIES.values()} == set(GGUF_ARCHITECTURES) - elsewhere


@pytest.mark.parametrize(
    ("family", "values", "key"),
    [
        ("glm4", {"rope.dimension_count": 7}, "rope.dimension_count"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func"),
        ("glm4_moe", {"expert_group_count": 2}, "expert_group_count"),
        ("minimax_m2", {"expert_gating_func": 0.5}, "expert_gating_func"),
        ("olmoe", {"expert_gating_func": 2}, "expert_gating_func"),
        ("olmo2", {"attention.sliding_window": 2**28}, "attention.sliding_window"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("glm", {"rope.dimension_count": 7}, "rope.dimension_count"),
        ("exaone4", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("cohere2", {"logit_scale": 0.0}, "logit_scale"),
        ("granite", {"logit_scale": 0.0}, "logit_scale"),
        ("starcoder2", {"embedding_scale": 2.0}, "embedding_scale"),
        ("gpt_oss", {"expert_gating_func": 2}, "expert_gating_func"),
        ("gpt_oss", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "factor"),
        ("qwen2_moe", {"expert_shared_feed_forward_length": 0}, "expert_shared_feed_forward"),
        ("gemma4", {"attention.shared_kv_layers": 5}, "attention.shared_kv_layers"),
        ("gemma4", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 1, 1, 1, 1]}, "head_count_kv"),
        ("gemma4", {"attention.value_length_swa": 8}, "attention.value_length_swa"),
        ("gemma4", {"feed_forward_length": [96] * 5 + [192]}, "feed_forward_length"),
        ("phi3 long", {"rope.scaling.type": 5}, "rope.scaling.type"),
    ],
)
def test_metadata_that_is_not_run_is_named(
    family: str, values: dict[str, Any], key: str, both: Both
) -> None:
    _, path = both(family)
    file = GgufFile(path)
    arch = file.metadata["general.architecture"]
    factors = {name: [1.0] * 6 for name in file.tensors if name.startswith("rope_factors")}
    if "rope_freqs.weight" in file.tensors:
        factors["rope_freqs.weight"] = file.view("rope_freqs.weight").tolist()
    from_gguf(file.metadata, file.tensors, factors)
    changed = {f"{arch}.{own}": value for own, value in values.items()}
    with pytest.raises((UnsupportedModel, ModelFileError), match=re.escape(key)):
        from_gguf({**file.metadata, **changed}, file.tensors, factors)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"ssm.time_step_rank": 7}, "ssm.time_step_rank"),
        ({"ssm.group_count": 3}, "ssm.time_step_rank"),
        ({"ssm.conv_kernel": 0}, "ssm.conv_kernel"),
        ({"attention.head_count_kv": 2}, "attention.head_count_kv"),
        ({"attention.head_count_kv": [0, 2, 2]}, "attention.head_count_kv"),
        ({"rope.scaling.finetuned": 1}, "rope.scaling.finetuned"),
        ({"expert_gating_func": 2}, "expert_gating_func"),
    ],
)
def test_states_that_do_not_fit_are_refused(
    tmp_path: Path, values: dict[str, Any], key: str
) -> None:
    """Granite 4: what a folder says in one product is two here, so it is no member of `FAMILIES`;
    llama.cpp reads it as we do."""
    model = hf_model("GraniteMoeHybrid", **MAMBA, **LOCAL)
    file = GgufFile(save_gguf(model, tmp_path / "m.gguf", "granitehybrid"))
    arch = from_gguf(file.metadata, file.tensors)
    assert arch.recurrence is not None
    assert arch.recurrence.layers == (0,)
    assert arch.nope == (True, True)
    changed = {f"granitehybrid.{own}": value for own, value in values.items()}
    with pytest.raises((UnsupportedModel, ModelFileError), match=re.escape(key)):
        from_gguf({**file.metadata, **changed}, file.tensors)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"attention.recurrent_layers": [True]}, "attention.recurrent_layers"),
        ({"attention.recurrent_layers": [True, 2]}, "attention.recurrent_layers"),
        ({"ssm.time_step_rank": 5}, "ssm.time_step_rank"),
        ({"rope.dimension_count": 7}, "rope.dimension_count"),
    ],
)
def test_delta_rules_that_do_not_fit_are_refused(
    tmp_path: Path, values: dict[str, Any], key: str
) -> None:
    """Qwen3.5: value heads take key heads in turn here, so it is no member of `FAMILIES` either."""
    model = hf_model("Qwen3_5Text", **DELTA)
    file = GgufFile(save_gguf(model, tmp_path / "m.gguf", "qwen35"))
    arch = from_gguf(file.metadata, file.tensors)
    assert arch.recurrence is not None
    assert arch.recurrence.tiled
    by_rule = {**file.metadata, "qwen35.full_attention_interval": 2}
    del by_rule["qwen35.attention.recurrent_layers"]
    assert from_gguf(by_rule, file.tensors) == arch
    changed = {f"qwen35.{own}": value for own, value in values.items()}
    with pytest.raises((UnsupportedModel, ModelFileError), match=re.escape(key)):
        from_gguf({**file.metadata, **changed}, file.tensors)


def test_pairs_that_turn_in_part_are_refused(both: Both) -> None:
    _, path = both("gemma4")
    file = GgufFile(path)
    good = file.view("rope_freqs.weight").tolist()
    assert from_gguf(file.metadata, file.tensors, {"rope_freqs.weight": good}).rope.share == 0.25
    for bad in (good[1:], [2.0, *good[1:]], [*good[:-1], 1.0]):
        with pytest.raises(UnsupportedModel, match="rope_freqs"):
            from_gguf(file.metadata, file.tensors, {"rope_freqs.weight": bad})


def test_long_factors_that_do_not_fit_are_refused(both: Both) -> None:
    _, path = both("phi3 long")
    file = GgufFile(path)
    for bad in ([1.0] * 5, [0.0] * 6, [float("nan")] * 6):
        factors = {f"rope_factors_{length}.weight": bad for length in ("short", "long")}
        with pytest.raises(ModelFileError, match="rope_factors_short"):
            from_gguf(file.metadata, file.tensors, factors)


def test_the_layer_that_predicts_a_second_token_is_not_read(tmp_path: Path) -> None:
    kind, arch, values = FAMILIES["glm4_moe"]
    model = hf_model(kind, **values)
    metadata = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    more = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    more["blk.2.attn_norm.weight"] = np.ones(64, np.float32)
    path = save_gguf(model, tmp_path / "m.gguf", arch, metadata=metadata, extra=more)
    assert open_model(str(path)).arch.layers == 2
    assert set(loaded(path)) == set(loaded(save_folder(model, tmp_path / "hf")))


def test_a_missing_stack_of_experts_is_named(tmp_path: Path) -> None:
    kind, arch, values = FAMILIES["granitemoe"]
    model, dropped = hf_model(kind, **values), ("blk.1.ffn_up_exps.weight",)
    path = save_gguf(model, tmp_path / "m.gguf", arch, drop=dropped)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.experts\.0\.up_proj"):
        loaded(path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gate_above_up_of_all_experts_may_be_one_tensor(tmp_path: Path, kind: str) -> None:
    name, arch, values = FAMILIES["qwen2_moe"]
    model = hf_model(name, **values)
    types = {"_exps.weight": kind}
    apart = GgufFile(save_gguf(model, tmp_path / "apart.gguf", arch))
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1) for part in ("gate", "up")]
    both = {
        f"blk.{layer}.ffn_gate_up_exps.weight": np.concatenate(
            [apart.view(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")], 1
        )
        for layer in (0, 1)
    }
    more = {"drop": tuple(names), "extra": both, "quantise": types}
    joined = loaded(save_gguf(model, tmp_path / "joined.gguf", arch, **more))
    wanted = loaded(save_gguf(model, tmp_path / "again.gguf", arch, quantise=types))
    assert set(joined) == set(wanted)
    for each, weight in wanted.items():
        ours, theirs = (getattr(one, "data", one) for one in (joined[each], weight))
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
