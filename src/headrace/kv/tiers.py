"""The tiers below the pool: which blocks are written to them, and which are loaded for a request.

**Down**: a block whose step has succeeded is final. It is written once, in the background, while
its bytes stay where they are (`hold`). Nothing is written at eviction: the next owner would have to
wait.

**Up**: work that is about to be admitted asks (`ready`). The tier's threads load blocks that
continue the pool's prefix into free ones, which are then entered in the index. Then the work is
admitted and finds them as any prefix hit. A failed read is a shorter hit. A tier shared with other
machines is first asked for its blocks.

**Or both**: if neither loading nor computing is much quicker, the work is admitted at once and
computes from the front, while blocks are loaded from the back. When it reaches the first loaded
block, it is admitted again and finds them all (`meets`).

**The canary**: one in `CANARY` loads leaves the last block out, or all blocks if the model keeps
states. The request computes it, as it would have without the tier. Its result for that block is
compared, bit for bit, with the kept one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from headrace.base.step import NULL_BLOCK
from headrace.base.tiers import BlockStore, KeyedBlock, Movement, OrderEnd, TierStats

from .handover import Handovers
from .manager import KvManager
from .prefix import PrefixChain

CANARY = 16
"""One in this number of loads computes a block and compares it."""
MOST_WRITING = 64
"""Most blocks held by writes; beyond this number blocks are not written."""
RESERVE = 0.02
"""Share of the pool that a load leaves to running sequences."""
REMEMBERED = 4096
"""Most remembered answers (one for each work), and most keys to compare."""

FIRST_RATES = (200e6, 50e6, 200e6)
"""Bytes a second assumed before any measurement: of a disk, of shared storage and of a prefill
server."""
LATENCY = 1e-3
"""Seconds from an order to its end, without the time for its bytes."""
ASKING = 5e-3
"""Least seconds of computing for which a tier is asked for a prompt's blocks."""
WORTH = 0.15
"""Least share of the time saved for which loading and computing run together."""
PIECE = 8
"""Most blocks of one order when loading from the back."""
PROBE = 16
"""One in this number of refusals loads anyway, to notice that a tier is fast again."""

Computing = Callable[[int, int], float]
"""(tokens present, further tokens) → seconds to compute the latter."""


