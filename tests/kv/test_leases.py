"""Leases: whatever the borrower does, and whatever it never says, nothing is held for long."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import GroupShape, PoolShape
from headrace.kv import KvManager, PrefixChain
from headrace.kv.leases import MOST_LENT, SECONDS, Leases, Name

SIZE, BLOCKS = 4, 40
POOL = PoolShape(
    SIZE, (GroupShape("full", (0,), None, BLOCKS), GroupShape("window", (1,), 6, BLOCKS))
)
names = st.tuples(st.sampled_from([b"one", b"two"]), st.integers(1, 5))


class Lending(RuleBasedStateMachine):
    """A pool, leases over it, and what a model of both says is lent."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.kv = KvManager(POOL)
        self.leases = self.kv.leases = Leases(self.kv, lambda: self.now)
        self.until: dict[Name, float] = {}
        self.lent: dict[Name, tuple[PrefixChain, int, int]] = {}
        self.step = 0

    def computed(self, text: int, blocks: int) -> PrefixChain | None:
        """A prompt that ran alone, and left its blocks in the index; None: there was no room."""
        tokens = [text] * (blocks * SIZE + 1)
        spec = RequestSpec(SamplingParams(max_tokens=1), seed=0)
        chain = self.kv.chain(Request("a", tokens, spec), tokens)
        assert chain is not None
        table = self.kv.open(len(tokens), chain, read=True)
        done = self.kv.cached(table)
        while done < len(tokens):
            end = min(done + 2 * SIZE, len(tokens))
            room = self.kv.grow(table, 0, done, end, [])
            if room <= done:
                self.kv.close(table)
                return None
            done = min(room, end)
            self.kv.enter(table, done, self.step)
            self.kv.settle(self.step)
            self.step += 1
        self.kv.close(table)
        return chain

    @rule(name=names)
    def offer(self, name: Name) -> None:
        assert self.leases.offer(name) == (name not in self.until)
        self.until.setdefault(name, self.now + SECONDS)

    @rule(name=names, text=st.integers(0, 2), blocks=st.integers(1, 8), first=st.integers(0, 3))
    def lend(self, name: Name, text: int, blocks: int, first: int) -> None:
        if name not in self.until or name in self.lent or first >= blocks:
            return
        chain = self.computed(text, blocks)
        runs = None if chain is None else self.leases.lend(name, chain, first, blocks)
        if chain is None:
            return
        if runs is None:
            del self.until[name]
            return
        assert [at for at, _ in runs] == [first, max(first, (blocks * SIZE - 5) // SIZE)]
        for pool, (at, held) in zip(self.kv.pools, runs, strict=True):
            assert [pool.keys[block] for block in held] == chain.keys[at:blocks]
        self.lent[name] = chain, first, blocks

    @rule(name=names)
    def release(self, name: Name) -> None:
        assert self.leases.release(name) == (name in self.until)
        self.until.pop(name, None)
        self.lent.pop(name, None)

    @rule(some=st.lists(names))
    def renew(self, some: list[Name]) -> None:
        self.leases.renew(some)
        self.until.update((name, self.now + SECONDS) for name in some if name in self.until)

    @rule(seconds=st.sampled_from([0.1, SECONDS / 2, SECONDS * 1.01]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {name for name, until in self.until.items() if until < self.now}
        assert set(self.leases.expire()) == late
        for name in late:
            del self.until[name]
            self.lent.pop(name, None)

    @rule()
    def the_cache_is_emptied(self) -> None:
        self.kv.reset()
        self.until.clear()
        self.lent.clear()

    @invariant()
    def what_is_lent_can_be_read_under_its_name(self) -> None:
        for name, (chain, first, blocks) in self.lent.items():
            lent = self.leases.lent(name, 0, range(first, blocks + 2))
            assert all(self.kv.pools[0].keys[one.block] == one.key for one in lent)
            assert [one.key for one in lent] == chain.keys[first:blocks]
            assert self.leases.lent(name, 0, [blocks, first]) == []

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.kv.check_integrity()
        assert len(self.leases) == len(self.until)
        if not self.lent:
            assert self.kv.usage == 0.0
        assert self.kv.usage <= MOST_LENT + 1e-9


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_step_needs_the_room_that_leases_leave() -> None:
    """Half of a pool stays with those who run here."""
    machine = Lending()
    held = 0
    for number in range(10):
        machine.leases.offer((b"one", number))
        chain = machine.computed(number, 7)
        assert chain is not None
        held += machine.leases.lend((b"one", number), chain, 0, 7) is not None
    assert held == int(MOST_LENT * machine.kv.pools[0].total) // 7
