"""Any class of `transformers` at its smallest, and a folder of it in the hub's layout."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

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
