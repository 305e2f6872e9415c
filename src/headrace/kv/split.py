"""The place where a prompt is computed: here, or on a prefill server that sends its blocks.

The gain of a split is not that one prompt is ready sooner: another device of the same kind takes as
long, and then its KV has to come. But a step with a chunk of a prompt is a long step for all
sequences that decode in it. So the time lost by all that wait is compared. The same rule decides in
an engine (`kv.tiers`) and in the simulator (`engine.simulator.sim`).
"""

from __future__ import annotations

from typing import NamedTuple

BESIDE = 0.1
"""Share of a move's time that each decoding stream loses: readers have 0.04 of a step's time, and
the system about as much to receive."""
UNKNOWN_RATE = 1000.0
"""Tokens a second assumed for a machine whose speed the roofline does not know."""


class SplitChoice(NamedTuple):
    """Costs of a prompt on either side, all in seconds but `decoding`."""

    here: float
    """Computing alone what this cache lacks of the prompt."""
    there: float
    """Computing what that cache lacks, as far as this side knows."""
    moving: float
    """Its KV on the link, and the messages around it."""
    ahead_here: float
    """Prompts that would be computed here before it or with it."""
    ahead_there: float
    decoding: int
    """Number of streams that decode here."""

    @property
    def pays(self) -> bool:
        """Whether less time is lost by handing the prompt over. Each stream that decodes here waits
        for a computation here."""
        here = self.ahead_here + self.here * (1 + self.decoding)
        there = self.ahead_there + self.there + self.moving * (1 + BESIDE * self.decoding)
        return there < here
