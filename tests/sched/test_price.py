"""The price of drafts: what pays is verified, what does not is not."""

from __future__ import annotations

import pytest
from control_plane_harness import DRAFTERS, pool_of, request_of
from control_plane_harness import Driver as ControlDriver
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.drafted import Drafted, Verified
from headrace.base.step import DraftCosts, Drafting, StepPlan, StepResult
from headrace.sched import Limits
from headrace.sched.price import (
    MARGIN,
    DraftCounts,
    StepPrices,
    computed,
    draft_lengths,
    least,
    paying,
)


def flat(tokens: int) -> float:
    return 1.0


def linear(tokens: int) -> float:
    return float(tokens)


def stairs(tokens: int) -> float:
    """Three rows cost more than four."""
    return {1: 10.0, 2: 10.5, 3: 12.6, 4: 10.6}.get(tokens, 5.0 + 2 * tokens)


def test_free_rows_take_every_draft() -> None:
    assert draft_lengths([bytes([200, 10, 1]), bytes([90])], 2, 9, StepPrices(flat)) == [3, 1]


def test_rows_at_full_price_take_none() -> None:
    assert draft_lengths([bytes([254, 250])], 1, 9, StepPrices(linear)) == [0]
    assert draft_lengths([b""], 1, 9, StepPrices(linear)) == [0]


def test_the_likeliest_first() -> None:
    assert draft_lengths([bytes([120, 60]), bytes([250, 200])], 2, 2, StepPrices(flat)) == [0, 2]


def test_a_dear_length_is_passed_over() -> None:
    assert draft_lengths([bytes([250, 30, 29])], 1, 3, StepPrices(stairs)) == [3]
    assert draft_lengths([bytes([250, 30])], 1, 2, StepPrices(stairs)) == [1]


def test_a_prompt_in_the_step_makes_drafts_dearer() -> None:
    def seconds(tokens: int) -> float:
        return max(8.0, tokens)

    chances = [bytes([230, 200, 150])]
    assert draft_lengths(chances, 1, 3, StepPrices(seconds)) == [3]
    assert draft_lengths(chances, 100, 3, StepPrices(seconds)) == [0]


def descending(values: list[int]) -> bytes:
    return bytes(sorted(values, reverse=True))


@given(
    st.lists(st.lists(st.integers(0, 255), max_size=5).map(descending), min_size=1, max_size=4),
    st.integers(0, 12),
    st.lists(st.floats(0.1, 10), min_size=30, max_size=30),
)
def test_no_other_lengths_give_more(survivals: list[bytes], room: int, times: list[float]) -> None:
    def rate(lengths: tuple[int, ...]) -> float:
        sure = len(survivals)
        hoped = sum(sum(one[:n]) for one, n in zip(survivals, lengths, strict=True)) / 255
        return (sure + hoped) / times[sure + sum(lengths)]

    found = draft_lengths(survivals, len(survivals), room, StepPrices(times.__getitem__))
    assert sum(found) <= room
    others = [()]
    for one in survivals:
        others = [(*before, n) for before in others for n in range(len(one) + 1)]
    best = max(rate(lengths) for lengths in others if sum(lengths) <= room)
    none = MARGIN * rate((0,) * len(survivals))
    if any(found):
        assert rate(tuple(found)) == pytest.approx(best)
    else:
        assert best <= none * (1 + 1e-9)


def test_prices_learn_what_a_size_takes() -> None:
    prices = StepPrices(flat)
    for _ in range(60):
        prices.observe(1, 0.010)
        prices.observe(4, 0.020)
    assert prices.seconds(4) / prices.seconds(1) == pytest.approx(2, rel=0.1)
    assert prices.seconds(1) <= prices.seconds(2) < prices.seconds(3) < prices.seconds(4)


def test_a_little_more_is_not_enough() -> None:
    def seconds(tokens: int) -> float:
        return 10 + (tokens - 4) * 2

    chances = [bytes([255]), b"", b"", b""]
    assert 5 / seconds(5) < MARGIN * 4 / seconds(4) < 5 / 11
    assert draft_lengths(chances, 4, 9, StepPrices(seconds)) == [0, 0, 0, 0]
    assert draft_lengths(chances, 4, 9, StepPrices(lambda n: 6 + n)) == [1, 0, 0, 0]


def true_seconds(tokens: int) -> float:
    """Return the time of a step on two cores (docs/kernels.md)."""
    return 0.0067 + 0.0014 * tokens


