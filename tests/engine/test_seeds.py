"""The seed of a request is resolved once, where the request is."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.sampling import SamplingParams
from headrace.base.spec import SEEDS, Task
from headrace.engine.input import InputProcessor
from headrace.loader import open_model
from headrace.text import load_tokenizer


@pytest.fixture
def processor(tiny: Path) -> InputProcessor:
    files = open_model(str(tiny))
    return InputProcessor(files, load_tokenizer(files.tokenizer), 64, ("pooling",))


@pytest.mark.parametrize("task", ["tokens", "vector"])
def test_an_unseeded_request_gets_a_seed_of_its_own(processor: InputProcessor, task: Task) -> None:
    seeds = set()
    for number in range(20):
        made = processor.request([1, 2], SamplingParams(), request_id=str(number), task=task)
        assert made.spec.sampling.seed is None, "whether the user gave one stays visible"
        assert 0 <= made.spec.seed < SEEDS
        seeds.add(made.spec.seed)
    assert len(seeds) == 20


@pytest.mark.parametrize("wish", [0, 7, -1, 2**64 - 1])
def test_a_seed_of_the_user_is_kept_as_64_bits(processor: InputProcessor, wish: int) -> None:
    made = processor.request([1, 2], SamplingParams(seed=wish), request_id="a")
    assert made.spec.seed == wish % SEEDS
