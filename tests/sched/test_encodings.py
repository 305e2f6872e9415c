"""Shared encodings beside text: what must hold whatever comes, fails and leaves."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from control_plane_harness import VOCAB, Driver, Encoded, driver, pool_of, request_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.encodings import EncoderShape, EncodingName, SealedHandle
from headrace.base.errors import ContextOverflow, InvalidRequest, Overloaded
from headrace.base.request import Request
from headrace.base.spec import InputSpan
from headrace.engine import messages
from headrace.sched import Limits
from headrace.sched.price import ALL_TOKENS, FEWEST, MixedPrices
from headrace.sched.scheduler import LOOK_AHEAD

EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", "100"))
SHAPE = EncoderShape(slices=5, width=1, bound=4 * 40)
"""Forty rows of one number."""


def with_inputs(
    request: Request, *spans: tuple[int, int, bytes], handle: int = 0, mutual: bool = False
) -> Request:
    """The request with inputs (first, length, digest), whose handles say what they hold."""
    made = []
    for first, length, digest in spans:
        name = EncodingName(request.tenant, digest)
        source = SealedHandle(handle, 0, repr(name).encode(), 1, 1)
        span = InputSpan(first, length, "sound", digest, source, units=length or 40)
        made.append(span._replace(mutual=mutual))
    request.spec = replace(request.spec, inputs=tuple(made))
    return request


def encoding_driver(shape: EncoderShape = SHAPE, **bounds: int) -> Driver:
    limits = Limits(
        bounds.get("rows", 8), bounds.get("step_tokens", 64), 64, 100, depth=bounds.get("depth", 1)
    )
    return Driver(limits, pool_of((None, 64)), encoder=shape)


def starts(d: Driver) -> list[bytes]:
    return [one.name.digest for plan in d.plans for one in plan.encodings]


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 6),
    step_tokens=st.integers(1, 40),
    depth=st.sampled_from([1, 2]),
    blocks=st.integers(8, 40),
    slices=st.integers(1, 6),
    across=st.booleans(),
    mutual=st.booleans(),
    window=st.sampled_from([None, 3, 9]),
    failures=st.sampled_from([(0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.2)]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_its_answer(
    seed: int,
    rows: int,
    step_tokens: int,
    depth: int,
    blocks: int,
    slices: int,
    across: bool,
    mutual: bool,
    window: int | None,
    failures: tuple[float, float],
    policy: str,
) -> None:
    """The worker of the harness asserts that nothing is computed twice or read before it is
    complete, that no chunk ends between tokens which see each other, and that a row reads its own
    tenant's; the scheduler's checks count the bytes."""
    limits = Limits(rows, step_tokens, 60, 100, policy, depth)  # type: ignore[arg-type]
    shape = SHAPE._replace(slices=slices, slot=40 * across, whole=across)
    groups: list[tuple[int | None, int]] = [(None, blocks)]
    if window is not None:  # As many blocks of it as a memory plan has at least.
        groups.append((window, min(blocks, (window + depth * step_tokens + 3) // 4 + 1)))
    d = Driver(limits, pool_of(*groups), seed=seed, encoder=shape)
    steps, d.worker.fails_items = failures
    rng = random.Random(seed)
    for number in range(rng.randint(1, 40)):
        action = rng.random()
        if action < 0.5:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))]
            salt = rng.choice(["", "other"])
            request = request_of(
                f"r{number}",
                prompt,
                max_tokens=rng.choice([1, 3, 9]),
                n=rng.choice([1, 1, 3]),
                priority=rng.choice([0, 5]),
                cache_salt=salt,
            )
            spans = spans_of(rng, len(prompt))
            if across:
                spans = [(0, 0, digest) for _, _, digest in spans[:1]]
            with_inputs(request, *spans, handle=number % 3, mutual=mutual and not across)
            try:
                d.add(request)
            except (Overloaded, ContextOverflow, InvalidRequest):
                continue
        elif action < 0.6 and d.requests:
            d.abort(rng.choice(list(d.requests)))
        elif action < 0.8:
            if len(d.flying) < depth:
                d.submit(fails=rng.random() < steps)
        elif d.flying:
            d.receive()
    d.worker.fails_items = 0.0
    d.run()
    d.check_answers()
    stats = d.scheduler.stats().encodings
    assert stats is not None
    assert stats.waiting == 0
    assert stats.bytes <= shape.bound


def spans_of(rng: random.Random, length: int) -> list[tuple[int, int, bytes]]:
    """Up to three inputs one after the other; equal names have equal lengths."""
    found, at = [], rng.randint(0, 3)
    for _ in range(rng.randint(0, 3)):
        size = rng.randint(1, 6)
        if at + size >= length:
            break
        found.append((at, size, f"{rng.choice('abc')}{size}".encode()))
        at += size + rng.randint(0, 4)
    return found


def test_two_requests_share_one_encoding_and_two_tenants_do_not() -> None:
    d = encoding_driver()
    for name, salt in (("a", ""), ("b", ""), ("c", "other")):
        request = request_of(name, [1] * 12 + [len(name)], cache_salt=salt)
        d.add(with_inputs(request, (2, 8, b"sound")))
    d.run()
    d.check_answers()
    tenants = [one.name.tenant for plan in d.plans for one in plan.encodings]
    assert len(tenants) == len(set(tenants)) == 2
    stats = d.scheduler.stats().encodings
    assert stats is not None
    assert (stats.computed, stats.shared, stats.bytes) == (2, 1, 4 * 16)


def test_text_before_an_input_is_computed_while_it_is_encoded() -> None:
    d = encoding_driver(EncoderShape(3, 1, 4 * 600))
    d.add(request_of("text", [3] * 4, max_tokens=20))
    d.step()
    d.add(with_inputs(request_of("sound", [1] * 40, max_tokens=1), (10, 25, b"sound")))
    d.run()
    d.check_answers()
    first = next(plan for plan in d.plans if plan.encodings)
    assert first.counts[: first.texts] == [1, 10], "up to the span"
    assert [plan.counts[-1] for plan in d.plans if plan.parts] == [1, 1, 1], "slice by slice"
    own = [plan.texts for plan in d.plans if plan.parts]
    assert own == [2, 1, 1], "text decodes in every step"


def test_a_prompt_about_an_input_is_computed_in_steps_that_streams_wait_for() -> None:
    """At a millisecond a token: fifty of them, the decode's among them."""
    d = encoding_driver(EncoderShape(3, 1, 4 * 600), step_tokens=512)
    d.add(request_of("text", [3] * 4, max_tokens=40))
    d.step()
    d.add(with_inputs(request_of("sound", [1] * 60, max_tokens=1), (2, 55, b"sound")))
    d.run()
    d.check_answers()
    assert max(plan.tokens for plan in d.plans if not plan.parts and plan.texts > 1) in (49, 50)


