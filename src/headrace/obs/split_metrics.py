"""Metrics of the prefill/decode split, from either side."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from ..base.split import SplitStats
from .instruments import Exposition, Labelled


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
