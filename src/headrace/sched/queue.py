"""The waiting queue: a heap by rank, from which any work can be taken.

Work keeps the rank with which its request was added, so preempted work returns to its old place.
Under "fcfs" the rank is the order of arrival. Under "priority" it is `arrival + priority *
PATIENCE_SECONDS`: the more urgent goes first, but none waits for ever, since work that has waited a
minute longer per step of priority has caught up. As all ranks age alike, the order of two never
changes and nothing is ever sorted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from .work import Work

PATIENCE_SECONDS = 60.0


class WaitingQueue:
    """A heap with push, peek, pop and discard in O(log n); discarded entries go lazily."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Work]] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, work: Work) -> bool:
        return work.id in self._live

    def push(self, work: Work) -> None:
        assert work.id not in self._live, f"{work} waits already"
        self._live.add(work.id)
        heappush(self._heap, (work.rank, work))

    def first(self, most: int) -> Iterator[Work]:
        """Return the head and roughly the next work, `most` at most."""
        self.peek()  # From now on the head is live.
        return (work for _, work in self._heap[:most] if work.id in self._live)

    def peek(self) -> Work | None:
        """Return the work that is served first."""
        heap = self._heap
        while heap and heap[0][1].id not in self._live:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Work:
        work = self.peek()
        assert work is not None, "nothing waits"
        heappop(self._heap)
        self._live.remove(work.id)
        return work

    def discard(self, work: Work) -> None:
        """Take out work wherever it stands; do nothing if it does not wait."""
        self._live.discard(work.id)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[1].id in self._live]
            heapify(self._heap)
