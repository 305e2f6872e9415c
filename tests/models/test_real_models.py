"""The catalog's models against transformers, on the same dequantised weights.

transformers could read the GGUF file itself, but slowly and with the dequantisation of the gguf
package in between; that ours equals that package's bit for bit is proven in `tests/quant`. So its
model is built from the architecture and gets our values, and what is compared is the forward.

Greedy equality by induction: if at every position the oracle's most likely token, given our answer
so far, is our next token, then its own greedy answer is ours. That takes one forward per prompt.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from headrace.base.arch import ModelArch
from headrace.kernels.arrays import tensor
from headrace.kernels.weights import BlockWeight
from headrace.loader.open import open_model
from headrace.loader.weights import load_weights
from headrace.quant.ggml import dequantise
from headrace.text.load import load_tokenizer
from headrace.worker import Worker, WorkerOptions
from oracle.asks import sampling
from oracle.driving import Driver
from oracle.reference import Oracle

pytestmark = [pytest.mark.model, pytest.mark.slow]

GREEDY = 64
NEAR_TIE = 1e-3
"""A distance of the two best logits (they reach 30) that fp32 rounding may turn around."""

PROMPTS = {
    "chat": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "What is a headrace in a hydroelectric power station?<|im_end|>\n<|im_start|>assistant\n",
    "code": "def quicksort(values: list[int]) -> list[int]:\n    ",
    "german": "Der Oberwasserkanal führt das Wasser vom Wehr zur Turbine. Seine Aufgabe ist",
    "chinese": "水力发电站的引水渠是一种",
    "one token": "The",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "json": '{"name": "Headrace", "ports": [8000, 8001], "models": [{"id": "',
    "emoji": "Translate to emoji: I love pizza 🍕 and",
    "long document": "".join(
        f"Section {number}. The gate of canal {number} was opened at {number % 24}:00 and let "
        f"{number * 7 % 50} cubic metres per second through. "
        for number in range(1, 50)
    )
    + "In summary, the gate of canal 17 was opened at",
}


def gemma_config(arch: ModelArch) -> transformers.Gemma3TextConfig:
    assert arch.local_rope is not None
    windows = {window for window in arch.windows if window is not None}
    return transformers.Gemma3TextConfig(
        **common(arch),
        query_pre_attn_scalar=round(arch.scale**-2),
        sliding_window=windows.pop(),
        layer_types=[
            "full_attention" if window is None else "sliding_attention" for window in arch.windows
        ],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": arch.rope.theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": arch.local_rope.theta},
        },
    )


def llama_config(arch: ModelArch) -> transformers.LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": arch.rope.theta}
    return transformers.LlamaConfig(**common(arch), rope_parameters=rope)


def qwen_config(arch: ModelArch) -> transformers.Qwen2Config:
    rope = {"rope_type": "default", "rope_theta": arch.rope.theta}
    return transformers.Qwen2Config(**common(arch), rope_parameters=rope)


def common(arch: ModelArch) -> dict:
    assert arch.rope.kind == "plain"
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden,
        "intermediate_size": arch.intermediate,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "max_position_embeddings": arch.max_context,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied_embedding,
        "attn_implementation": "eager",
    }


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2.5-coder-0.5b", qwen_config),
        ("smollm2-135m", llama_config),
        ("gemma-3-270m", gemma_config),
    ],
    ids=lambda param: param[0],
)
def real(request):
    name, config = request.param
    files = open_model(name)
    values = {
        name: dequantise(weight, torch.float32)
        if isinstance(weight, BlockWeight)
        else tensor(weight)
        for name, weight in load_weights(files)
    }
    if files.arch.tied_embedding:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    model = transformers.AutoModelForCausalLM.from_config(config(files.arch))
    model.load_state_dict(values, strict=True, assign=True)
    worker = Worker(
        files, WorkerOptions(kernels="ref", threads=1, rows=32, step_tokens=512, max_context=4096)
    )
    return worker, Oracle(model), load_tokenizer(files.tokenizer), files


def prompts_of(tokenizer, files) -> dict[str, list[int]]:
    bos = [files.bos_id] if files.add_bos else []
    return {name: bos + tokenizer.encode(text) for name, text in PROMPTS.items()}


def test_greedy(real) -> None:
    worker, oracle, tokenizer, files = real
    prompts = prompts_of(tokenizer, files)
    assert len(prompts["long document"]) > 1000
    driver = Driver(worker, blocks=400)
    for name, tokens in prompts.items():
        driver.add(name, tokens, sampling(max_tokens=GREEDY))
    answers = driver.run()
    for name, tokens in prompts.items():
        answer = answers[name, 0].tokens
        assert len(answer) == GREEDY
        logits = oracle.logits(tokens + answer)[len(tokens) - 1 : -1]
        best = logits.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        near = (gaps < NEAR_TIE).nonzero()
        safe = int(near[0]) if len(near) else GREEDY
        assert safe > GREEDY // 2, f"{name}: a near tie at {safe}"
        assert answer[:safe] == best.indices[:safe, 0].tolist(), name


def test_alone_and_among_31_others(real) -> None:
    worker, _, tokenizer, files = real
    tokens = prompts_of(tokenizer, files)["code"]
    alone = Driver(worker, blocks=400).ask(tokens, sampling(max_tokens=16)).tokens
    driver = Driver(worker, blocks=400)
    driver.add("code", tokens, sampling(max_tokens=16))
    for index in range(31):
        driver.add(
            str(index),
            tokens[: index % 7 + 1] + tokens * (index % 3),
            sampling(max_tokens=16, temperature=float(index % 2), seed=index),
        )
    assert driver.run()["code", 0].tokens == alone
