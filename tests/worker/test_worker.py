"""Plans by hand: order of side effects, copies, errors that stay in their step, KV types."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.base.errors import OptionError
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockCopy, BlockWrite, StepPlan
from headrace.worker import Worker, WorkerOptions
from headrace.worker.options import resolve
from oracle.asks import prompt, sampling
from oracle.driving import Driver, pool_of
from tiny import families


def admit(row: int, tokens: list[int], **values) -> Admission:
    return Admission(row, row + 1, tokens, len(tokens), 0, RequestSpec(sampling(**values), 0))


def first_step(row: int, tokens: list[int], blocks: list[int], **values) -> StepPlan:
    return StepPlan(
        1,
        [row],
        [0],
        [len(tokens)],
        [True],
        [admit(row, tokens)],
        [BlockWrite(row, 0, 0, blocks)],
        **values,
    )


def decode(worker: Worker, row: int, start: int, count: int) -> list[int]:
    out = []
    for place in range(start, start + count):
        result = worker.execute(StepPlan(2, [row], [place], [1], [True]))
        assert result.error is None
        out += result.tokens[0]
    return out


def test_a_step_by_hand(worker: Worker) -> None:
    worker.allocate(pool_of(worker, 20))
    worker.warm_up()
    for layer in worker.cache.layers:
        assert not layer.k[0].any(), "the null block stays zero"
    tokens = prompt(20)
    result = worker.execute(first_step(3, tokens, [5, 2]))
    assert result.error is None
    assert result.number == 1
    assert result.seconds > 0
    answer = result.tokens[0] + decode(worker, 3, 20, 5)
    assert answer == Driver(worker).ask(tokens, sampling(max_tokens=6)).tokens


def test_a_chunk_that_does_not_sample_gives_nothing(worker: Worker) -> None:
    worker.allocate(pool_of(worker, 20))
    plan = StepPlan(
        1, [0], [0], [7], [False], [admit(0, prompt(20))], [BlockWrite(0, 0, 0, [1, 2])]
    )
    assert worker.execute(plan).tokens == [[]]
    rest = worker.execute(StepPlan(2, [0], [7], [13], [True]))
    assert rest.tokens[0] == Driver(worker).ask(prompt(20), sampling(max_tokens=1)).tokens


def test_a_row_is_released_and_taken_again_in_one_plan(worker: Worker) -> None:
    worker.allocate(pool_of(worker, 20))
    worker.execute(first_step(0, prompt(40), [1, 2, 3]))
    result = worker.execute(first_step(0, prompt(5), [4], released=[0]))
    assert result.error is None
    assert worker._tables.tables[0][0].tolist()[:4] == [4, 0, 0, 0]
    assert result.tokens[0] == Driver(worker).ask(prompt(5), sampling(max_tokens=1)).tokens


def test_copies_run_before_the_step_and_in_order(worker: Worker) -> None:
    worker.allocate(pool_of(worker, 20))
    tokens = prompt(20)
    expected = worker.execute(first_step(0, tokens, [1, 2])).tokens[0] + decode(worker, 0, 20, 4)
    # Row 1 gets private copies, the second through a third block, and decodes from them.
    plan = StepPlan(
        3,
        [1],
        [20],
        [1],
        [True],
        [Admission(1, 2, [*tokens, expected[0]], 20, 0, RequestSpec(sampling(), 0))],
        [BlockWrite(1, 0, 0, [7, 8])],
        copies=[BlockCopy(0, 1, 7), BlockCopy(0, 2, 9), BlockCopy(0, 9, 8)],
    )
    before = [layer.k[2].clone() for layer in worker.cache.layers]
    assert worker.execute(plan).tokens[0] + decode(worker, 1, 21, 3) == expected[1:]
    for layer, kept in zip(worker.cache.layers, before, strict=True):
        assert torch.equal(layer.k[2], kept), "the source is not written"


def test_an_error_stays_in_its_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop ends the sequences of a failed step; the others must go on as if nothing was."""
    tokens = prompt(60)
    expected = Driver(worker).ask(tokens, sampling(max_tokens=20)).tokens
    driver = Driver(worker)
    driver.add("a", tokens, sampling(max_tokens=20))
    for _ in range(5):
        driver.step()
    inner, calls = worker.text.program.step, []

    def step(batch, want):
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("no\nluck")
        return inner(batch, want)

    monkeypatch.setattr(worker.text.program, "step", step)
    driver.step()
    assert driver.answers["a", 0].finish == "error"
    assert driver.answers["a", 0].error == "RuntimeError: no luck"
    driver.add("b", tokens, sampling(max_tokens=20))
    assert driver.run()["b", 0].tokens == expected


