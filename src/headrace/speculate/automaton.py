"""A suffix automaton of texts that grow token by token, which counts what followed what.

The automaton is the smallest graph whose paths from the root spell exactly the substrings of the
texts (Blumer and others 1985; the online construction: Crochemore). A state stands for substrings
that occur at the same places; its link leads to the state of its longest suffix that occurs at
more. Both together find the longest context that was seen before, and hold how often: what
SuffixDecoding (Oliaro and others, arXiv 2411.04975) keeps in a suffix tree.

Contexts count up to `DEPTH` tokens: a count is exact for any substring of at most that many
tokens and the one behind it, and costs at most `DEPTH` steps a token. Nobody asks for longer ones,
so a text is spelt in windows that overlap by `DEPTH`: no token adds more than `WINDOW` edges,
whatever strangers write (a substring that begins a window may then have a state of its own).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import getsizeof

DEPTH = 24
WINDOW = 256
ROOT, NONE = 0, -1
_INTS = 64
"""Bytes of the two numbers of an entry in a dictionary."""


class SuffixAutomaton:
    """Texts, one after the other, and how often each token followed each context.

    A state's first edge lies in arrays, further ones in a dictionary of their own, which only
    branching states have. What a token takes is told in docs/speculation.md.
    """

    def __init__(self, depth: int = DEPTH, window: int = WINDOW) -> None:
        """`depth`: tokens of context that count. `window`: tokens that are spelt in one go, more
        than those."""
        assert 0 < depth < window
        self._depth, self._window = depth, window
        self._length = array("i", (0,))
        """Tokens of a state's longest substring."""
        self._link = array("i", (NONE,))
        self._token = array("i", (NONE,))
        self._target = array("i", (NONE,))
        self._count = array("i", (0,))
        """How often a state's substrings occur."""
        self._best = array("i", (NONE,))
        """The token that followed most often; of equals the one that did last."""
        self._more: dict[int, dict[int, int]] = {}
        self._branching = 0
        """Bytes of the dictionaries in `_more`."""
        self._spelt = ROOT
        """The state of the whole window so far."""
        self._last: list[int] = []
        """The window's tokens."""
        self.end: Context = (ROOT, 0)
        """Where the text ends: the state of its last tokens, `depth` at most, and their number."""
        self.size = 0
        """Tokens of all texts."""

    @property
    def held(self) -> int:
        """Bytes of memory."""
        columns = (self._length, self._link, self._token, self._target, self._count, self._best)
        return sum(map(getsizeof, columns)) + getsizeof(self._more) + self._branching

    def cut(self, behind: Sequence[int] = ()) -> None:
        """Begin a new text; or go on with one behind its last tokens, which count no more."""
        self._spelt, self.end = ROOT, (ROOT, 0)
        self._last = list(behind[-self._depth :])
        for token in self._last:
            self._spell(token)
            self.end = self.next(self.end, token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the current text."""
        for token in tokens:
            if len(self._last) == self._window:
                self._turn()
            self._last.append(token)
            self._spell(token)
            self._tally(token)
        self.size += len(tokens)

    def next(self, context: Context, token: int) -> Context:
        """The longest suffix of a context and a token behind it that the texts contain."""
        state, length = self._settled(context)
        while (target := self._follow(state, token)) == NONE:
            state = self._link[state]
            if state == NONE:
                return ROOT, 0
            length = self._length[state]
        return self._settled((target, min(length + 1, self._depth)))

    def shorter(self, context: Context) -> Context:
        """The longest proper suffix of a context that another state stands for; the empty one at
        last."""
        state = self._link[self._settled(context)[0]]
        return (ROOT, 0) if state == NONE else (state, self._length[state])

    def count(self, context: Context) -> int:
        """How often a context occurs."""
        return self._count[self._settled(context)[0]]

    def likeliest(self, context: Context) -> int:
        """The token that followed most often, `NONE` where nothing did."""
        return self._best[self._settled(context)[0]]

    def _settled(self, context: Context) -> Context:
        """A context where its state has been split since it was found."""
        state, length = context
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def _follow(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (token, NONE):
            self._token[state], self._target[state] = token, target
            return
        more = self._more.get(state)
        if more is None:
            self._more[state] = {token: target}
            self._branching += getsizeof(self._more[state]) + 2 * _INTS
            return
        before = getsizeof(more) + len(more) * _INTS
        more[token] = target
        self._branching += getsizeof(more) + len(more) * _INTS - before

    def _state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._token.append(NONE)
        self._target.append(NONE)
        self._count.append(0)
        self._best.append(NONE)
        return len(self._length) - 1

    def _turn(self) -> None:
        """Begin a window with the end of the one before."""
        self._spelt = ROOT
        self._last = self._last[-self._depth :]
        for token in self._last:
            self._spell(token)

    def _spell(self, token: int) -> None:
        """The construction's step; where an earlier text went the same way, states are shared."""
        last = self._spelt
        target = self._follow(last, token)
        if target != NONE:
            self._spelt = self._exactly(last, token, target)
            return
        self._spelt = new = self._state(self._length[last] + 1)
        while last != NONE and (target := self._follow(last, token)) == NONE:
            self._connect(last, token, new)
            last = self._link[last]
        if last != NONE:
            self._link[new] = self._exactly(last, token, target)

    def _exactly(self, state: int, token: int, target: int) -> int:
        """The state whose longest substring is `state`'s and the token: `target`, or split off."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        twin = self._state(length)
        for column in self._link, self._token, self._target, self._count, self._best:
            column[twin] = column[target]
        if target in self._more:
            self._more[twin] = self._more[target].copy()
            self._branching += getsizeof(self._more[twin]) + (len(self._more[twin]) + 1) * _INTS
        self._link[target] = twin
        while state != NONE and self._follow(state, token) == target:
            self._connect(state, token, twin)
            state = self._link[state]
        return twin

    def _tally(self, token: int) -> None:
        """Count the token behind every context that ends where the text ended, and go on."""
        state, length = self._settled(self.end)
        counted = first = NONE
        count, best = self._count, self._best
        while state != NONE:
            target = self._follow(state, token)
            if target != counted:
                count[target] += 1
                counted = target
                if first == NONE:
                    first = target
            most = best[state]
            if most != token and (
                most == NONE or count[target] >= count[self._follow(state, most)]
            ):
                best[state] = token
            state = self._link[state]
        count[ROOT] += 1
        self.end = self._settled((first, min(length + 1, self._depth)))


Context = tuple[int, int]
"""A state, and how many tokens of context it stands for here."""
