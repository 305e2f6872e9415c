"""Prompts that a decode server has a prefill server compute, and the leases on their blocks.

Work is handed over at most once; if that fails, its prompt is computed here. Lent blocks are read
like those of any tier (`tiers`). They are released when the work has read them, no longer needs
them, or has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.split import PrefillServers, SplitStats

from .prefix import PrefixChain
from .split import UNKNOWN_RATE, SplitChoice

REMEMBERED = 4096
"""Most decisions (one for each work) and most lent prompts that are remembered."""
LEAST_SECONDS = 5e-3
"""Least seconds of computing for which a prompt is handed over."""


class Handovers:
    """The decode server's side of hand-overs. Belongs to the engine's thread."""

    def __init__(
        self,
        servers: PrefillServers,
        computing: Callable[[int, int], float],
        beside: Callable[[], tuple[int, int]],
        stats: SplitStats,
    ) -> None:
        """`computing`: (tokens present, tokens to compute) → seconds. `beside`: returns (decoding
        sequences, prompt tokens admitted but not computed)."""
        self._servers = servers
        self._computing = computing
        self._beside = beside
        self.stats = stats
        self._tickets: dict[int, int] = {}
        """By work decided on: its order, or 0 if none is open."""
        self._awaited: dict[bytes, int] = {}
        """Last block of a prompt that another server is computing → its order."""
        self._open: dict[int, bytes] = {}
        """By order: its last block."""
        self._there: dict[bytes, None] = {}
        """Last blocks of recently lent prompts; the server that computed them probably still has
        them."""

    def ask(
        self, ticket: int, work: int, chain: PrefixChain, first: int, blocks: int, moving: float
    ) -> bool | None:
        """Decide whether a prefill server computes the blocks `first` … `blocks` of a prompt. True:
        it was asked, as order `ticket`. None: other work ordered it already. `moving`: seconds to
        fetch them."""
        if work in self._tickets:
            return False
        handed = chain.handed(first, blocks)
        ahead = self._servers.ahead()
        if handed is None or ahead is None:
            return False
        if handed.key in self._awaited:
            return None
        size = chain.block_size
        here = self._seconds(first * size, (blocks - first) * size)
        known = next((at for at in range(blocks, 0, -1) if chain.keys[at - 1] in self._there), 0)
        there = self._seconds(known * size, (blocks - known) * size)
        decoding, admitted = self._beside()
        ahead_here = self._seconds(0, admitted) if admitted else 0.0
        choice = SplitChoice(here, there, moving, ahead_here, ahead, decoding)
        pays = here >= LEAST_SECONDS and choice.pays
        self._decided(work, ticket if pays else 0)
        if not pays:
            self.stats.here += 1
            return False
        self.stats.handed += 1
        self._open[ticket] = handed.key
        self._awaited[handed.key] = ticket
        self._servers.ask(ticket, handed, chain.keys[:blocks], there)
        return True

    def ended(self, ticket: int, good: bool) -> None:
        """Note that an order has ended. `good`: its blocks can be read from now on."""
        key = self._open.pop(ticket, None)
        if key is not None and self._awaited.get(key) == ticket:
            del self._awaited[key]
        self.stats.brought += good
        if key is not None and good:
            self._there[key] = None
            if len(self._there) > REMEMBERED:
                del self._there[next(iter(self._there))]

    def done(self, work: int) -> None:
        """Release the blocks lent for a work that has read them or does not need them."""
        if ticket := self._tickets.get(work, 0):
            self._tickets[work] = 0
            self._servers.release(ticket)

    def gone(self, work: int) -> None:
        """Forget work that ended before it ran."""
        self.done(work)
        self._tickets.pop(work, None)

    def _seconds(self, there: int, tokens: int) -> float:
        seconds = self._computing(there, tokens)
        return seconds if seconds < float("inf") else tokens / UNKNOWN_RATE

    def _decided(self, work: int, ticket: int) -> None:
        self._tickets[work] = ticket
        if len(self._tickets) > REMEMBERED:
            oldest = next(iter(self._tickets))
            self.done(oldest)
            del self._tickets[oldest]
