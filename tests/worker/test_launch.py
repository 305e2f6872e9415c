"""Steps launched ahead of the results before them: the same tokens; errors where they belong."""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, StepPlan
from headrace.worker import Worker
from headrace.worker.transfer import to_device, to_host
from oracle.driving import pool_of

PROMPT = [5, 6, 7, 8]


def plans(worker: Worker, steps: int) -> list[StepPlan]:
    worker.allocate(pool_of(worker, 8))
    groups = len(worker._pool.groups)
    params = SamplingParams(temperature=0, max_tokens=steps)
    first = StepPlan(
        0,
        [0],
        [0],
        [len(PROMPT)],
        [True],
        admitted=[Admission(0, 0, PROMPT, len(PROMPT), 0, RequestSpec(params, 0))],
        blocks=[BlockWrite(0, group, 0, [1, 2]) for group in range(groups)],
    )
    rest = [StepPlan(n, [0], [len(PROMPT) + n - 1], [1], [True]) for n in range(1, steps)]
    return [first, *rest]


def test_results_may_be_taken_later(worker: Worker) -> None:
    one_by_one = [worker.execute(plan).tokens for plan in plans(worker, 6)]
    launched = [worker.launch(plan) for plan in plans(worker, 6)]
    assert [finish().tokens for finish in launched] == one_by_one
    assert len({token for step in one_by_one for tokens in step for token in tokens}) > 1


def test_a_launch_that_fails_is_a_result(worker: Worker) -> None:
    first, second, *_ = plans(worker, 3)
    inner, worker.text.program.step = worker.text.program.step, None
    failed = worker.launch(first)
    worker.text.program.step = inner
    going = worker.launch(second)
    assert "TypeError" in (failed().error or "")
    assert failed().tokens == [[]]
    assert going().error is None


def test_transfers_keep_values_and_types() -> None:
    device = torch.device("cpu")
    for values in (np.arange(6).reshape(2, 3).T, np.array([], np.int32), np.array([True, False])):
        tensor = to_device(values, device)
        assert tensor.numpy().dtype == values.dtype
        assert to_host(tensor)() == values.tolist()
