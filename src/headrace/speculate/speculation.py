"""All drafters of an engine: a set per sequence, of which the best proposal is used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..base.textlibrary import library
from .acceptance import Acceptance
from .automaton import DEPTH
from .drafter import NOTHING, Drafter, Proposal
from .forced import ForcedDrafter, Forcing
from .ngram import NGramDrafter
from .predicted import PredictedDrafter
from .suffix import PORTION, Corpus, SuffixDrafter

DRAFTERS = ("forced", "prediction", "suffix", "ngram")
"""Names of the built-in drafters."""
DEFAULT = ("forced", "prediction", "suffix")
"""Drafters worth using for every sequence: the suffix drafter finds all that n-grams find."""
MODEL = "draft"
"""Name of the draft model, an alternative to these: workers have it, it needs a device."""
TENANTS = 64
"""Most remembered tenants; the least recently seen one is forgotten."""


class Tenant:
    """Memory shared by the sequences of one salt and one adapter."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.corpus = Corpus()


class Drafts:
    """The drafters of one sequence."""

    def __init__(
        self, tenant: Tenant, drafters: Sequence[Drafter], prompt: int, *, remembered: bool
    ) -> None:
        """`prompt`: number of first tokens that are not part of the answer. `remembered`: whether
        the tenant's corpus takes the answer."""
        self._tenant = tenant
        self._remembered = remembered
        self._drafters = drafters
        self._prompt = prompt
        self._answer: list[int] = []
        """End of the answer: tokens not yet added to the tenant's corpus, and the tokens before
        them."""
        self._told = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that became part of the sequence: first the prompt, then the answer."""
        for drafter in self._drafters:
            drafter.extend(tokens)
        prompt = min(self._prompt, len(tokens))
        self._prompt -= prompt
        if self._remembered:
            self._answer.extend(tokens[prompt:])
        if len(self._answer) - self._told >= PORTION:
            self._tell()

    def propose(self, most: int) -> Proposal:
        """Return the proposal of at most `most` tokens with the largest expected number of accepted
        tokens; the first drafter's among equals."""
        proposals = [one for drafter in self._drafters if (one := drafter.propose(most))]
        if len(proposals) < 2:
            return proposals[0] if proposals else NOTHING
        return max(proposals, key=lambda one: sum(self.survival(one)))

    def survival(self, proposal: Proposal) -> list[float]:
        """Return each of its tokens' chance that it and all before it are accepted."""
        return self._tenant.acceptance.survival(proposal)

    def settle(self, verified: Proposal, accepted: int) -> None:
        """Learn that the first `accepted` tokens of a proposal, cut to its verified part, held."""
        self._tenant.acceptance.record(verified, accepted)

    def end(self) -> None:
        """Remember the rest of the answer for the tenant's next sequences."""
        self._tell()

    def _tell(self) -> None:
        self._tenant.corpus.add(self._answer[self._told :], self._answer[: self._told])
        self._answer = self._answer[-DEPTH:]
        self._told = len(self._answer)


class Speculation:
    """Maker of each sequence's drafters, and the memory that a tenant's sequences share."""

    def __init__(
        self,
        makers: Sequence[Callable[[], Drafter]] | None = None,
        *,
        names: Sequence[str] = ("ngram",),
    ) -> None:
        """`makers`: functions that make the drafters of a sequence, in place of the built-in ones
        called `names`. Among equal proposals the first one is used."""
        assert set(names) <= set(DRAFTERS)
        self._makers = makers
        self._names = names
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()

    def begin(
        self,
        tenant: str = "",
        *,
        prompt: int = 0,
        expected: Sequence[int] = (),
        grammar: Forcing | None = None,
    ) -> Drafts:
        """Make the drafters of a new sequence.

        `tenant` names sequences that may learn from each other: it joins the salt and the adapter
        of the request. `prompt`: number of first tokens that are not part of the answer.
        `expected`: the answer that the client expects. `grammar`: a grammar that may force tokens.
        """
        found = self._tenant(tenant)
        if self._makers is not None:
            return Drafts(found, [make() for make in self._makers], prompt, remembered=False)
        ways: dict[str, Callable[[], Drafter | None]] = {
            "forced": lambda: ForcedDrafter(grammar) if grammar else None,
            "prediction": lambda: PredictedDrafter(expected, prompt) if expected else None,
            "suffix": lambda: SuffixDrafter(found.corpus),
            "ngram": NGramDrafter,
        }
        made = (ways[name]() for name in self._names)
        drafters = [one for one in made if one is not None]
        return Drafts(found, drafters, prompt, remembered="suffix" in self._names)

    def _tenant(self, name: str) -> Tenant:
        found = self._tenants.setdefault(name, Tenant())
        self._tenants.move_to_end(name)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        return found


def names_of(choice: str) -> tuple[str, ...]:
    """Return the text drafters for a choice of the option `speculate`. With "auto", n-grams replace
    suffixes if the library of the automaton is absent (`textlibrary.absence` says why)."""
    if choice == MODEL:
        return ()
    if choice != "auto":
        return (choice,)
    return DEFAULT if library() is not None else (*DEFAULT[:-1], "ngram")
