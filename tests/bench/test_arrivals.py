"""Arrival processes have the rates and the spreads that they claim; lengths and workloads too."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter

import pytest

from headrace.base.errors import InvalidRequest
from headrace.bench.arrivals import (
    Arrivals,
    gamma,
    parse_arrivals,
    poisson,
    ramp,
    ramp_time,
    scheduled,
)
from headrace.bench.lengths import parse_lengths
from headrace.bench.material import WORDS, Material
from headrace.bench.workload import WORKLOADS, Session, Wish, make_workload, shareable_tokens

COUNT = 20_000


def gaps(arrivals: Arrivals, seed: int = 1) -> list[float]:
    times = list(itertools.islice(arrivals(random.Random(seed)), COUNT))
    assert times == sorted(times)
    return [b - a for a, b in itertools.pairwise([0.0, *times])]


def kolmogorov(values: list[float], distribution: object) -> float:
    """Greatest distance between the sample's distribution and a given one."""
    assert callable(distribution)
    ordered = sorted(values)
    return max(
        max(abs((i + 1) / len(ordered) - distribution(x)), abs(i / len(ordered) - distribution(x)))
        for i, x in enumerate(ordered)
    )


def test_poisson_gaps_are_exponential_and_independent() -> None:
    found = gaps(poisson(5.0))
    # Critical distance at 1 % significance: 1.63 / sqrt(n).
    assert kolmogorov(found, lambda x: 1 - math.exp(-5 * x)) < 1.63 / COUNT**0.5
    mean = statistics.mean(found)
    lagged = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(found))
    assert abs(lagged / COUNT / statistics.variance(found)) < 2.6 / COUNT**0.5


def test_poisson_counts_have_the_variance_of_poisson() -> None:
    times = itertools.accumulate(gaps(poisson(10.0), 2))
    counts = Counter(int(time) for time in times)
    per_second = [counts[second] for second in range(max(counts))]
    assert statistics.mean(per_second) == pytest.approx(10, rel=0.03)
    assert statistics.variance(per_second) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_mean_and_spread(burstiness: float) -> None:
    found = gaps(gamma(3.0, burstiness))
    assert statistics.mean(found) == pytest.approx(1 / 3, rel=0.05)
    spread = statistics.stdev(found) / statistics.mean(found)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_gaps_are_constant() -> None:
    found = gaps(parse_arrivals("constant:8"))[1:]
    assert all(gap == pytest.approx(0.125) for gap in found)


