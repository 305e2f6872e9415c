"""Counts of the parts of an engine that not each has: drafts, encodings, the split, tiers."""

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
        self.places = Labelled("vllm:spec_decode_num_accepted_tokens_per_pos", "position",
                               "Drafts accepted, by place among those of a step.")  # fmt: skip
        self.tokens = Labelled("headrace:draft_tokens", "drafter", "Drafts verified.")
        self.accepted = Labelled("headrace:accepted_draft_tokens", "drafter", "Drafts accepted.")
        self.seconds = Labelled("headrace:draft_seconds", "kind", "Predicted time of drafts.",
                                "saved", "spent", "vain")  # fmt: skip

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
        self.ends = Labelled("headrace:encodings", "end",
            "Encodings: computed, used once more by another request, or failed.",
            "computed", "shared", "failed")  # fmt: skip
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

    def numbers(self, x: Exposition) -> Iterator[Metric]:
        """Yield the families that are no instruments."""
        yield from x.counter("headrace:encodings_seconds", "Time of their slices.", self.seconds)
        yield from x.gauge("headrace:encodings_waiting",
            "Encodings that are wanted and not complete.", self.stats.waiting)  # fmt: skip
        yield from x.gauge("headrace:encodings_bytes",
            "Bytes of encodings, reserved or kept.", self.stats.bytes)  # fmt: skip


class TierMetrics:
    """Sum of the counts of successive engines; each begins at zero."""

    def __init__(self) -> None:
        self.stats = TierStats()
        # fmt: off
        self.bytes = Labelled("headrace:context_cache_bytes", "way",
            "Bytes moved to and from disk and store.", "read", "written", "read_remote")
        self.blocks = Labelled("headrace:context_cache_blocks", "end",
            "Blocks for the disk, by what became of them.", "written", "left_out", "damaged")
        self.prefixes = Labelled("headrace:context_cache_prefixes", "end",
            "Prefixes found there: loaded, computed since that was quicker, or both at once.",
            "loaded", "recomputed", "met")
        self.checks = Labelled("headrace:context_cache_checks", "result",
            "Blocks computed anew and compared with the disk's; wrong must stay 0.",
            "equal", "wrong")
        # fmt: on
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

    def numbers(self, x: Exposition) -> Iterator[Metric]:
        """Yield the families that are no instruments."""
        yield from x.counter("headrace:context_cache_load_seconds",
            "Time that prefixes took to load.", self.seconds)  # fmt: skip
        yield from x.gauge("headrace:context_cache_kept_bytes", "Bytes of KV on the disk.",
            self.stats.kept_bytes)  # fmt: skip


class SplitMetrics:
    """Counts of prompts and blocks between servers; they restart with the engine's process."""

    def __init__(self, stats: SplitStats) -> None:
        self.stats = stats
        self.prompts = Labelled("headrace:split_prompts", "end",
            "Prompts: brought by a prefill server; declined, failed, no longer wanted (left) there;"
            " computed here since that is quicker for all; computed for others, and refused to"
            " them.")  # fmt: skip
        for end in ("brought", "declined", "failed", "left", "here", "computed", "refused"):
            self.prompts.add(end, getattr(stats, end))

    def numbers(self, x: Exposition) -> Iterator[Metric]:
        """Yield the families that are no instruments."""
        stats = self.stats
        for make, name, help_, value in (
            (x.counter, "leases_expired", "Leases that were not renewed.", stats.expired),
            (x.counter, "lent_bytes", "Bytes of blocks sent.", stats.lent_bytes),
            (x.gauge, "servers", "Prefill servers that answer.", stats.servers),
            (x.gauge, "leases", "Leases of this server's blocks.", stats.leases),
            (x.gauge, "lent_blocks", "Blocks that they hold.", stats.lent_blocks),
        ):
            yield from make(f"headrace:split_{name}", help_, value)
