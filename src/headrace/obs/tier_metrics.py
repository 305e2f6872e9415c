"""Metrics of the tiers below the KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.core import Metric

from ..base.split import SplitStats
from ..base.tiers import TierStats
from .instruments import Exposition, Labelled
from .split_metrics import split_families


class TierMetrics:
    """Sum of the counts of successive engines; each begins at zero."""

    def __init__(self) -> None:
        self._stats = TierStats()
        self._bytes = Labelled("read", "written", "read_remote")
        self._blocks = Labelled("written", "left_out", "damaged")
        self._prefixes = Labelled("loaded", "recomputed", "met")
        self._checks = Labelled("equal", "wrong")
        self._seconds = 0.0

    def now(self, stats: TierStats) -> None:
        """Take the engine's counts after a step."""
        was = self._stats
        remote = stats.remote_bytes - was.remote_bytes
        self._bytes.add("read", stats.loaded_bytes - was.loaded_bytes - remote)
        self._bytes.add("read_remote", remote)
        self._bytes.add("written", stats.written_bytes - was.written_bytes)
        self._blocks.add("written", stats.written_blocks - was.written_blocks)
        self._blocks.add("left_out", stats.left_out - was.left_out)
        self._blocks.add("damaged", stats.damaged - was.damaged)
        self._prefixes.add("loaded", stats.loads - was.loads)
        self._prefixes.add("recomputed", stats.recomputed - was.recomputed)
        self._prefixes.add("met", stats.met - was.met)
        wrong = stats.wrong - was.wrong
        self._checks.add("wrong", wrong)
        self._checks.add("equal", stats.checked - was.checked - wrong)
        self._seconds += stats.load_seconds - was.load_seconds
        self._stats = replace(stats)  # The engine in this process goes on counting in it.

    def restart(self) -> None:
        """Start over: a new engine process counts from zero."""
        self._stats = TierStats()

    def families(self, x: Exposition, split: SplitStats | None) -> Iterator[Metric]:
        """Yield all of them, as they are now, and those of prefill servers, also a tier."""
        if split is not None:
            yield from split_families(x, split)
        for help_, label, values, name in (
            ("Bytes moved to and from disk and store.", "way", self._bytes, "bytes"),
            ("Blocks for the disk, by what became of them.", "end", self._blocks, "blocks"),
            (
                "Prefixes found there: loaded, computed since that was quicker, or both at once.",
                "end",
                self._prefixes,
                "prefixes",
            ),
            (
                "Blocks computed anew and compared with the disk's; wrong must stay 0.",
                "result",
                self._checks,
                "checks",
            ),
        ):
            yield from x.counters(help_, label, values, f"headrace:context_cache_{name}")
        yield from x.counter(
            "Time that prefixes took to load.", self._seconds, "headrace:context_cache_load_seconds"
        )
        yield from x.gauge(
            "Bytes of KV on the disk.", self._stats.kept_bytes, "headrace:context_cache_kept_bytes"
        )