def test_a_prompt_that_is_in_the_index_wants_no_encoding() -> None:
    d = encoding_driver(EncoderShape(3, 1, 4 * 20))
    prompt = list(range(1, 31))
    d.add(with_inputs(request_of("a", prompt, max_tokens=1), (4, 12, b"one")))
    d.run()
    d.add(with_inputs(request_of("b", [9] * 20, max_tokens=1), (1, 18, b"two")))
    d.run()
    assert starts(d) == [b"one", b"two"]
    d.add(with_inputs(request_of("c", [*prompt, 5], max_tokens=1), (4, 12, b"one")))
    d.run()
    assert starts(d) == [b"one", b"two"], "its keys and values are there"
    d.check_answers()


def test_an_encoding_without_readers_is_kept_until_others_need_its_room() -> None:
    d = encoding_driver()
    for turn, digest in enumerate((b"a", b"b", b"a", b"c", b"a")):
        request = request_of(f"r{turn}", [turn + 1] + [5] * 25, max_tokens=1)
        d.add(with_inputs(request, (2, 15, digest)))
        d.run()
    assert starts(d) == [b"a", b"b", b"c"], "the one that was read longest ago goes"
    stats = d.scheduler.stats().encodings
    assert stats is not None
    assert stats.bytes == 4 * 30
    d.check_answers()


