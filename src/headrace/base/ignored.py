"""Counts of ignored request content, by place, for the metrics.

Nothing is ignored silently: other unused content is an error, or listed as inert in the API's
document (ADR 0047).
"""

from __future__ import annotations

import threading
from collections import Counter

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def ignored(where: str, times: int = 1) -> None:
    """Count; `where` is a name in the source, so their number is bounded."""
    with _lock:
        _counts[where] += times


def all_ignored() -> dict[str, int]:
    """Return the counts of this process so far, by place."""
    with _lock:
        return dict(_counts)
