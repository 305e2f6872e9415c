"""Counts of the parts of an engine that not each has: drafts, encodings, tiers (`metrics.txt`)."""

from __future__ import annotations

from dataclasses import replace

from ..base.drafted import Verified
from ..base.encodings import EncodingStats
from ..base.tiers import TierStats
from .instruments import Labelled


class DraftMetrics:
    """Counters of the drafts of one engine. Belongs to one thread."""

    def __init__(self) -> None:
        self.places = Labelled()
        self.tokens = Labelled()
        self.accepted = Labelled()
        self.seconds = Labelled("saved", "spent", "vain")

    def verified(self, one: Verified) -> None:
        """Count the verified drafts of one sequence in a step."""
        for place in range(one.accepted):
            self.places.add(str(place))
        self.tokens.add(one.drafter, one.tried)
        self.accepted.add(one.drafter, one.accepted)
        self.seconds.add("saved", one.saved)
        self.seconds.add("spent", one.spent)
        self.seconds.add("vain", one.spent * (1 - one.accepted / one.tried))


class EncodingMetrics:
    """Sum of the counts of successive engines; each begins at zero."""

    def __init__(self) -> None:
        self.stats = EncodingStats()
        self._was = EncodingStats()
        self.ends = Labelled("computed", "shared", "failed")
        self.seconds = 0.0

    def now(self, stats: EncodingStats) -> None:
        """Take the engine's counts after a step."""
        was, self._was = self._was, stats
        for name in ("computed", "shared", "failed"):
            self.ends.add(name, getattr(stats, name) - getattr(was, name))
        self.seconds += stats.seconds - was.seconds
        self.stats = stats

    def restart(self) -> None:
        """Start over: a new engine process counts from zero."""
        self._was = EncodingStats()


class TierMetrics:
    """Sum of the counts of successive engines; each begins at zero."""

    def __init__(self) -> None:
        self.stats = TierStats()
        self.bytes = Labelled("read", "written", "read_remote")
        self.blocks = Labelled("written", "left_out", "damaged")
        self.prefixes = Labelled("loaded", "recomputed", "met")
        self.checks = Labelled("equal", "wrong")
        self.seconds = 0.0

    def now(self, stats: TierStats) -> None:
        """Take the engine's counts after a step."""
        was = self.stats
        remote = stats.remote_bytes - was.remote_bytes
        self.bytes.add("read", stats.loaded_bytes - was.loaded_bytes - remote)
        self.bytes.add("read_remote", remote)
        self.bytes.add("written", stats.written_bytes - was.written_bytes)
        self.blocks.add("written", stats.written_blocks - was.written_blocks)
        self.blocks.add("left_out", stats.left_out - was.left_out)
        self.blocks.add("damaged", stats.damaged - was.damaged)
        self.prefixes.add("loaded", stats.loads - was.loads)
        self.prefixes.add("recomputed", stats.recomputed - was.recomputed)
        self.prefixes.add("met", stats.met - was.met)
        wrong = stats.wrong - was.wrong
        self.checks.add("wrong", wrong)
        self.checks.add("equal", stats.checked - was.checked - wrong)
        self.seconds += stats.load_seconds - was.load_seconds
        self.stats = replace(stats)  # The engine in this process keeps counting in it.

    def restart(self) -> None:
        """Start over: a new engine process counts from zero."""
        self.stats = TierStats()
