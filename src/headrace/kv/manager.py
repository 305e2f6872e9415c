"""Block tables over the pools of all layer groups: growth, windows, prefix hits.

A table is a list of blocks per group, and its index range has four regions:

    [0, first)           before the window: given back, NULL_BLOCK in the table (sliding groups)
    [first, entered)     full, their content is final: in the prefix index
    [entered, last]      being filled, or full and not entered yet
    above                not there yet

**When is a block in the index?** As soon as the step that fills it has been *scheduled*, not when
it is done. Steps run in order. In a step the KV of all rows is written before any row attends to
it, layer by layer; so work scheduled in the same step or a later one may read it. Sixteen requests
with one prefix that arrive together compute it once. The price: if that step fails, its entries
must go (`forget`). So entries are remembered per step until it has succeeded (`settle`).

**What is a hit with several groups?** The largest n such that every full group has blocks 0 … n-1,
every sliding group has those of them that a query at token n * block_size can see, and the state
group has a checkpoint there (`states`): its table does not grow, it is one block. Without states,
the first tokens of one more block may follow; that block is copied (see `partial`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Sequence

from headrace.base.request import Request
from headrace.base.split import LentBlocks
from headrace.base.step import NULL_BLOCK, BlockCopy, BlockWrite, GroupShape, PoolShape, StepPlan
from headrace.base.tiers import KeyedBlock, LowerTiers

from .holdings import Holdings
from .partial import PartialBlocks
from .pool import BlockPool
from .prefix import PrefixChain, root_of
from .slots import Slots
from .states import StateBlocks
from .table import BlockTable


class KvManager:
    """Owner of every block of every group; the scheduler asks it for room and gets deltas."""

    def __init__(
        self,
        pool: PoolShape,
        *,
        prefix_cache: bool = True,
        keep: float = 1.0,
        identity: str = "",
        adapter_content: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep`: the share of each pool that cached prefixes may fill before blocks without memory
        are taken (see `pool`); 1 if the whole pool has its memory from the start.

        `identity`: everything that determines this engine's KV, see `prefix.root_of`.
        `adapter_content`: maps an adapter's name to a name of its content.
        """
        self.root = root_of(pool, identity)
        self._adapter_content = adapter_content
        self.block_size = pool.block_size
        self.groups: tuple[GroupShape, ...] = pool.groups
        self.pools = [
            BlockPool(group.blocks, int(keep * group.blocks), clock) for group in pool.groups
        ]
        self._clock = clock
        self.prefix_cache = prefix_cache
        self.prefix_queries = 0
        """Tokens looked up in the index since the start."""
        self.prefix_hits = 0
        """Tokens found, of those looked up."""
        self.tiers: LowerTiers | None = None
        self.leases: LentBlocks | None = None
        self.slots = Slots(pool.slots[0].blocks) if pool.slots else None
        self.states: StateBlocks | None = None
        for at, group in enumerate(pool.groups):
            if group.state:
                assert self.states is None, "all states of a sequence are in one group"
                self.states = StateBlocks(at, self.pools[at], self.block_size)
        self._paged = [
            (at, group.window, block_pool)
            for at, (group, block_pool) in enumerate(zip(pool.groups, self.pools, strict=True))
            if not group.state
        ]
        """(group, window, pool) of each group whose tables grow with their sequences."""
        self.holdings = Holdings(self._paged, self.block_size)
        self._tables: dict[int, BlockTable] = {}
        self.unsettled: dict[int, list[KeyedBlock]] = {}
        """Per step not known to have ended: the blocks that it entered into the index."""
        self._fresh: set[bytes] = set()
        """Keys of these blocks."""
        self._copying: dict[int, list[list[int]]] = {}
        """Per step not known to have ended: the blocks that it copies, by group."""
        self.partial = PartialBlocks(max((pool.total for pool in self.pools), default=0), self._has)

    # What fits

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that can run alone."""
        size, longest = self.block_size, 2**62
        for _, window, pool in self._paged:
            # A window of w tokens lies in at most (w - 2) // size + 2 blocks. A pool too small for
            # a long chunk gets shorter ones, so the window always fits.
            if window is None or pool.total < (window - 2) // size + 2:
                longest = min(longest, pool.total * size)
        return longest

    @property
    def usage(self) -> float:
        """Share of the blocks that are owned, in the fullest group, 0 to 1."""
        pools = [pool for _, _, pool in self._paged if pool.total]
        return max((1 - pool.free / pool.total for pool in pools), default=0.0)

    @property
    def free(self) -> int:
        """Free blocks of all groups together."""
        return sum(pool.free for pool in self.pools)

    def turn(self) -> None:
        """Take back the blocks whose movements in lower tiers have ended."""
        if self.tiers is not None:
            self.tiers.turn()

    def has_room(self, tokens: int, chunk: int, shared: int, reserve: float) -> bool:
        """Return whether there is room for `tokens` of a new sequence that comes in chunks.

        `shared` tokens of them lie in blocks that are owned already. `reserve` is the share of each
        pool that must stay free, so that running sequences can grow.
        """
        size = self.block_size
        if self.states is not None and not (shared or self.states.pool.free):
            return False
        for _, window, pool in self._paged:
            need = -(-tokens // size) - shared // size
            if window is not None:
                need = min(need, (window + chunk) // size + 2)
            if need > pool.free - int(reserve * pool.total):
                return False
        return True

    # A table's life

    def chain(self, request: Request, tokens: list[int]) -> PrefixChain | None:
        """Return the prefix chain of a request's `tokens`, a list that grows; None without an
        index."""
        if not self.prefix_cache:
            return None
        spec = request.spec
        return PrefixChain(
            self.root,
            self.block_size,
            tokens,
            salt=request.cache_salt,
            adapter=None if spec.adapter is None else self._adapter_content(spec.adapter),
            inputs=spec.inputs,
            retained=request.retained,
            marks=request.marks,
        )

    def open(self, known: int, chain: PrefixChain | None, *, read: bool) -> BlockTable:
        """Open a table that starts with the longest prefix of `known` tokens that all groups hold:
        whole blocks, then a part of one.

        At least the last token is left to compute: something must produce the next one. Without
        `read` nothing is looked up, but computed blocks are still entered for others.
        """
        table = BlockTable(len(self.pools), chain if self.prefix_cache else None)
        self._tables[id(table)] = table
        if table.chain is None or not read:
            return table
        limit = (known - 1) // self.block_size
        keys = table.chain.extend(limit)
        hit = self.longest(keys, limit, [pool.index for pool in self.pools])
        for group, window, pool in self._paged:
            first = self.first_visible(window, hit * self.block_size)
            found = [pool.index[key] for key in keys[first:hit]]
            for block in found:
                pool.share(block)
            self._retain(pool, table.chain, found, first)
            table.blocks[group] = [NULL_BLOCK] * first + found
            table.first[group] = first
        self.holdings.note(table, hit)
        table.entered = hit
        if self.states is None:
            self._part_of_a_block(table, known)
        else:
            paged = self._longest_paged(keys, limit, [pool.index for pool in self.pools])
            self.states.open(table, known, hit, paged)
        return table

    def _retain(self, pool: BlockPool, chain: PrefixChain, blocks: list[int], first: int) -> None:
        """Retain the blocks of a prefix from index `first`, as the request asked."""
        now = self._clock()
        for tokens, seconds, priority in chain.retained:
            for block in blocks[: max(0, -(-tokens // self.block_size) - first)]:
                pool.retain(block, now + seconds, priority)

    def _part_of_a_block(self, table: BlockTable, known: int) -> None:
        """Find a block that begins with the table's next tokens."""
        chain, hit, size = table.chain, table.entered, self.block_size
        assert chain is not None
        wanted = chain.plain(hit * size, min(known - 1, (hit + 1) * size))
        if not wanted:
            return
        whole = chain.extend(hit + 1)[hit] if (hit + 1) * size <= known else None
        if whole is not None and self._has(whole):
            key, tokens = whole, len(wanted)
        else:
            key, tokens = self.partial.best(chain.before(hit), wanted)
            # Of many with one beginning, the one that ends here may not be among the newest.
            rest = chain.rest(known - 1) if tokens < len(wanted) < size else b""
            if self._has(rest):
                key, tokens = rest, len(wanted)
        if not tokens:
            return
        sources = [pool.index[key] for pool in self.pools]
        if all(pool.free > 1 for pool in self.pools):  # One to copy into, and this one.
            for pool, block in zip(self.pools, sources, strict=True):
                pool.share(block)
            table.sources, table.copied = sources, tokens

    def _has(self, key: bytes) -> bool:
        """Return whether this block is in every group and computed."""
        return key not in self._fresh and all(key in pool.index for pool in self.pools)

    def keep(self, table: BlockTable, row: int, start: int, plan: StepPlan) -> None:
        """Add to the plan the state checkpoints that a table is to keep. The plan's last chunk
        starts at token `start` of the table."""
        if self.states is not None:
            self.states.keep(table, row, start, start + plan.counts[-1], plan)

    def count_lookup(self, tokens: int, hits: int) -> None:
        """Count one lookup; separate from `open`, since a sequence that did not fit asks again."""
        self.prefix_queries += tokens
        self.prefix_hits += hits

    def cached(self, table: BlockTable) -> int:
        """Return the number of tokens found for a table just opened."""
        return table.entered * self.block_size + table.copied

    def writes(self, table: BlockTable, row: int, plan: StepPlan) -> None:
        """Add to the plan the block writes and copies for the row of a table just opened."""
        for group, blocks in enumerate(table.blocks):
            if blocks:
                plan.blocks.append(BlockWrite(row, group, 0, blocks.copy()))
        if self.states is not None:
            self.states.restore(table, plan)
        if table.sources:
            for group, source in enumerate(table.sources):
                target = table.blocks[group][table.entered]
                plan.copies.append(BlockCopy(group, source, target))
            self._copying.setdefault(plan.number, []).append(table.sources)
            table.sources, table.copied = [], 0

    def grow(
        self, table: BlockTable, row: int, oldest: int, end: int, out: list[BlockWrite]
    ) -> int:
        """Add blocks for tokens up to `end`, as far as free blocks allow; return the position up to
        which there is room.

        `oldest` is the first position from which a step in flight or the next one queries: blocks
        before its window are given back first. Deltas for the row are appended to `out`.
        """
        size = self.block_size
        wanted = -(-end // size)
        if self.states is not None and not table.blocks[self.states.group]:
            if not self.states.pool.free:
                return oldest
            table.blocks[self.states.group] = [self.states.pool.take()]
        for group, window, pool in self._paged:
            if window is not None:
                self._leave_behind(table, group, pool, window, row, oldest, out)
            wanted = min(wanted, len(table.blocks[group]) + pool.free)
        for group, _, pool in self._paged:
            blocks = table.blocks[group]
            held = len(blocks)
            if held < wanted:
                new = pool.take_many(wanted - held)
                blocks += new
                out.append(BlockWrite(row, group, held, new))
        return len(table.blocks[0]) * size if table.blocks else end

    def enter(self, table: BlockTable, upto: int, step: int | None) -> None:
        """Make the full blocks below token `upto` findable.

        `step` is the last step that may write them, or None if all their writers succeeded.
        """
        blocks = upto // self.block_size
        if table.chain is None or blocks <= table.entered:
            return
        chain, size = table.chain, self.block_size
        keys, tenant = chain.extend(blocks), chain.tenant
        entries: list[KeyedBlock] = [] if step is None else self.unsettled.setdefault(step, [])
        for group, _, pool in self._paged:
            held = table.blocks[group]
            for at in range(max(table.entered, table.first[group]), blocks):
                if pool.enter(keys[at], held[at], tenant):
                    kept = chain.kept_for(at)
                    entries.append(KeyedBlock(group, held[at], keys[at], at, tenant, kept))
                    if kept:
                        self._retain(pool, chain, [held[at]], at)
                    if step is not None:
                        self._fresh.add(keys[at])
        for at in range(table.entered, blocks):
            if tokens := chain.plain(at * size, (at + 1) * size):
                self.partial.add(chain.before(at), keys[at], tokens)
        self.holdings.note(table, blocks)
        table.entered = blocks
        if step is None and self.tiers is not None:
            self.tiers.offer(entries)

    def leave_rest(self, table: BlockTable, upto: int) -> None:
        """Make the last block before token `upto`, which is not full, findable for work that
        continues there. No step in flight writes to it, and no later one will."""
        chain, at = table.chain, upto // self.block_size
        if chain is None or at != table.entered or at >= min(map(len, table.blocks), default=0):
            return
        if tokens := chain.plain(at * self.block_size, upto):
            key = chain.rest(upto)
            for group, pool in enumerate(self.pools):
                pool.enter(key, table.blocks[group][at], chain.tenant)
            self.partial.add(chain.before(at), key, tokens)

    def close(self, table: BlockTable) -> None:
        """Give back all blocks, the last first: a prefix is evicted from its end."""
        del self._tables[id(table)]
        if self.slots is not None:
            self.slots.leave(table)
        if self.states is not None:
            self.states.leave(table)
        self._give_back([table.sources] if table.sources else [])
        table.sources = []
        for pool, blocks, first in zip(self.pools, table.blocks, table.first, strict=True):
            pool.give_back_many(reversed(blocks[first:] if first else blocks))
        table.blocks = []

    def distrust(self, table: BlockTable) -> None:
        """Stop a table whose content may be wrong from entering anything in the index."""
        table.chain = None

    # Steps

    def settle(self, step: int) -> None:
        """Note that a step succeeded: the blocks that it entered are computed."""
        entered = self.unsettled.pop(step, [])
        if self.states is not None:
            entered += self.states.settle(step)
        if entered:
            self._fresh.difference_update(piece.key for piece in entered)
            if self.tiers is not None:
                self.tiers.offer(entered)
        self._give_back(self._copying.pop(step, []))

    def forget(self, step: int) -> None:
        """Take out of the index all entries of a failed step and of later ones."""
        if self.states is not None:
            self.states.forget(step)
        for number in [number for number in self.unsettled if number >= step]:
            for group, block, key, *_ in self.unsettled.pop(number):
                self._fresh.discard(key)
                # The block may have been taken for other content since.
                if self.pools[group].keys[block] == key:
                    self.pools[group].forget(block)
        self._give_back(self._copying.pop(step, []))  # Later ones are still in flight.

    def _give_back(self, copied: list[list[int]]) -> None:
        for sources in copied:
            for pool, block in zip(self.pools, sources, strict=True):
                pool.give_back(block)

    def reset(self) -> None:
        """Empty the prefix index (new weights, or a user's request). Owned blocks stay owned."""
        self.unsettled.clear()
        if self.slots is not None:
            self.slots.reset()
        if self.states is not None:
            self.states.reset()
        self._fresh.clear()
        self.partial.clear()
        for holder in _holders(self):
            holder.distrust()
        for pool in self.pools:
            for block in list(pool.index.values()):
                pool.forget(block)
        for table in self._tables.values():
            # Its blocks were computed before: they must not come back under their keys.
            self.distrust(table)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and counted by its owners."""
        if self.slots is not None:
            slots = [table.slot for table in self._tables.values()]
            self.slots.check_integrity([slot for slot in slots if slot is not None])
        for table in self._tables.values():
            lengths = {len(table.blocks[group]) for group, _, _ in self._paged}
            assert len(lengths) <= 1, "groups grow together"
        for group, pool in enumerate(self.pools):
            owners = {block: times for (at, block), times in lent_of(self).items() if at == group}
            copied = [sources for step in self._copying.values() for sources in step]
            copied += [table.sources for table in self._tables.values() if table.sources]
            for sources in copied:
                owners[sources[group]] = owners.get(sources[group], 0) + 1
            if self.states is not None and self.states.group == group:
                for block in self.states.held(self._tables.values()):
                    owners[block] = owners.get(block, 0) + 1
            for table in self._tables.values():
                blocks, first = table.blocks[group], table.first[group]
                assert all(block == NULL_BLOCK for block in blocks[:first])
                for block in blocks[first:]:
                    owners[block] = owners.get(block, 0) + 1
            pool.check_integrity(owners)

    # Inside

    def first_visible(self, window: int | None, position: int) -> int:
        """Return the first block with a token that a query at `position` sees."""
        if window is None:
            return 0
        return max(0, position - window + 1) // self.block_size

    def longest(self, keys: list[bytes], limit: int, found: Sequence[Container[bytes]]) -> int:
        """Return the blocks of the longest prefix that every group can serve with the keys `found`
        for it (see the module's docstring)."""
        hit = self._longest_paged(keys, limit, found)
        while self.states is not None and hit:
            lower = self.states.longest(keys, hit, found[self.states.group])
            if lower == hit:
                break
            hit = self._longest_paged(keys, lower, found)
        return hit

    def _longest_paged(
        self, keys: list[bytes], limit: int, found: Sequence[Container[bytes]]
    ) -> int:
        """Do as `longest` for the groups whose tables grow."""
        hit = limit
        groups = [(window, found[group]) for group, window, _ in self._paged]
        for window, index in groups:
            if window is None:
                for at in range(hit):
                    if keys[at] not in index:
                        hit = at
                        break
        sliding = [(window, index) for window, index in groups if window is not None]
        agreed = not sliding
        while not agreed and hit:
            # A group that cannot serve `hit` lowers it, so ask all of them again.
            agreed = True
            for window, index in sliding:
                lower = self._longest_sliding(keys, index, window, hit)
                if lower < hit:
                    hit, agreed = lower, False
        return hit

    def _longest_sliding(
        self, keys: list[bytes], index: Container[bytes], window: int, limit: int
    ) -> int:
        """Return the largest hit, at most `limit`, whose visible blocks one sliding group has."""
        hit = at = limit
        while at > self.first_visible(window, hit * self.block_size):
            at -= 1
            if keys[at] not in index:
                hit = at
        return hit

    def _leave_behind(
        self,
        table: BlockTable,
        group: int,
        pool: BlockPool,
        window: int,
        row: int,
        oldest: int,
        out: list[BlockWrite],
    ) -> None:
        """Give back the blocks that no query at or after `oldest` sees."""
        first, blocks = table.first[group], table.blocks[group]
        visible = min(self.first_visible(window, oldest), len(blocks))
        if first < visible:
            pool.give_back_many(reversed(blocks[first:visible]))
            nulls = [NULL_BLOCK] * (visible - first)
            blocks[first:visible] = nulls
            table.first[group] = visible
            out.append(BlockWrite(row, group, first, nulls.copy()))


def lent_of(kv: KvManager) -> Counter[tuple[int, int]]:
    """Count the holders of each (group, block) that are not tables: tier orders and leases."""
    lent: Counter[tuple[int, int]] = Counter()
    for holder in _holders(kv):
        lent.update(holder.held)
    return lent


def _holders(kv: KvManager) -> list[LowerTiers | LentBlocks]:
    return [one for one in (kv.tiers, kv.leases) if one is not None]
