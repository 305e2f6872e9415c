"""What work holds besides a row and blocks, without the scheduler knowing what it is."""

from __future__ import annotations

from typing import Protocol

from headrace.base.request import Request

from .work import Work


class Resource(Protocol):
    """Adapter slots, encoder budget, state slots: anything of which there is not enough for all.

    The scheduler calls `prepare` when it wants to admit work, and `free` once for each `prepare`
    that said yes. Work for which `prepare` says no keeps its place and does not hold up others.
    """

    def verify(self, request: Request) -> None:
        """Raise `InvalidRequest` if `prepare` could never say yes, even to a lone one."""

    def prepare(self, work: Work) -> bool:
        """Take what the work needs to run; False, and nothing taken, if it is not there."""

    def free(self, work: Work) -> None:
        """It finished or was preempted; no step in flight uses it."""


def all_prepared(resources: tuple[Resource, ...], work: Work) -> bool:
    """Prepare all or none."""
    for i, resource in enumerate(resources):
        if not resource.prepare(work):
            for taken in resources[:i]:
                taken.free(work)
            return False
    return True
