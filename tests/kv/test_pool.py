"""The block pool: three states, one list, no clock."""

from __future__ import annotations

import random

import pytest

from headrace.kv import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_blocks_are_handed_out_once_and_the_null_block_never() -> None:
    pool = BlockPool(5)
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 4]
    assert pool.free == 0
    with pytest.raises(AssertionError):
        pool.take()


def test_empty_blocks_are_taken_before_cached_ones_and_these_in_order_of_last_use() -> None:
    pool = BlockPool(5)
    a, b, c, d = (pool.take() for _ in range(4))
    pool.enter(key(1), a)
    pool.enter(key(2), b)
    pool.enter(key(3), c)
    for block in (b, a, d, c):
        pool.give_back(block)
    pool.share(b)
    pool.give_back(b)  # used again: now the last to go
    assert [pool.take() for _ in range(4)] == [d, a, c, b]


def test_blocks_that_come_next_and_have_no_memory_yet_are_known() -> None:
    pool = BlockPool(6, keep=1)
    assert list(pool.fresh(2)) == [1, 2]
    a, b = pool.take(), pool.take()
    assert list(pool.fresh(2)) == [3, 4]
    assert list(pool.fresh(9)) == [3, 4, 5]
    for number, block in enumerate((a, b)):
        pool.enter(key(number), block)
        pool.give_back(block)
    assert not pool.fresh(2)  # More is cached than stays: the next is one of those.
    pool.reset()
    assert list(pool.fresh(1)) == [1]


def test_an_evicted_block_leaves_the_index() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert pool.enter(key(1), block)
    pool.give_back(block)
    assert pool.index == {key(1): block}
    assert pool.take() == block
    assert pool.index == {}
    pool.check_integrity({block: 1})


def test_a_cached_block_can_be_taken_up_from_the_middle_of_the_list() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.enter(key(number), block)
        pool.give_back(block)
    pool.share(blocks[1])
    pool.share(blocks[1])
    pool.check_integrity({blocks[1]: 2})
    assert pool.free == 2
    pool.give_back(blocks[1])
    pool.check_integrity({blocks[1]: 1})


def test_the_second_block_of_one_content_is_not_entered() -> None:
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    assert pool.enter(key(1), a)
    assert not pool.enter(key(1), b)
    assert not pool.enter(key(2), a)
    assert pool.index == {key(1): a}


def test_blocks_without_memory_are_spared_once_enough_are_cached() -> None:
    pool = BlockPool(101, keep=4)
    for number in range(60):  # one sequence of two blocks after the other
        blocks = [pool.take(), pool.take()]
        for at, block in enumerate(blocks):
            pool.enter(key(2 * number + at), block)
        for block in reversed(blocks):
            pool.give_back(block)
        pool.check_integrity({})
    assert pool.touched == 6  # four kept, two in use
    assert pool.cached == len(pool.index) == 6
    assert key(119) in pool.index
    assert key(0) not in pool.index
    # Those who run have all of the pool: then the cached ones go, the oldest first.
    assert len({pool.take() for _ in range(100)}) == 100
    assert pool.index == {}


def test_without_a_bound_all_blocks_are_used_before_a_cached_one_goes() -> None:
    pool = BlockPool(7)
    for number in range(6):
        block = pool.take()
        pool.enter(key(number), block)
        pool.give_back(block)
    assert pool.touched == 6
    assert pool.take() == 1


def test_a_forgotten_block_is_empty_at_once() -> None:
    pool = BlockPool(4)
    a, b = pool.take(), pool.take()
    for number, block in enumerate((a, b)):
        pool.enter(key(number), block)
        pool.give_back(block)
    pool.forget(b)
    pool.check_integrity({})
    assert (pool.cached, pool.free) == (1, 3)
    assert pool.take() == b


def test_giving_back_what_is_not_owned_is_a_bug() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="not owned"):
        pool.give_back(1)


def test_against_a_plain_model() -> None:
    """Random calls; a list in plain Python says which block goes next."""
    for seed in range(30):
        rng = random.Random(seed)
        pool = BlockPool(8)
        order = list(range(1, 8))
        owners: dict[int, int] = {}
        keys: dict[int, bytes] = {}
        for number in range(300):
            action = rng.random()
            if action < 0.3 and order:
                block = order.pop(0)
                keys.pop(block, None)
                owners[block] = 1
                assert pool.take() == block
            elif action < 0.6 and owners:
                block = rng.choice(list(owners))
                pool.give_back(block)
                owners[block] -= 1
                if not owners[block]:
                    del owners[block]
                    order.insert(len(order) if block in keys else 0, block)
            elif action < 0.8 and owners:
                block = rng.choice(list(owners))
                if block not in keys:
                    keys[block] = key(number)
                    assert pool.enter(key(number), block)
            elif keys:
                block = rng.choice(list(keys))
                assert pool.index[keys[block]] == block
                if block in order:
                    order.remove(block)
                owners[block] = owners.get(block, 0) + 1
                pool.share(block)
            pool.check_integrity(owners)
            assert pool.free == len(order)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def cached(pool: BlockPool, tenant: str, numbers: range) -> list[int]:
    """Blocks that a tenant leaves behind, one after the other."""
    blocks = []
    for number in numbers:
        block = pool.take()
        pool.enter(key(number), block, tenant)
        pool.give_back(block)
        blocks.append(block)
    return blocks


