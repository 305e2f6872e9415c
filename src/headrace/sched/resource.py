"""What a sequence holds besides a row and blocks, without the scheduler knowing what it is."""

from __future__ import annotations

from typing import Protocol

from headrace.base.request import Request

from .sequence import Sequence


class Resource(Protocol):
    """Adapter slots, encoder budget, state slots: anything of which there is not enough for all.

    The scheduler calls `prepare` when it wants to admit a sequence, `update` after each result
    that brought it tokens, and `free` once for each `prepare` that said yes. A sequence for
    which `prepare` says no keeps its place and does not hold up others.
    """

    def verify(self, request: Request) -> None:
        """Raise `InvalidRequest` if `prepare` could never say yes, even to a lone sequence."""

    def prepare(self, sequence: Sequence) -> bool:
        """Take what the sequence needs to run; False, and nothing taken, if it is not there."""

    def update(self, sequence: Sequence, tokens: int) -> None:
        """The sequence got `tokens` new ones; it may have finished by them, and holds on still."""

    def free(self, sequence: Sequence) -> None:
        """The sequence finished or was preempted; no step in flight uses it."""


def all_prepared(resources: tuple[Resource, ...], sequence: Sequence) -> bool:
    """Prepare all or none."""
    for i, resource in enumerate(resources):
        if not resource.prepare(sequence):
            for taken in resources[:i]:
                taken.free(sequence)
            return False
    return True