def test_the_log_has_the_stack_of_a_failed_step_once(
    make_worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker()
    driver = Driver(worker)

    def unlucky(batch, want):
        raise RuntimeError("no luck")

    monkeypatch.setattr(worker.text.program, "step", unlucky)
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            driver.add(name, prompt(5), sampling(max_tokens=2))
            driver.step()
            assert driver.answers[name, 0].error == "RuntimeError: no luck"
    assert caplog.text.count("RuntimeError: no luck") == 1
    assert ", in unlucky" in caplog.text


def test_what_it_cannot_do_is_an_error_by_name(worker: Worker) -> None:
    worker.allocate(pool_of(worker, 20))
    spec = RequestSpec(sampling(), 0, grammar="root")
    plan = StepPlan(
        1,
        [0],
        [0],
        [3],
        [True],
        [Admission(0, 1, prompt(3), 3, 0, spec)],
        [BlockWrite(0, 0, 0, [1])],
    )
    assert worker.execute(plan).error == "EngineFault: this worker has no support for grammar"


def test_context_to_its_last_token(worker_files) -> None:
    worker = Worker(worker_files, WorkerOptions(kernels="ref", threads=1, rows=2, max_context=50))
    answer = Driver(worker, step_tokens=16).ask(prompt(40), sampling(max_tokens=None))
    assert (len(answer.tokens), answer.finish) == (10, "length")
    reference = Worker(
        worker_files, WorkerOptions(kernels="ref", threads=1, rows=2, max_context=200)
    )
    assert Driver(reference).ask(prompt(40), sampling(max_tokens=10)).tokens == answer.tokens


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"),
    [("bfloat16", 0.05), ("int8", 0.1), ("k8v4", 0.8), ("fp8", 0.5)],
)
def test_kv_types(make_worker, worker: Worker, kv_dtype: str, tolerance: float) -> None:
    small = make_worker(kv_dtype=kv_dtype)
    scores = [
        Driver(each, step_tokens=33).ask(prompt(100), sampling(prompt_logprobs=0, max_tokens=1))
        for each in (worker, small)
    ]
    assert scores[1].error is None
    exact, rounded = ([one.logprob for one in each.prompt_logprobs] for each in scores)
    difference = (torch.tensor(exact) - torch.tensor(rounded)).abs()
    assert 0 < difference.mean() < tolerance
    layer = small.cache.layers[0]
    assert (layer.k_scale is not None) == (kv_dtype in ("int8", "fp8", "k8v4"))


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_block_sizes(worker: Worker, block_size: int) -> None:
    expected = Driver(worker).ask(prompt(150), sampling()).tokens
    assert Driver(worker, block_size=block_size).ask(prompt(150), sampling()).tokens == expected


def test_two_workers_in_one_process(make_worker) -> None:
    one, two = Driver(make_worker()), Driver(make_worker(kv_dtype="bfloat16"), block_size=32)
    expected = [driver.ask(prompt(50), sampling()).tokens for driver in (one, two)]
    for driver in (one, two):
        driver.add("again", prompt(50), sampling())
    while one.scheduler.has_work or two.scheduler.has_work:
        one.step()
        two.step()
    assert [driver.answers["again", 0].tokens for driver in (one, two)] == expected


def test_facts(make_worker) -> None:
    worker = make_worker()
    facts = worker.facts
    assert facts.weight_bytes > families.VOCAB * 192 * 4 * 2
    assert facts.device_memory > 0
    decided = {decision.name: decision for decision in facts.kernels}
    assert decided["kernels.attend"].value == "ref"
    assert decided["dtype"].value == "float32"
    assert decided["kv_dtype"].value == "float32"  # the reference stays exact
    worker.allocate(pool_of(worker, 10))
    worker.warm_up()
    assert list(facts.phases) == [
        "open_weights",
        "load_weights",
        "keep_weights",
        "allocate",
        "warm_up",
    ]
    worker.close()
    assert not hasattr(worker, "_model")


@pytest.mark.parametrize(
    ("options", "param"),
    [({"dtype": "int8"}, "dtype"), ({"kv_dtype": "fp4"}, "kv_dtype")],
)
def test_options_are_refused_by_name(options: dict, param: str) -> None:
    with pytest.raises(OptionError) as raised:
        resolve(WorkerOptions(**options))
    assert raised.value.param == param


def test_unknown_kernels(worker_files) -> None:
    with pytest.raises(OptionError, match="there are: auto, "):
        Worker(worker_files, WorkerOptions(kernels="magic"))


def test_an_admitted_row_may_wait_for_its_data(worker: Worker) -> None:
    """A row is held, and its tables are written, before the step that first computes for it."""
    worker.allocate(pool_of(worker, 20))
    tokens = prompt(20)
    expected = worker.execute(first_step(0, tokens, [1, 2])).tokens[0]
    waits = StepPlan(2, [], [], [], [], [admit(1, tokens)], [BlockWrite(1, 0, 0, [3, 4])])
    waits.rows, waits.starts, waits.counts, waits.samples = [0], [20], [1], [True]
    waits.verify()
    assert worker.execute(waits).error is None
    assert worker.execute(StepPlan(3, [1], [0], [20], [True])).tokens == [expected]