def test_a_few_steps_tell_of_their_neighbours() -> None:
    """A calibration beside others' work said that rows are as good as free. Steps of a dozen sizes,
    each seen once, mend that for all sizes between them."""
    prices = StepPrices(lambda tokens: 0.057 + 0.0003 * tokens)
    for tokens in [8] * 20 + [11, 13, 19, 23, 26, 31, 34, 37, 17, 15, 29, 21]:
        prices.observe(tokens, true_seconds(tokens))
    for tokens in (12, 16, 20, 24, 28):
        told = prices.seconds(tokens) / prices.seconds(8)
        assert told == pytest.approx(true_seconds(tokens) / true_seconds(8), rel=0.25)


def test_no_row_is_free_before_it_was_seen() -> None:
    """Eight sequences, drafts as likely as text gives them: none is verified on a guess; of one
    sequence they are."""
    likely = bytes([round(255 * 0.7**depth) for depth in range(1, 8)])
    assert sum(draft_lengths([likely] * 8, 8, 500, StepPrices(least))) == 0
    assert sum(draft_lengths([likely], 1, 500, StepPrices(least))) > 0


def test_a_slow_moment_of_small_steps_is_forgotten_by_who_always_drafts() -> None:
    """Nothing but steps of four rows ran since, so no small one can show that it is quick again."""
    prices = StepPrices(flat)
    for _ in range(300):
        prices.observe(1, 0.050)
    for _ in range(2000):
        prices.observe(4, 0.012)
    assert prices.seconds(1) == pytest.approx(prices.seconds(4) * flat(1) / flat(4), rel=0.1)


def test_a_slow_moment_does_not_keep_a_draft_model_drafting() -> None:
    """Its drafts do not pay at what steps take; while steps of one row took four times that, they
    did, and since then there was none."""
    chances, prices = [bytes([round(255 * 0.5**depth) for depth in range(1, 8)])], StepPrices(least)
    for _ in range(300):
        prices.observe(1, 4 * true_seconds(1))
    drafted = []
    for _ in range(1500):
        (count,) = draft_lengths(chances, 1, 500, prices, [0.5 * true_seconds(1)])
        drafted.append(count)
        prices.observe(1 + count, true_seconds(1 + count))
    assert drafted[0] > 0
    assert not any(drafted[1000:])


def test_between_the_numbers_that_are_predicted_prices_are_on_a_line() -> None:
    asked = []

    def predict(tokens: int) -> float:
        asked.append(tokens)
        return true_seconds(tokens)

    prices = StepPrices(predict)
    assert prices.rising(1, 256) == pytest.approx([true_seconds(one) for one in range(1, 257)])
    assert len(asked) < 50


def test_one_slow_step_is_forgotten() -> None:
    prices = StepPrices(flat)
    for _ in range(20):
        prices.observe(1, 0.010)
    prices.observe(3, 5.0)
    dear = prices.seconds(3)
    assert dear < 0.020
    for _ in range(2000):
        prices.observe(1, 0.010)
    assert prices.seconds(3) < 0.0105


def test_what_drafts_saved_and_took() -> None:
    """A step of two decodes and three drafts takes 11, one of two decodes 8: each row a third of
    what the three took, each accepted draft a step of the two."""
    prices = StepPrices(lambda tokens: 6.0 + tokens)
    counts, verified = DraftCounts(), {0: Verified("a", 2, 1), 1: Verified("b", 1, 0)}
    counts.note(5, 2, verified, prices)
    assert verified[0].spent == verified[0].saved == 0, "nothing is known of this machine yet"
    prices.observe(5, 0.011)
    counts.note(5, 2, verified, prices)
    assert counts.totals == (4, 6, 2)
    assert verified[0][3:] == pytest.approx((0.002, 0.008))
    assert verified[1][3:] == pytest.approx((0.001, 0.0))
    told = Drafted()
    for one in verified.values():
        told.add(one)
    assert told.totals() == (2, 3, 1)
    assert (told.saved, told.spent, told.vain) == pytest.approx((0.008, 0.003, 0.002))
    both = Drafted()
    both.join(told)
    both.join(told)
    assert both.told()["acceptance_histogram"] == [2, 2]
    assert both.told()["draft_acceptance_rate"] == pytest.approx(1 / 3)
    assert both.totals("a") == (2, 4, 2)


def test_prices_learn_from_what_was_computed() -> None:
    """With two steps in flight more drafts may be planned than are ready."""
    plan = StepPlan(0, [0, 1], [8, 8], [8, 4], [True, True], drafts=10)
    result = StepResult(0, [[1, 2], [3]], verified={0: Verified("a", 3, 1)})
    assert computed(plan, result) == 5
    assert computed(plan, StepResult(0, [[1], [3]])) == 2


