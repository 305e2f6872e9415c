"""llama.cpp says of every family's GGUF what we say: the same tokens, as likely."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.environments import LLAMA_CPP, python_of
from headrace import LLM, SamplingParams
from tiny.checkpoints import hf_model
from tiny.gguf_files import WORDS, save_gguf

from .test_gguf_families import DELTA, EXPERTS, FAMILIES, LOCAL, MAMBA

pytestmark = pytest.mark.slow
NARROW = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
ELSEWHERE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen3": ("Qwen3", "qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", "qwen3moe", {**EXPERTS, "moe_intermediate_size": 32}),
    "llama": ("Llama", "llama", {}),
    "mixtral": ("Mixtral", "llama", LOCAL),
    "gemma3": ("Gemma3Text", "gemma3", {"sliding_window": 64, "query_pre_attn_scalar": 16}),
    "qwen 3.5": ("Qwen3_5Text", "qwen35", DELTA),
    "qwen 3.5 mixture": ("Qwen3_5MoeText", "qwen35moe", {**DELTA, **EXPERTS, **NARROW}),
    "qwen 3 next": ("Qwen3Next", "qwen3next", {**DELTA, **EXPERTS, **NARROW}),
    "nemotron h": (
        "NemotronH",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 32,
            "time_step_min": 1e-9,
        },
    ),
    "granite 4": ("GraniteMoeHybrid", "granitehybrid", {**MAMBA, **LOCAL}),
    "granite 4 dense": ("GraniteMoeHybrid", "granitehybrid", {**MAMBA, "num_local_experts": 0}),
}
"""Architectures whose files other tests read."""
UNREAD = ("deepseek_v2",)
"""It takes a latent of queries for granted, but in files of 26 or 27 layers."""
NAMES = {name: values for name, values in {**FAMILIES, **ELSEWHERE}.items() if name not in UNREAD}
PROMPT = list(range(20, 60))
NEAR = 5e-3
"""Between log probabilities: it keeps K and V, and a table of GELU, in half precision."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for number, (name, (kind, arch, values)) in enumerate(NAMES.items()):
        model = hf_model(kind, **values)
        for buffer in model.buffers():
            if buffer.shape == (4,):  # The bias of the choice of four experts.
                buffer.copy_(torch.randn(4))
        found[name] = save_gguf(model, folder / f"{number}.gguf", arch, metadata=WORDS)
    return found


@pytest.fixture(scope="module")
def theirs(files: dict[str, Path]) -> dict[str, list[tuple[int, float]]]:
    lines = "".join(json.dumps([str(path), PROMPT, 12]) + "\n" for path in files.values())
    command = [str(python_of(LLAMA_CPP)), str(Path(__file__).with_name("llamacpp_tokens.py"))]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    return dict(zip(files, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens(name: str, files: dict[str, Path], theirs: dict[str, Any]) -> None:
    assert isinstance(theirs[name], list), theirs[name]
    how = {"kv_dtype": "float32", "max_context": 256, "threads": 1, "context_cache": "0"}
    with LLM(str(files[name]), max_sequences=2, speculate="off", **how) as llm:
        wish = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
        (output,) = llm.generate([PROMPT], wish)
    (choice,) = output.outputs
    assert list(choice.token_ids) == [token for token, _ in theirs[name]]
    for ours, (_, logprob) in zip(choice.logprobs, theirs[name], strict=True):
        assert ours.logprob == pytest.approx(logprob, abs=NEAR)
