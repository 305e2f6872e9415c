"""Drafters that are given what comes: a text that is expected, tokens that a grammar forces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate import NOTHING, Drafter, ForcedDrafter, PredictedDrafter, Proposal
from headrace.speculate.predicted import NEAR

EXPECTED = list(range(100, 160))


def told(tokens: Sequence[int], expected: Sequence[int] = EXPECTED) -> PredictedDrafter:
    drafter = PredictedDrafter(expected)
    drafter.extend(tokens)
    return drafter


def test_it_follows_the_text_from_its_beginning() -> None:
    assert told([]).propose(3) == Proposal([100, 101, 102], 0, "prediction")
    assert told([100, 101]).propose(3) == Proposal([102, 103, 104], 2, "prediction")


def test_a_replaced_token_is_passed_over() -> None:
    drafter = told([100, 101, 7])
    assert drafter.propose(3) is NOTHING, "nothing says where the text goes on"
    drafter.extend([103])
    assert drafter.propose(3) == Proposal([104, 105, 106], 1, "prediction")


def test_an_insertion_of_any_length_is_passed_over() -> None:
    drafter = told([*EXPECTED[:10], *range(50), *EXPECTED[10:12]])
    assert drafter.propose(2).tokens == EXPECTED[12:14]


def test_a_deletion_is_passed_over() -> None:
    near = told([*EXPECTED[:5], EXPECTED[5 + NEAR - 1]])
    assert near.propose(1).tokens == [EXPECTED[5 + NEAR]]
    far = told([*EXPECTED[:5], *EXPECTED[50:52]])
    assert far.propose(1) is NOTHING
    far.extend(EXPECTED[52:53])
    assert far.propose(1) == Proposal([EXPECTED[53]], 3, "prediction")


def test_text_that_comes_back_is_found_behind_the_place() -> None:
    expected = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]
    assert told([1, 2, 3, 4, 9, 1, 2, 3], expected).propose(1).tokens == [5]
    assert told([*expected, 9, 1, 2, 3], expected).propose(1).tokens == [6], "none ahead"


def test_the_prompt_is_not_compared() -> None:
    drafter = PredictedDrafter(EXPECTED, prompt=3)
    drafter.extend([100, 7])
    drafter.extend([8, 100])
    assert drafter.propose(1) == Proposal([101], 1, "prediction")


def test_nothing_is_left_behind_the_end() -> None:
    assert told(EXPECTED).propose(4) is NOTHING
    assert told([], []).propose(4) is NOTHING


@given(
    expected=st.lists(st.integers(0, 4), max_size=40),
    text=st.lists(st.integers(0, 4), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    most=st.integers(0, 8),
)
def test_what_is_proposed_stands_in_the_text_behind_what_matched(
    expected: list[int], text: list[int], cuts: list[int], most: int
) -> None:
    whole, parts = told(text, expected), PredictedDrafter(expected)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(borders):
        parts.extend(text[begin:end])
    proposal = whole.propose(most)
    assert parts.propose(most) == proposal
    if proposal:
        said = [*text[len(text) - proposal.matched :], *proposal.tokens]
        places = range(len(expected) - len(said) + 1)
        assert any(expected[at : at + len(said)] == said for at in places)


class Frame:
    """A grammar that forces its tokens one after the other."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.left = list(tokens)

    def forced(self) -> Sequence[int]:
        return self.left


def test_forced_tokens_are_proposed_as_they_are() -> None:
    drafter: Drafter = ForcedDrafter(Frame([1, 2, 3]))
    drafter.extend([9])
    assert drafter.propose(2) == Proposal([1, 2], 0, "forced")
    assert drafter.propose(0) is NOTHING
    assert ForcedDrafter(Frame([])).propose(2) is NOTHING


class Matched:
    """A grammar of llguidance, over single bytes."""

    def __init__(self, schema: object) -> None:
        llguidance = pytest.importorskip("llguidance")
        self.tokenizer = llguidance.LLTokenizer("byte")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_flexible": False}
        )
        self.matcher = llguidance.LLMatcher(self.tokenizer, grammar)

    def forced(self) -> Sequence[int]:
        return self.matcher.compute_ff_tokens()

    def allowed(self) -> list[int]:
        mask = self.matcher.compute_bitmask()
        return [token for token in range(256) if mask[token // 8] >> token % 8 & 1]


def test_what_a_grammar_forces_is_all_that_it_allows() -> None:
    """So the target draws these tokens whatever its logits are: a forced draft is always right."""
    properties = {"city": {"type": "string"}, "large": {"type": "boolean"}}
    grammar = Matched(
        {"properties": properties, "required": ["city", "large"]} | {"type": "object"}
    )
    drafter = ForcedDrafter(grammar)
    answer = b'{"city":"Ulm","large":true}'
    at = forced = 0
    while at < len(answer):
        proposal = drafter.propose(100)
        for token in proposal.tokens:
            assert grammar.allowed() == [token]
            assert answer[at] == token
            grammar.matcher.consume_token(token)
            at, forced = at + 1, forced + 1
        if not proposal:
            assert grammar.matcher.consume_token(answer[at])
            at += 1
    assert forced > 15
