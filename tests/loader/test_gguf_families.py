"""GGUF of every family says what its folder of safetensors says: the same architecture, and the
same numbers under the same names. The names of the files' tensors are gguf's own."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.base.arch import ModelArch
from headrace.base.arch_gguf import GGUF_ARCHITECTURES, from_gguf
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.loader import open_model
from headrace.loader.gguf import GgufFile
from headrace.loader.weights_gguf import PERMUTED

from .fakes import TOKENS, hf_model, permuted, save_folder
from .test_weights import loaded

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
    "gemma2": ("Gemma2", "gemma2", {**FOUR, "query_pre_attn_scalar": 16}),
    "cohere2": ("Cohere2", "cohere2", FOUR),
    "exaone4": ("Exaone4", "exaone4", FOUR),
    "exaone4 full": (
        "Exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
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
    "minimax_m2": ("MiniMaxM2", "minimax-m2", {**LOCAL, "rotary_dim": 8}),
    "gpt_oss": ("GptOss", "gpt-oss", {**FOUR, **LOCAL, "max_position_embeddings": 16_384}),
}
KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "norm_topk_prob": "expert_weights_norm",
}
"""Key of config.json → key of GGUF, of those that mean the same."""


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes."""
    found = {
        key: value for own, key in KEYS.items() if (value := getattr(config, own, None)) is not None
    }
    rope = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found["block_count"] = config.num_hidden_layers
    found["rope.freq_base"] = float(rope["rope_theta"])
    found["attention.key_length"] = found["attention.value_length"] = head
    if arch in ("phi3", "glm4", "glm4moe", "minimax-m2"):
        found["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if arch in ("glm4moe", "minimax-m2"):
        found["expert_gating_func"] = 2
    if rope["rope_type"] == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = float(rope["factor"])
        original = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
    if arch in ("minimax-m2", "gpt-oss"):
        found["expert_feed_forward_length"] = config.intermediate_size
    if arch == "exaone4" and config.sliding_window:
        kinds = config.layer_types
        found["attention.sliding_window_pattern"] = [kind.startswith("sli") for kind in kinds]
    if rope.get("rope_type") == "longrope":
        found["rope.scaling.original_context_length"] = 128
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(4) / np.log(128)))
    return found


def tensors_of(folder: Path, config: Any, arch: str) -> dict[str, np.ndarray]:
    """The tensors of a folder as the converter writes them: renamed, stacked, permuted, + 1."""
    (number,) = (one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    renamed = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    family = GGUF_ARCHITECTURES[arch]
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if family in PERMUTED and f".{part}_proj." in name:
                data = permuted(data, heads)
        if arch in ("gemma", "gemma2") and name.endswith("norm.weight"):
            data = data + np.float32(1)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if arch == "gpt-oss" and ".experts." in name:
            kind = name.rpartition(".")[2]
            outputs = data if kind.endswith("_bias") else data.swapaxes(1, 2)
            kind = kind.removesuffix("_bias").removesuffix("_proj")
            suffix = "bias" if data.ndim == 2 else "weight"
            at = f"blk.{name.split('.')[2]}"
            parts = {"gate": outputs[:, ::2], "up": outputs[:, 1::2]}
            for part, values in (parts if kind == "gate_up" else {"down": outputs}).items():
                found[f"{at}.ffn_{part}_exps.{suffix}"] = values
            continue
        if name.endswith(".sinks"):
            name += ".weight"
        if name.endswith("input_linear.weight"):
            at = f"blk.{name.split('.')[2]}"
            gate, up = np.split(data, 2, 1)
            found |= {f"{at}.ffn_gate_exps.weight": gate, f"{at}.ffn_up_exps.weight": up}
        elif expert := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name):
            stacks.setdefault(f"{expert[1]}.{expert[2]}.weight", []).append(data)
        else:
            own = renamed.get_name(name, (".weight", ".bias"))
            assert own is not None, name
            found[own] = data.squeeze(0) if name.endswith("shared_expert_gate.weight") else data
    for name, parts in stacks.items():
        own = renamed.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        found[own] = np.stack(parts)
    rope = config.rope_parameters
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            values = np.array(rope[f"{length}_factor"], np.float32)
            found[f"rope_factors_{length}.weight"] = values
    return found


