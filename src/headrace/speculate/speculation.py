"""All drafters of an engine: a set per sequence, of which the best proposal counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from .acceptance import Acceptance
from .drafter import NOTHING, Drafter, Proposal
from .ngram import NGramDrafter

TENANTS = 64
"""Tenants about whom something is remembered; whoever was not seen longest is forgotten."""


class Tenant:
    """What is remembered for those who share: one salt and one adapter."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()


class Drafts:
    """The drafters of one sequence."""

    def __init__(self, tenant: Tenant, drafters: Sequence[Drafter]) -> None:
        self._tenant = tenant
        self._drafters = drafters

    def extend(self, tokens: Sequence[int]) -> None:
        """Take what became part of the sequence: first the prompt, then what was said."""
        for drafter in self._drafters:
            drafter.extend(tokens)

    def propose(self, most: int) -> Proposal:
        """The proposal, at most `most` tokens long, of which most are likely to be accepted; of
        equals the first drafter's."""
        proposals = [drafter.propose(most) for drafter in self._drafters]
        return max(proposals, key=lambda one: sum(self.survival(one)), default=NOTHING)

    def survival(self, proposal: Proposal) -> list[float]:
        """The chance of each of its tokens to be accepted."""
        return self._tenant.acceptance.survival(proposal)

    def settle(self, verified: Proposal, accepted: int) -> None:
        """Learn that of a proposal, cut to what was verified, the first `accepted` tokens held."""
        self._tenant.acceptance.record(verified, accepted)


class Speculation:
    """Makes the drafters of each sequence and keeps what tenants' sequences teach each other."""

    def __init__(self, makers: Sequence[Callable[[], Drafter]] = (NGramDrafter,)) -> None:
        """`makers`: of the drafters of a sequence."""
        self._makers = makers
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()

    def begin(self, tenant: str = "") -> Drafts:
        """The drafters of a new sequence. `tenant` names those who may learn from each other: it
        joins the salt and the adapter of the request."""
        return Drafts(self._tenant(tenant), [make() for make in self._makers])

    def forget(self, tenant: str) -> None:
        """Drop all that was learnt from a tenant."""
        self._tenants.pop(tenant, None)

    def _tenant(self, name: str) -> Tenant:
        found = self._tenants.setdefault(name, Tenant())
        self._tenants.move_to_end(name)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        return found
