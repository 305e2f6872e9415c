"""The models of `checkpoints` as GGUF, as the reference converter would write them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from headrace.models.reader import GGUF_ARCHITECTURES, from_hf
from headrace.models.registry import FAMILIES
from tiny.checkpoints import TOKENS, save_folder

VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 317 + [3, 3, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
"""Metadata of the vocabulary that `checkpoints` has."""
WORDS: dict[str, Any] = {
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["t", "1", "t1", *(f"x{number}" for number in range(317))],
    "tokenizer.ggml.token_type": [1] * 320,
    "tokenizer.ggml.merges": ["t 1"],
}
"""A vocabulary that llama.cpp takes, in which no name means an end."""
MAMBA = ("mamba", "linear_attention")
DELTA = ("qwen35", "qwen35moe", "qwen3next")
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
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
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
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "topk_group": "expert_group_used_count",
}
"""Key of config.json → key of GGUF, of those that mean the same."""


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes."""
    found = {
        key: value for own, key in KEYS.items() if (value := getattr(config, own, None)) is not None
    }
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"}
    rope = rope.get("full_attention", rope)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found["block_count"] = config.num_hidden_layers
    found["rope.freq_base"] = float(rope["rope_theta"])
    found["attention.key_length"] = found["attention.value_length"] = head
    if arch == "gemma4":
        found |= gemma4_sizes(config)
    if arch == "llama4":
        found["expert_feed_forward_length"] = config.intermediate_size
        found["feed_forward_length"] = config.intermediate_size_mlp
        found["interleave_moe_layer_step"] = config.interleave_moe_layer_step
        found["rope.dimension_count"] = head
    if arch == "granitehybrid":
        heads, kinds = config.num_key_value_heads, config.layer_types
        found["attention.head_count_kv"] = [0 if k in MAMBA else heads for k in kinds]
        found["ssm.conv_kernel"], found["ssm.state_size"] = (
            config.mamba_d_conv,
            config.mamba_d_state,
        )
        found["ssm.group_count"] = config.mamba_n_groups
        found["ssm.inner_size"] = config.mamba_expand * config.hidden_size
        found["ssm.time_step_rank"] = config.mamba_n_heads
        found["rope.scaling.finetuned"] = False
        found["expert_shared_feed_forward_length"] = config.shared_intermediate_size
        if not config.num_local_experts:
            del found["expert_count"], found["expert_used_count"]
            found["feed_forward_length"] = config.shared_intermediate_size
    if arch == "nemotron_h":
        kinds, heads = config.layers_block_type, config.num_key_value_heads
        found["attention.head_count_kv"] = [heads if k == "full_attention" else 0 for k in kinds]
        inner = config.intermediate_size
        found["feed_forward_length"] = [inner if k == "mlp" else 0 for k in kinds]
        found["ssm.conv_kernel"], found["ssm.state_size"] = (
            config.conv_kernel,
            config.ssm_state_size,
        )
        found["ssm.group_count"], found["ssm.time_step_rank"] = (
            config.n_groups,
            config.mamba_num_heads,
        )
        found["ssm.inner_size"] = config.mamba_num_heads * config.mamba_head_dim
        for epsilon in ("", "_rms"):
            found[f"attention.layer_norm{epsilon}_epsilon"] = config.layer_norm_epsilon
        found = {key: value for key, value in found.items() if not key.startswith("expert_")}
    if arch in DELTA:
        found["ssm.conv_kernel"] = config.linear_conv_kernel_dim
        found["ssm.state_size"] = config.linear_key_head_dim
        found["ssm.group_count"] = config.linear_num_key_heads
        found["ssm.time_step_rank"] = config.linear_num_value_heads
        found["ssm.inner_size"] = config.linear_value_head_dim * config.linear_num_value_heads
        kinds = config.layer_types
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
        found["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
        found["rope.dimension_sections"] = [2, 1, 1, 0]
    if arch == "lfm2":
        heads = config.num_key_value_heads
        found["attention.head_count_kv"] = [0 if k == "conv" else heads for k in config.layer_types]
        found["feed_forward_length"] = from_hf(config.to_dict()).intermediate
    if arch in ("phi3", "chatglm", "glm4", "glm4moe", "minimax-m2"):
        found["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if arch in ("glm4moe", "minimax-m2"):
        found["expert_gating_func"] = 2
    if arch == "deepseek2":
        rotary = found["rope.dimension_count"] = config.qk_rope_head_dim
        own = config.qk_nope_head_dim + rotary, config.v_head_dim
        cached = config.kv_lora_rank + rotary, config.kv_lora_rank
        for part, size, mla in zip(("key", "value"), cached, own, strict=True):
            found[f"attention.{part}_length"] = size
            found[f"attention.{part}_length_mla"] = mla
        found["attention.head_count_kv"] = 1
        sigmoid = config.model_type == "deepseek_v3"
        found["expert_gating_func"] = 2 if sigmoid else 1
        if rope.get("mscale_all_dim"):
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
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


def gemma4_sizes(config: Any) -> dict[str, Any]:
    """The keys of Gemma 4, whose full layers have heads of their own."""
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    each = [config.per_layer_config[layer] for layer in range(len(kinds))]
    full = each[kinds.index(False)].head_dim
    shared, rope = config.num_kv_shared_layers, config.rope_parameters
    inner = [config.intermediate_size] * len(kinds)
    for layer in range(len(kinds) - shared, len(kinds)):
        inner[layer] *= 2 if config.use_double_wide_mlp else 1
    sizes = {"attention.key_length": full, "attention.value_length": full}
    sizes |= {f"{key}_swa": config.head_dim for key in sizes}
    return {
        **sizes,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "attention.head_count_kv": [one.num_key_value_heads for one in each],
        "attention.sliding_window_pattern": kinds,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": inner,
        **({"expert_used_count": config.top_k_experts} if config.enable_moe_block else {}),
    }


def tensors_of(state: dict[str, torch.Tensor], config: Any, arch: str) -> dict[str, np.ndarray]:
    """Return a folder's tensors as the converter writes them: renamed, stacked, permuted, + 1."""
    (number,) = (one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    renamed = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names = FAMILIES[GGUF_ARCHITECTURES[arch]].names
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in state.items():
        data = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if names.permuted and f".{part}_proj." in name:
                data = permuted(data, heads)
        plus = arch in ("gemma", "gemma2", "gemma3") or arch in DELTA
        if plus and name.endswith("norm.weight") and ".linear_attn." not in name:
            data = data + np.float32(1)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if arch == "llama4" and ".experts." in name:
            at, outputs = f"blk.{name.split('.')[2]}", data.swapaxes(1, 2)
            if name.endswith("gate_up_proj"):
                gate, up = np.split(outputs, 2, 1)
                found |= {f"{at}.ffn_gate_exps.weight": gate, f"{at}.ffn_up_exps.weight": up}
            else:
                found[f"{at}.ffn_down_exps.weight"] = outputs
            continue
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
        if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
            plain, at = config.qk_nope_head_dim, f"blk.{name.split('.')[2]}"
            heads = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            found[f"{at}.attn_k_b.weight"] = heads[:, :plain].swapaxes(1, 2)
            found[f"{at}.attn_v_b.weight"] = heads[:, plain:]
            continue
        if name.endswith((".sinks", ".layer_scalar")):
            name += ".weight"
        at = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
        if scale := next((own for end, own in scales.items() if name.endswith(end)), None):
            found[f"{at}.{scale}.scale"] = data
            continue
        if arch == "gemma4" and ".experts." in name:
            name += ".weight"
        if ".shared_mlp." in name:
            end = "_shexp.weight" if config.num_local_experts else ".weight"
            at = f"blk.{name.split('.')[2]}.ffn"
            if name.endswith("output_linear.weight"):
                found[f"{at}_down{end}"] = data
            else:
                found[f"{at}_gate{end}"], found[f"{at}_up{end}"] = np.split(data, 2)
            continue
        if ".linear_attn." in name:
            found |= delta_tensors(data, name, config)
            continue
        if ".mamba." in name or (arch == "nemotron_h" and not is_plain(name)):
            if name.endswith(("A_log", ".D")):
                data = -np.exp(data)[:, None] if name.endswith("A_log") else data[:, None]
                found[f"blk.{name.split('.')[2]}.ssm_{'a' if 'A_log' in name else 'd'}"] = data
                continue
            if name.endswith("norm.weight"):
                groups = config.n_groups if arch == "nemotron_h" else config.mamba_n_groups
                data = data.reshape(groups, -1)
            elif name.endswith("dt_bias"):
                found[f"blk.{name.split('.')[2]}.ssm_dt.bias"] = data
                continue
            elif name.endswith("conv1d.weight"):
                data = data.squeeze(1)
        if name.endswith("input_linear.weight"):
            at = f"blk.{name.split('.')[2]}"
            gate, up = np.split(data, 2, 1)
            found |= {f"{at}.ffn_gate_exps.weight": gate, f"{at}.ffn_up_exps.weight": up}
        elif expert := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name):
            stacks.setdefault(f"{expert[1]}.{expert[2]}.weight", []).append(data)
        else:
            own = renamed.get_name(name, (".weight", ".bias"))
            assert own is not None, name
            if name.endswith("shared_expert_gate.weight"):
                data = data.squeeze(0)
            elif name.endswith("conv.weight"):
                data = data.squeeze(1)
            found[own] = data
    for name, parts in stacks.items():
        own = renamed.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        found[own] = np.stack(parts)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"}
    if arch == "gemma4":
        pairs = gemma4_sizes(config)["attention.key_length"] // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1] * turning + [1e30] * (pairs - turning), "f4")
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            values = np.array(rope[f"{length}_factor"], np.float32)
            found[f"rope_factors_{length}.weight"] = values
    return found


def is_plain(name: str) -> bool:
    """Is this a tensor of Nemotron-H that is no state's?"""
    parts = ("A_log", ".D", "mixer.norm.weight", "dt_bias", "conv1d.weight")
    return not name.endswith(parts)


def delta_tensors(data: np.ndarray, name: str, config: Any) -> dict[str, np.ndarray]:
    """Qwen3.5's value heads take key heads in turn; Qwen3-Next's stay, with one product less."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim

    def turned(rows: np.ndarray, each: int) -> np.ndarray:
        if config.model_type == "qwen3_next":
            return rows
        cut = rows.reshape(keys, values // keys, each, *rows.shape[1:])
        return cut.swapaxes(0, 1).reshape(rows.shape)

    at, part = f"blk.{name.split('.')[2]}", name.split(".linear_attn.")[1]
    ahead = 2 * keys * config.linear_key_head_dim
    match part.removesuffix(".weight"):
        case "in_proj_qkvz":
            cut = data.reshape(keys, -1, data.shape[1])
            ends = np.cumsum([config.linear_key_head_dim] * 2 + [values // keys * size])
            *qkv, z = (each.reshape(-1, data.shape[1]) for each in np.split(cut, ends, 1))
            return {f"{at}.attn_qkv.weight": np.concatenate(qkv), f"{at}.attn_gate.weight": z}
        case "in_proj_ba":
            return {f"{at}.ssm_ba.weight": data}
        case "in_proj_qkv":
            rows = np.concatenate([data[:ahead], turned(data[ahead:], size)])
            return {f"{at}.attn_qkv.weight": rows}
        case "conv1d":
            data = data.squeeze(1)
            rows = np.concatenate([data[:ahead], turned(data[ahead:], size)])
            return {f"{at}.ssm_conv1d.weight": rows}
        case "in_proj_z":
            return {f"{at}.attn_gate.weight": turned(data, size)}
        case "in_proj_b":
            return {f"{at}.ssm_beta.weight": turned(data, 1)}
        case "in_proj_a":
            return {f"{at}.ssm_alpha.weight": turned(data, 1)}
        case "A_log":
            return {f"{at}.ssm_a": turned(-np.exp(data), 1)}
        case "dt_bias":
            return {f"{at}.ssm_dt.bias": turned(data, 1)}
        case "out_proj":
            return {f"{at}.ssm_out.weight": np.ascontiguousarray(turned(data.T, size).T)}
        case other:
            assert other == "norm", name
            return {f"{at}.ssm_norm.weight": data}


def permuted(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows as the reference converter lays q and k of llama files."""
    rows = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return rows.swapaxes(1, 2).reshape(data.shape)


def write_gguf(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, str] | None = None,
) -> Path:
    """Write a file of these keys and tensors; `kinds`: end of a tensor's name → its type. Bytes are
    blocks of it, or of MXFP4."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for name, data in tensors.items():
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), "F32")
        qtype = gguf.GGMLQuantizationType[kind]
        if data.dtype == np.uint8:
            raw = gguf.GGMLQuantizationType.MXFP4 if kind == "F32" else qtype
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
        elif kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(data))
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_gguf(
    model: Any,
    path: Path,
    arch: str,
    *,
    quantise: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a model of `checkpoints`; `quantise`: end of a tensor's name → its type."""
    # What Gemma 4's layers have each of their own is here read of all, too.
    model.config.allow_global_per_layer_attribute_access = True
    with tempfile.TemporaryDirectory() as folder:
        state = load_file(save_folder(model, Path(folder)) / "model.safetensors")
        tensors = {**tensors_of(state, model.config, arch), **(extra or {})}
    said = {f"{arch}.{key}": value for key, value in metadata_of(model.config, arch).items()}
    return write_gguf(
        path,
        arch,
        {**said, **VOCABULARY, **(metadata or {})},
        {name: data for name, data in tensors.items() if name not in drop},
        quantise,
    )