def test_a_reset_forgets_what_nobody_reads() -> None:
    """A worker that sleeps has nothing of it any more."""
    d = encoding_driver()
    d.add(with_inputs(request_of("a", [1] * 20, max_tokens=1), (2, 8, b"a")))
    d.run()
    d.scheduler.reset()
    d.check()
    stats = d.scheduler.stats().encodings
    assert stats is not None
    assert stats.bytes == 0
    d.worker.encodings.clear()
    d.worker.encodings[0] = Encoded(EncodingName("", b"none"), b"", 0)
    d.add(with_inputs(request_of("b", [2] * 20, max_tokens=1), (2, 8, b"a")))
    d.run()
    d.check_answers()
    assert starts(d) == [b"a", b"a"]


def test_who_finds_no_room_goes_before_later_ones_that_need_some() -> None:
    """Two requests that each need more than half run one after the other, and a stream of small
    ones does not keep a large one out."""
    d = encoding_driver(rows=4)
    for name in ("a", "b"):
        spans = [(1, 12, f"{name}1".encode()), (14, 12, f"{name}2".encode())]
        d.add(with_inputs(request_of(name, [len(name)] * 30, max_tokens=2), *spans))
    for turn in range(60):
        if d.scheduler.waiting < 3:
            request = request_of(f"s{turn}", [turn % 40 + 1] * 12, max_tokens=6)
            d.add(with_inputs(request, (1, 10, f"s{turn}".encode())))
        d.step()
    assert ("b", 0) in d.finish
    d.run()
    d.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_urgent_get_the_room_of_who_waits(depth: int) -> None:
    """More urgent ones than are looked past; work that gave way to them holds all the room."""
    d = Driver(Limits(1, 64, 64, 100, "priority", depth), pool_of((None, 64)), encoder=SHAPE)
    low = request_of("low", [9] * 45, max_tokens=9, priority=5)
    d.add(with_inputs(low, (2, 40, b"low")))
    while ("low", 0) not in d.out:
        d.step()
    for turn in range(LOOK_AHEAD + 2):
        request = request_of(f"u{turn}", [turn + 1] * 12, max_tokens=2, priority=0)
        d.add(with_inputs(request, (1, 8, f"u{turn}".encode())))
    d.run()
    d.check_answers()
    assert d.finish["low", 0].finish == "length"
    assert list(d.finish)[-1] == ("low", 0)


def test_nobody_loses_room_to_who_finds_none_even_so() -> None:
    """The urgent one waits for what runs, so what waits keeps what it has."""
    d = Driver(Limits(2, 64, 64, 100, "priority"), pool_of((None, 64)), encoder=SHAPE)
    d.add(with_inputs(request_of("runs", [9] * 30, max_tokens=9), (1, 25, b"runs")))
    while ("runs", 0) not in d.out:
        d.step()
    d.add(with_inputs(request_of("waits", [8] * 15, max_tokens=2, priority=5), (1, 10, b"waits")))
    d.step()
    d.add(with_inputs(request_of("urgent", [7] * 40, max_tokens=2), (1, 30, b"urgent")))
    d.run()
    d.check_answers()
    assert starts(d) == [b"runs", b"waits", b"urgent"]


def test_inputs_that_never_fit_are_refused() -> None:
    d = encoding_driver()
    request = with_inputs(request_of("a", [1] * 60), (0, 30, b"a"), (30, 20, b"b"))
    with pytest.raises(InvalidRequest, match="at most 160"):
        d.add(request)
    twice = request_of("b", [1] * 62, max_tokens=1)
    d.add(with_inputs(twice, (0, 30, b"a"), (30, 30, b"a")))
    d.run()
    d.check_answers()


def test_inputs_without_a_handle_are_refused() -> None:
    request = with_inputs(request_of("a", [1] * 20), (0, 8, b"a"))
    spans = tuple(span._replace(source=None) for span in request.spec.inputs)
    request.spec = replace(request.spec, inputs=spans)
    with pytest.raises(InvalidRequest, match="no handle"):
        encoding_driver().add(request)


def test_a_step_that_is_tried_again_ends_no_reader() -> None:
    d = encoding_driver()
    d.add(with_inputs(request_of("a", [1] * 20), (0, 8, b"a")))
    plan = d.scheduler.schedule()
    assert plan is not None
    assert d.scheduler.fail(plan, "no memory", again=True) == []
    d.worker.execute(plan, fails=True)
    d.run()
    assert d.finish["a", 0].finish == "length"
    assert len(starts(d)) == 1, "once more"
    d.check_answers()


