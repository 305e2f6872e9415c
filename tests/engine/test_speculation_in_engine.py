"""Speculation through the engine: the same answers, and refused where nothing can be drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.base.config import EngineOptions
from headrace.base.errors import InvalidRequest, OptionError
from headrace.base.hardware import CpuFacts, GpuFacts, Hardware
from headrace.engine import start
from headrace.engine.start import DRAFTS, drafts_of, resolve
from headrace.loader import open_model
from headrace.speculate import DEFAULT
from oracle import tiny_encoder

PROMPTS = [
    "a b a b a b a b a",
    "The water turns the turbine and",
    "x = x = x = x = ",
    "zzzzzzzzzzz",
]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, n=2, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=40, stop=["qu"], repetition_penalty=1.2),
    SamplingParams(temperature=0.3, seed=4, max_tokens=40, min_tokens=20, presence_penalty=0.5),
]


def answers(options: dict[str, Any]) -> list[Any]:
    with LLM(**options) as llm:
        together = llm.generate(PROMPTS, SAMPLINGS)
        alone = [llm.generate([PROMPTS[0]], one)[0] for one in SAMPLINGS]
    return [one.outputs for one in (*together, *alone)]


@pytest.mark.parametrize(("depth", "drafters"), [(1, "auto"), (1, "ngram"), (2, "suffix")])
def test_the_same_answers(options: dict[str, Any], depth: int, drafters: str) -> None:
    options["depth"] = depth
    assert answers({**options, "speculate": drafters}) == answers(options)


def test_what_is_expected_comes_in_fewer_steps(options: dict[str, Any]) -> None:
    """Over Python, as over HTTP: the same answer, drafted from the text that was given for it."""
    with LLM(**options) as llm:
        digits = tuple(llm.tokenizer.encode(one)[0] for one in "13579")
        drawn = SamplingParams(seed=2, max_tokens=32, ignore_eos=True, allowed_token_ids=digits)
        (plain,) = llm.generate(PROMPTS[1], drawn)
        text = plain.outputs[0].text
        assert llm.tokenizer.encode(text) == plain.outputs[0].token_ids, "it is said as it is read"
    accepted = []
    for prediction in (None, [text]):
        with LLM(**{**options, "speculate": "auto"}) as llm:
            (told,) = llm.generate(PROMPTS[1], drawn, prediction=prediction)
            assert told.outputs == plain.outputs
            accepted.append(llm.stats.accepted_tokens)
            assert plain.drafted is None
            assert told.drafted is not None
            stats = llm.stats
            totals = told.drafted.totals()
            assert totals == (stats.drafts, stats.draft_tokens, stats.accepted_tokens)
            assert (told.drafted.saved > 0) == (stats.accepted_tokens > 0)
            assert (told.drafted.totals("prediction")[2] > 0) == (prediction is not None)
            with pytest.raises(InvalidRequest, match="2 predictions for 1 prompts"):
                llm.generate(PROMPTS[1], drawn, prediction=["a", "b"])
    assert accepted[0] < accepted[1]


CPU = CpuFacts("a CPU", frozenset(), cores=8, physical_cores=4, memory=2**34, available=2**33)
GPU = GpuFacts(0, "a GPU", (9, 0), 80 * 2**30, 79 * 2**30)


def test_off_unless_asked_for(tiny: Path) -> None:
    files = open_model(str(tiny))
    assert drafts_of(resolve(EngineOptions(), files, Hardware(CPU, ())).options) == 0
    resolved = resolve(EngineOptions(speculate="auto"), files, Hardware(CPU, ()))
    assert drafts_of(resolved.options) == DRAFTS
    (decision,) = [one for one in resolved.decisions if one.name == "speculate"]
    assert all(name in decision.reason for name in DEFAULT)


def test_refused_with_the_reason(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    options = EngineOptions(speculate="auto")
    with pytest.raises(OptionError, match="cuda") as caught:
        resolve(options, open_model(str(tiny)), Hardware(CPU, (GPU,)))
    assert caught.value.param == "speculate"
    encoder = open_model(str(tiny_encoder.make_encoder(tmp_path)))
    with pytest.raises(OptionError, match="encoder") as caught:
        resolve(options, encoder, Hardware(CPU, ()))
    assert caught.value.param == "speculate"
