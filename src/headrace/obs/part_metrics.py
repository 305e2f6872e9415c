"""Metrics of the parts of an engine that not each has: drafts, encodings, prefill servers, tiers.

Names are vLLM's if it has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.core import Metric

from ..base.drafted import Verified
from ..base.encodings import EncodingStats
from ..base.split import SplitStats
from ..base.tiers import TierStats
from .instruments import Exposition, Labelled


class DraftMetrics:
    """Counters of the drafts of one engine. Belongs to one thread."""

    def __init__(self) -> None:
        self._places = Labelled()
        self._tokens = Labelled()
        self._accepted = Labelled()
        self._seconds = Labelled("saved", "spent", "vain")

    def verified(self, one: Verified) -> None:
        """Count the verified drafts of one sequence in a step."""
        for place in range(one.accepted):
            self._places.add(str(place))
        self._tokens.add(one.drafter, one.tried)
        self._accepted.add(one.drafter, one.accepted)
        self._seconds.add("saved", one.saved)
        self._seconds.add("spent", one.spent)
        self._seconds.add("vain", one.spent * (1 - one.accepted / one.tried))

    def families(self, x: Exposition) -> Iterator[Metric]:
        """Yield all of them, as they are now."""
        place = "vllm:spec_decode_num_accepted_tokens_per_pos"
        for help_, label, values, name in (
            ("Drafts accepted, by place among those of a step.", "position", self._places, place),
            ("Drafts verified.", "drafter", self._tokens, "headrace:draft_tokens"),
            ("Drafts accepted.", "drafter", self._accepted, "headrace:accepted_draft_tokens"),
            ("Predicted time of drafts.", "kind", self._seconds, "headrace:draft_seconds"),
        ):
            yield from x.counters(help_, label, values, name)


class EncodingMetrics:
    """Sum of the counts of successive engines; each begins at zero."""

    def __init__(self) -> None:
        self._stats: EncodingStats | None = None
        self._was = EncodingStats()
        self._ends = Labelled("computed", "shared", "failed")
        self._seconds = 0.0

    def now(self, stats: EncodingStats) -> None:
        """Take the engine's counts after a step."""
        was, self._was = self._was, stats
        for name in ("computed", "shared", "failed"):
            self._ends.add(name, getattr(stats, name) - getattr(was, name))
        self._seconds += stats.seconds - was.seconds
        self._stats = stats

    def restart(self) -> None:
        """Start over: a new engine process counts from zero."""
        self._was = EncodingStats()

    def families(self, x: Exposition) -> Iterator[Metric]:
        """Yield all of them, as they are now; none for a model without an encoder."""
        stats = self._stats
        if stats is None:
            return
        yield from x.counters(
            "Encodings: computed, used once more by another request, or failed.",
            "end",
            self._ends,
            "headrace:encodings",
        )
        yield from x.counter("Time of their slices.", self._seconds, "headrace:encodings_seconds")
        yield from x.gauge(
            "Encodings that are wanted and not complete.",
            stats.waiting,
            "headrace:encodings_waiting",
        )
        yield from x.gauge(
            "Bytes of encodings, reserved or kept.", stats.bytes, "headrace:encodings_bytes"
        )


def split_families(x: Exposition, stats: SplitStats) -> Iterator[Metric]:
    """Yield all of them, as they are now; counts restart with the engine's process."""
    prompts = Labelled()
    for end in ("brought", "declined", "failed", "left", "here", "computed", "refused"):
        prompts.add(end, getattr(stats, end))
    yield from x.counters(
        "Prompts: brought by a prefill server; declined, failed, no longer wanted (left) there; "
        "computed here since that is quicker for all; computed for others, and refused to them.",
        "end",
        prompts,
        "headrace:split_prompts",
    )
    yield from x.counter(
        "Leases that their borrower did not renew.", stats.expired, "headrace:split_leases_expired"
    )
    yield from x.counter("Bytes of blocks sent.", stats.lent_bytes, "headrace:split_lent_bytes")
    for help_, value, name in (
        ("Prefill servers that answer.", stats.servers, "servers"),
        ("Leases of this server's blocks.", stats.leases, "leases"),
        ("Blocks that they hold.", stats.lent_blocks, "lent_blocks"),
    ):
        yield from x.gauge(help_, value, f"headrace:split_{name}")


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
