"""One idea of the scheduler per test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_plane_harness import (
    DRAFTERS,
    Driver,
    driver,
    expected,
    pool_of,
    request_of,
    shared_blocks,
)

from headrace.base.errors import ContextOverflow, InvalidRequest, OptionError, Overloaded
from headrace.base.outputs import Vector
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan, RequestSpec
from headrace.base.step import PoolShape, StepPlan, StepResult
from headrace.kv import KvManager
from headrace.sched import ALL, Limits, Scheduler, Sequence, State, Work


def columns(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return list(zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True))


# The form of a plan


def test_a_prompt_comes_in_chunks_and_decodes_go_first() -> None:
    d = driver(rows=2, step_tokens=10)
    d.add(request_of("a", [1] * 3, max_tokens=4))
    d.step()
    d.add(request_of("b", [2] * 15, max_tokens=4))
    d.run()
    assert [columns(plan) for plan in d.plans[:4]] == [
        [(0, 0, 3, True)],
        [(0, 3, 1, True), (1, 0, 9, False)],
        [(0, 4, 1, True), (1, 9, 6, True)],
        [(0, 5, 1, True), (1, 15, 1, True)],
    ]
    d.check_answers()


def test_an_admission_is_sent_once_with_its_blocks() -> None:
    d = driver(step_tokens=5)
    d.add(request_of("a", list(range(1, 9)), max_tokens=2))
    d.run()
    assert [len(plan.admitted) for plan in d.plans] == [1, 0, 0]
    admission = d.plans[0].admitted[0]
    assert (admission.row, admission.tokens, admission.prompt_length) == (0, list(range(1, 9)), 8)
    assert [write.first for plan in d.plans for write in plan.blocks] == [0, 2]


def test_a_row_is_released_before_it_is_taken_again() -> None:
    d = driver(rows=1)
    d.add(request_of("a", [1], max_tokens=1))
    d.add(request_of("b", [2], max_tokens=1))
    d.run()
    assert d.plans[1].released == [0]
    assert d.plans[1].admitted[0].row == 0


def test_no_more_run_than_the_budget_can_decode() -> None:
    d = driver(rows=8, step_tokens=3)
    for i in range(6):
        d.add(request_of(f"r{i}", [i + 1], max_tokens=5))
    d.run()
    assert max(len(plan.rows) for plan in d.plans) == 3
    d.check_answers()


def test_depth_two_plans_before_the_result() -> None:
    d = driver(depth=2)
    d.add(request_of("a", [1, 2, 3], max_tokens=5))
    assert d.submit()
    assert d.submit()
    assert not d.submit(), "the depth is reached"
    assert columns(d.plans[1]) == [(0, 3, 1, True)]
    d.run()
    d.check_answers()


def test_depth_two_plans_nothing_beyond_the_length() -> None:
    d = driver(depth=2)
    d.add(request_of("a", [1, 2, 3], max_tokens=2))
    d.run()
    assert sum(plan.tokens for plan in d.plans) == 4


def test_what_follows_a_stop_is_dropped_at_depth_two() -> None:
    d = driver(depth=2)
    request = request_of("a", [1, 2, 3], max_tokens=20)
    tokens, _ = expected(request, 0, 64)
    request.spec = replace(request.spec, stop_ids=(tokens[3],))
    d.add(request)
    d.run()
    assert d.out[("a", 0)] == tokens[: tokens.index(tokens[3]) + 1]
    assert d.scheduler.in_flight == 0
    d.check_answers()


# How sequences end


def scripted(tokens: list[list[int]], **sampling: int) -> list[tuple[list[int], str | None]]:
    """Feed results of one sequence by hand."""
    stop_ids, wish = (9,), {"max_tokens": None, **sampling}
    scheduler = Scheduler(
        Limits(1, 16, 12, 4, drafts=3), KvManager(pool_of((None, 16))), clock=lambda: 1.0
    )
    scheduler.add(Request("a", [1, 2], RequestSpec(SamplingParams(**wish), 0, stop_ids)))  # type: ignore[arg-type]
    news = []
    for new in tokens:
        plan = scheduler.schedule()
        assert plan is not None
        for delta in scheduler.update(plan, StepResult(plan.number, [new])):
            news.append((delta.tokens, delta.finish))
    scheduler.check_integrity()
    return news


def test_a_stop_id_ends_it_and_is_delivered() -> None:
    assert scripted([[5], [9]]) == [([5], None), ([9], "stop")]


def test_max_tokens_ends_it() -> None:
    assert scripted([[5], [5]], max_tokens=2) == [([5], None), ([5], "length")]


def test_the_context_ends_it() -> None:
    news = scripted([[5]] * 10)
    assert len(news) == 10
    assert news[-1] == ([5], "length")


def test_a_stop_id_before_min_tokens_does_not_count() -> None:
    assert scripted([[9], [9], [9]], min_tokens=3) == [([9], None), ([9], None), ([9], "stop")]


def test_a_stop_id_as_the_last_token_is_a_stop() -> None:
    assert scripted([[5], [9]], max_tokens=2)[-1] == ([9], "stop")


def test_several_tokens_of_one_step_are_cut_at_the_end() -> None:
    assert scripted([[5], [6, 7, 9, 8]]) == [([5], None), ([6, 7, 9], "stop")]
    assert scripted([[5], [6, 7, 8]], max_tokens=3) == [([5], None), ([6, 7], "length")]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_planned_and_corrected(depth: int, drafter: str) -> None:
    d = driver(depth=depth, drafts=3, drafter=drafter, step_tokens=40)
    for i in range(4):
        d.add(request_of(f"r{i}", [i + 1] * 5, max_tokens=30))
    d.run()
    assert max(max(plan.counts) for plan in d.plans[2:]) == 4
    d.check_answers()


def test_a_prompt_does_not_wait_for_drafts() -> None:
    d = driver(drafts=3, drafter="right", step_tokens=10)
    d.add(request_of("a", [1, 2], max_tokens=60))
    while not any(work.drafts for work in d.scheduler._roster.decoding.values()):
        d.step()
    d.add(request_of("b", [3] * 9))
    d.submit()
    assert d.plans[-1].counts == [1, 9]
    d.run()
    d.check_answers()


# Prefixes


def test_one_wave_shares_a_prefix_while_it_is_computed() -> None:
    d = driver(rows=8, step_tokens=64)
    prefix = list(range(1, 25))
    for i in range(6):
        d.add(request_of(f"r{i}", [*prefix, 30 + i], max_tokens=3))
    d.submit()
    assert d.plans[0].tokens == 25 + 5
    assert len(shared_blocks(d)) == 6
    d.run()
    d.check_answers()
    assert [delta.cached for delta in d.finish.values()] == [0, 24, 24, 24, 24, 24]


def test_n_choices_compute_the_prompt_once() -> None:
    d = driver()
    d.add(request_of("a", list(range(1, 18)), n=4))
    d.submit()
    assert d.plans[0].tokens == 17 + 3
    d.run()
    d.check_answers()


def test_a_conversation_finds_what_was_generated() -> None:
    d = driver()
    d.add(request_of("a", [1, 2, 3], max_tokens=10))
    d.run()
    d.add(request_of("b", [1, 2, 3, *d.out[("a", 0)], 4, 4], max_tokens=1))
    d.run()
    # 12 of the 13 tokens are computed: the last one was never put in.
    assert d.finish[("b", 0)].cached == 12
    d.check_answers()


def test_a_whole_hit_computes_the_last_token() -> None:
    d = driver()
    for name in ("a", "b"):
        d.add(request_of(name, list(range(1, 9)), max_tokens=1))
        d.run()
    assert columns(d.plans[1]) == [(0, 7, 1, True)]
    assert len(d.plans[1].copies) == 1
    d.check_answers()


def test_tenants_do_not_share() -> None:
    d = driver()
    for salt in ("a", "b"):
        d.add(request_of(salt, list(range(1, 18)), cache_salt=salt))
    d.submit()
    assert not shared_blocks(d)
    d.run()
    d.check_answers()


def test_images_behind_equal_placeholders_share_what_lies_before_them() -> None:
    d = driver()
    for number, digest in enumerate((b"a", b"b", b"a")):
        image = InputSpan(9, 6, "image", digest)
        d.add(request_of(f"r{number}", list(range(1, 22)), inputs=(image,)))
        d.run()
    assert [delta.cached for delta in d.finish.values()] == [0, 8, 20]
    d.check_answers()


def test_prompt_logprobs_need_every_position() -> None:
    d = driver()
    d.add(request_of("a", list(range(1, 18))))
    d.run()
    d.add(request_of("b", list(range(1, 18)), prompt_logprobs=1, n=2))
    d.run()
    assert [d.finish[("b", choice)].cached for choice in (0, 1)] == [0, 16]
    assert not d.prompt_scores[("b", 1)]
    d.check_answers()


def test_prompt_logprobs_come_once_in_spite_of_a_preemption() -> None:
    d = driver((None, 10), step_tokens=4, rows=2, max_context=36)
    d.add(request_of("a", [1] * 9, max_tokens=20))
    while d.scheduler.stats().sampled_tokens == 0:
        d.step()
    d.add(request_of("b", [2] * 23, max_tokens=2, prompt_logprobs=1))
    while d.scheduler.stats().preemptions == 0:
        d.step()
    assert 0 < len(d.prompt_scores[("b", 0)]) < 22, "in the middle of its prompt"
    d.run()
    d.check_answers()


# Limits


def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    d = driver((None, 5), max_context=64)
    with pytest.raises(ContextOverflow, match="20") as caught:
        d.add(request_of("a", [1] * 20))
    assert caught.value.param == "prompt"
    with pytest.raises(ContextOverflow, match="20") as caught:
        d.add(request_of("a", [1] * 10, max_tokens=11))
    assert caught.value.param == "max_tokens"
    d.add(request_of("a", [1] * 10, max_tokens=10))
    d.add(request_of("b", [1] * 19, max_tokens=None))
    d.run()
    d.check_answers()


@pytest.mark.parametrize("prompt", [[], [-1], [2**31], [1.5], ["x"], [None]])
def test_a_prompt_that_is_none_is_refused(prompt: list[int]) -> None:
    d = driver()
    with pytest.raises(InvalidRequest) as caught:
        d.scheduler.add(Request("a", prompt, RequestSpec(SamplingParams(), 0)))
    assert caught.value.param == "prompt"
    assert not d.scheduler.has_work


def test_an_id_in_use_is_refused() -> None:
    d = driver()
    d.add(request_of("a", [1]))
    with pytest.raises(InvalidRequest) as caught:
        d.add(request_of("a", [1]))
    assert caught.value.param == "request_id"
    d.run()
    d.add(request_of("b", [1]))


def test_too_many_waiting_are_refused_until_some_are_done() -> None:
    d = driver(rows=2, max_waiting=1)
    d.add(request_of("a", [1], n=2))
    d.step()
    d.add(request_of("b", [1]))
    with pytest.raises(Overloaded) as caught:
        d.add(request_of("c", [1]))
    assert caught.value.retry_after is not None
    assert 1 <= caught.value.retry_after <= 60
    d.run()
    d.add(request_of("c", [1]))
    d.run()
    d.check_answers()


def test_without_a_queue_free_rows_can_still_be_had() -> None:
    d = driver(rows=2, max_waiting=0)
    d.add(request_of("a", [1]))
    d.add(request_of("b", [1]))
    with pytest.raises(Overloaded):
        d.add(request_of("c", [1]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0),
        ("step_tokens", 0),
        ("max_context", 1),
        ("max_waiting", -1),
        ("policy", "fair"),
        ("depth", 3),
        ("drafts", -1),
    ],
)
def test_limits_are_checked(field: str, value: object) -> None:
    good = {"rows": 1, "step_tokens": 1, "max_context": 2, "max_waiting": 0}
    with pytest.raises(OptionError) as caught:
        Limits(**{**good, field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


# Abort


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_while_waiting_running_and_in_flight(depth: int) -> None:
    d = driver(rows=1, depth=depth)
    for name in "abc":
        d.add(request_of(name, [1, 2, 3], max_tokens=9))
    d.submit()
    d.submit()
    d.abort("a")
    d.abort("b")
    assert d.kv.usage > 0, "a step in flight still uses the blocks"
    d.abort("a")
    d.run()
    assert [d.finish[(name, 0)].finish for name in "abc"] == ["abort", "abort", "length"]
    assert d.scheduler.abort("nobody") == []
    d.check_answers()


def test_one_choice_ends_and_the_others_go_on() -> None:
    d = driver()
    d.add(request_of("a", [1, 2, 3], n=3, max_tokens=6))
    d.step()
    d.read(d.scheduler.abort_choice("a", 1))
    assert d.scheduler.abort_choice("a", 1) == []
    d.run()
    assert d.finish[("a", 1)].finish == "stop"
    assert [len(d.out[("a", choice)]) for choice in range(3)] == [6, 1, 6]


def test_a_preempted_sequence_can_be_aborted_before_and_after_its_last_step() -> None:
    for wait in (False, True):
        d = driver((None, 6), rows=2, depth=2, max_context=24)
        d.add(request_of("a", [1] * 7, max_tokens=16))
        d.add(request_of("b", [2] * 7, max_tokens=16))
        while d.scheduler.stats().preemptions == 0:
            if not d.submit():
                d.receive()
        while wait and d.flying:
            d.receive()
        d.abort("b")
        d.run()
        assert d.finish[("b", 0)].finish == "abort"
        d.check_answers()


# Failure


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_sequences_and_poisons_no_one(depth: int) -> None:
    d = driver(rows=2, depth=depth)
    prompt = list(range(1, 21))
    d.add(request_of("a", prompt, max_tokens=3))
    d.submit(fails=True)
    d.add(request_of("b", prompt, max_tokens=3))
    d.submit()
    d.run()
    failed = d.finish[("a", 0)]
    assert (failed.finish, failed.error, failed.error_status) == ("error", "the step failed", 500)
    assert d.finish[("b", 0)].finish == "length"
    d.check_answers()


def test_the_loop_may_fail_a_plan_itself() -> None:
    d = driver(depth=2)
    d.add(request_of("a", [1, 2, 3], n=2))
    d.submit()
    d.submit()
    while d.flying:
        d.read(d.scheduler.fail(d.flying.popleft().plan, "the worker died"))
    assert {delta.error for delta in d.finish.values()} == {"the worker died"}
    assert not d.scheduler.has_work
    d.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_step_wrote_is_not_found_later(depth: int) -> None:
    d = driver(depth=depth)
    d.add(request_of("a", [1, 2, 3], max_tokens=9))
    d.submit()
    d.receive()
    d.submit(fails=True)  # computes position 3, the last of its block
    d.submit()
    while d.flying:
        d.receive()
    d.add(request_of("b", [1, 2, 3, *d.out[("a", 0)], 5], max_tokens=3))
    d.run()
    assert d.finish[("b", 0)].cached == 0
    d.check_answers()


# Other work, other resources


def test_a_pooling_request_ends_with_its_vector() -> None:
    d = driver(step_tokens=8)
    d.add(request_of("a", [1] * 20, task="vector"))
    d.run()
    assert d.finish[("a", 0)].output == Vector([20.0])
    assert d.finish[("a", 0)].finish == "stop"
    assert d.out[("a", 0)] == []
    d.check_answers()


def test_a_model_that_keeps_nothing_reads_its_input_whole() -> None:
    d = Driver(Limits(8, 16, 64, 100), PoolShape(4, ()))
    for name, size in (("a", 9), ("b", 9), ("c", 7), ("d", 16), ("e", 1)):
        d.add(request_of(name, [1] * size, task="vector"))
    with pytest.raises(ContextOverflow, match="16"):
        d.add(request_of("f", [1] * 17, task="vector"))
    d.run()
    assert [plan.counts for plan in d.plans] == [[9], [9, 7], [16], [1]]
    assert all(plan.starts == [0] * len(plan.counts) for plan in d.plans)
    d.check_answers()


def test_an_atom_is_never_cut_and_waits_for_room() -> None:
    d = driver(rows=4, step_tokens=16)
    for i in range(3):
        d.add(request_of(f"t{i}", [i + 1] * 4, max_tokens=6))
    d.step()
    d.add_once(request_of("image", [9] * 20, task="vector"), atom=8)
    d.run()
    image = [(plan.counts[3], len(plan.rows)) for plan in d.plans if len(plan.rows) > 3]
    assert image == [(8, 4), (12, 4)], "whole atoms, or all the rest"
    d.check_answers()


@pytest.mark.parametrize("atom", [8, ALL])
def test_an_atom_as_large_as_a_step_does_not_starve_beside_text(atom: int) -> None:
    """Text comes as fast as it goes; what fills a step of its own is served all the same."""
    d = driver(rows=4, step_tokens=8, max_context=40)
    for turn in range(200):
        if d.scheduler.waiting < 4:
            d.add(request_of(f"t{turn}", [turn % 40 + 1] * 3, max_tokens=20))
        if turn == 10:
            d.add_once(request_of("image", [9] * 8, task="vector"), atom)
        d.step()
        if ("image", 0) in d.finish:
            break
    assert ("image", 0) in d.finish
    assert turn < 10 + 60, "those before it had to end, nobody else"
    d.run()
    d.check_answers()


class Slots:
    """A resource of which two sequences can hold one each, wanted by adapters only."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def verify(self, request: Request) -> None:
        if request.spec.adapter == "unknown":
            raise InvalidRequest("no such adapter", param="adapter")

    def prepare(self, work: Work) -> bool:
        if work.request.spec.adapter is None:
            return True
        if len(self.held) == 2:
            return False
        self.held.add(work.id)
        return True

    def free(self, work: Work) -> None:
        self.held.discard(work.id)


