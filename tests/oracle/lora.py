"""Adapters as PEFT makes and saves them, and models into which PEFT merged them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers


def make(model: Path, folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """A random adapter for the model, saved in `folder`."""
    settings = {
        "r": 4,
        "lora_alpha": 16,
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    }
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**{**settings, **config}))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            # PEFT starts with B = 0, which adds nothing.
            parameter.data = torch.randn_like(parameter) * 0.15
    adapted.save_pretrained(folder)
    return folder


def merged(model: Path, adapter: Path) -> Any:
    """The model with the adapter's additions in its weights."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