def write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            float: writer.add_float32,
            list: writer.add_array,
        }[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    for name, data in tensors.items():
        blocks = gguf.GGMLQuantizationType.MXFP4 if data.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def both(family: str, folder: Path) -> tuple[Path, Path]:
    """The same model as a folder and as GGUF."""
    kind, arch, values = FAMILIES[family]
    model = hf_model(kind, **values)
    for buffer in model.buffers():
        if buffer.shape == (4,):  # The bias of the choice of four experts.
            buffer.copy_(torch.randn(4))
    save_folder(model, folder / "hf")
    tensors = tensors_of(folder / "hf", model.config, arch)
    path = write(folder / "m.gguf", arch, metadata_of(model.config, arch), tensors)
    return folder / "hf", path


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
def test_both_kinds_of_file_say_the_same(family: str, tmp_path: Path) -> None:
    folder, path = both(family, tmp_path)
    assert rounded(open_model(str(path)).arch) == rounded(open_model(str(folder)).arch)
    theirs, ours = loaded(folder), loaded(path)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        # Gemma's + 1 rounds its norms once.
        torch.testing.assert_close(ours[name], tensor, atol=1e-6 if "norm" in name else 0, rtol=0)


def test_every_architecture_of_gguf_has_a_file_here() -> None:
    elsewhere = {"qwen2", "qwen3", "qwen3moe", "llama", "gemma3"}
    assert {arch for _, arch, _ in FAMILIES.values()} == set(GGUF_ARCHITECTURES) - elsewhere


@pytest.mark.parametrize(
    ("family", "values", "key"),
    [
        ("glm4", {"rope.dimension_count": 7}, "rope.dimension_count"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func"),
        ("glm4_moe", {"expert_group_count": 2}, "expert_group_count"),
        ("minimax_m2", {"expert_gating_func": 0.5}, "expert_gating_func"),
        ("olmoe", {"expert_gating_func": 2}, "expert_gating_func"),
        ("olmo2", {"attention.sliding_window": 64}, "attention.sliding_window"),
        ("exaone4", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("cohere2", {"logit_scale": 0.0}, "logit_scale"),
        ("granite", {"logit_scale": 0.0}, "logit_scale"),
        ("starcoder2", {"embedding_scale": 2.0}, "embedding_scale"),
        ("gpt_oss", {"expert_gating_func": 2}, "expert_gating_func"),
        ("gpt_oss", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "factor"),
        ("qwen2_moe", {"expert_shared_feed_forward_length": 0}, "expert_shared_feed_forward"),
        ("phi3 long", {"rope.scaling.type": 5}, "rope.scaling.type"),
    ],
)
def test_metadata_that_is_not_run_is_named(
    family: str, values: dict[str, Any], key: str, tmp_path: Path
) -> None:
    _, path = both(family, tmp_path)
    file = GgufFile(path)
    arch = file.metadata["general.architecture"]
    factors = {name: [1.0] * 6 for name in file.tensors if name.startswith("rope_factors")}
    from_gguf(file.metadata, file.tensors, factors)
    changed = {f"{arch}.{own}": value for own, value in values.items()}
    with pytest.raises((UnsupportedModel, ModelFileError), match=re.escape(key)):
        from_gguf({**file.metadata, **changed}, file.tensors, factors)


def test_long_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, path = both("phi3 long", tmp_path)
    file = GgufFile(path)
    for bad in ([1.0] * 5, [0.0] * 6, [float("nan")] * 6):
        factors = {f"rope_factors_{length}.weight": bad for length in ("short", "long")}
        with pytest.raises(ModelFileError, match="rope_factors_short"):
            from_gguf(file.metadata, file.tensors, factors)


def test_the_layer_that_predicts_a_second_token_is_not_read(tmp_path: Path) -> None:
    folder, path = both("glm4_moe", tmp_path)
    kind, arch, values = FAMILIES["glm4_moe"]
    config = hf_model(kind, **values).config
    metadata = metadata_of(config, arch) | {"block_count": 3, "nextn_predict_layers": 1}
    more = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    more["blk.2.attn_norm.weight"] = np.ones(64, np.float32)
    write(path, arch, metadata, {**tensors_of(folder, config, arch), **more})
    assert open_model(str(path)).arch.layers == 2
    assert set(loaded(path)) == set(loaded(folder))


def test_a_missing_stack_of_experts_is_named(tmp_path: Path) -> None:
    kind, arch, values = FAMILIES["granitemoe"]
    model = hf_model(kind, **values)
    tensors = tensors_of(save_folder(model, tmp_path / "hf"), model.config, arch)
    del tensors["blk.1.ffn_up_exps.weight"]
    path = write(tmp_path / "m.gguf", arch, metadata_of(model.config, arch), tensors)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.experts\.0\.up_proj"):
        loaded(path)
