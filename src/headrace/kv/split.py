"""The choice where to compute a prompt: here, or on a prefill server that sends its blocks.

A split does not make one prompt ready sooner: an equal device takes as long, and then its KV has to
be moved. But a step with a prompt chunk is slow for all sequences that decode in it. So the rule
compares the time lost by all that wait. The same rule decides in an engine (`kv.tiers`) and in the
simulator (`engine.simulator.sim`).
"""

from __future__ import annotations

from typing import NamedTuple

BESIDE = 0.1
"""Share of a move's time that each decoding stream loses: reading takes 0.04 of a step's time, and
receiving in the system about as much."""
UNKNOWN_RATE = 1000.0
"""Tokens a second assumed for a machine whose speed the roofline does not know."""


class SplitChoice(NamedTuple):
    """Costs of a prompt on either side, all in seconds but `decoding`."""

    here: float
    """Computing the part of the prompt that this cache lacks."""
    there: float
    """Computing the part that that cache lacks, as far as this side knows."""
    moving: float
    """Its KV on the link, and the messages around it."""
    ahead_here: float
    """Computing the prompts ahead of it or with it here."""
    ahead_there: float
    decoding: int
    """Number of streams that decode here."""

    @property
    def pays(self) -> bool:
        """Whether handing the prompt over loses less time. Each stream that decodes here waits for
        a computation here."""
        here = self.ahead_here + self.here * (1 + self.decoding)
        there = self.ahead_there + self.there + self.moving * (1 + BESIDE * self.decoding)
        return there < here
