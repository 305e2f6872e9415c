"""Tiny models on disk: the real classes of transformers, written by the reference packages."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = [f"t{i}" for i in range(317)] + ["<|im_end|>", "<|endoftext|>", "tail"]


def hf_model(kind: str, **values: Any) -> Any:
    """A random model of `kind` ("Llama", "Qwen2", …); norms too are random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **values})
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model.eval()


def save_folder(model: Any, folder: Path, **files: Any) -> Path:
    """A folder in Hugging Face layout with the least of a tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    contents: dict[str, Any] = {
        "tokenizer.json": {
            "added_tokens": [
                {"id": 1, "content": "<s>"},
                {"id": 2, "content": "</s>"},
                {"id": 317, "content": "<|im_end|>"},
            ],
            "post_processor": None,
            "model": {"type": "BPE", "vocab": {"a": 3}, "merges": []},
        },
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        **files,
    }
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permuted(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows as the reference converter lays q and k of llama files."""
    rows = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return rows.swapaxes(1, 2).reshape(data.shape)


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
    """The model as the reference converter would write it; `quantise`: GGUF suffix → type."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS[: config.vocab_size])
    writer.add_token_types([1] * 317 + [3, 3, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)](key, value)
    for name, data in {**gguf_tensors(model, arch), **(extra or {})}.items():
        if name in drop:
            continue
        kind = (quantise or {}).get(name.split(".", 2)[-1] if name[:3] == "blk" else name, "F32")
        if kind == "F32":
            writer.add_tensor(name, data)
        else:
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """GGUF name → fp32 data, with the converter's changes of rows and norms."""
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    gemma = arch == "gemma3"
    norms = (
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
        if gemma
        else {"post_attention_layernorm": "ffn_norm"}
    )
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if gemma and name.endswith("norm.weight"):
            data = data + np.float32(1)
        for heads, part in (
            (model.config.num_attention_heads, "q_proj"),
            (model.config.num_key_value_heads, "k_proj"),
        ):
            if arch == "llama" and f".{part}." in name:
                data = permuted(data, heads)
        stem, suffix = name.rsplit(".", 1)
        if stem in _TOP:
            tensors[f"{_TOP[stem]}.{suffix}"] = data
            continue
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            layer = name.split(".")[2]
            halves = (
                {
                    "ffn_gate_exps": data[:, : data.shape[1] // 2],
                    "ffn_up_exps": data[:, data.shape[1] // 2 :],
                }
                if name.endswith("gate_up_proj")
                else {"ffn_down_exps": data}
            )
            for each, half in halves.items():
                tensors[f"blk.{layer}.{each}.weight"] = np.ascontiguousarray(half)
            continue
        _, _, layer, part = stem.split(".", 3)
        part = part.replace("block_sparse_moe", "mlp")
        tensors[f"blk.{layer}.{ {**_NAMES, **norms}[part] }.{suffix}"] = data
    assert not experts
    return tensors
