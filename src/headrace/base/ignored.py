"""What requests held that has no effect, counted by where it stood, for the metrics.

Nothing is left out in silence: what is not counted here is an error, or listed as inert in the
API's document (ADR 0047).
"""

from __future__ import annotations

import threading
from collections import Counter

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def ignored(where: str, times: int = 1) -> None:
    """Count; `where` is a name in the source, so that there are few of them."""
    with _lock:
        _counts[where] += times


def all_ignored() -> dict[str, int]:
    """The counts of this process so far, by where."""
    with _lock:
        return dict(_counts)
