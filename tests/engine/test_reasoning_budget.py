"""A limit on tokens of reasoning holds to the token, whatever else the request asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest
from headrace.base.request import CompletionOutput
from headrace.base.spec import ReasoningBudget, RequestSpec
from headrace.base.step import Admission
from headrace.text.events import ContentDelta, ReasoningDelta
from headrace.text.grammar import after_reasoning, from_schema
from headrace.text.reasoning import THINK as MARKS
from headrace.text.router import StreamRouter
from headrace.worker.reasoning import ReasoningBudgets
from headrace.worker.rows import Rows
from tiny import bytewise
from tiny.bytewise import THINK, UNTHINK
from tiny.kept import Kept

NEVER_ITSELF = {UNTHINK: -100.0, bytewise.END: -100.0}
"""The model never closes its reasoning and never ends."""


def opened(folder: Path, **more: Any) -> LLM:
    options = {
        "device": "cpu",
        "threads": 1,
        "kv_memory": "8MiB",
        "step_tokens": 64,
        "offline": True,
        "max_sequences": 8,
    }
    return LLM(str(folder), **{**options, **more})


@pytest.fixture(scope="module")
def llm(kept: Kept) -> Iterator[LLM]:
    with opened(kept(bytewise.make, template=bytewise.THINKING)) as it:
        yield it


def ask(llm: LLM, prompt: str = "ab<think>", **fields: Any) -> CompletionOutput:
    values = {"temperature": 0.0, "max_tokens": 24, "logit_bias": NEVER_ITSELF, **fields}
    return llm.generate(prompt, SamplingParams(**values))[0].outputs[0]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_mark_comes_when_the_budget_is_spent(llm: LLM, budget: int) -> None:
    free = ask(llm).token_ids
    assert UNTHINK not in free
    held = ask(llm, thinking_token_budget=budget).token_ids
    assert held[:budget] == free[:budget]
    assert held.index(UNTHINK) == budget
    assert len(held) == 24, "the answer goes on"
    assert held.count(UNTHINK) == 1


def test_white_space_after_the_opening_mark_is_no_matter(llm: LLM) -> None:
    held = ask(llm, "ab<think>\n", thinking_token_budget=3).token_ids
    assert held.index(UNTHINK) == 3


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("ab<think>cd\nef", True),
        ("<think>ab</think>cd<|end|><think>ef", True),
        ("ab<think>cd</think>ef", False),
        ("ab<think>cd<|end|>ef", False),
        ("ab<think>cd<|mark|>ef", False),
    ],
)
def test_a_prompt_may_end_in_the_midst_of_reasoning(llm: LLM, prompt: str, inside: bool) -> None:
    silent = {**NEVER_ITSELF, THINK: -100.0}
    held = ask(llm, prompt, thinking_token_budget=3, logit_bias=silent).token_ids
    assert [place for place, token in enumerate(held) if token == UNTHINK] == [3] * inside


def test_who_ends_earlier_is_left_alone(llm: LLM) -> None:
    eager = {**NEVER_ITSELF, UNTHINK: 100.0}
    assert set(ask(llm, thinking_token_budget=2, logit_bias=eager).token_ids) == {UNTHINK}
    never = {THINK: -100.0, **NEVER_ITSELF}
    outside = ask(llm, "ab", thinking_token_budget=0, logit_bias=never).token_ids
    assert UNTHINK not in outside, "there was no reasoning"


def test_reasoning_that_the_model_opens_itself(llm: LLM) -> None:
    eager = {**NEVER_ITSELF, THINK: 100.0}
    held = ask(llm, "ab", thinking_token_budget=4, logit_bias=eager).token_ids
    assert held[:6] == [THINK] * 5 + [UNTHINK]
    assert set(held[6:]) == {THINK}, "it is over once and for all"


def test_choices_that_are_drawn_with_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(
        n=3,
        temperature=1.3,
        top_p=0.95,
        seed=5,
        max_tokens=12,
        logprobs=2,
        repetition_penalty=1.2,
        logit_bias=NEVER_ITSELF,
        thinking_token_budget=5,
    )
    outputs = llm.generate("ab<think>", params)[0].outputs
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    for output in outputs:
        assert output.token_ids.index(UNTHINK) == 5
        assert output.logprobs is not None
        assert len(output.logprobs) == 12
        assert all(one.logprob < 0 for one in output.logprobs)


def test_rows_with_and_without_a_budget_in_one_batch(llm: LLM) -> None:
    prompts = ["ab<think>", "cde<think>", "x<think>", "yz"]
    budgets = [3, None, 0, 6]
    silent = {**NEVER_ITSELF, THINK: -100.0}
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=15, logit_bias=silent, thinking_token_budget=budget
        )
        for budget in budgets
    ]
    alone = [
        llm.generate(p, s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]
    together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
    assert together == alone
    assert [UNTHINK in ids for ids in together] == [True, False, True, False]


def test_a_form_after_the_reasoning_while_it_streams(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    # Neither mark is a control token of this model: the grammar reads them as text.
    grammar = after_reasoning(from_schema(schema, "schema"), MARKS, opened=True)
    router = StreamRouter(reasoning=MARKS, in_reasoning=True)
    events = []
    output = llm.generate(
        "ab<think>",
        SamplingParams(
            temperature=1.2,
            seed=3,
            max_tokens=200,
            thinking_token_budget=9,
            logit_bias={**dict.fromkeys(b" \n\r\t<", -100.0), **NEVER_ITSELF},
        ),
        grammar=grammar,
        on_delta=lambda delta: events.extend(router.feed(delta.text, len(delta.token_ids))),
    )[0].outputs[0]
    events += router.finish()
    assert output.error is None
    assert output.token_ids.index(UNTHINK) == 9
    assert output.finish_reason == "stop"
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    assert reasoning
    assert "think" not in reasoning + content
    assert 0 <= json.loads(content)["a"] <= 99


def test_the_chat_template_opens_the_reasoning(llm: LLM) -> None:
    messages = [{"role": "user", "content": "ab"}]
    params = SamplingParams(
        temperature=0.0, max_tokens=8, logit_bias=NEVER_ITSELF, thinking_token_budget=2
    )
    assert llm.chat(messages, params)[0].outputs[0].token_ids.index(UNTHINK) == 2


def test_what_was_generated_before_a_preemption_counts() -> None:
    rule = ReasoningBudget(3, THINK, UNTHINK, inside=False)

    def spent(*generated: int) -> bool:
        budgets = ReasoningBudgets(Rows(5, 16, "cpu"))
        tokens = [1, 2, THINK, *generated]
        spec = RequestSpec(SamplingParams(), 0, reasoning=rule)
        budgets.admit(Admission(4, 0, tokens, 3, 0, spec))
        logits = torch.zeros(2, 300)
        budgets.mask(logits, np.array([1, 4]), np.array([9, 9]))
        assert not logits[0].any()
        return bool(logits[1].isinf().sum() == 299)

    assert not spent(7, 7, 7, 7)
    assert not spent(7, THINK, 7, 7)
    assert spent(7, THINK, 7, 7, 7)
    assert not spent(7, THINK, 7, 7, 7, UNTHINK, 7)


def test_bad_input_is_named(llm: LLM, kept: Kept) -> None:
    for budget in (-1, 1.5, True, 2**40):
        with pytest.raises(InvalidRequest) as caught:
            ask(llm, thinking_token_budget=budget)
        assert caught.value.param == "thinking_token_budget"
    with opened(kept(bytewise.make)) as plain:
        assert len(ask(plain).token_ids) == 24
        with pytest.raises(InvalidRequest, match="no reasoning") as caught:
            ask(plain, thinking_token_budget=1)
        assert caught.value.param == "thinking_token_budget"
    template = bytewise.THINKING.replace("think>", "seed:think>")
    with (
        opened(kept(bytewise.make, template=template)) as seed,
        pytest.raises(InvalidRequest, match="no tokens of this model"),
    ):
        ask(seed, thinking_token_budget=1)
