"""Unwanted words, allowed ids and the further filters through a whole engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest
from headrace.base.request import CompletionOutput
from tiny import bytewise
from tiny.kept import Kept

NO_END = {bytewise.END: -100.0}


@pytest.fixture(scope="module")
def llm(kept: Kept) -> Iterator[LLM]:
    folder = kept(bytewise.make, template=bytewise.THINKING)
    with LLM(
        str(folder),
        device="cpu",
        threads=1,
        kv_memory="8MiB",
        step_tokens=64,
        offline=True,
        max_sequences=8,
    ) as it:
        yield it


def ask(llm: LLM, **fields: Any) -> CompletionOutput:
    values = {"temperature": 0.0, "max_tokens": 24, "logit_bias": NO_END, **fields}
    return llm.generate("ab", SamplingParams(**values))[0].outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_nothing_but_allowed_ids(llm: LLM, temperature: float) -> None:
    found = ask(llm, allowed_token_ids=[70, 66, 67], temperature=temperature, seed=1).token_ids
    assert set(found) <= {66, 67, 70}
    assert len(found) == 24
    assert set(ask(llm, allowed_token_ids=[70]).token_ids) == {70}


def test_an_unwanted_word_never_comes(llm: LLM) -> None:
    free = ask(llm, max_tokens=48)
    place = next(  # Where two letters or signs stand beside each other, each of them a token.
        at
        for at, pair in enumerate(itertools.pairwise(free.token_ids))
        if all(33 <= each < 127 for each in pair)
    )
    word = "".join(map(chr, free.token_ids[place : place + 2]))
    assert word in free.text
    held = ask(llm, max_tokens=48, bad_words=[word])
    assert held.token_ids[: place + 1] == free.token_ids[: place + 1], "its beginning may come"
    assert held.token_ids[place + 1] != free.token_ids[place + 1]
    assert word not in held.text
    assert len(held.token_ids) == 48
    drawn = ask(llm, max_tokens=48, bad_words=[word[0], word], temperature=1.0, seed=3)
    assert ord(word[0]) not in drawn.token_ids


def test_the_filters_leave_less(llm: LLM) -> None:
    """With the narrowest filter a drawn answer is a greedy one."""
    free = ask(llm).token_ids
    assert ask(llm, temperature=2.0, seed=5).token_ids != free
    for narrow in ({"top_n_sigma": 1e-6}, {"top_a": 1.0, "top_n_sigma": 1e-6}):
        assert ask(llm, temperature=2.0, seed=5, **narrow).token_ids == free
    assert len(ask(llm, temperature=2.0, seed=5, typical_p=0.1).token_ids) == 24


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [66], "thinking_token_budget": 3}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"top_a": -0.1}, "top_a"),
    ],
)
def test_what_cannot_be_is_refused_by_name(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(llm, **fields)
    assert caught.value.param == param


def test_a_form_and_a_list_of_ids_exclude_each_other(llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("ab", SamplingParams(allowed_token_ids=[66]), grammar='start: "a"')
    assert caught.value.param == "allowed_token_ids"
