"""Resources of work other than a row and blocks, opaque to the scheduler."""

from __future__ import annotations

from typing import Protocol

from headrace.base.request import Request

from .work import Work


class Resource(Protocol):
    """Adapter slots, encoder budget, state slots: anything that is too scarce for all.

    The scheduler calls `prepare` when it wants to admit work, and `free` once for each `prepare`
    that said yes. Work for which `prepare` says no keeps its place and does not hold up others.
    """

    def verify(self, request: Request) -> None:
        """Raise `InvalidRequest` if `prepare` could never say yes, even to this request alone."""

    def prepare(self, work: Work) -> bool:
        """Take the resource that the work needs to run. False, and nothing is taken, if it is not
        there."""

    def free(self, work: Work) -> None:
        """Free what the work took: it finished or was preempted, and no step in flight uses it."""


def all_prepared(resources: tuple[Resource, ...], work: Work) -> bool:
    """Prepare all or none."""
    for i, resource in enumerate(resources):
        if not resource.prepare(work):
            for taken in resources[:i]:
                taken.free(work)
            return False
    return True