def test_a_ramp_rises_linearly() -> None:
    times = list(itertools.islice(ramp(2.0, 20.0, 500.0)(random.Random(3)), 7000))
    counts = Counter(int(time // 50) for time in times)
    for part in range(10):
        rate = 2 + 18 * (part + 0.5) / 10
        assert counts[part] == pytest.approx(rate * 50, abs=4 * (rate * 50) ** 0.5)
    after = [b - a for a, b in itertools.pairwise(t for t in times if t > 500)]
    assert statistics.mean(after) == pytest.approx(1 / 20, rel=0.15)
    assert ramp_time(20.0, 2.0, 100.0, 1100) == pytest.approx(100)


def test_a_trace_keeps_its_gaps_and_speeds_up() -> None:
    offsets = list(scheduled([10.0, 11.0, 15.0], speed=2.0)(random.Random(0)))
    assert offsets == [0.0, 0.5, 2.5]


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert gaps(poisson(5.0), 7) == gaps(poisson(5.0), 7)
    assert gaps(poisson(5.0), 7) != gaps(poisson(5.0), 8)


@pytest.mark.parametrize(
    "text", ["poisson", "poisson:0", "poisson:x", "gamma:3", "ramp:1:2", "burst:3", "constant:-1"]
)
def test_bad_arrivals_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_arrivals(text)
    assert error.value.param == "arrivals"


def test_lengths() -> None:
    rng = random.Random(0)
    assert {parse_lengths("64").draw(rng) for _ in range(9)} == {64}
    uniform = [parse_lengths("uniform:10:20").draw(rng) for _ in range(3000)]
    assert set(uniform) == set(range(10, 21))
    normal = [parse_lengths("normal:500:50").draw(rng) for _ in range(3000)]
    assert statistics.mean(normal) == pytest.approx(500, rel=0.02)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.05)
    log = [parse_lengths("lognormal:400:0.8@100-900").draw(rng) for _ in range(3000)]
    assert statistics.median(log) == pytest.approx(400, rel=0.05)
    assert min(log) >= 100
    assert max(log) <= 900


@pytest.mark.parametrize("text", ["", "0", "x", "uniform:5", "uniform:9:3", "normal:a:b", "5@9-3"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_lengths(text, "input")


class Halves:
    """A tokenizer that gives every word two tokens, and a word that ends in s three."""

    vocab_size = 300

    def encode(self, text: str) -> list[int]:
        return [0] * sum(3 if word.endswith("s") else 2 for word in text.split())

    def piece(self, token_id: int) -> bytes:
        return b" " + bytes([97 + token_id % 26]) * 4 if token_id % 2 else b"\xff"


def test_material_is_exact_with_a_tokenizer() -> None:
    material = Material(Halves())
    assert material.exact
    for tokens in (2, 10, 500):
        assert material.count(material.text(tokens, random.Random(tokens))) == tokens
    assert len(material.tokens(33, random.Random(0))) == 33
    plain = Material()
    assert len(plain.text(50, random.Random(0)).split()) == 50
    assert set(plain.text(50, random.Random(0)).split()) <= set(WORDS)


def wish(**changes: object) -> Wish:
    values: dict[str, object] = {
        "sessions": 400,
        "seed": 3,
        "input": parse_lengths("30"),
        "output": parse_lengths("20"),
        "material": Material(),
        "ids": False,
        "groups": 6,
        "prefix_tokens": 40,
    }
    return Wish(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_are_functions_of_their_seed(name: str) -> None:
    small = wish(sessions=5)
    assert make_workload(name, small) == make_workload(name, small)
    assert make_workload(name, small) != make_workload(name, wish(sessions=5, seed=4))
    least = 0 if name == "embeddings" else 1
    assert all(turn.output_tokens >= least for s in make_workload(name, small) for turn in s.turns)


def test_prefixes_are_shared_by_zipf() -> None:
    sessions = make_workload("shared-prefix", wish(sessions=4000, zipf=1.2))
    counts = Counter(session.group for session in sessions)
    weights = [1 / rank**1.2 for rank in range(1, 7)]
    for group, weight in enumerate(weights):
        expected = 4000 * weight / sum(weights)
        assert counts[group] == pytest.approx(expected, abs=4 * expected**0.5)
    by_group: dict[int, set[str]] = {}
    for session in sessions:
        by_group.setdefault(session.group, set()).add(" ".join(session.turns[0].text.split()[:40]))
    assert all(len(prefixes) == 1 for prefixes in by_group.values())
    assert len({next(iter(prefixes)) for prefixes in by_group.values()}) == 6
    assert shareable_tokens(sessions) == (4000 - 6) * 40


def test_chat_thinks_and_agents_are_cancelled() -> None:
    chat = make_workload("chat", wish(turns=5, think_seconds=2.0))
    thoughts = [turn.think_seconds for session in chat for turn in session.turns[1:]]
    assert statistics.mean(thoughts) == pytest.approx(2.0, rel=0.1)
    assert all(session.turns[0].think_seconds == 0 for session in chat)
    agents = make_workload("agentic", wish(turns=4, cancel_share=0.25))
    turns = [turn for session in agents for turn in session.turns]
    cancelled = sum(turn.cancel_after is not None for turn in turns)
    assert cancelled / len(turns) == pytest.approx(0.25, abs=0.05)


def test_unknown_workloads_are_refused_with_the_list() -> None:
    with pytest.raises(InvalidRequest, match="shared-prefix"):
        make_workload("sharegtp", wish())
    assert shareable_tokens([Session([]), Session([])]) == 0
