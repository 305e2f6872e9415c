"""Where a prompt is computed: here, or on a prefill server whose blocks are then moved here.

The gain of a split is not that one prompt is ready sooner: another device of the same kind takes as
long, and then its KV has to come. It is that a step with a chunk of a prompt is a long step for all
who decode beside it. So what is compared is the time that all who wait lose. The same rule decides
in an engine (`kv.tiers`) and in the simulator (`engine.sim`).
"""

from __future__ import annotations

from typing import NamedTuple

BESIDE = 0.1
"""Share of a move's time that each decoding stream loses: readers have 0.04 of a step's time, and
the system about as much to receive."""
UNKNOWN_RATE = 1000.0
"""Tokens a second that a machine is taken to compute where the roofline knows nothing of it."""


class SplitChoice(NamedTuple):
    """What a prompt costs on either side, all in seconds but `decoding`."""

    here: float
    """What this cache lacks of it, computed alone."""
    there: float
    """What that cache lacks, as far as one knows here."""
    moving: float
    """Its KV on the link, and the messages around it."""
    ahead_here: float
    """Prompts that would be computed here before it or with it."""
    ahead_there: float
    decoding: int
    """Streams that decode here."""

    @property
    def pays(self) -> bool:
        """Is less time lost when it is handed over? Each stream that decodes here waits for
        what is computed here."""
        here = self.ahead_here + self.here * (1 + self.decoding)
        there = self.ahead_there + self.there + self.moving * (1 + BESIDE * self.decoding)
        return there < here