def test_a_plan_has_no_more_drafts_than_places_for_them() -> None:
    StepPlan(0, [0, 1], [8, 0], [8, 4], [True, False], drafts=7).verify()
    with pytest.raises(AssertionError, match="8 drafts in 7"):
        StepPlan(0, [0, 1], [8, 0], [8, 4], [True, False], drafts=8).verify()


def test_from_which_chance_on_drafts_pay() -> None:
    prices = StepPrices(least)
    for running in (1, 2, 8):
        chance = paying(running, prices)
        assert chance == pytest.approx(
            MARGIN * (1 + 0.4 * running - 0.2) / (0.8 + 0.2 * running) - 1
        )
        for survival in (chance - 0.01, chance + 0.01):
            likely = [bytes([round(255 * survival)])] * running
            assert (sum(draft_lengths(likely, running, 99, prices)) == running) == (
                survival > chance
            )


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_priced_drafts_change_no_answer(drafter: str) -> None:
    """Steps cost what the stairs say; the fake's chances are any, its answers are checked."""
    limits = Limits(4, 40, 60, 100, drafts=5)
    driver = ControlDriver(limits, pool_of((None, 64)), drafter=drafter)
    driver.scheduler.prices = StepPrices(stairs)
    for i in range(6):
        driver.add(request_of(f"r{i}", [i + 1] * 5, max_tokens=40))
    driver.run()
    driver.check_answers()
    stats = driver.scheduler.stats()
    assert 0 < stats.drafts < stats.draft_tokens
    if drafter in ("right", "wrong"):
        assert stats.accepted_tokens == (drafter == "right") * stats.draft_tokens
    lengths = {count for plan in driver.plans for count in plan.counts}
    assert len(lengths) > 2
    assert stats.draft_tokens >= sum(one.verified.tried for one in driver.deltas if one.verified)
    tried = sum(plan.drafts for plan in driver.plans)
    assert stats.draft_tokens <= tried, "a step whose sequence has ended tries for nobody"


def test_drafts_that_are_still_to_be_made_cost_their_time_once_for_all() -> None:
    """Rows cost nothing here: what counts is the deepest draft that a model makes."""
    prices, likely = StepPrices(lambda tokens: 1.0), bytes([250, 200, 150])
    for making, wanted in ((0.1, 3), (0.5, 2), (0.75, 1), (0.95, 0)):
        assert draft_lengths([likely], 1, 9, prices, [making]) == [wanted]
    # Two sequences share the time of each draft.
    assert draft_lengths([likely, b""], 2, 9, prices, [0.75, 0.75]) == [0, 0]
    assert draft_lengths([likely, likely], 2, 9, prices, [0.75, 0.75]) == [1, 1]


def test_drafts_that_are_there_are_verified_where_making_others_does_not_pay() -> None:
    prices = StepPrices(lambda tokens: 1.0)
    sure, likely = bytes([150, 150]), bytes([250])
    assert draft_lengths([likely, sure], 2, 9, prices, [5.0, 0.0]) == [0, 2]
    assert draft_lengths([likely, sure], 2, 9, prices, [0.1, 0.0]) == [1, 2]
    assert draft_lengths([likely, sure], 2, 9, None, [5.0, 0.0]) == [1, 2]


def test_made_drafts_spend_the_time_of_their_making() -> None:
    counts, prices = DraftCounts(), StepPrices(least)
    prices.observe(1, 1.0)
    verified = {0: Verified("draft", 3, 1), 1: Verified("suffix", 3, 1)}
    counts.note(8, 2, verified, prices, 0.6)
    assert verified[0].spent - verified[1].spent == pytest.approx(0.6)
    assert verified[0].saved == verified[1].saved > 0


def test_costs_of_a_part_that_drafts_follow_its_times() -> None:
    """A step takes 0.1 s without it; a draft of each row 0.02 s, reading a token 0.001 s."""
    counts, guess = DraftCounts(), DraftCosts(0.5, 0.1)
    assert counts.making == 0.0
    assert counts.costs is None
    counts.learn(Drafting([0], guess), 0.3, decodes=False)
    assert counts.costs == guess, "a prompt says nothing of a step's time"
    for _ in range(200):
        told = Drafting([0], guess, seconds=0.09, making=0.06, depth=3, read=30)
        counts.learn(told, 0.19, decodes=True)
    assert counts.costs == pytest.approx((0.2, 0.01))
    assert counts.making == pytest.approx(0.02)
    for _ in range(3000):
        counts.learn(Drafting([], guess), 0.1, decodes=True)
    assert counts.costs == pytest.approx((0.5, 0.01), rel=0.01), "tried again, by its bytes"
