"""Members of a running gateway: a newly named replica joins, one no longer named leaves.

A leaving replica gets no new requests. When its last request ends, its tasks, its connections and
its metric series are removed. If it is named again before that, it stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from ..base.errors import OptionError
from ..engine.simulator.routing import PrefixAffinity, Router
from .endpoints import cluster_source
from .gateway import Gateway
from .holdings import follow, forget
from .replica import Replica
from .sources import MOST_SERVERS, ServerSource, dns_source

log = logging.getLogger("headrace.route")

SWEEP_SECONDS = 1.0
"""Seconds between two checks for replicas that have left."""


def read_servers(servers: Sequence[str]) -> tuple[list[str], list[ServerSource]]:
    """Split a command's words into addresses and sources of more. Raises `OptionError`."""
    fixed: list[str] = []
    sources: list[ServerSource] = []
    for text in servers:
        found = cluster_source(text) if text.startswith("k8s://") else dns_source(text)
        if found is None:
            fixed.append(text)
        else:
            sources.append(found)
    if not servers:
        raise OptionError("servers must name at least one address", param="servers")
    if len({one.name for one in sources}) < len(sources):
        raise OptionError("servers names a source twice", param="servers")
    return fixed, sources


class Membership:
    """The replicas of a gateway and their tasks: probes, and reports of cached prefixes."""

    def __init__(
        self, gateway: Gateway, router: Router, sources: Sequence[ServerSource], key: str = ""
    ) -> None:
        """Create the roster. `key`: an operator's key of the replicas, if they require keys."""
        self._gateway, self._router, self._key = gateway, router, key
        self._fixed = [one.url for one in gateway.replicas]
        self._named: dict[str, Sequence[str]] = {one.name: () for one in sources}
        self._next = len(gateway.replicas)
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._full = False
        """Whether more replicas are named than the gateway has room for."""
        gateway.sources = list(sources)

    def start(self) -> None:
        """Start probes, reports and sources in the running loop."""
        keep = self._gateway.tasks.keep
        for one in self._gateway.replicas:
            self._begin(one)
        for source in self._gateway.sources:
            found = partial(self.found, source.name)
            self._watching.append(keep(f"source-{source.name}", partial(source.watch, found)))
        if self._watching:
            self._watching.append(keep("leaving", self._sweep))

    def stop(self) -> None:
        """Cancel all tasks."""
        for task in (*self._watching, *(task for tasks in self._tasks.values() for task in tasks)):
            task.cancel()

    def found(self, source: str, urls: Sequence[str]) -> None:
        """Take a source's whole list: new addresses join, missing ones leave."""
        self._named[source] = urls
        self._settle()

    def _settle(self) -> None:
        """Let replicas join and leave according to the current names."""
        wanted = dict.fromkeys(self._fixed)
        for urls in self._named.values():
            wanted |= dict.fromkeys(urls)
        here = {one.url: one for one in self._gateway.replicas}
        for url, one in here.items():
            one.leaving = url not in wanted
        room = max(0, MOST_SERVERS - len(here))
        new = [url for url in wanted if url not in here]
        if len(new) > room and not self._full:
            log.warning(
                "more servers are named than a gateway takes",
                extra={"named": len(wanted), "most": MOST_SERVERS},
            )
        self._full = len(new) > room
        for url in new[:room]:
            one = Replica(self._next, url)
            self._next += 1
            self._gateway.admit(one)
            self._begin(one)
            log.info("a server joined", extra={"replica": url})

    def _begin(self, one: Replica) -> None:
        keep = self._gateway.tasks.keep
        tasks = [keep(f"probes-{one.number}", partial(one.watch, self._key))]
        if isinstance(self._router, PrefixAffinity):
            reports = partial(follow, one, self._router, self._key)
            tasks.append(keep(f"reports-{one.number}", reports))
        self._tasks[one.number] = tasks

    async def _sweep(self) -> None:
        """Dismiss leaving replicas without requests in work, for as long as the gateway
        runs."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for one in list(self._gateway.replicas):
                if one.leaving and not one.outstanding:
                    await self._dismiss(one)
            if self._full:
                self._settle()

    async def _dismiss(self, one: Replica) -> None:
        tasks = self._tasks.pop(one.number, [])
        self._gateway.dismiss(one)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for name in (f"probes-{one.number}", f"reports-{one.number}"):
            self._gateway.tasks.down.pop(name, None)
        if isinstance(self._router, PrefixAffinity):
            await forget(one, self._router)
        log.info("a server left", extra={"replica": one.url})