def test_readers_end_with_the_step_that_failed_and_others_go_on() -> None:
    d = encoding_driver()
    d.add(with_inputs(request_of("a", [1] * 20), (0, 8, b"a")))
    d.add(with_inputs(request_of("b", [2] * 20), (0, 8, b"a")))
    d.add(with_inputs(request_of("c", [3] * 20), (0, 8, b"c")))
    d.submit(fails=True)
    d.receive()
    assert {key[0]: one.finish for key, one in d.finish.items()} == {"a": "error", "b": "error"}
    d.run()
    assert d.finish["c", 0].finish == "length"
    d.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
def test_another_handle_of_the_same_content_is_tried(depth: int) -> None:
    """The first reader has left, and its handle with it, before the worker opened it."""
    d = encoding_driver(depth=depth)
    d.add(with_inputs(request_of("a", [1] * 20), (0, 8, b"a"), handle=1))
    d.add(with_inputs(request_of("b", [2] * 20), (0, 8, b"a"), handle=2))
    d.worker.fails_items = 1.0
    d.submit()
    d.worker.fails_items = 0.0
    d.run()
    ends = {key[0]: one.finish for key, one in d.finish.items()}
    assert ends == {"a": "error", "b": "length"}
    handles = [one.source.process for plan in d.plans for one in plan.encodings]
    assert handles == [1, 2]
    d.check_answers()


def test_nobody_gives_way_to_who_waits_for_an_encoding() -> None:
    limits = Limits(2, 64, 64, 100, policy="priority")
    d = Driver(limits, pool_of((None, 64)), encoder=EncoderShape(5, 1, 4 * 3000))
    for name in ("a", "b"):
        d.add(request_of(name, [len(name)] * 4, max_tokens=40, priority=5))
    d.step()
    urgent = request_of("urgent", [1] * 60, max_tokens=2, priority=0)
    d.add(with_inputs(urgent, (0, 55, b"a")))
    d.run()
    d.check_answers()
    assert d.scheduler.stats().preemptions <= 2, "once to begin the encoding, once to run"
    done = [key[0] for key in d.finish]
    assert done[0] == "urgent"


def test_the_last_reader_takes_an_unfinished_encoding_with_it() -> None:
    d = encoding_driver(EncoderShape(5, 1, 4 * 3000))
    d.add(request_of("text", [3] * 4, max_tokens=30))
    d.step()
    d.add(with_inputs(request_of("a", [1] * 60), (0, 55, b"a")))
    d.step()
    d.step()
    assert d.scheduler.stats().encodings.bytes == 4 * 55  # type: ignore[union-attr]
    d.abort("a")
    d.run()
    assert d.scheduler.stats().encodings.bytes == 0  # type: ignore[union-attr]
    assert [one for plan in d.plans for one in plan.dropped] == [0]
    d.check_answers()


def test_one_that_is_begun_again_while_its_last_slices_are_in_flight_is_given_back() -> None:
    d = encoding_driver(depth=2)
    d.add(with_inputs(request_of("a", [1] * 20), (0, 8, b"a")))
    d.submit()
    d.abort("a")
    d.add(with_inputs(request_of("b", [2] * 20), (0, 8, b"a")))
    d.submit()
    d.run()
    assert starts(d) == [b"a", b"a"]
    assert [one for plan in d.plans for one in plan.dropped] == [0]
    d.check_answers()


def test_a_more_urgent_input_passes_one_that_is_under_way() -> None:
    """Its slices go first, and the other goes on where it was; both are attended to by every
    token."""
    shape = EncoderShape(slices=5, width=1, bound=4 * 3000, slot=4000)
    d = Driver(Limits(4, 64, 64, 100, "priority"), pool_of((None, 64)), encoder=shape)
    d.add(request_of("text", [3] * 4, max_tokens=30))
    d.step()
    d.add(with_inputs(request_of("long", [1] * 9, max_tokens=1, priority=1), (0, 0, b"long")))
    d.step()
    d.add(with_inputs(request_of("short", [2] * 9, max_tokens=1), (0, 0, b"short")))
    d.run()
    d.check_answers()
    ends = [key[0] for key in d.finish]
    assert ends.index("short") < ends.index("long")
    assert starts(d) == [b"long", b"short"], "none is begun again"


