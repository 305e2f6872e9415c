"""The waiting queue: a heap by rank, from which any sequence can be taken.

A sequence's rank is set when its request is added and never changes, so a preempted sequence
returns to its old place. Under "fcfs" the rank is the order of arrival. Under "priority" it is
`arrival + priority * PATIENCE_SECONDS`: the more urgent goes first, but nobody waits for ever,
since whoever has waited a minute longer per step of priority has caught up. As all ranks age
alike, the order of two sequences never changes and nothing is ever sorted again.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .sequence import Sequence

PATIENCE_SECONDS = 60.0


class WaitingQueue:
    """push, peek, pop and discard in O(log n) at most; discarded entries are dropped lazily."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._live

    def push(self, sequence: Sequence) -> None:
        assert sequence.id not in self._live, f"{sequence} waits already"
        self._live.add(sequence.id)
        heappush(self._heap, (sequence.rank, sequence))

    def peek(self) -> Sequence | None:
        """The sequence to be served first."""
        heap = self._heap
        while heap and heap[0][1].id not in self._live:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None, "nothing waits"
        heappop(self._heap)
        self._live.remove(sequence.id)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands; does nothing if it does not wait."""
        self._live.discard(sequence.id)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[1].id in self._live]
            heapify(self._heap)
