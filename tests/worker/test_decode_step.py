"""Steps that only decode, on the CPU kernels: no tensor is made, and the tokens are the same."""

from __future__ import annotations

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.kernels.cpu import library
from headrace.worker import Worker
from oracle.driving import Driver


@pytest.fixture(scope="module")
def cpu(make_worker) -> Worker:
    try:
        library.load()
    except library.LibraryAbsent as absent:
        pytest.skip(str(absent))
    return make_worker(kernels="cpu", threads=2)


class Modes:
    """Counts how often `inference_mode` is entered: once in every step that uses tensors."""

    def __init__(self) -> None:
        self.entered = 0
        self._inner = torch.inference_mode

    def __call__(self, *arguments: object) -> torch.inference_mode:
        self.entered += 1
        return self._inner()


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Modes:
    found = Modes()
    monkeypatch.setattr(torch, "inference_mode", found)
    return found


def crowd(driver: Driver, count: int, **more: object) -> None:
    for index in range(count):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 20 + index % 7, **more})
        driver.add(f"{index}", [5 + index, 6, 7 + index % 3], params)


def general(worker: Worker) -> None:
    """From now on every step of this worker goes the general way."""
    worker._steps.host = None


WAYS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "seed": 6},
]


@pytest.mark.parametrize("count", [1, 3, 4, 17])
@pytest.mark.parametrize("asked", [WAYS[:1], WAYS[1:2], WAYS], ids=["greedy", "drawn", "mixed"])
def test_the_same_tokens_as_the_general_way(
    cpu: Worker, count: int, asked: list[dict[str, object]]
) -> None:
    """Across blocks, with rows that leave and rows that come, another where one was."""
    answers = []
    for way in (lambda worker: None, general):
        driver = Driver(cpu, block_size=8, rows=12)
        way(cpu)
        for index in range(count):
            values = {"temperature": 0, "max_tokens": 20 + index % 7, **asked[index % len(asked)]}
            driver.add(f"{index}", [5 + index, 6, 7 + index % 3], SamplingParams(**values))
        answers.append({name: answer.tokens for name, answer in driver.run().items()})
    assert answers[0] == answers[1]
    assert all(len(tokens) >= 20 for tokens in answers[0].values())
    assert len({tuple(tokens) for tokens in answers[0].values()}) >= min(count, 3)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_step_that_decodes_makes_no_tensor(cpu: Worker, modes: Modes, temperature: float) -> None:
    driver = Driver(cpu, block_size=8)
    crowd(driver, 5, temperature=temperature)
    while driver.step():
        pass
    assert len(driver.plans) == 24
    busy = sum(bool(plan.admitted or plan.released) for plan in driver.plans)
    assert busy >= 5, "they end one after the other"
    # Allocation, admission, and the steps after one has left.
    assert modes.entered <= 1 + busy


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "logprobs": 1},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"logit_bias": {11: 5.0}},
        {"min_tokens": 4},
        {"prompt_logprobs": 1},
    ],
)
def test_beside_a_row_that_asks_for_more(cpu: Worker, asked: dict[str, object]) -> None:
    """Its neighbours get what they got alone; it gets what it asked for."""
    alone = Driver(cpu).ask([5, 6, 7], SamplingParams(temperature=0, max_tokens=24)).tokens
    driver = Driver(cpu)
    driver.add("plain", [5, 6, 7], SamplingParams(temperature=0, max_tokens=24))
    driver.add("asking", [9, 8], SamplingParams(**{"temperature": 0, "max_tokens": 9, **asked}))
    answers = driver.run()
    assert answers["plain", 0].tokens == alone
    assert len(answers["asking", 0].tokens) == 9
    assert len(answers["asking", 0].logprobs) == (9 if "logprobs" in asked else 0)
    assert len(answers["asking", 0].prompt_logprobs) == ("prompt_logprobs" in asked)


def test_what_the_program_cannot_draw(cpu: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose candidates had no room gets the token that it would have got."""
    answers = []
    for broken in (False, True):
        driver = Driver(cpu)
        crowd(driver, 4, temperature=1.0, seed=9)
        if broken:
            step = cpu.text.program.step

            def without_room(batch, want, step=step):
                found = step(batch, want)
                assert want.tokens == "rules"
                found.tokens[-1] = -1
                return found

            monkeypatch.setattr(cpu.text.program, "step", without_room)
        answers.append({name: answer.tokens for name, answer in driver.run().items()})
    assert answers[0] == answers[1]


def test_a_failure_in_such_a_step_is_its_result(cpu: Worker, monkeypatch) -> None:
    driver = Driver(cpu)
    crowd(driver, 2)
    driver.step()
    driver.step()

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(cpu.text.program, "step", fail)
    driver.step()
    assert [answer.error for answer in driver.answers.values()] == ["MemoryError: no room"] * 2
    monkeypatch.undo()
    assert len(driver.ask([5, 6, 7], SamplingParams(temperature=0, max_tokens=4)).tokens) == 4
