"""Adapters between the planes: their slots as a `sched.Resource`, their names and folders.

Each load of an adapter has a name of its own inside the engine (`name@3`). So nothing of an
unloaded adapter, KV of prefixes above all, is ever taken for that of a later one with its name.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...base.errors import InvalidRequest, NotFound
from ...base.request import Request
from ...sched.work import Work

_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]{0,127}", re.ASCII)


class AdapterSlots:
    """A `sched.Resource`: at most `slots` different adapters run at the same time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.known: dict[str, str] = {}
        """Name of an adapter that a new request may use → digest of its content."""
        self._running: Counter[str] = Counter()

    def add(self, name: str, content: str) -> None:
        """Add an adapter that was loaded; `content`: digest of its files."""
        self.known[name] = content

    def content(self, name: str) -> str:
        """Return the name of a known adapter's content."""
        return self.known.get(name, name)

    def named(self, content: str) -> str | None:
        """Return the name of the adapter with this content, or None if it is not known."""
        return next((name for name, one in self.known.items() if one == content), None)

    def verify(self, request: Request) -> None:
        adapter = request.spec.adapter
        if adapter is not None and adapter not in self.known:
            raise NotFound("the adapter was unloaded", param="model")

    def prepare(self, work: Work) -> bool:
        name = work.request.spec.adapter
        if name is None:
            return True
        if name not in self._running and len(self._running) >= self.slots:
            return False
        self._running[name] += 1
        return True

    def free(self, work: Work) -> None:
        name = work.request.spec.adapter
        if name is not None:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    name: str
    path: str
    id: str
    """The name inside the engine."""


class AdapterBook:
    """The adapters of an engine by the names that its users know."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedAdapter] = {}
        self._numbers = itertools.count(1)

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        return self._loaded

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(list(self._loaded.values()))

    def new(self, name: str, path: str, taken: str) -> LoadedAdapter:
        """Make a record for `add`; `taken`: the name of the model. Raises `InvalidRequest`."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(
                "the name of an adapter has 1 to 128 letters, digits and . _ : / -",
                param="lora_name",
            )
        if name == taken or name in self._loaded:
            raise InvalidRequest(f"the name {name!r} is in use", param="lora_name")
        return LoadedAdapter(name, path, f"{name}@{next(self._numbers)}")

    def add(self, adapter: LoadedAdapter) -> None:
        self._loaded[adapter.name] = adapter

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name. Raises `NotFound`."""
        found = self._loaded.get(name)
        if found is None:
            raise NotFound(f"no adapter {name!r:.140} is loaded", param="model")
        return found

    def remove(self, name: str) -> LoadedAdapter:
        found = self.find(name)
        del self._loaded[name]
        return found
