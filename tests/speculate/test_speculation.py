"""Several drafters of one sequence, and what sequences of one tenant teach each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headrace.speculate import NOTHING, NGramDrafter, Proposal, Speculation
from headrace.speculate.speculation import TENANTS


class Says:
    """Always proposes the same."""

    def __init__(self, name: str, tokens: Sequence[int], matched: int) -> None:
        self.name = name
        self.proposal = Proposal(tokens, matched, name)

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, most: int) -> Proposal:
        return Proposal(self.proposal.tokens[:most], self.proposal.matched, self.name)


def test_the_likelier_proposal_counts_and_experience_tells_which() -> None:
    speculation = Speculation([partial(Says, "a", [1, 2], 4), partial(Says, "b", [3, 4], 4)])
    drafts = speculation.begin()
    assert drafts.propose(2).drafter == "a", "of equals the first"
    for _ in range(3):
        drafts.settle(drafts.propose(2), 0)
    assert drafts.propose(2).drafter == "b"


def test_nobody_proposes_where_there_is_no_drafter() -> None:
    assert Speculation([]).begin().propose(4) is NOTHING


def test_a_tenant_does_not_learn_from_another() -> None:
    speculation = Speculation([NGramDrafter])
    one, other = speculation.begin("one"), speculation.begin("other")
    for drafts in one, other:
        drafts.extend([1, 2, 3, 4, 1, 2])
    before = other.survival(other.propose(4))
    for _ in range(20):
        one.settle(one.propose(4), 0)
    assert one.survival(one.propose(4)) < before
    assert other.survival(other.propose(4)) == before


def test_whoever_was_not_seen_longest_is_forgotten() -> None:
    speculation = Speculation([partial(Says, "a", [1], 4)])
    drafts = speculation.begin("first")
    drafts.settle(drafts.propose(1), 0)
    learnt = drafts.survival(drafts.propose(1))
    for number in range(TENANTS - 1):
        speculation.begin(str(number))
    again = speculation.begin("first")
    assert again.survival(again.propose(1)) == learnt
    for number in range(TENANTS):
        speculation.begin(str(number))
    anew = speculation.begin("first")
    assert anew.survival(anew.propose(1)) > learnt