def test_a_resource_holds_up_only_those_who_want_it() -> None:
    slots = Slots()
    scheduler = Scheduler(
        Limits(8, 64, 64, 100), KvManager(pool_of((None, 64))), (slots,), lambda: 0.0
    )
    with pytest.raises(InvalidRequest):
        scheduler.add(request_of("x", [1], adapter="unknown"))
    for i in range(4):
        scheduler.add(request_of(f"r{i}", [1], max_tokens=2, adapter="a"))
    scheduler.add(request_of("plain", [1], max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert [a.sequence_id for a in plan.admitted] == [0, 1, 4]
    ends = []
    while True:
        news = scheduler.update(plan, StepResult(plan.number, [[5]] * len(plan.rows)))
        ends += [delta for delta in news if delta.finish]
        plan = scheduler.schedule()
        if plan is None:
            break
    assert len(ends) == 5
    assert not slots.held
    scheduler.check_integrity()


def test_resources_return_when_there_are_no_blocks() -> None:
    slots = Slots()
    scheduler = Scheduler(
        Limits(8, 64, 40, 100), KvManager(pool_of((None, 10))), (slots,), lambda: 0.0
    )
    scheduler.add(request_of("a", [1] * 30, max_tokens=2))
    scheduler.add(request_of("b", [2] * 30, max_tokens=2, adapter="a"))
    scheduler.schedule()
    assert scheduler.running == 1
    assert not slots.held


def test_the_head_of_the_queue_enters_as_soon_as_there_are_blocks() -> None:
    d = driver((None, 10), max_context=40)
    d.add(request_of("long", [1] * 9, max_tokens=20))
    d.add(request_of("short", [2] * 9, max_tokens=2))
    d.add(request_of("head", [3] * 18, max_tokens=2))
    d.step()
    assert d.scheduler.waiting == 1
    while ("short", 0) not in d.finish:
        d.step()
    d.step()
    assert (d.scheduler.running, d.scheduler.waiting) == (2, 0)
    d.run()
    d.check_answers()


# States and books


def test_only_legal_transitions() -> None:
    sequence = Sequence(0, request_of("a", [1]), 0, 5, (0.0, 0))
    with pytest.raises(AssertionError):
        sequence.move(State.PREEMPTED)
    sequence.move(State.FINISHED)
    with pytest.raises(AssertionError):
        sequence.move(State.RUNNING)


def test_stats_count() -> None:
    d = driver(rows=2, step_tokens=20)
    d.add(request_of("a", list(range(1, 13)), max_tokens=3))
    d.add(request_of("b", list(range(1, 13)), max_tokens=3))
    d.add(request_of("c", [1], max_tokens=3))
    d.step()
    stats = d.scheduler.stats()
    assert (stats.running, stats.waiting, stats.entries) == (2, 1, 2)
    assert (stats.tokens, stats.prefill_tokens, stats.sampled_tokens) == (16, 16, 2)
    assert (stats.prefix_queries, stats.prefix_hits) == (24, 8)
    assert stats.kv_usage == 4 / 64
    d.step()
    assert d.scheduler.stats().prefill_tokens == 0
    d.run()
    assert d.scheduler.stats().kv_usage == 0


def test_queue_time_ends_when_it_first_runs() -> None:
    d = driver(rows=1)
    d.add(request_of("a", [1], max_tokens=1))
    d.add(request_of("b", [2], max_tokens=1))
    d.now = 5.0
    d.step()
    d.now = 9.0
    d.run()
    assert [delta.scheduled for delta in d.finish.values()] == [5.0, 9.0]