def test_a_flood_pushes_out_nobody_who_holds_less() -> None:
    pool = BlockPool(101, clock=Clock())
    mine = cached(pool, "a", range(30))
    cached(pool, "flood", range(1000, 3000))
    assert all(pool.keys[block] == key(at) for at, block in enumerate(mine))
    others = cached(pool, "b", range(100, 150))
    cached(pool, "flood", range(3000, 5000))
    held = {tenant: sum(key(at) in pool.index for at in numbers) for tenant, numbers in
            {"a": range(30), "b": range(100, 150)}.items()}  # fmt: skip
    assert held["a"] == 30
    assert held["b"] >= 33, "a third"
    assert others
    pool.check_integrity({})


def test_who_does_not_come_any_more_goes_first() -> None:
    clock = Clock()
    pool = BlockPool(101, clock=clock)
    cached(pool, "gone", range(30))
    clock.now = 700.0
    cached(pool, "here", range(100, 200))
    assert not any(key(at) in pool.index for at in range(30))
    assert all(key(at) in pool.index for at in range(100, 200))


def test_what_is_retained_goes_last_and_like_any_other_when_its_time_is_over() -> None:
    clock = Clock()
    pool = BlockPool(101, clock=clock)
    for number in range(60):
        block = pool.take()
        pool.enter(key(number), block, "a")
        pool.retain(block, until=100.0, priority=10 if number < 20 else 90)
        pool.give_back(block)
    cached(pool, "a", range(1000, 2000))
    assert sum(key(at) in pool.index for at in range(60)) == 50, "half of the pool, never more"
    pool.check_integrity({})
    taken = [pool.take() for _ in range(60)]
    assert not any(key(at) in pool.index for at in range(10)), "the lowest priority first"
    assert all(key(at) in pool.index for at in range(20, 50))
    for block in taken:
        pool.give_back(block)
    clock.now = 101.0
    cached(pool, "b", range(3000, 3101))
    assert sum(key(at) in pool.index for at in range(60)) <= 40
    pool.check_integrity({})


def test_any_order_of_calls_keeps_the_books() -> None:
    rng, clock = random.Random(3), Clock()
    pool = BlockPool(40, clock=clock)
    owned: list[int] = []
    for step in range(5000):
        clock.now += rng.choice([0.0, 1.0, 100.0])
        if owned and rng.random() < 0.5:
            pool.give_back(owned.pop(rng.randrange(len(owned))))
        elif pool.index and rng.random() < 0.3:
            block = rng.choice(list(pool.index.values()))
            pool.share(block)
            owned.append(block)
        elif pool.free:
            block = pool.take()
            owned.append(block)
            if rng.random() < 0.8 and pool.enter(key(step), block, rng.choice("abc")):
                if rng.random() < 0.3:
                    pool.retain(block, clock.now + 50, rng.randrange(3))
            elif rng.random() < 0.1 and pool.index:
                pool.forget(rng.choice(list(pool.index.values())))
        pool.check_integrity({block: owned.count(block) for block in owned})


@pytest.mark.parametrize("entered", [False, True])
def test_many_blocks_are_those_that_come_one_by_one(entered: bool) -> None:
    """Taken and given back together or alone, with blocks in the index and without."""
    draws, pools = random.Random(7), (BlockPool(60, keep=5), BlockPool(60, keep=5))
    held: list[list[int]] = []
    for number in range(300):
        if held and draws.random() < 0.5:
            blocks = held.pop(draws.randrange(len(held)))
            pools[0].give_back_many(reversed(blocks))
            for block in reversed(blocks):
                pools[1].give_back(block)
        elif (count := draws.randrange(9)) <= pools[0].free:
            blocks = pools[0].take_many(count)
            assert blocks == [pools[1].take() for _ in range(count)]
            held.append(blocks)
            if entered and blocks and draws.random() < 0.3:
                assert all(pool.enter(key(number), blocks[0]) for pool in pools)
        for pool in pools:
            pool.check_integrity({block: 1 for blocks in held for block in blocks})
        assert pools[0].touched == pools[1].touched
