"""Shared encodings: work that others wait for, computed once, slice by slice.

    reserved ──► wanted ──► ready        (each of them may be forgotten)

A request's items are reserved together, all or none, before it takes a row: its encodings then have
room until it leaves, so nobody who runs waits for room that another one holds. Who found no room
comes before all later requests that need some, and takes it from those of them that do not run. An
item is *wanted* once a reader's next token, or a later one, stands for a row of it or attends to
it; a prompt that is found in the prefix index wants no rows. One item is computed at a time, the
one with the oldest reader first, until it is complete or has to wait for a more urgent one. An
encoding that has lost its last reader is forgotten if it is incomplete. Else it is kept until
others need its room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from headrace.base.encodings import (
    EncoderShape,
    EncodingName,
    EncodingStart,
    EncodingStats,
    SealedHandle,
)
from headrace.base.errors import InvalidRequest
from headrace.base.request import Request
from headrace.base.spec import InputSpan
from headrace.base.step import StepPlan, StepResult

from .limits import StepRoom
from .price import STEP_SECONDS, WHOLE_SECONDS, MixedPrices
from .work import ALL, State, Work

Items = dict[EncodingName, tuple[int, InputSpan]]
"""By name: bytes, and a span of the prompt that stands for it."""
PART = 1
"""Number of the encoder among the parts of a plan."""


class Encoding:
    """One item: its readers, and the progress of its computation."""

    __slots__ = (
        "aligns", "columns", "done", "in_flight", "name", "planned", "readers", "rows", "size",
        "slot", "source", "state", "tries", "units",
    )  # fmt: skip

    def __init__(self, name: EncodingName, span: InputSpan, size: int) -> None:
        """`span`: one of those that stand for it; `size`: its bytes."""
        self.name, self.size, self.aligns = name, size, span.aligns
        self.rows, self.units, self.columns = span.rows, span.units, span.columns
        self.state: Literal["reserved", "wanted", "ready", "gone"] = "reserved"
        self.readers: dict[Work, SealedHandle] = {}
        """Handles of the input by the work that came with them."""
        self.slot = -1
        self.source: SealedHandle | None = None
        """Handle that the worker was given."""
        self.planned = self.done = 0
        """Slices in plans, and slices that are computed."""
        self.in_flight = 0
        self.tries = 0
        """Failures so far: slices that were planned before the last of them do not count."""

    @property
    def rank(self) -> tuple[float, int]:
        return min(reader.rank for reader in self.readers)


class SliceEntry(NamedTuple):
    """Slices of an encoding in a plan."""

    encoding: Encoding
    slices: int
    tries: int


class Encodings:
    """All encodings of an engine. Changed by the scheduler only."""

    def __init__(self, shape: EncoderShape, prices: MixedPrices) -> None:
        self.shape, self.prices = shape, prices
        self._known: dict[EncodingName, Encoding] = {}
        self._unread: dict[EncodingName, Encoding] = {}
        """Complete ones without a reader, the one that was read longest ago first."""
        self._of: dict[Work, list[Encoding]] = {}
        self._wanted: list[Encoding] = []
        self._current: Encoding | None = None
        """The one whose slices were planned last, until it is complete."""
        self._short: Work | None = None
        """Work that found no room: nothing of lower rank takes any."""
        self._free: list[int] = []
        self._slots = 0
        self._dropped: list[int] = []
        self.bytes = 0
        self._computed = self._shared = self._failed = 0
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether slices are to be computed."""
        return self._current is not None or bool(self._wanted)

    def stats(self) -> EncodingStats:
        waiting = len(self._wanted) + (self._current is not None)
        counts = self._computed, self._shared, self._failed, waiting
        return EncodingStats(*counts, self.bytes, self._seconds)

    # Readers come and go

    def verify(self, request: Request) -> None:
        """Raise `InvalidRequest` for inputs that never have room together, or have no handle."""
        if any(span.source is None for span in request.spec.inputs):
            raise InvalidRequest("an input that is not text has no handle", param="prompt")
        size = sum(size for size, _ in _items(request, self.shape).values())
        if size > self.shape.bound:
            raise InvalidRequest(
                f"the inputs that are not text take {size} bytes; at most {self.shape.bound} are "
                "kept for all requests",
                param="messages",
            )

    def reserve(self, work: Work) -> bool:
        """Make room for all items of a work that comes, and read them. False, and nothing is taken,
        without room."""
        if work in self._of or not work.request.spec.inputs:
            return True
        items = _items(work.request, self.shape)
        ahead = self._short is not None and self._short.rank < work.rank
        if self._need_of(items) and (ahead or not self._make_room(work, items)):
            if not ahead:
                self._short = work
            return False
        if self._short is work:
            self._short = None
        self._of[work] = []
        for name, (size, span) in items.items():
            found = self._known.get(name)
            if found is None:
                found = self._known[name] = Encoding(name, span, size)
                self.bytes += size
            else:
                self._shared += not any(one.request is work.request for one in found.readers)
            self._unread.pop(name, None)
            assert span.source is not None, "an input of an encoder has a handle"
            found.readers[work] = span.source
            self._of[work].append(found)
        return True

    def need(self, work: Work, start: int) -> None:
        """Want the items of a work whose next token to compute is `start`, and set `Work.ready`."""
        for span in work.request.spec.inputs:
            found = self._known.get(_name(work, span.digest))
            if found is not None and found.state == "reserved" and span.read_from(start):
                found.state = "wanted"
                self._wanted.append(found)
        self._settle(work, start)

    def leave(self, work: Work) -> None:
        """Forget a reader that has ended."""
        if self._short is work:
            self._short = None
        for found in self._of.pop(work, ()):
            found.readers.pop(work, None)
            if found.readers or found.state == "gone":
                continue
            if found.state == "ready":
                self._unread[found.name] = found
            else:
                self._forget(found)

    def reset(self) -> None:
        """Forget the encodings that nobody reads."""
        for found in list(self._unread.values()):
            self._forget(found)

    def _need_of(self, items: Items) -> int:
        """Return the bytes of items for which no room is reserved."""
        return sum(size for name, (size, _) in items.items() if name not in self._known)

    def _make_room(self, work: Work, items: Items) -> bool:
        """Forget what nobody reads, then what only later work reads that does not run, until the
        items of a work have room. Returns False, and forgets nothing, if that is not enough."""
        if self.bytes + self._need_of(items) <= self.shape.bound:
            return True
        held = sum(size for size, _ in items.values())
        for name, one in self._known.items():
            if name not in items and not all(_yields(reader, work) for reader in one.readers):
                held += one.size
        if held > self.shape.bound:
            return False
        later = sorted((one for one in self._of if _yields(one, work)), key=lambda one: one.rank)
        while self.bytes + self._need_of(items) > self.shape.bound:
            spare = next((one for name, one in self._unread.items() if name not in items), None)
            if spare is not None:
                self._forget(spare)
                continue
            last = later.pop()
            last.ready = ALL  # Until it is tried again.
            self.leave(last)
        return True

    def _forget(self, found: Encoding) -> None:
        found.state = "gone"
        del self._known[found.name]
        self._unread.pop(found.name, None)
        self.bytes -= found.size
        if found in self._wanted:
            self._wanted.remove(found)
        if self._current is found:
            self._current = None
        self._drop(found)

    def _drop(self, found: Encoding) -> None:
        """Give back the slot, once no step in flight computes in it."""
        if found.slot >= 0 and not found.in_flight:
            self._dropped.append(found.slot)
            found.slot = -1

    def _settle(self, work: Work, start: int) -> None:
        """Let a work compute up to the first row that it needs and that is not there."""
        work.ready = ALL
        for span in work.request.spec.inputs:
            if span.read_from(start):
                found = self._known.get(_name(work, span.digest))
                if found is None or found.state != "ready":
                    work.ready = span.first
                    return

    # Steps

    def paced(self, prompts: Iterable[Work]) -> bool:
        """Return whether a step is bounded by its time: it has slices, or some of the prompts that
        are computed read encodings, whose rows are many."""
        return self.busy or any(work.request.spec.inputs for work in prompts)

    def tokens(self, decodes: int) -> int:
        """Return the most tokens of prompts in such a step next to `decodes`."""
        return self.prices.tokens(decodes, STEP_SECONDS / 2 if self.busy else STEP_SECONDS)

    def plan(self, plan: StepPlan, decodes: Sequence[Work], bounds: StepRoom) -> SliceEntry | None:
        """Add as many slices to a plan as its seconds allow, at least one; few if `bounds` say that
        other models wait. Returns None if nothing is wanted, or if the wanted one waits for a step
        that failed, or for more urgent `decodes` of texts that are read whole."""
        found = self._choose()
        if found is None or (self.shape.whole and _more_urgent(decodes, found)):
            return None
        if not found.planned:
            if found.slot < 0:
                plan.dropped += self.take_dropped()  # So that no more slots are used than needed.
                found.slot = self._take()
            reader = min(found.readers, key=lambda one: one.rank)
            found.source = found.readers[reader]
            given = found.slot, found.name, found.source, found.units, found.columns, found.aligns
            plan.encodings.append(EncodingStart(*given))
        first, left = found.planned, self.shape.slices - found.planned
        room = WHOLE_SECONDS if self.shape.whole else self.prices.room(len(decodes))
        if bounds.shared is not None:
            room = min(room, STEP_SECONDS / 2)
        count = self.prices.slices_that_fit(found.units, left, plan.tokens, room)
        found.planned += count
        found.in_flight += 1
        if found.planned == self.shape.slices:
            self._current = None
        texts = len(plan.rows)
        plan.rows.append(found.slot)
        plan.starts.append(first)
        plan.counts.append(count)
        plan.samples.append(found.planned == self.shape.slices)
        plan.parts = (*[0] * texts, PART)
        return SliceEntry(found, count, found.tries)

    def _choose(self) -> Encoding | None:
        """Return the item to go on with: the one under way, unless another one's reader is more
        urgent than all of its own."""
        found = self._current
        waiting = [one for one in self._wanted if not one.in_flight]
        first = min(waiting, key=lambda one: one.rank, default=None)
        if first is None or (found is not None and first.rank[0] >= found.rank[0]):
            return found
        if found is not None:
            self._wanted.append(found)
        self._wanted.remove(first)
        self._current = first
        return first

    def take_dropped(self) -> list[int]:
        """Return the slots given back since the last call, for a plan to tell the worker."""
        dropped, self._dropped = self._dropped, []
        for slot in dropped:
            heappush(self._free, slot)
        return dropped

    def _take(self) -> int:
        """Take a slot. Numbers that no plan has told the worker to drop are not used again."""
        if self._free:
            return heappop(self._free)
        self._slots += 1
        return self._slots - 1

    def land(
        self, plan: StepPlan, result: StepResult, entry: SliceEntry | None
    ) -> list[tuple[Work, str]]:
        """Book the times of a step, and its slices, if it has any; return the work that has to end,
        with the reason."""
        units = 0 if entry is None else entry.encoding.units * entry.slices
        text = result.seconds - result.encoding
        self.prices.observe(plan.tokens, text, units, result.encoding)
        if entry is None:
            return []
        why = result.failures.get(plan.texts)
        if why is not None:
            return [(work, why) for work in self.failed(entry, alone=True)]
        self.computed(entry, result.encoding)
        return []

    def computed(self, entry: SliceEntry, seconds: float) -> None:
        """Book slices that a step has computed in `seconds`."""
        found = entry.encoding
        found.in_flight -= 1
        self._seconds += seconds
        if found.state == "gone":
            self._drop(found)
        if found.state == "gone" or found.tries != entry.tries:
            return
        found.done += entry.slices
        if found.done == self.shape.slices:
            found.state = "ready"
            self._computed += 1
            for work in found.readers:
                work.ready = ALL  # Until it is tried again, if it does not run.
                if work.state is State.RUNNING:
                    self._settle(work, work.scheduled)

    def failed(self, entry: SliceEntry, *, alone: bool, again: bool = False) -> list[Work]:
        """Book slices that failed; return the readers that have to end.

        `alone`: the item failed, and not its step. Then a reader that came with another handle of
        the same content may still have it. `again`: the step is to be tried again.
        """
        found = entry.encoding
        found.in_flight -= 1
        if found.state == "gone":
            self._drop(found)
        if found.state == "gone" or found.tries != entry.tries:
            return []
        found.tries += 1
        self._failed += 1
        ended = [] if again else list(found.readers)
        if alone:
            ended = [one for one in ended if found.readers[one] == found.source]
        for work in ended:
            del found.readers[work]
            self._of[work].remove(found)
        if not found.readers:
            self._forget(found)
        else:
            if self._current is found:
                self._current = None
            found.state, found.planned, found.done = "wanted", 0, 0
            if found not in self._wanted:
                self._wanted.append(found)
        return ended

    def check_integrity(self, live: list[Work], flying: list[Encoding]) -> None:
        """Assert the invariants; `live`: all work of requests, `flying`: items of steps in
        flight."""
        known = list(self._known.values())
        assert self.bytes == sum(one.size for one in known) <= self.shape.bound
        assert set(self._of) <= set(live), "a reader that has ended"
        for one in known:
            assert one.state != "gone"
            assert bool(one.readers) != (one.name in self._unread)
            assert all(one in self._of[work] for work in one.readers)
            assert all(work.request.tenant == one.name.tenant for work in one.readers)
            assert one.in_flight == flying.count(one)
            queued = one in self._wanted or one is self._current or one.in_flight > 0
            assert (one.state == "wanted") == queued
        assert all(one.state == "ready" for one in self._unread.values())
        slots = [one.slot for one in {*known, *flying} if one.slot >= 0]
        slots += [*self._dropped, *self._free]
        assert sorted(slots) == list(range(self._slots)), "slots leak"


def _more_urgent(texts: Sequence[Work], found: Encoding) -> bool:
    """Return whether a text of another tenant is of a more urgent priority than all readers of an
    item, none of which has waited for so long that it is before it all the same."""
    return any(
        text.request.tenant != found.name.tenant
        and all(
            text.request.priority < reader.request.priority and text.rank < reader.rank
            for reader in found.readers
        )
        for text in texts
    )


def _name(work: Work, digest: bytes) -> EncodingName:
    return EncodingName(work.request.tenant, digest)


def _yields(reader: Work, work: Work) -> bool:
    """Return whether a reader gives its room to other work: it is later, and does not run."""
    return reader.rank > work.rank and reader.state is not State.RUNNING


def _items(request: Request, shape: EncoderShape) -> Items:
    """Return the items of a request, each once."""
    items: Items = {}
    for span in request.spec.inputs:
        name = EncodingName(request.tenant, span.digest)
        items.setdefault(name, (shape.size(span.rows), span))
    return items
