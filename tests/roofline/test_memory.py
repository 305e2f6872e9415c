"""The memory plan: it fits, it wastes nothing, and it says what it gave up."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.arch import ModelArch
from headrace.base.errors import DoesNotFit, OptionError
from headrace.base.graph import AttentionSpec, LatentSpec
from headrace.base.layout import Layout
from headrace.engine.ranks.ranks import rank_groups
from headrace.models.registry import describe
from headrace.roofline.formats import kv_token_bytes
from headrace.roofline.memory import USABLE, MemoryPlan, plan_memory
from headrace.roofline.memory_parts import RANK_BYTES

from .archs import ALL, DEEPSEEK_LITE, GEMMA_270M, LLAMA_8B, MISTRAL_WINDOWED, QWEN_05B

GIB = 2**30


def plan(arch: ModelArch = QWEN_05B, **changes: Any) -> MemoryPlan:
    wish: dict[str, Any] = {
        "weight_bytes": 400 * 2**20,
        "available": 8 * GIB,
        "rows": 16,
        "step_tokens": 512,
        "max_context": None,
    }
    return plan_memory(arch, **{**wish, **changes})


def spec(arch: ModelArch) -> AttentionSpec | LatentSpec:
    return describe(arch).attentions()[0]


def test_kv_of_a_token() -> None:
    assert kv_token_bytes(spec(QWEN_05B), "float32") == 2 * 2 * 64 * 4
    assert kv_token_bytes(spec(QWEN_05B), "int8") == 2 * 2 * (64 + 2)
    assert kv_token_bytes(spec(LLAMA_8B), "bfloat16") == 4096
    assert kv_token_bytes(spec(DEEPSEEK_LITE), "bfloat16") == (512 + 64) * 2


def test_graphs_are_counted_before_they_are_measured() -> None:
    """Graphs hold copies of their largest step's logits. A worker's measurement replaces the
    formula; a host has no graphs."""
    cuda = {"arch": LLAMA_8B, "available": 80 * GIB, "device": "cuda", "max_context": 2048}
    assert plan(**cuda, rows=64).graph_bytes == 10 * 64 * LLAMA_8B.vocab_size
    most = plan(**cuda, rows=1024).graph_bytes
    assert plan(**cuda, rows=2000).graph_bytes == most == 10 * 1024 * LLAMA_8B.vocab_size
    assert plan(**cuda, rows=64, graph_bytes=5, step_bytes=7).graph_bytes == 5
    assert plan(**cuda, rows=64, step_bytes=7).graph_bytes == 0
    assert plan(rows=4, max_context=2048).graph_bytes == 0


def test_everything_fits_and_nothing_is_given_up() -> None:
    made = plan(rows=4, max_context=2048)
    assert made.rows == 4
    assert made.max_context == 2048
    assert [decision.name for decision in made.decisions] == ["kv_memory"]
    (group,) = made.pool.groups
    assert group.blocks == 1 + 4 * 2048 // 16, "the full need and the null block, no more"
    assert made.full_sequences == 4
    assert made.kv_bytes == group.blocks * 16 * 24 * 1024


def test_ranks_that_share_the_kv_hold_more_tokens() -> None:
    """Each keeps its part of a token, so a pool of the same bytes has room for more of them."""
    wish = {"arch": LLAMA_8B, "available": 24 * GIB, "device": "cuda", "rows": 512}
    whole = plan(**wish, max_context=8192)
    parts = plan(**wish, max_context=8192, kv_share=4)
    assert parts.kv_bytes == pytest.approx(whole.kv_bytes, rel=1e-3)
    assert parts.kv_tokens == pytest.approx(4 * whole.kv_tokens, rel=1e-3)
    assert parts.kv_bytes_per_token * 4 == whole.kv_bytes_per_token


def test_ranks_of_a_host_are_counted_with_the_heads_that_several_have() -> None:
    one = plan(rows=4, max_context=2048)
    for layout, copies in (("TP2", 1), ("TP4", 2), ("PP2", 1), ("TP4.PP2", 2)):
        ranks = rank_groups(Layout.parse(layout), QWEN_05B, "float32")
        made = plan(rows=4, max_context=2048, ranks=ranks)
        assert made.kv_bytes == copies * one.kv_bytes
        assert made.kv_bytes_per_token == copies * one.kv_bytes_per_token
        assert made.activation_bytes == len(ranks) * one.activation_bytes
        assert made.process_bytes == (len(ranks) - 1) * RANK_BYTES


def test_windowed_layers_have_a_group_of_their_own() -> None:
    made = plan(GEMMA_270M, rows=8, available=40 * GIB, device="cuda")
    full, windowed = made.pool.groups
    assert full.window is None
    assert full.layers == (5, 11, 17)
    assert windowed.window == 512
    assert len(windowed.layers) == 15
    assert full.blocks == 1 + 8 * 32_768 // 16
    assert windowed.blocks == 1 + 8 * ((512 + 512) // 16 + 1)
    deeper = plan(GEMMA_270M, rows=8, available=40 * GIB, depth=2)
    assert deeper.pool.groups[1].blocks == 1 + 8 * ((512 + 2 * 512) // 16 + 1)


def test_a_window_over_the_whole_context_needs_no_more_than_the_context() -> None:
    made = plan(GEMMA_270M, max_context=512, rows=8)
    assert [group.blocks for group in made.pool.groups] == [1 + 8 * 32, 1 + 8 * 32]


def test_a_model_of_windows_only() -> None:
    made = plan(MISTRAL_WINDOWED, available=200 * GIB, rows=2, kv_dtype="bfloat16")
    (group,) = made.pool.groups
    assert group.blocks == 1 + 2 * ((4096 + 512) // 16 + 1)
    assert made.full_sequences == 2


def test_context_is_lowered_to_what_fits() -> None:
    wish = {
        "arch": LLAMA_8B,
        "weight_bytes": 5 * GIB,
        "available": 16 * GIB,
        "kv_dtype": "bfloat16",
        "rows": 1,
    }
    made = plan(**wish)
    assert 2048 <= made.max_context < LLAMA_8B.max_context
    decision = next(d for d in made.decisions if d.name == "max_context")
    assert decision.value == str(made.max_context)
    assert "131072" in decision.reason
    assert made.full_sequences >= 1
    # It is the largest: one block more does not fit.
    with pytest.raises(DoesNotFit):
        plan(**wish, max_context=made.max_context + 16)


def test_rows_are_lowered_when_sampling_alone_is_too_much() -> None:
    made = plan(rows=1024, available=3 * GIB)
    assert made.rows < 1024
    assert any(d.name == "max_sequences" for d in made.decisions)


def test_a_refusal_names_values_that_help() -> None:
    wish = {"weight_bytes": 5 * GIB, "available": 12 * GIB, "kv_dtype": "float32", "rows": 4}
    with pytest.raises(DoesNotFit) as refusal:
        plan(LLAMA_8B, max_context=65_536, **wish)
    found = re.search(r"--max-context (\d+)", refusal.value.message)
    assert found is not None, refusal.value.message
    helped = plan(LLAMA_8B, max_context=int(found.group(1)), **wish)
    assert helped.max_context == int(found.group(1))


def test_weights_that_do_not_fit_are_said() -> None:
    with pytest.raises(DoesNotFit, match="smaller model"):
        plan(LLAMA_8B, weight_bytes=16 * GIB, available=8 * GIB)


def test_explicit_kv_memory() -> None:
    made = plan(kv_memory=256 * 2**20)
    assert 0.95 * 256 * 2**20 < made.kv_bytes <= 256 * 2**20
    assert made.max_context < 32_768
    with pytest.raises(DoesNotFit, match=r"--kv-memory \d+MiB"):
        plan(kv_memory=9 * GIB)
    for asked in ({}, {"max_context": 4096}):
        with pytest.raises(DoesNotFit, match=r"kv_memory of .* is too small") as told:
            plan(kv_memory=200_000, **asked)
        assert told.value.param == "kv_memory"
        enough = re.search(r"--kv-memory (\d+)MiB", str(told.value))
        assert enough is not None
        assert plan(kv_memory=int(enough[1]) * 2**20, **asked).max_context >= 128


def test_a_host_keeps_its_memory() -> None:
    token = kv_token_bytes(spec(QWEN_05B), "bfloat16") * 24
    made = plan(rows=64, available=64 * GIB, kv_dtype="bfloat16")
    assert made.kv_tokens == 64 * 1024, "so many tokens a row, where nobody chose a context"
    assert "--kv-memory" in made.decisions[-1].reason
    few = plan(rows=2, available=64 * GIB, kv_dtype="bfloat16")
    assert few.kv_tokens == 32_768, "one sequence of the full context at least"
    chosen = plan(rows=64, max_context=4096, available=16 * GIB, kv_dtype="bfloat16")
    assert 1.9 * GIB < chosen.kv_bytes <= 2 * GIB, "an eighth of the memory"
    asked = plan(rows=64, available=64 * GIB, kv_dtype="bfloat16", kv_memory=8 * GIB)
    assert asked.kv_bytes > 8 * GIB - 16 * token
    device = plan(rows=64, available=64 * GIB, kv_dtype="bfloat16", device="cuda")
    assert device.kv_bytes > 20 * GIB


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_context": 40_000}, "max_context"),
        ({"rows": 0}, "max_sequences"),
        ({"step_tokens": 0}, "step_tokens"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
    ],
)
def test_bad_options_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(OptionError) as error:
        plan(**change)
    assert error.value.param == param


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(ALL)),
    weights=st.integers(0, 20 * GIB),
    available=st.integers(2**20, 200 * GIB),
    rows=st.integers(1, 512),
    step_tokens=st.integers(16, 8192),
    max_context=st.none() | st.integers(8, 32_768),
    block_size=st.sampled_from([8, 16, 64]),
    kv_dtype=st.sampled_from(["float32", "bfloat16", "int8", "fp8"]),
    device=st.sampled_from(sorted(USABLE)),
    depth=st.integers(1, 2),
)
def test_a_plan_fits_or_is_refused(
    name: str,
    weights: int,
    available: int,
    rows: int,
    step_tokens: int,
    max_context: int | None,
    block_size: int,
    kv_dtype: str,
    device: str,
    depth: int,
) -> None:
    arch = ALL[name]
    try:
        made = plan_memory(
            arch,
            weight_bytes=weights,
            available=available,
            rows=rows,
            step_tokens=step_tokens,
            max_context=max_context,
            block_size=block_size,
            kv_dtype=kv_dtype,
            device=device,
            depth=depth,
        )
    except DoesNotFit:
        return
    made.verify()
    assert (
        sum(size for name, size in made.parts() if name != "margin") <= available * USABLE[device]
    )
    assert made.rows <= rows
    assert max_context is None or made.max_context == max_context
    assert sorted(layer for group in made.pool.groups for layer in group.layers) == list(
        range(arch.layers)
    )
    whole = -(-made.max_context // block_size)
    for group in made.pool.groups:
        if group.window is None:
            assert group.blocks - 1 >= whole, "one sequence of the full context runs alone"
        else:
            alone = -(-(group.window + depth * step_tokens) // block_size) + 1
            assert group.blocks - 1 >= min(whole, alone)
        assert group.blocks - 1 >= made.rows, "every row can start"
    lowered = {decision.name for decision in made.decisions}
    assert (made.rows < rows) == ("max_sequences" in lowered)
