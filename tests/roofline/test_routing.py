"""Uneven load of experts: the closed forms compared with drawing, and their consequences."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from headrace.base.layout import Layout
from headrace.cli.roofline import command
from headrace.roofline.composition import decode_step
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.operators import count_step
from headrace.roofline.routing import EVEN, busiest, padding, popularity, typical_skew
from headrace.roofline.step import StepModel
from headrace.roofline.weights import WeightBytes

SHAPES = [
    (256, 8, 4096, 8, 1.01),
    (128, 8, 2048, 4, 1.2),
    (128, 4, 2048, 4, 1.2),
    (256, 8, 64, 8, 1.01),
    (256, 8, 4096, 32, 1.01),
]


def drawn_maximum(experts: int, active: int, tokens: int, ranks: int, skew: float) -> float:
    """Busiest rank over mean, by drawing popularities as the published generator does."""
    rng, total, rounds = random.Random(0), 0.0, 300
    low, high = (1.0, 0.8 * tokens) if tokens * active > experts else (0.01, 2.0)
    power, size = 1 - skew, experts // ranks
    for _ in range(rounds):
        drawn = [
            ((high**power - low**power) * rng.random() + low**power) ** (1 / power)
            for _ in range(experts)
        ]
        sums = [sum(drawn[n : n + size]) for n in range(0, experts, size)]
        total += max(sums) / sum(drawn) * ranks
    return total / rounds


@pytest.mark.parametrize(("experts", "active", "tokens", "ranks", "skew"), SHAPES)
def test_the_busiest_rank_against_drawing(
    experts: int, active: int, tokens: int, ranks: int, skew: float
) -> None:
    load = busiest(experts, active, tokens, ranks, skew)
    found = load.pairs / (tokens * active / ranks)
    assert found == pytest.approx(drawn_maximum(experts, active, tokens, ranks, skew), rel=0.15)
    assert found > 1.2


def test_balls_into_bins() -> None:
    """Nearly even popularities: what is left is the counting, as in throwing balls."""
    rng, ranks, balls, rounds = random.Random(1), 8, 512 * 2, 400
    total = 0
    for _ in range(rounds):
        bins = [0] * ranks
        for _ in range(balls):
            bins[rng.randrange(ranks)] += 1
        total += max(bins)
    load = busiest(256, 2, 512, ranks, -40.0)  # Density x ** 40: all close to the upper bound.
    assert load.pairs == pytest.approx(total / rounds, rel=0.02)


@pytest.mark.parametrize("skew", [EVEN, 0.6, 1.0, 1.01, 1.2, 2.0])
@pytest.mark.parametrize(("experts", "active"), [(8, 2), (128, 8), (256, 8), (4, 4)])
def test_popularities_are_probabilities(experts: int, active: int, skew: float) -> None:
    for tokens in (1, 7, 500, 100_000):
        chances = popularity(experts, active, tokens, skew)
        assert len(chances) == experts
        assert sum(chances) == pytest.approx(active)
        assert all(0 <= p <= 1 for p in chances)
        assert list(chances) == sorted(chances)


def test_even_routing_is_exactly_even() -> None:
    load = busiest(256, 8, 512, 8, EVEN)
    assert load.pairs == 512
    assert load.hit == pytest.approx(32 * (1 - (1 - 8 / 256) ** 512))
    assert load.tokens == pytest.approx(512 * (1 - (7 / 8) ** 8))


def test_uneven_experts_need_more_tiles() -> None:
    assert padding(8, 2, 1024, EVEN, 64) == pytest.approx(1)
    assert padding(128, 8, 64, EVEN, 64) == pytest.approx(16, rel=0.03), "4 rows in a tile of 64"
    assert padding(128, 8, 4096, 1.2, 64) > padding(128, 8, 4096, EVEN, 64)
    assert padding(128, 8, 64, 1.2, 1) == 1, "no tiles on a CPU"


def test_uneven_routing_makes_steps_longer_where_ranks_wait() -> None:
    """The busiest rank and its exchange; a single device reads fewer experts instead."""
    arch = known("deepseek-v3")[0]
    case = Case(arch, WeightBytes("fp8"), kv_dtype="fp8", layout=Layout(1, 1, True, 8))
    uneven = replace(case, skew=typical_skew(arch))
    step = decode_step(arch, 512, 2000)
    times = [StepModel(one, DEVICES["H200"]).seconds(step) for one in (case, uneven)]
    assert times[1] > 1.05 * times[0]

    def exchanged(one: Case) -> float:
        (found,) = (count for count in count_step(one, step) if count.operator == "all_to_all")
        return found.read_bytes

    load, mean = (busiest(256, 8, 512 * 8, 8, skew) for skew in (uneven.skew, EVEN))
    assert exchanged(uneven) / exchanged(case) == pytest.approx(load.tokens / mean.tokens)
    few = busiest(128, 8, 16, 1, 1.2).hit
    assert few < busiest(128, 8, 16, 1, EVEN).hit


def test_dense_models_have_no_skew() -> None:
    assert typical_skew(known("llama-3.1-8b")[0]) == EVEN
    assert typical_skew(known("deepseek-v3")[0]) == 1.01
    assert typical_skew(known("mixtral-8x7b")[0]) == 1.2


def test_the_command_takes_another_skew() -> None:
    """The skew is the one published for the model unless told otherwise."""

    def experts(*extra: str) -> float:
        done = CliRunner().invoke(
            command,
            [
                "deepseek-v3",
                "--hardware",
                "H200",
                "--layout",
                "DP8.EP8",
                "--batch",
                "256",
                "--format",
                "fp8",
                "--json",
                *extra,
            ],
        )
        assert done.exit_code == 0, done.output
        steps = json.loads(done.output)
        decode = next(step for name, step in steps.items() if name.startswith("decode"))
        return float(next(o["flops"] for o in decode["operators"] if o["operator"] == "experts"))

    even, published = experts("--skew", "0"), experts()
    assert even == 6 * 256 * 8 * 7168 * 2048, "each rank as many pairs as it has tokens, times k"
    assert published == pytest.approx(even * busiest(256, 8, 2048, 8, 1.01).pairs / 2048)
    assert experts("--skew", "2") > published
