"""The roofline's counts are those of a hand: weights and KV of a decode, dense, MoE, MLA, MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace.roofline.composition import decode_step
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.step import step_time

CONTEXT = 2048


@dataclass(frozen=True)
class Hand:
    """A model counted by hand: numbers of weights that every token reads, and of experts."""

    name: str
    dense: float
    """Bytes that every step reads, embedding rows left out."""
    kv_token: int
    """Bytes of a token's KV in all layers."""
    expert: float = 0.0
    """Bytes of one expert in all layers that have them."""
    experts: int = 0
    active: int = 0
    full: float = 1.0
    """Share of the context that a mean layer sees."""


LLAMA = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14_336) + 4096 * 128_256
QWEN = 48 * (2048 * (4096 * 2 + 512 * 2) + 2048 * 128) + 2048 * 151_936
LATENT = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
DEEPSEEK = 61 * LATENT + 3 * 3 * 7168 * 18_432 + 58 * (3 * 7168 * 2048 + 7168 * 256)
OSS = 36 * (2880 * 64 * (64 + 16) + 64 * 64 * 2880 + 2880 * 128) + 2880 * 201_088
HANDS = (
    Hand("llama-3.1-8b", LLAMA * 2.0, 32 * 8 * 128 * 2 * 2),
    Hand("qwen3-30b-a3b", QWEN * 2.0, 48 * 4 * 128 * 2 * 2, 48 * 3 * 2048 * 768 * 2.0, 128, 8),
    Hand(
        "deepseek-v3",
        DEEPSEEK + 7168 * 129_280 * 2.0,
        61 * 576 * 2,
        58 * 3 * 7168 * 2048 * 1.0,
        256,
        8,
    ),
    Hand(
        "gpt-oss-120b",
        OSS * 2.0,
        36 * 8 * 64 * 2 * 2,
        36 * 3 * 2880 * 2880 * 4.25 / 8,
        128,
        4,
        (129 + 2049) / 2 / 2049,
    ),
)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand.name)
def test_bytes_of_a_decode_step(hand: Hand, batch: int) -> None:
    """Even routing, KV in bf16."""
    arch, weights = known(hand.name)
    case = Case(arch, weights, kv_dtype="bfloat16")
    found = step_time(case, DEVICES["H100"], decode_step(arch, batch, CONTEXT)).operators
    hit = hand.experts * (1 - (1 - hand.active / hand.experts) ** batch) if hand.experts else 0
    read = sum(
        one.count.weight_bytes * one.count.calls for one in found if one.count.operator != "embed"
    )
    kv = sum(one.count.kv_bytes * one.count.calls for one in found if one.count.kind == "attention")
    assert read == pytest.approx(hand.dense + hit * hand.expert, rel=0.001)
    assert kv == pytest.approx(batch * (CONTEXT + 1) * hand.kv_token * hand.full, rel=0.003)
