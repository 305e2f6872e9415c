"""The default model, and a small one of another family, through both faces, end to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM, AsyncEngine, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.base.step import DraftCosts
from headrace.engine.loop import prediction
from headrace.sched import StepPrices
from headrace.worker.draft_model import DraftModel

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODELS = (DEFAULT_MODEL, "smollm2-135m")
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_memory": "256MiB",
    "max_context": 2048,
    "max_sequences": 32,
}
CHATS = [
    [{"role": "user", "content": text}]
    for text in (
        "What is the capital of France? Answer with one word.",
        "Write a Python function that adds two numbers.",
        "Wie heißt die Hauptstadt von Italien? Antworte in einem Satz.",
        "请用一句话介绍长江。",
        "Count from 1 to 10, separated by commas.",
    )
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as opened:
        yield opened


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


@pytest.mark.parametrize("model", [DEFAULT_MODEL], indirect=True)
def test_answers_that_a_person_would_accept(llm: LLM) -> None:
    outputs = llm.chat(CHATS, greedy(80))
    texts = [output.outputs[0].text for output in outputs]
    assert "Paris" in texts[0]
    assert "def " in texts[1]
    assert "return" in texts[1]
    assert "Hauptstadt" in texts[2]  # The right city is beyond half a billion weights.
    assert "长江" in texts[3]
    assert "�" not in texts[3]
    assert "1, 2, 3, 4, 5, 6, 7, 8, 9, 10" in texts[4]
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert outputs[0].outputs[0].stop_reason is None


def test_the_same_alone_and_among_others_in_both_faces(model: str, llm: LLM) -> None:
    alone = [llm.chat(chat, greedy(40))[0].outputs[0].token_ids for chat in CHATS]
    among = llm.chat([*CHATS, *CHATS, *CHATS], greedy(40))
    for place, output in enumerate(among):
        assert output.outputs[0].token_ids == alone[place % len(CHATS)]

    async def run() -> list[list[int]]:
        async with await AsyncEngine.start(model=model, **OPTIONS) as engine:
            assert engine.template is not None
            prompts = [engine.tokenizer.encode(engine.template.render(chat)) for chat in CHATS]
            answers = await asyncio.gather(*(engine.generate(p, greedy(40)) for p in prompts))
            report = await engine.inspect()
            assert (report.running, report.kv_usage, report.integrity) == (0, 0.0, "")
            return [list(answer.outputs[0].token_ids) for answer in answers]

    assert asyncio.run(run()) == alone


def test_its_own_draft_model_is_always_right(
    model: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn; at real prices nothing would be drafted."""

    class Free(StepPrices):
        def rising(self, least: int, most: int) -> list[float]:
            return [1e9] * (most - least + 1)

    monkeypatch.setattr(prediction, "StepPrices", Free)
    given = property(lambda part: DraftCosts(0.0, 0.0), lambda part, told: None)
    monkeypatch.setattr(DraftModel, "costs", given, raising=False)
    samplings = [
        greedy(48),
        SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=48, n=2),
    ]
    wanted = [llm.chat(CHATS, one) for one in samplings]
    with LLM(model, **OPTIONS, speculate="draft", draft_model=model) as drafting:
        for one, plain in zip(samplings, wanted, strict=True):
            found = drafting.chat(CHATS, one)
            assert [each.outputs for each in found] == [each.outputs for each in plain]
        stats = drafting.stats
    assert stats.accepted_tokens == stats.draft_tokens > 200
