"""The tiers below the pool: what is read, what is kept nearer, and what is compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from headrace.base.step import GroupShape, PoolShape
from headrace.base.tiers import KeyedBlock, OrderEnd
from headrace.kv import KvManager, PrefixChain, Tiers
from headrace.kv.tiers import CANARY

SIZE, BLOCKS = 4, 4
KNOWN = SIZE * BLOCKS + 1
"""Tokens of every prompt here: four full blocks and one token."""
DISK, SHARED = 0, 1


class Store:
    """A store that says where its blocks are and notes its orders; `end` ends them all."""

    nearest, keeps, asks = DISK, True, False

    def __init__(self) -> None:
        self.places: dict[bytes, int] = {}
        self.orders: list[tuple[str, int, list[KeyedBlock]]] = []
        self._done: list[OrderEnd] = []

    def known(self, group: int) -> Iterable[bytes]:
        return self.places.keys()

    def place(self, group: int, key: bytes) -> int | None:
        return self.places.get(key)

    def read(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("read", ticket, list(pieces)))

    def write(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("write", ticket, list(pieces)))

    def compare(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("compare", ticket, list(pieces)))

    def ended(self) -> list[OrderEnd]:
        done, self._done = self._done, []
        return done

    def kept_bytes(self) -> int:
        return 0

    def end(self, bad: Iterable[bytes] = ()) -> list[tuple[str, list[bytes]]]:
        """End all orders; pieces of a key in `bad` fail. Return (kind, keys) of each."""
        orders, self.orders = self.orders, []
        for kind, ticket, pieces in orders:
            good = tuple(piece.key not in bad for piece in pieces)
            self._done.append(OrderEnd(ticket, kind, good, 10 * sum(good), 0.001))  # type: ignore[arg-type]
        return [(kind, [piece.key for piece in pieces]) for kind, _, pieces in orders]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def kv(store: Store) -> KvManager:
    """A pool above the store, whose engine takes a second for a token."""
    kv = KvManager(PoolShape(SIZE, (GroupShape("full", (0,), None, 101),)))
    kv.tiers = Tiers(kv, store, [10], lambda there, more: float(more))  # type: ignore[arg-type]
    return kv


def tiers_of(kv: KvManager) -> Tiers:
    assert isinstance(kv.tiers, Tiers)
    return kv.tiers


def prompt(work: int) -> PrefixChain:
    return PrefixChain(b"root", SIZE, list(range(100 * work, 100 * work + KNOWN)))


def found(kv: KvManager, work: int) -> int:
    table = kv.open(KNOWN, prompt(work), read=True)
    hit = kv.cached(table)
    kv.close(table)
    kv.check_integrity()
    return hit


def kept(store: Store, work: int, place: int) -> list[bytes]:
    """Have the store hold a prompt's blocks."""
    keys = prompt(work).extend(BLOCKS)
    store.places |= dict.fromkeys(keys, place)
    return keys


@pytest.mark.parametrize("place", [DISK, SHARED])
def test_what_is_read_is_a_hit_and_is_kept_nearer(kv: KvManager, store: Store, place: int) -> None:
    tiers, keys = tiers_of(kv), kept(store, 1, place)
    assert not tiers.ready(1, prompt(1), KNOWN)
    assert not tiers.ready(1, prompt(1), KNOWN), "it is on its way"
    kv.check_integrity()
    assert found(kv, 1) == 0
    assert store.end() == [("read", keys)]
    kv.turn()
    assert tiers.ready(1, prompt(1), KNOWN)
    assert tiers.loaded(1) == found(kv, 1) == SIZE * BLOCKS
    assert (tiers.stats.loads, tiers.stats.loaded_bytes) == (1, 40)
    assert tiers.stats.remote_bytes == (40 if place == SHARED else 0)
    assert store.end() == ([("write", keys)] if place == SHARED else [])
    kv.turn()
    assert tiers.stats.written_blocks == (BLOCKS if place == SHARED else 0)
    assert not tiers.held
    kv.check_integrity()


def test_a_read_that_fails_is_a_shorter_hit(kv: KvManager, store: Store) -> None:
    tiers, keys = tiers_of(kv), kept(store, 1, SHARED)
    assert not tiers.ready(1, prompt(1), KNOWN)
    store.end(bad=keys[2:3])
    kv.turn()
    assert tiers.ready(1, prompt(1), KNOWN)
    assert tiers.loaded(1) == 0
    assert found(kv, 1) == 2 * SIZE
    assert tiers.stats.damaged == 1
    assert store.end() == [("write", [*keys[:2], keys[3]])], "what came is kept nearer"


def test_what_is_under_way_at_a_reset_does_not_come(kv: KvManager, store: Store) -> None:
    tiers = tiers_of(kv)
    kept(store, 1, SHARED)
    assert not tiers.ready(1, prompt(1), KNOWN)
    tiers.distrust()
    kv.reset()
    store.end()
    kv.turn()
    assert found(kv, 1) == 0
    assert not store.orders
    assert not tiers.held


@pytest.mark.parametrize("wrong", [False, True])
def test_one_load_in_sixteen_computes_its_last_block_and_compares(
    kv: KvManager, store: Store, wrong: bool
) -> None:
    tiers = tiers_of(kv)
    for work in range(1, CANARY + 1):
        keys = kept(store, work, DISK)
        assert not tiers.ready(work, prompt(work), KNOWN)
        read = keys[:-1] if work == CANARY else keys
        assert store.end() == [("read", read)]
        kv.turn()
        assert tiers.ready(work, prompt(work), KNOWN)
    table = kv.open(KNOWN, prompt(CANARY), read=True)
    assert kv.cached(table) == SIZE * (BLOCKS - 1)
    kv.grow(table, 0, kv.cached(table), KNOWN, [])
    kv.enter(table, KNOWN, step=7)
    assert not store.orders, "its step may fail"
    kv.settle(7)
    assert store.end(bad=keys[-1:] if wrong else ()) == [("compare", keys[-1:])]
    kv.turn()
    assert (tiers.stats.checked, tiers.stats.wrong) == (1, int(wrong))
    kv.close(table)
    kv.check_integrity()
    assert not tiers.held