@pytest.mark.parametrize("whole", [True, False])
def test_slices_wait_for_more_urgent_texts_that_are_read_whole(whole: bool) -> None:
    shape = EncoderShape(slices=5, width=1, bound=4 * 3000, slot=4000, whole=whole)
    d = Driver(Limits(4, 64, 64, 100, "priority"), pool_of((None, 64)), encoder=shape)
    d.add(request_of("urgent", [3] * 4, max_tokens=9, cache_salt="other"))
    d.step()
    d.add(with_inputs(request_of("other", [1] * 9, max_tokens=1, priority=1), (0, 0, b"other")))
    d.run()
    d.check_answers()
    with_slices = [plan for plan in d.plans if plan.parts]
    assert {plan.texts for plan in with_slices} == ({0} if whole else {1})
    assert len(with_slices) == (3 if whole else 5), "a tenth of a second, or half of it"


@given(
    depth=st.sampled_from([1, 2]),
    tokens=st.integers(8, 20),
    seconds=st.floats(4.0, 20.0),
    priority=st.integers(1, 2),
)
@settings(max_examples=EXAMPLES // 10, deadline=None, suppress_health_check=list(HealthCheck))
def test_slices_wait_for_a_minute_at_most_for_each_step_of_priority(
    depth: int, tokens: int, seconds: float, priority: int
) -> None:
    """More urgent texts come without end, one a step, so that some decode in every step."""
    shape = EncoderShape(slices=5, width=1, bound=4 * 3000, slot=4000, whole=True)
    d = Driver(Limits(8, 64, 64, 100, "priority", depth), pool_of((None, 64)), encoder=shape)
    other = request_of("other", [1] * 9, max_tokens=1, priority=priority)
    added, begin = 0, 0.0
    for turn in range(200):
        if added - len(d.finish) < 4:
            d.add(request_of(f"{added}", [3] * 4, max_tokens=tokens, cache_salt="new"))
            added += 1
        if turn == 4:
            d.add(with_inputs(other, (0, 0, b"other")))
            begin = d.now
        d.step()
        d.now += seconds
        if starts(d):
            break
    waited = d.now - begin
    assert 60 * priority - seconds < waited < 60 * priority + (tokens + 6) * seconds
    d.run()
    d.check_answers()


def test_slices_of_a_tenant_do_not_wait_for_its_own_texts() -> None:
    shape = EncoderShape(slices=5, width=1, bound=4 * 3000, slot=4000, whole=True)
    d = Driver(Limits(4, 64, 64, 100, "priority"), pool_of((None, 64)), encoder=shape)
    d.add(request_of("urgent", [3] * 4, max_tokens=40))
    d.step()
    d.add(with_inputs(request_of("other", [1] * 9, max_tokens=1, priority=1), (0, 0, b"other")))
    d.run()
    d.check_answers()
    assert [key[0] for key in d.finish] == ["other", "urgent"]


def test_equal_texts_about_different_inputs_share_no_block() -> None:
    shape = EncoderShape(slices=2, width=1, bound=4 * 3000, slot=4000)
    d = encoding_driver(shape)
    for name, digest in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        d.add(with_inputs(request_of(name, [5] * 40, max_tokens=4), (0, 0, digest)))
        d.run()
    d.check_answers()
    assert d.scheduler.stats().prefix_hits == 39, "the third has the first's"


def test_plans_cross_processes_as_they_are() -> None:
    d = encoding_driver()
    d.add(with_inputs(request_of("a", [1] * 20), (2, 8, b"a")))
    d.submit()
    d.abort("a")
    d.add(with_inputs(request_of("b", [2] * 20), (2, 8, b"b")))
    d.run()
    for plan in d.plans:
        sent = msgspec.msgpack.encode(messages.Execute(plan))
        got = msgspec.msgpack.decode(sent, type=messages.ToWorker)
        assert isinstance(got, messages.Execute)
        assert got.plan == plan


def prices(token: float, unit: float) -> MixedPrices:
    return MixedPrices(lambda tokens: token * tokens, lambda units: unit * units)


def test_a_step_has_the_slices_and_the_prompt_that_its_seconds_hold() -> None:
    known = prices(1e-3, 1e-5)
    assert known.tokens(0, 0.025) == ALL_TOKENS, "nobody waits for the next token"
    assert known.tokens(5, 0.025) == 20
    assert known.tokens(500, 0.025) == FEWEST
    assert known.slices_that_fit(1000, 32, tokens=10, room=known.room(10)) == 1, "20 ms"
    assert known.slices_that_fit(1000, 32, tokens=20, room=known.room(20)) == 2
    assert known.slices_that_fit(1000, 32, tokens=40, room=known.room(40)) == 1, "50 ms at most"
    assert known.slices_that_fit(1000, 32, tokens=0, room=known.room(0)) == 25
    assert known.slices_that_fit(1000, 3, tokens=0, room=known.room(0)) == 3
    assert known.slices_that_fit(100_000, 32, tokens=400, room=known.room(10)) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_other_models_wait_for_has_fewer_slices(*, whole: bool) -> None:
    counts = []
    for shared in (None, 64):
        d = encoding_driver(EncoderShape(slices=64, width=1, bound=160, whole=whole))
        d.scheduler.room.shared = shared
        d.add(with_inputs(request_of("a", [1] * 20), (0, 4, b"a")))
        d.submit()
        counts.append(d.plans[0].counts[-1])
    assert counts == ([25, 6] if whole else [62, 6]), "4 ms a slice: 100 or 250 ms, and 25"


def test_prices_follow_the_steps() -> None:
    known = prices(1e-3, 1e-5)
    for _ in range(20):
        known.observe(10, 0.02, 4000, 0.16)
    assert known.slices_that_fit(1000, 32, tokens=0, room=known.room(0)) == pytest.approx(6, abs=1)
    assert known.tokens(1, 0.025) < 20


def test_plans_without_inputs_are_those_of_a_model_without_an_encoder() -> None:
    def played(d: Driver) -> Sequence[object]:
        for turn in range(30):
            d.add(request_of(f"r{turn}", [turn % 7 + 1] * (turn % 20 + 1), max_tokens=9))
            d.step()
        d.run()
        return d.plans

    plain = driver(rows=8, step_tokens=64)
    assert played(encoding_driver()) == played(plain)


def chunks_of(d: Driver, row: int = 0) -> list[tuple[int, int]]:
    """(start, end) of the chunks of a row's prompt."""
    found = []
    for plan in d.plans:
        entries = list(zip(plan.rows, plan.starts, plan.counts, strict=True))[: plan.texts]
        found += [(start, start + count) for at, start, count in entries if at == row]
    return found


def test_chunks_end_before_tokens_that_see_each_other_or_behind_them() -> None:
    d = encoding_driver(step_tokens=10)
    request = request_of("a", list(range(1, 40)), max_tokens=1)
    d.add(with_inputs(request, (7, 8, b"one"), (16, 10, b"two"), mutual=True))
    d.run()
    d.check_answers()
    assert chunks_of(d) == [(0, 7), (7, 16), (16, 26), (26, 36), (36, 39)]


def test_an_input_larger_than_a_step_is_refused() -> None:
    d = encoding_driver(step_tokens=10)
    request = request_of("a", list(range(1, 40)), max_tokens=1)
    with pytest.raises(InvalidRequest, match="11 tokens that one step computes"):
        d.add(with_inputs(request, (7, 11, b"one"), mutual=True))
    assert not d.scheduler.has_work


def test_tokens_that_see_each_other_fit_beside_slices_and_decodes() -> None:
    """While items are encoded beside decodes a step has time for 24 tokens of prompts here."""
    d = encoding_driver(step_tokens=64)
    d.add(request_of("text", [1, 2, 3], max_tokens=50))
    d.step()
    first = request_of("first", list(range(1, 40)), max_tokens=1)
    d.add(with_inputs(first, (2, 30, b"one"), mutual=True))
    for number in range(8):
        more = request_of(f"more{number}", [*range(number, number + 8)], max_tokens=1)
        d.add(with_inputs(more, (2, 5, f"more{number}".encode()), mutual=True))
    d.run()
    d.check_answers()
    assert (2, 32) in chunks_of(d, 1)
