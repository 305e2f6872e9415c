"""Features of every family on the CPU kernels: the same answers with any of them.

`docs/capabilities.py` makes its table of families and features from `MODELS`, `FEATURES` and
`REFUSED`: a cell stands for a test here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import HeadraceError
from headrace.base.sampling import SamplingParams
from headrace.loader.open import open_model
from headrace.speculate import Proposal, Speculation
from headrace.text import load_tokenizer
from headrace.text.grammar import from_regex
from headrace.text.lltokenizer import grammar_tokenizer
from headrace.worker import Worker, WorkerOptions
from oracle import lora
from oracle.asks import prompt
from oracle.driving import Answer, Driver
from oracle.reference import Oracle
from tiny import families
from tiny.kept import Kept

pytestmark = pytest.mark.slow

PROMPTS = [prompt(length) for length in (1, 23, 70)]
ASKED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=20, logprobs=1)
REFUSED = {("lfm2", "adapters"): "out_proj"}
"""(family, feature) → the words of the refusal."""


LOSSY = {"int8": 0.12, "k8v4": 0.9}
"""Mean change of a log-probability by each type of KV, at most: of random weights, whose values no
training made robust."""


class Told:
    """Drafts what the answers are known to be; every third draft is wrong."""

    name = "told"
    texts: Sequence[list[int]] = ()

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._asked = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, most: int) -> Proposal:
        self._asked += 1
        known = len(self._tokens)
        text = next((one for one in self.texts if one[:known] == self._tokens), [])
        coming = text[known : known + most]
        if self._asked % 3 == 0 and coming:
            coming[-1] = (coming[-1] + 1) % families.VOCAB
        return Proposal(coming, 9, self.name)


class Family:
    """Workers of one tiny model, and what it answers to `PROMPTS`, each alone and whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plain = self.worker()
        self.alone = self.answers(Driver(self.plain, prefix_cache=False), together=False)

    def worker(
        self,
        speculation: Speculation | None = None,
        grammar_tokenizer: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Worker:
        settings = {"kernels": "cpu", "threads": 1, "rows": 8, "step_tokens": 128, **options}
        settings = {"max_context": 256, **settings}
        return Worker(
            open_model(str(self.path)),
            WorkerOptions(**settings),
            speculation=speculation,
            grammar_tokenizer=grammar_tokenizer,
        )

    def answers(self, driver: Driver, *, together: bool = True) -> list[Answer]:
        for place, tokens in enumerate(PROMPTS):
            driver.add(str(place), tokens, ASKED)
            if not together:
                driver.run()
        found = driver.run()
        answers = [found.pop((str(place), 0)) for place in range(len(PROMPTS))]
        assert not [answer.error for answer in answers if answer.error]
        return answers

    def same(self, answers: list[Answer], as_: list[Answer] | None = None) -> None:
        for ours, wanted in zip(answers, as_ or self.alone, strict=True):
            assert ours.tokens == wanted.tokens
            assert ours.logprobs == wanted.logprobs


def in_chunks(family: Family) -> None:
    for chunk in (1, 7, 64):
        family.same(family.answers(Driver(family.plain, step_tokens=chunk, prefix_cache=False)))


def with_a_prefix(family: Family) -> None:
    driver = Driver(family.plain, step_tokens=48)
    family.answers(driver)
    again = family.answers(driver)
    family.same(again)
    assert again[-1].cached >= 64


def after_preemption(family: Family) -> None:
    driver = Driver(family.plain, blocks=9, prefix_cache=False)
    answers = family.answers(driver)
    family.same(answers)
    assert sum(answer.preemptions for answer in answers)


def with_drafts(family: Family) -> None:
    texts = [[*a, *b.tokens] for a, b in zip(PROMPTS, family.alone, strict=True)]
    told = type("ToldAll", (Told,), {"texts": texts})
    worker = family.worker(Speculation([told]), drafts=4)
    driver = Driver(worker, drafts=4, depth=2)
    family.same(family.answers(driver))
    assert any(max(plan.counts) > 1 and not any(plan.admitted) for plan in driver.plans)


def kept_as(kv_dtype: str) -> Callable[[Family], None]:
    """The same answers whatever the batch, and those of wider KV within a bound."""

    def check(family: Family) -> None:
        worker = family.worker(kv_dtype=kv_dtype)
        alone = family.answers(Driver(worker, prefix_cache=False), together=False)
        family.same(family.answers(Driver(worker, step_tokens=7)), alone)
        exact, kept = scores(family.worker(kv_dtype="float32")), scores(worker)
        assert 0 < np.abs(kept - exact).mean() <= LOSSY[kv_dtype]

    return check


def scores(worker: Worker) -> np.ndarray:
    """Log-probabilities of a prompt's own tokens, read from KV of other chunks."""
    driver = Driver(worker, step_tokens=7, prefix_cache=False)
    driver.add("scored", PROMPTS[2], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return np.array([one.logprob for one in driver.run()["scored", 0].prompt_logprobs])


def with_a_grammar(family: Family) -> None:
    """A row that may say some ids alone, in chunks and beside rows that may say anything, which
    say what they would without it."""
    files = open_model(str(family.path))
    words = partial(
        grammar_tokenizer, load_tokenizer(files.tokenizer), vocab_size=families.VOCAB, eos_ids=[999]
    )
    worker = family.worker(grammar_tokenizer=words)
    said = {}
    for name, chunk in (("alone", 128), ("beside", 7)):
        driver = Driver(worker, step_tokens=chunk, prefix_cache=False)
        if name == "beside":
            family.same(family.answers(driver))
            driver.add("free", PROMPTS[1], ASKED)
        driver.add(name, PROMPTS[2], ASKED, grammar=from_regex("(t[0-9]{1,2}|x){30}", "regex"))
        said[name] = driver.run()[name, 0]
    assert said["alone"].tokens == said["beside"].tokens
    assert said["alone"].logprobs == said["beside"].logprobs
    assert set(said["alone"].tokens) <= set(range(100))
    assert len(said["alone"].tokens) == ASKED.max_tokens


def with_an_adapter(family: Family) -> None:
    """An adapter gives what it gives as part of the weights, beside requests without it."""
    module = "out_proj" if "lfm2" in (family.path / "config.json").read_text() else "o_proj"
    folder = lora.make(family.path, family.path.parent / "adapter", target_modules=[module])
    worker = family.worker(adapters=1, kv_dtype="float32")
    worker.load_adapter("a", str(folder))
    driver = Driver(worker)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    driver.add("plain", PROMPTS[2], asked)
    driver.add("adapted", PROMPTS[2], asked, adapter="a")
    answers = driver.run()
    logits = Oracle(lora.merged(family.path, folder)).logits(PROMPTS[2])
    expected = torch.log_softmax(logits, -1)
    wanted = [float(expected[i, token]) for i, token in enumerate(PROMPTS[2][1:])]
    given = {
        name: [one.logprob for one in answers[name, 0].prompt_logprobs]
        for name in ("plain", "adapted")
    }
    assert given["adapted"] == pytest.approx(wanted, abs=2e-3)
    assert given["plain"] != pytest.approx(wanted, abs=0.05)


FEATURES: dict[str, Callable[[Family], None]] = {
    "prompts in chunks": in_chunks,
    "prefixes shared": with_a_prefix,
    "preemption": after_preemption,
    "drafts": with_drafts,
    "grammar": with_a_grammar,
    "KV int8": kept_as("int8"),
    "KV k8v4": kept_as("k8v4"),
    "adapters": with_an_adapter,
}


@pytest.fixture(scope="module", params=families.MODELS)
def family(request: pytest.FixtureRequest, kept: Kept) -> tuple[str, Family]:
    return request.param, Family(kept(families.make, request.param))


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(family: tuple[str, Family], feature: str) -> None:
    name, made = family
    words = REFUSED.get((name, feature))
    if words is None:
        FEATURES[feature](made)
        return
    with pytest.raises(HeadraceError, match=words):
        FEATURES[feature](made)
