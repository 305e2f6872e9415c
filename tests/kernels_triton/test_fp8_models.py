"""Whole models of fp8 checkpoints on the Triton path: near the dequantised oracle, and with norms
and gates that hand their codes straight to the products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.base.graph import WeightRef
from headrace.kernels.triton import product_fp8
from headrace.loader import open_model
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import WeightSource
from headrace.loader.weights import load_weights
from headrace.models.registry import describe
from oracle import checkpoints

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 160,
    "intermediate_size": 256,
    "vocab_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""Parts of q, k and v of whole blocks: they become one matrix."""


def step(arch, tokens: int):
    """One prompt on a fresh cache."""
    cache = checkpoints.cache_of(arch, blocks=4)
    return checkpoints.prompt_step(tokens, cache), cache


@pytest.mark.parametrize("form", ["hub-block", "channel"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_logits_are_near_the_oracle(
    form: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    checkpoints.fp8_folder(tmp_path, form, kind, **{**SMALL, **(moe if kind != "Llama" else {})})
    files = open_model(str(tmp_path))
    quantised: list[int] = []
    rows = product_fp8.quantise_rows

    def counted(x: torch.Tensor, *, blocked: bool):
        quantised.append(x.shape[1])
        return rows(x, blocked=blocked)

    monkeypatch.setattr(product_fp8, "quantise_rows", counted)
    answers = []
    for name in ("ref", "triton"):
        operators = checkpoints.operators(name)
        model = prepare(
            describe(files.arch),
            WeightSource(load_weights(files)),
            operators,
            device="cpu",
            dtype="float32",
            max_context=64,
        )
        batch, cache = step(files.arch, 17)
        quantised.clear()
        answers.append(model.forward(operators, batch, cache, every=True))
    error = (answers[1][0] - answers[0][0]).norm() / answers[0][0].norm()
    assert error < 0.1
    # Only the attention's output has no operator before it that could write its codes; the
    # experts' input is quantised in `moe`, through a name of its own.
    assert quantised == [files.arch.heads * files.arch.head_dim]


def test_a_step_with_adapters_keeps_values(tmp_path: Path) -> None:
    """An adapter's product reads its input as values, not as codes."""
    checkpoints.fp8_folder(tmp_path, "channel", "Llama", **SMALL)
    files = open_model(str(tmp_path))
    operators = checkpoints.operators("triton")
    model = prepare(
        describe(files.arch),
        WeightSource(load_weights(files)),
        operators,
        device="cpu",
        dtype="float32",
        max_context=64,
    )
    batch, cache = step(files.arch, 3)
    seen: list[torch.dtype] = []

    def adding(ref: WeightRef, x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append(x.dtype)

    model.forward(operators, batch, cache, adding)
    assert seen == [torch.float32] * len(model.products())