class Tiers:
    """The tiers below the pool of one `KvManager`. Belongs to the engine's thread."""

    def __init__(
        self, kv: KvManager, store: BlockStore, bytes_per_block: list[int], computing: Computing
    ) -> None:
        """`bytes_per_block`: one number for each group."""
        self.kv = kv
        self.store = store
        self.stats = TierStats()
        self.held: Counter[tuple[int, int]] = Counter()
        """(group, block) → number of orders under way that hold it."""
        self._bytes = bytes_per_block
        self._computing = computing
        self.rates = list(FIRST_RATES)
        """Bytes a second of recent loads from each tier, from order to end."""
        self._coming_bytes = [0] * len(FIRST_RATES)
        self._orders: dict[int, _Order] = {}
        """By ticket."""
        self._coming: dict[tuple[int, bytes], int] = {}
        """(group, key) of a block that is being read → the ticket."""
        self._loading: dict[int, _Load] = {}
        """Loads under way, by their work."""
        self._sought: set[int] = set()
        """Work for which a tier was asked."""
        self._meeting: dict[int, list[bytes]] = {}
        """By work that computes meanwhile: keys of the prefix to be there when both have met."""
        self.handovers: Handovers | None = None
        """Hand-overs to prefill servers, if there are any."""
        self._answered: dict[int, int] = {}
        """Work that has its answer → tokens that were loaded for it."""
        self._witnesses: dict[tuple[int, bytes], None] = {}
        """Blocks to compare once they are computed."""
        self._ticket = 0
        self._writing = 0
        self._canary = 0

    # Down

    def offer(self, blocks: Iterable[KeyedBlock]) -> None:
        """Write blocks that are computed and final, if the pool still has them under their keys."""
        wanted: list[KeyedBlock] = []
        compared: list[KeyedBlock] = []
        nearest = self.store.nearest
        for piece in blocks:
            pool, name = self.kv.pools[piece.group], (piece.group, piece.key)
            if pool.keys[piece.block] != piece.key:
                continue  # Taken for other content since.
            if name in self._witnesses:
                del self._witnesses[name]
                compared.append(piece)
            elif self.store.place(piece.group, piece.key) == nearest or not self.store.keeps:
                continue
            elif self._writing + len(wanted) >= MOST_WRITING:
                self.stats.left_out += 1
            else:
                wanted.append(piece)
        if wanted:
            self._writing += len(wanted)
            self.store.write(self._order("write", wanted), wanted)
        if compared:
            self.store.compare(self._order("compare", compared), compared)

    # Up

    def ready(self, work: int, chain: PrefixChain, known: int) -> bool:
        """Return whether work with `known` tokens can be admitted. False: more of its blocks are
        being loaded, and their arrival wakes the loop."""
        ready = self._ready(work, chain, known)
        if ready and work in self._answered and work not in self._meeting:
            self._done(work)
        return ready

    def _ready(self, work: int, chain: PrefixChain, known: int) -> bool:
        if work in self._answered:
            return True
        if work in self._loading:
            return False
        kv, size = self.kv, self.kv.block_size
        # One token stays to compute. A full last block can be used in part, a state cannot.
        limit = (known if kv.states is None else known - 1) // size
        keys = chain.extend(limit)
        hit = kv.longest(keys, limit, [pool.index for pool in kv.pools])
        views = [_Either(pool.index, self.store.known(at)) for at, pool in enumerate(kv.pools)]
        most = hit if hit == limit else kv.longest(keys, limit, views)
        if most < limit and self._seek(work, chain, most, limit):
            return False
        if most < limit and self._hand_over(work, chain, most, limit):
            return False
        witness = most - 1
        lent = most > hit and self._place((0, witness), keys) == 2  # It will be gone soon.
        compares = self._canary + 1 >= CANARY and witness > hit and not lent
        if compares and kv.states is None:
            most = kv.longest(keys, witness, views)
        if most <= hit:
            self._done(work)
            return True
        if compares and kv.states is not None and keys[witness] not in kv.pools[0].index:
            # Nothing comes before a state that is computed: the whole prefix is computed.
            self._canary = 0
            self._watch(keys[witness])
            self._answer(work, 0)
            return True
        needed = [
            (group, at)
            for group, of in enumerate(kv.groups)  # States: the last only.
            for at in range(kv.first_visible(2 if of.state else of.window, most * size), most)
        ]
        missing = [(group, at) for group, at in needed if keys[at] not in kv.pools[group].index]
        # The blocks to continue must still be there when the rest has arrived, so they are held
        # too.
        there = [
            (group, kv.pools[group].index[keys[at]])
            for group, at in needed
            if keys[at] in kv.pools[group].index
        ]
        if any((group, keys[at]) in self._coming for group, at in missing):
            return False  # Another load brings it.
        if not self._room(missing, there):
            return True  # It cannot be admitted now; it asks again later.
        loading = LATENCY + self._seconds(missing, keys)
        computing = self._computing(hit * size, (most - hit) * size)
        both = loading * computing / (loading + computing) if computing < float("inf") else loading
        met = kv.states is None and len(missing) == most - hit > PIECE
        if met and both < (1 - WORTH) * min(loading, computing):
            # Load from the back the blocks for which loading and computing end together.
            front = hit + max(1, round((most - hit) * both / computing))
            self._meeting[work] = keys[:most]
            self.stats.met += 1
            pieces = [piece for piece in missing if piece[1] >= front]
            for end in range(len(pieces), 0, -PIECE):
                self._read(work, chain, pieces[max(0, end - PIECE) : end], [])
            self._answer(work, 0)
            return True
        if loading > computing:
            self.stats.recomputed += 1
            if self.stats.recomputed % PROBE:
                self._answer(work, 0)
                return True
        self._canary = 0 if compares else self._canary + 1
        if compares and most == witness and keys[witness] in self.store.known(0):
            self._watch(keys[witness])
        self._loading[work] = _Load((most - hit) * size)
        for place in range(len(self.rates)):
            pieces = [one for one in missing if (self._place(one, keys) or 0) == place]
            if pieces:
                self._read(work, chain, pieces, there)
                there = []
        return False

    def _seek(self, work: int, chain: PrefixChain, most: int, limit: int) -> bool:
        """Ask, once, the remote tiers for blocks that continue the first `most`. False: there are
        none, or nothing to gain."""
        size = self.kv.block_size
        if work in self._sought or not self.store.asks:
            return False
        if self._computing(most * size, (limit - most) * size) < ASKING:
            return False
        keys = chain.extend(limit)
        self._sought.add(work)
        self._ticket += 1
        pieces = [
            KeyedBlock(group, NULL_BLOCK, keys[at], at, chain.tenant)
            for group in range(len(self.kv.pools))
            for at in range(most, limit)
        ]
        self._orders[self._ticket] = _Order("seek", pieces, work)
        self._loading[work] = _Load(0, 1)
        self.store.seek(self._ticket, pieces)
        return True

    def _hand_over(self, work: int, chain: PrefixChain, most: int, limit: int) -> bool:
        """Return whether a prefill server is computing the blocks after the first `most`."""
        if self.handovers is None:
            return False
        kv, counts = self.kv, []
        for of in kv.groups:
            seen = kv.first_visible(2 if of.state else of.window, limit * kv.block_size)
            counts.append(limit - max(most, seen))
        nbytes = sum(count * size for count, size in zip(counts, self._bytes, strict=True))
        moving = LATENCY + nbytes / self.rates[2]
        begun = self.handovers.ask(self._ticket + 1, work, chain, most, limit, moving)
        if begun:
            self._ticket += 1
            self._orders[self._ticket] = _Order("prefill", [], work)
            self._orders[self._ticket].counts = counts
            self._loading[work] = _Load(0, 1)
            asked = [order.counts for order in self._orders.values() if order.kind == "prefill"]
            for group, (pool, *some) in enumerate(zip(kv.pools, *asked, strict=True)):
                self.store.prepare(group, pool.fresh(sum(some)))
        return begun is not False

    def _done(self, work: int) -> None:
        """Release the hand-over: nothing more is read for the work."""
        if self.handovers is not None:
            self.handovers.done(work)

    def _place(self, piece: tuple[int, int], keys: list[bytes]) -> int | None:
        return self.store.place(piece[0], keys[piece[1]])

    def _seconds(self, missing: list[tuple[int, int]], keys: list[bytes]) -> float:
        """Return the seconds until all of it is read, including reads under way."""
        waiting = self._coming_bytes.copy()
        for group, at in missing:
            waiting[self._place((group, at), keys) or 0] += self._bytes[group]
        return sum(nbytes / rate for nbytes, rate in zip(waiting, self.rates, strict=True))

    def _read(
        self,
        work: int,
        chain: PrefixChain,
        missing: list[tuple[int, int]],
        there: list[tuple[int, int]],
    ) -> None:
        """Order the read of `missing`, as (group, place in the prefix), all from one tier."""
        ticket = self._ticket = self._ticket + 1
        place = self._place(missing[0], chain.keys) or 0
        for group, block in there:
            self._hold(group, block)
        pieces = []
        for group, at in missing:
            block = self.kv.pools[group].take()
            self.held[group, block] += 1
            kept = chain.kept_for(at)
            pieces.append(KeyedBlock(group, block, chain.keys[at], at, chain.tenant, kept))
            self._coming[group, chain.keys[at]] = ticket
            self._coming_bytes[place] += self._bytes[group]
        self._orders[ticket] = _Order("read", pieces, work, there, place)
        if work in self._loading:
            self._loading[work].orders += 1
        self.store.read(ticket, pieces)

    def meets(self, work: int, computed: int) -> bool:
        """Return whether the load has reached the `computed` tokens: all later blocks are there.
        Then it is better to admit the work again."""
        keys = self._meeting.get(work)
        if keys is None:
            return False
        at = computed // self.kv.block_size
        if at >= len(keys):
            del self._meeting[work]
            self._done(work)
            return False
        met = all(key in pool.index for pool in self.kv.pools for key in keys[at:])
        if met:
            del self._meeting[work]
            self._done(work)
        return met

    def loaded(self, work: int) -> int:
        """Return the tokens loaded for the work that the pool still had on their arrival."""
        return self._answered.get(work, 0)

    def left(self, work: int) -> None:
        """Note that the work gave back its blocks; if it comes again, it asks again."""
        self._answered.pop(work, None)
        self._sought.discard(work)
        if self._meeting.pop(work, None) is not None:
            self._done(work)

    def gone(self, work: int) -> None:
        """Note that waiting work has ended and its blocks are no longer awaited."""
        self.left(work)
        if self.handovers is not None:
            self.handovers.gone(work)

    def turn(self) -> None:
        """Book the orders that have ended, and give back what they held."""
        stats = self.stats
        for moved in self.store.ended():
            order = self._orders.pop(moved.ticket)
            good = sum(moved.good)
            if order.kind == "prefill" and self.handovers is not None:
                self.handovers.ended(moved.ticket, good > 0)
            if order.kind in ("seek", "prefill"):
                self._arrived_for(order, 0)
                continue
            if order.kind == "write":
                self._writing -= len(order.pieces)
                stats.written_blocks += good
                stats.written_bytes += moved.nbytes
            elif order.kind == "compare":
                stats.checked += len(order.pieces)
                stats.wrong += len(order.pieces) - good
            else:
                self._arrived(moved, order)
            for piece in reversed(order.pieces):
                self._let_go(piece.group, piece.block)
            for group, block in reversed(order.beside):
                self._let_go(group, block)
            stats.kept_bytes = self.store.kept_bytes()

    def _arrived(self, moved: OrderEnd, order: _Order) -> None:
        """Enter the good blocks of a read that has ended into the index."""
        stats, good, place = self.stats, sum(moved.good), order.place
        entered = []
        for piece, fine in zip(order.pieces, moved.good, strict=True):
            # After `forget` the keys mean other content.
            ours = self._coming.pop((piece.group, piece.key), None) == moved.ticket
            pool = self.kv.pools[piece.group]
            if fine and ours and pool.enter(piece.key, piece.block, piece.tenant):
                entered.append(piece)
        self._coming_bytes[place] -= sum(self._bytes[piece.group] for piece in order.pieces)
        if good and moved.seconds > 0:
            self.rates[place] += 0.25 * (moved.nbytes / moved.seconds - self.rates[place])
        stats.loaded_bytes += moved.nbytes
        stats.load_seconds += moved.seconds
        stats.damaged += len(order.pieces) - good
        if place == 1:
            stats.remote_bytes += moved.nbytes
        elif place == 2:
            stats.lent_bytes += moved.nbytes
        self._arrived_for(order, len(order.pieces) - good)
        if place:
            self.offer(entered)  # The nearer tiers keep it, too.

    def _arrived_for(self, order: _Order, bad: int) -> None:
        """Count down the orders for a work; the end of the last one lets it be admitted."""
        assert order.work is not None
        load = self._loading.get(order.work)
        if load is None:
            return
        load.orders -= 1
        load.bad += bad
        if not load.orders:
            del self._loading[order.work]
            if load.tokens:
                self.stats.loads += 1
                self._answer(order.work, 0 if load.bad else load.tokens)

    def distrust(self) -> None:
        """Drop all loads under way: the pool's content means something else from now on."""
        self._witnesses.clear()
        self._coming.clear()
        self._meeting.clear()

    # Inside

    def _room(self, missing: list[tuple[int, int]], there: list[tuple[int, int]]) -> bool:
        """Return whether free blocks suffice for the load, the blocks that it continues, and the
        running requests."""
        for number, pool in enumerate(self.kv.pools):
            need = sum(group == number for group, _ in missing)
            need += sum(group == number and not pool.refs[block] for group, block in there)
            if need > pool.free - int(RESERVE * pool.total) - 1:
                return False
        return True

    def _order(self, kind: Movement, pieces: list[KeyedBlock]) -> int:
        self._ticket += 1
        self._orders[self._ticket] = _Order(kind, pieces)
        for piece in pieces:
            self._hold(piece.group, piece.block)
        return self._ticket

    def _hold(self, group: int, block: int) -> None:
        self.kv.pools[group].share(block)
        self.held[group, block] += 1

    def _let_go(self, group: int, block: int) -> None:
        self.kv.pools[group].give_back(block)
        self.held[group, block] -= 1
        if not self.held[group, block]:
            del self.held[group, block]

    def _answer(self, work: int, tokens: int) -> None:
        """Note the answer for a work. Work aborted while it waits does not report that, so the
        oldest answers are forgotten."""
        self._answered[work] = tokens
        if len(self._answered) > REMEMBERED:
            oldest = next(iter(self._answered))
            del self._answered[oldest]
            self._meeting.pop(oldest, None)
            self._sought.discard(oldest)

    def _watch(self, key: bytes) -> None:
        self._witnesses[0, key] = None
        if len(self._witnesses) > REMEMBERED:
            del self._witnesses[next(iter(self._witnesses))]


@dataclass(slots=True)
class _Order:
    kind: Movement
    pieces: list[KeyedBlock]
    work: int | None = None
    beside: list[tuple[int, int]] = field(default_factory=list)
    """(group, block) of the blocks that a read continues."""
    place: int = 0
    """The tier from which it is read."""
    counts: list[int] = field(default_factory=list)
    """Per group: blocks that a prefill server is asked for."""


@dataclass(slots=True)
class _Load:
    """The load that a work waits for."""

    tokens: int
    """Tokens that it brings; 0 for a question."""
    orders: int = 0
    """Orders for it that are under way."""
    bad: int = 0
    """Blocks that did not come."""


class _Either:
    """The keys of two places together."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Container[bytes], second: Container[bytes]) -> None:
        self._first, self._second = first, second

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second
