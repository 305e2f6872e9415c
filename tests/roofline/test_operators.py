"""Counts of FLOPs and bytes, against figures worked out by hand and known totals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.arch import ModelArch
from headrace.base.layout import Layout
from headrace.base.step import StepPlan
from headrace.roofline.collectives import collective_seconds, moved_bytes
from headrace.roofline.composition import (
    Attended,
    compose,
    compose_plan,
    decode_step,
    prefill_step,
    verify_step,
    visible_pairs,
    visible_tokens,
)
from headrace.roofline.counts import Case, Count
from headrace.roofline.hardware import DEVICES, Hardware
from headrace.roofline.known import known
from headrace.roofline.operators import count_step
from headrace.roofline.weights import WeightBytes, from_tensors, parameters, total_bytes

from .archs import ALL, DEEPSEEK_LITE, GEMMA_270M, LLAMA_8B, QWEN_05B, QWEN_30B_A3B

H100, DEEPSEEK_V3 = DEVICES["H100"], known("deepseek-v3")[0]


def by_label(counts: list[Count]) -> dict[str, Count]:
    assert len({count.label for count in counts}) == len(counts)
    return {count.label: count for count in counts}


@given(st.integers(0, 300), st.integers(1, 200), st.none() | st.integers(1, 64))
def test_visible_sums_against_a_loop(start: int, count: int, window: int | None) -> None:
    seen = [
        range(0 if window is None else max(0, p - window + 1), p + 1)
        for p in range(start, start + count)
    ]
    assert visible_pairs(start, count, window) == sum(len(one) for one in seen)
    assert visible_tokens(start, count, window) == len(set().union(*map(set, seen)))


@pytest.mark.parametrize(
    ("arch", "billions"),
    [(LLAMA_8B, 8.03), (QWEN_05B, 0.494), (QWEN_30B_A3B, 30.5), (DEEPSEEK_LITE, 15.7)],
    ids=["llama-8b", "qwen-0.5b", "qwen-30b-a3b", "deepseek-lite"],
)
def test_parameters_of_known_models(arch: ModelArch, billions: float) -> None:
    # Published sizes; norms and biases are not counted.
    assert sum(parameters(arch).values()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_decode_step_by_hand() -> None:
    counts = by_label(count_step(Case(LLAMA_8B), decode_step(LLAMA_8B, 4, 1000)))
    qkv = counts["qkv"]
    assert qkv.calls == 32
    assert qkv.shape == (6144, 4096)
    assert qkv.flops == 2 * 4 * 4096 * 6144
    assert qkv.weight_bytes == 4096 * 6144 * 2
    assert qkv.read_bytes == 4 * 4096 * 2
    assert qkv.write_bytes == 4 * 6144 * 2
    attention = counts["attention"]
    assert attention.kv_bytes == 4 * 1001 * 4096, "one layer's KV of 1,001 tokens, four times"
    assert attention.flops == 4 * 1001 * 32 * (4 * 128 + 5)
    assert counts["head"].write_bytes == 4 * 128_256 * 4, "logits are fp32"
    assert counts["write"].kv_bytes == 4 * 4096


def test_flops_of_a_prefill_are_two_per_parameter_and_token() -> None:
    counts = count_step(Case(LLAMA_8B), prefill_step(LLAMA_8B, [512]))
    products = sum(
        c.flops * c.calls for c in counts if c.operator == "linear" and c.label != "head"
    )
    weights = parameters(LLAMA_8B)
    all_rows = 512 * (sum(weights.values()) - weights["embed"] - weights["head"])
    # Behind the KV of the last layer 511 rows have nothing to do.
    spared = 511 * sum(weights[name] for name in ("output", "gate_up", "down")) // 32
    assert products == 2 * (all_rows - spared)


def test_a_chunk_that_samples_nothing_ends_with_the_kv_of_the_last_layer() -> None:
    counts = by_label(count_step(Case(LLAMA_8B), compose(LLAMA_8B, [0], [512], samples=0)))
    calls = {label: count.calls for label, count in counts.items()}
    assert calls == {
        "embed": 1,
        "input": 1,
        "norms": 62,
        "qkv": 32,
        "write": 32,
        "attention": 31,
        "output": 31,
        "gate_up": 31,
        "gated": 31,
        "down": 31,
    }


def test_windows_bound_the_kv() -> None:
    counts = by_label(count_step(Case(GEMMA_270M), decode_step(GEMMA_270M, 1, 4000)))
    assert counts["attention/512"].calls == 15
    assert counts["attention"].calls == 3
    assert counts["attention/512"].kv_bytes == 512 * 2 * 256 * 2
    assert counts["attention"].kv_bytes == 4001 * 2 * 256 * 2
    assert counts["post"].calls == 2 * 18


def test_experts_are_read_as_they_are_hit() -> None:
    one = by_label(count_step(Case(QWEN_30B_A3B), decode_step(QWEN_30B_A3B, 1, 10)))["experts"]
    many = by_label(count_step(Case(QWEN_30B_A3B), prefill_step(QWEN_30B_A3B, [4096])))["experts"]
    expert = 3 * 2048 * 768 * 2
    assert one.weight_bytes == pytest.approx(8 * expert)
    assert many.weight_bytes == pytest.approx(128 * expert)
    assert many.flops == 6 * 4096 * 8 * 2048 * 768


def test_latent_attention_caches_the_latent() -> None:
    step = decode_step(DEEPSEEK_LITE, 8, 1000)
    latent = by_label(count_step(Case(DEEPSEEK_LITE), step))["latent"]
    assert latent.kv_bytes == 8 * 1002 * 576 * 2, "1,001 read and one written per sequence"
    absorbed = 8 * 1001 * 16 * (2 * 576 + 2 * 512) + 2 * 8 * 16 * 256 * 512
    assert latent.flops == absorbed + 5 * 8 * 1001 * 16


def test_quantised_weights_and_kv() -> None:
    case = Case(LLAMA_8B, WeightBytes("Q4_K"), kv_dtype="int8")
    counts = by_label(count_step(case, decode_step(LLAMA_8B, 1, 99)))
    assert counts["down"].weight_bytes == 4096 * 14_336 * 4.5 / 8
    assert counts["attention"].kv_bytes == 100 * 2 * 8 * (128 + 2)


def test_ranks_share_products_and_add_collectives() -> None:
    step = decode_step(LLAMA_8B, 8, 500)
    alone = by_label(count_step(Case(LLAMA_8B), step))
    shared = by_label(count_step(Case(LLAMA_8B, layout=Layout(tp=4)), step))
    for label in ("qkv", "gate_up", "down", "output"):
        assert shared[label].weight_bytes == alone[label].weight_bytes / 4
        assert shared[label].flops == alone[label].flops / 4
    assert shared["attention"].kv_bytes == alone["attention"].kv_bytes / 4
    assert shared["ranks"].calls == 2 * 32
    assert "ranks" not in alone


def test_the_last_layer_sums_the_sampled_rows() -> None:
    """By hand: of 512 tokens one samples, in two of 64 all-reduces."""
    case = Case(LLAMA_8B, layout=Layout(tp=4))
    counts = by_label(count_step(case, prefill_step(LLAMA_8B, [512])))
    assert (counts["ranks"].calls, counts["ranks/last"].calls) == (62, 2)
    assert counts["ranks"].read_bytes == 512 * counts["ranks/last"].read_bytes == 512 * 4096 * 2


def test_ranks_beyond_the_kv_heads_compute_a_whole_one() -> None:
    """By hand: 32 query heads and 4 KV heads of 128 on 8 ranks."""
    case = Case(QWEN_30B_A3B, layout=Layout(8))
    counts = by_label(count_step(case, decode_step(QWEN_30B_A3B, 2, 99)))
    assert counts["qkv"].flops == 2 * 2 * 2048 * (4 + 2) * 128
    assert counts["attention"].kv_bytes == 2 * 100 * 2 * 128 * 2


def test_a_verify_step_is_a_decode_with_more_rows() -> None:
    """k drafts: k + 1 tokens and logits of each sequence, whose KV is read once for all."""
    verify = by_label(count_step(Case(LLAMA_8B), verify_step(LLAMA_8B, 4, 1000, 3)))
    plain = by_label(count_step(Case(LLAMA_8B), decode_step(LLAMA_8B, 4, 1003)))
    assert verify["down"].flops == 4 * plain["down"].flops
    assert verify["down"].weight_bytes == plain["down"].weight_bytes
    assert verify["head"].rows == 16
    assert verify["attention"].kv_bytes == plain["attention"].kv_bytes
    pairs = 4 * (1001 + 1002 + 1003 + 1004)
    assert verify["attention"].flops == pairs * 32 * (4 * 128 + 5)


def test_a_plan_that_verifies_pays_for_the_head_of_each_draft() -> None:
    """A chunk beside it gives no token. By this the engine predicts its steps."""
    plan = StepPlan(0, [0, 1, 2], [1000, 900, 0], [4, 2, 64], [True, True, False], drafts=4)
    wanted = compose(LLAMA_8B, plan.starts, plan.counts, 6)
    assert compose_plan(LLAMA_8B, plan) == wanted
    assert by_label(count_step(Case(LLAMA_8B), wanted))["head"].rows == 6


def test_deepseek_v3_by_hand() -> None:
    """Its own sizes (arXiv 2412.19437): 128 heads, latent 512 + 64, 256 experts of 2048, 8 active.

    One decoded token with 4,096 before it, on 8 groups of one rank: attention of its own, experts
    shared. The rank has 32 experts, and the tokens of all groups.
    """
    layout = Layout(1, 1, True, 8)
    case = Case(DEEPSEEK_V3, WeightBytes("fp8"), kv_dtype="bfloat16", layout=layout)
    counts = by_label(count_step(case, decode_step(DEEPSEEK_V3, 64, 4095)))
    latent = counts["latent"]
    assert latent.calls == 61
    assert latent.kv_bytes == 64 * (4096 + 1) * 576 * 2
    scores = 64 * 4096 * 128
    unpacking = 2 * 64 * 128 * 256 * 512
    assert latent.flops == scores * (2 * 576 + 2 * 512 + 5) + unpacking
    assert counts["q_b"].flops == 2 * 64 * 1536 * 128 * 192
    assert counts["kv_a"].flops == 2 * 64 * 7168 * 576
    experts = counts["experts"]
    assert experts.calls == 58
    assert experts.flops == 6 * (64 * 8) * 8 * 7168 * 2048 / 8
    hit = 1 - (1 - 8 / 256) ** (64 * 8)
    assert experts.weight_bytes == pytest.approx(hit * 32 * 3 * 7168 * 2048)
    exchange = counts["exchange"]
    assert exchange.calls == 2 * 58
    places = 8 * (1 - (7 / 8) ** 8)
    assert exchange.read_bytes == pytest.approx(64 * 7168 * 2 * places)
    assert counts["shared_down"].flops == 2 * 64 * 2048 * 7168
    # A long prompt is cheaper with unpacked heads.
    prompt = by_label(count_step(case, prefill_step(DEEPSEEK_V3, [4096])))["latent"]
    pairs = 4096 * 4097 // 2
    assert prompt.flops == 128 * pairs * (2 * 192 + 2 * 128 + 5) + 2 * 4096 * 128 * 256 * 512


def test_expert_parallelism_shares_whole_experts() -> None:
    step = decode_step(QWEN_30B_A3B, 32, 500)
    sliced = by_label(count_step(Case(QWEN_30B_A3B, layout=Layout(4)), step))
    spread = by_label(count_step(Case(QWEN_30B_A3B, layout=Layout(4, ep=True)), step))
    assert spread["experts"].weight_bytes == sliced["experts"].weight_bytes
    assert spread["experts"].flops == sliced["experts"].flops
    assert "ranks" in spread
    assert spread["ranks"].operator == "all_reduce"


def test_stages_send_between_them() -> None:
    counts = count_step(Case(LLAMA_8B, layout=Layout(2, 4)), decode_step(LLAMA_8B, 8, 500))
    (send,) = (count for count in counts if count.operator == "send")
    assert send.calls == 3
    assert send.read_bytes == 8 * 4096 * 2 / 2


def test_without_an_all_to_all_every_token_goes_to_all_ranks() -> None:
    """By hand: 100 tokens a group to and from 7 others; narrowed on the way there."""
    arch = DEEPSEEK_V3
    step = decode_step(arch, 100, 1000)
    layout = Layout(1, 1, True, 8)

    def moved(**fields: Any) -> float:
        case = Case(arch, WeightBytes("fp8"), layout=layout, skew=1.01, **fields)
        counts = count_step(case, step)
        (found,) = (count for count in counts if count.operator == "all_to_all")
        return moved_bytes(found)

    assert moved(gathered=True) == pytest.approx(7 * 100 * 7168 * 2)
    assert moved(gathered=True, dispatch_dtype="fp8") == pytest.approx(7 * 100 * 7168 * 1.5)
    assert moved() < moved(gathered=True)


def test_collectives_move_what_their_algorithms_move() -> None:
    def seconds(operator: str, ranks: int, size: float, device: Hardware = H100) -> float:
        count = Count(operator, "", 1, "network", 0, read_bytes=size, ranks=ranks)
        return collective_seconds(device, count)

    assert seconds("all_reduce", 4, 4e9) == pytest.approx(2 * 3 / 4 * 4e9 / 450e9)
    assert seconds("all_to_all", 8, 4e9) == pytest.approx(7 / 8 * 4e9 / 450e9)
    assert seconds("send", 2, 4e9) == pytest.approx(4e9 / 450e9)
    assert seconds("all_to_all", 16, 4e9) == pytest.approx(15 / 16 * 4e9 / 50e9), "another node"


def test_bytes_known_from_the_file() -> None:
    sizes = {"model.embed_tokens.weight": 1000}
    for layer in range(24):
        for name, size in (("q_proj", 10), ("k_proj", 2), ("v_proj", 3), ("o_proj", 9)):
            sizes[f"model.layers.{layer}.self_attn.{name}.weight"] = size
        sizes[f"model.layers.{layer}.self_attn.q_proj.bias"] = 77
        for name, size in (("gate_proj", 40), ("up_proj", 41), ("down_proj", 50 + layer)):
            sizes[f"model.layers.{layer}.mlp.{name}.weight"] = size
    weights = from_tensors(QWEN_05B, sizes, "Q4_K")
    assert weights.by_role["qkv"] == 24 * 15
    assert weights.by_role["gate_up"] == 24 * 81
    assert weights.by_role["head"] == 1000, "a tied head is read like one of its own"
    counts = by_label(count_step(Case(QWEN_05B, weights), decode_step(QWEN_05B, 1, 5)))
    assert counts["qkv"].weight_bytes == 15
    assert counts["down"].weight_bytes == 50 + 11
    assert counts["down/last"].weight_bytes == 50 + 23
    assert total_bytes(QWEN_05B, weights) == 1000 + 24 * (15 + 9 + 81 + 61.5)


@given(
    st.sampled_from(sorted(ALL)),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600)), min_size=1, max_size=20),
)
def test_counts_are_sane_for_every_architecture(name: str, entries: list[tuple[int, int]]) -> None:
    arch = ALL[name]
    step = compose(arch, [start for start, _ in entries], [count for _, count in entries])
    for count in count_step(Case(arch), step):
        assert count.flops >= 0
        assert count.bytes > 0
        assert count.calls >= 1
    more = compose(arch, [start for start, _ in entries], [count + 1 for _, count in entries])
    total, larger = (
        sum(c.flops * c.calls for c in count_step(Case(arch), one)) for one in (step, more)
    )
    assert larger > total


def test_the_last_layer_has_the_price_of_its_own_weights() -> None:
    """Recipes leave the last layers wider: they are priced by the sizes of a file's tensors."""
    arch, made = QWEN_05B, {}
    for layer in range(arch.layers):
        size = 4_000_000 if layer == arch.layers - 1 else 1_000_000
        made[f"model.layers.{layer}.mlp.down_proj.weight"] = size
        made[f"model.layers.{layer}.mlp.gate_proj.weight"] = 3_000_000
    case = Case(arch, from_tensors(arch, made, "Q4_K"))
    for step in (decode_step(arch, 4, 100), prefill_step(arch, [100])):
        counts = by_label(count_step(case, step))
        assert (counts["down"].calls, counts["down"].weight_bytes) == (arch.layers - 1, 1_000_000)
        assert (counts["down/last"].calls, counts["down/last"].weight_bytes) == (1, 4_000_000)
    assert counts["gate_up/last"].weight_bytes == counts["gate_up"].weight_bytes == 3_000_000
    alike = by_label(count_step(case, decode_step(arch, 4, 100)))
    assert alike["gate_up"].calls == arch.layers


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=12),
    st.sampled_from([(None,), (1, None), (16, 40), (200,)]),
)
def test_a_composition_is_the_sum_of_its_entries(
    entries: list[tuple[int, int]], windows: tuple[int | None, ...]
) -> None:
    """Token by token: the position p sees min(p + 1, window) positions."""
    starts, counts = [start for start, _ in entries], [count for _, count in entries]
    step = compose(replace(LLAMA_8B, windows=windows), starts, counts)
    for window in windows:
        seen = [
            [min(p + 1, window or p + 1) for p in range(start, start + count)]
            for start, count in entries
        ]
        lowest = [0 if window is None else max(0, start + 1 - window) for start in starts]
        assert step.attended[window] == Attended(
            sum(map(sum, seen)),
            sum(start + count - low for (start, count), low in zip(entries, lowest, strict=True)),
            sum(
                sum(one)
                for one, (start, count) in zip(seen, entries, strict=True)
                if start and count == 1
            ),
        )
    assert step.decodes == sum(1 for start, count in entries if start and count == 1)
    assert step.tokens == sum(counts)
