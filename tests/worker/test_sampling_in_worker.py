"""Sampling options of a request, through plans: seeds, penalties, stops, log-probabilities."""

from __future__ import annotations

import pytest
import torch

from headrace.worker import Worker
from oracle.asks import prompt, sampling
from oracle.driving import Driver


def test_greedy_is_the_same_alone_and_among_31_others(worker: Worker) -> None:
    prompts = [prompt(1 + 7 * index) for index in range(32)]
    alone = [Driver(worker).ask(tokens, sampling(max_tokens=40)).tokens for tokens in prompts]
    driver = Driver(worker, step_tokens=200)
    for index, tokens in enumerate(prompts):
        driver.add(str(index), tokens, sampling(max_tokens=40))
    answers = driver.run()
    assert max(len(plan.rows) for plan in driver.plans) == 32
    assert [answers[str(index), 0].tokens for index in range(32)] == alone


def test_a_seed_gives_its_text_in_any_batch(worker: Worker) -> None:
    wanted = sampling(temperature=1.0, top_p=0.9, seed=1234, n=2)
    alone = Driver(worker)
    alone.add("a", prompt(30), wanted)
    first = alone.run()
    # Among others, in chunks, and with so few blocks that it is preempted on the way.
    driver = Driver(worker, blocks=14, step_tokens=40)
    for index in range(4):
        other = sampling(temperature=1.3, top_k=50 + index, min_p=0.01)
        driver.add(f"other {index}", prompt(30, seed=index + 1), other)
    driver.add("a", prompt(30), wanted)
    second = driver.run()
    assert sum(answer.preemptions for answer in second.values()) > 0
    for choice in (0, 1):
        assert len(first["a", choice].tokens) == 24
        assert first["a", choice].tokens == second["a", choice].tokens
    assert first["a", 0].tokens != first["a", 1].tokens


def test_other_seeds_give_other_texts(worker: Worker) -> None:
    asked = [sampling(temperature=1.0, seed=seed) for seed in range(3)]
    answers = [tuple(Driver(worker).ask(prompt(9), one).tokens) for one in asked]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_any_seed(worker: Worker, seed: int) -> None:
    wanted = sampling(temperature=1.0, seed=seed, max_tokens=5)
    assert (
        Driver(worker).ask(prompt(9), wanted).tokens == Driver(worker).ask(prompt(9), wanted).tokens
    )


def test_bias_forces_and_forbids(worker: Worker) -> None:
    plain = Driver(worker).ask(prompt(9), sampling()).tokens
    assert set(Driver(worker).ask(prompt(9), sampling(logit_bias={3: 100.0})).tokens) == {3}
    without = Driver(worker).ask(prompt(9), sampling(logit_bias={plain[0]: -100.0})).tokens
    assert plain[0] not in without


def test_penalties_count_prompt_and_output_as_defined(worker: Worker) -> None:
    """Replays each greedy choice from the raw logits, by the definition, token for token."""
    wanted = sampling(
        repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3, max_tokens=30
    )
    driver = Driver(worker)
    program, seen = worker.text.program, []
    inner = program.step

    def step(batch, want):
        found = inner(batch, want)
        seen.append(found.logits[-1].tolist())
        return found

    program.step = step
    tokens = prompt(20)
    answer = driver.ask(tokens, wanted)
    assert len(seen) == 30
    out: list[int] = []
    for raw, token in zip(seen, answer.tokens, strict=True):
        logits = torch.tensor(raw, dtype=torch.float64)
        for one in set(tokens + out):
            logits[one] *= 1 / 1.4 if logits[one] > 0 else 1.4
        for one in set(out):
            logits[one] -= 0.6 * out.count(one) + 0.3
        assert token == int(logits.argmax())
        out.append(token)
    plain = Driver(worker).ask(tokens, sampling(max_tokens=30)).tokens
    assert plain != answer.tokens


def test_min_tokens_keeps_stops_out_of_reach(worker: Worker) -> None:
    plain = Driver(worker).ask(prompt(9), sampling()).tokens
    stop = (plain[0], plain[3])
    driver = Driver(worker)
    driver.add("now", prompt(9), sampling(), stop_ids=stop)
    driver.add("later", prompt(9), sampling(min_tokens=6), stop_ids=stop)
    answers = driver.run()
    assert answers["now", 0].tokens == plain[:1]
    assert answers["now", 0].finish == "stop"
    later = answers["later", 0].tokens
    assert len(later) >= 6
    assert not set(later[:6]) & set(stop)


def test_logprobs_are_of_the_raw_distribution(worker: Worker) -> None:
    tokens = prompt(40)
    wanted = sampling(
        temperature=0.7, top_k=5, seed=3, repetition_penalty=1.5, logprobs=4, max_tokens=10
    )
    driver = Driver(worker)
    driver.add("a", tokens, wanted)
    driver.add("other", prompt(12), sampling(logprobs=0))
    driver.add("none", prompt(13), sampling())
    answers = driver.run()
    answer = answers["a", 0]
    assert len(answer.logprobs) == 10
    assert answers["none", 0].logprobs == []
    assert all(one.top_ids == [] for one in answers["other", 0].logprobs)
    assert [one.rank for one in answers["other", 0].logprobs] == [1] * 24
    # The same positions as a prompt: what the model thinks of its own answer.
    scored = Driver(worker, step_tokens=11).ask(
        tokens + answer.tokens, sampling(prompt_logprobs=4, max_tokens=1)
    )
    assert len(scored.prompt_logprobs) == len(tokens) + 9
    for ours, theirs in zip(answer.logprobs, scored.prompt_logprobs[-10:], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)


def test_prompt_logprobs_are_those_of_a_plain_forward(worker: Worker) -> None:
    tokens = prompt(150)
    whole = Driver(worker).ask(tokens, sampling(prompt_logprobs=2, max_tokens=1)).prompt_logprobs
    assert len(whole) == 149
    # In chunks, with a preemption in the middle, next to another; each position once.
    driver = Driver(worker, blocks=16, step_tokens=24)
    driver.add("other", prompt(60), sampling(max_tokens=80))
    driver.add("a", tokens, sampling(prompt_logprobs=2, n=2, max_tokens=40))
    answers = driver.run()
    assert sum(answer.preemptions for answer in answers.values()) > 0
    got = answers["a", 0].prompt_logprobs
    assert [one.top_ids for one in got] == [one.top_ids for one in whole]
    assert torch.allclose(
        torch.tensor([one.logprob for one in got]),
        torch.tensor([one.logprob for one in whole]),
        atol=1e-5,
    )
    assert answers["a", 1].prompt_logprobs == []
