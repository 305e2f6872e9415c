"""Continuations by frequency: what is proposed has occurred, what is kept has a bound, and nobody
learns what another tenant wrote."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate import (
    DEFAULT,
    NOTHING,
    Proposal,
    Speculation,
    SuffixDrafter,
)
from headrace.speculate.automaton import DEPTH
from headrace.speculate.suffix import PORTION, SHORTEST, Corpus

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def occurs(text: Sequence[int], wanted: Sequence[int]) -> bool:
    wanted = list(wanted)
    return any(
        list(text[at : at + len(wanted)]) == wanted for at in range(len(text) - len(wanted) + 1)
    )


@given(text=TEXTS, past=st.lists(TEXTS, max_size=3), most=st.integers(0, 10))
def test_a_proposal_occurred_behind_its_context(
    text: list[int], past: list[list[int]], most: int
) -> None:
    corpus = Corpus()
    for answer in past:
        corpus.add(answer)
    drafter = SuffixDrafter(corpus)
    drafter.extend(text)
    proposal = drafter.propose(most)
    assert len(proposal) <= most
    if proposal:
        assert proposal.matched >= SHORTEST
        context = text[len(text) - proposal.matched :]
        # Each token followed the context that stands before it, as far as contexts count.
        for end in range(1, len(proposal) + 1):
            said = [*context, *proposal.tokens[:end]][-proposal.matched - 1 :]
            assert any(occurs(one, said) for one in [text, *past])


@given(text=TEXTS, most=st.integers(1, 10))
def test_the_context_is_the_longest_that_something_followed(text: list[int], most: int) -> None:
    drafter = SuffixDrafter()
    drafter.extend(text)
    longest = max(
        (
            length
            for length in range(1, min(len(text), DEPTH + 1))
            if occurs(text[:-1], text[len(text) - length :])
        ),
        default=0,
    )
    proposal = drafter.propose(most)
    assert proposal.matched == (longest if longest >= SHORTEST else 0)


@given(text=TEXTS, past=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_how_text_is_cut_does_not_matter(text: list[int], past: list[int], cuts: list[int]) -> None:
    corpus = Corpus()
    corpus.add(past)
    whole, parts = SuffixDrafter(corpus), SuffixDrafter(corpus)
    whole.extend(text)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(borders):
        parts.extend(text[begin:end])
        parts.propose(4)
    assert parts.propose(8) == whole.propose(8)


@given(past=st.lists(st.integers(0, 2), max_size=40), cut=st.integers(0, 40))
def test_parts_of_an_answer_are_the_answer(past: list[int], cut: int) -> None:
    whole, parts = Corpus(), Corpus()
    whole.add(past)
    parts.add(past[:cut])
    parts.add(past[cut:], past[:cut])
    for context in itertools.product(range(3), repeat=3):
        one, other = SuffixDrafter(whole), SuffixDrafter(parts)
        one.extend(context)
        other.extend(context)
        assert one.propose(5) == other.propose(5)


def test_the_more_frequent_continuation_counts() -> None:
    drafter = SuffixDrafter()
    drafter.extend([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2])
    assert drafter.propose(1).tokens == [3]


def test_an_unlikely_path_ends() -> None:
    text = [one for follower in range(11, 31) for one in (1, 2, follower)]
    drafter = SuffixDrafter()
    drafter.extend([*text, 1, 2])
    assert drafter.propose(4) is NOTHING, "twenty continuations, one in twenty each"


def test_past_answers_are_found_and_what_comes_while_a_sequence_runs_too() -> None:
    corpus = Corpus()
    drafter = SuffixDrafter(corpus)
    drafter.extend([5, 6, 7])
    assert drafter.propose(2) is NOTHING
    corpus.add([4, 5, 6, 7, 8, 9])
    assert drafter.propose(2) == Proposal([8, 9], 3, "suffix")
    drafter.extend([8])
    assert drafter.propose(2) == Proposal([9], 4, "suffix")


def texts(kind: str, length: int) -> list[int]:
    rng = random.Random(kind)
    return {
        "all different": list(range(length)),
        "all equal": [7] * length,
        "two words": [rng.randrange(2) for _ in range(length)],
        "many words": [int(rng.paretovariate(0.7)) % 150_000 for _ in range(length)],
        "runs that end": [0 if n % 200 else n for n in range(length)],
    }[kind]


@pytest.mark.parametrize(
    "kind", ["all different", "all equal", "two words", "many words", "runs that end"]
)
def test_a_corpus_never_holds_more_than_its_bound(kind: str) -> None:
    bound = 1 << 20
    corpus, most, dropped = Corpus(bound), 0, False
    text = texts(kind, 12_000)
    for begin in range(0, len(text), 500):
        before = corpus.generations[-1:]
        corpus.add(text[begin : begin + 500])
        most = max(most, corpus.held)
        dropped = dropped or not set(before) <= set(corpus.generations)
    assert most <= bound
    if kind in ("all different", "two words", "many words"):  # Others say little that is new.
        assert dropped, "more was written than fits"
        assert most > bound / 4, "what is allowed is used"


def test_a_corpus_without_room_remembers_nothing() -> None:
    corpus = Corpus(1000)
    corpus.add([1, 2, 3])
    assert not corpus.generations


def test_what_is_dropped_is_not_proposed() -> None:
    corpus = Corpus(1 << 20)
    drafter = SuffixDrafter(corpus)
    drafter.extend([-5, -6])
    corpus.add([-5, -6, -7])
    assert drafter.propose(1).tokens == [-7]
    old = corpus.generations[0]
    number = 0
    while old in corpus.generations:
        corpus.add(range(number, number + PORTION))
        number += PORTION
    assert drafter.propose(1) is NOTHING


def drafted(speculation: Speculation, tenant: str, text: list[int]) -> list[Proposal]:
    """Everything that is proposed along a text."""
    drafts = speculation.begin(tenant, prompt=4)
    proposals = []
    drafts.extend(text[:4])
    for token in text[4:]:
        proposals.append(drafts.propose(4))
        drafts.settle(proposals[-1], 0)
        drafts.extend([token])
    drafts.end()
    return proposals


@given(st.data())
def test_drafts_of_a_tenant_do_not_depend_on_what_another_wrote(data: st.DataObject) -> None:
    alone, shared = Speculation(names=DEFAULT), Speculation(names=DEFAULT)
    for _ in range(3):
        other = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=80))
        drafted(shared, "other", other)
        mine = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=80))
        assert drafted(shared, "mine", mine) == drafted(alone, "mine", mine)


def test_drafts_of_a_tenant_do_depend_on_what_it_wrote() -> None:
    text = list(range(100))
    speculation = Speculation(names=DEFAULT)
    assert not any(drafted(speculation, "mine", text))
    assert any(drafted(speculation, "mine", text))
    assert not any(drafted(speculation, "other", text))


def test_prompts_are_not_remembered() -> None:
    speculation = Speculation(names=DEFAULT)
    first = speculation.begin(prompt=6)
    first.extend([1, 2, 3, 4, 5, 6])
    first.extend([9, 9])
    first.end()
    second = speculation.begin(prompt=3)
    second.extend([1, 2, 3])
    assert second.propose(3) is NOTHING


def test_without_the_suffix_drafter_nothing_is_kept() -> None:
    speculation = Speculation(names=["ngram"])
    assert any(drafted(speculation, "mine", [1, 2, 3, 4] * 20))
    assert not speculation.begin("mine")._tenant.corpus.generations
