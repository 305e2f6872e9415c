"""Tables, windows, hits and the books of the KV manager."""

from __future__ import annotations

from headrace.base.step import BlockWrite, GroupShape, PoolShape, StepPlan
from headrace.kv import BlockTable, KvManager, PrefixChain

SIZE = 4


def manager(*groups: tuple[int | None, int], prefix_cache: bool = True) -> KvManager:
    """(window, blocks without the null block) of each group."""
    shapes = tuple(
        GroupShape(f"g{i}", (i,), window, blocks + 1) for i, (window, blocks) in enumerate(groups)
    )
    return KvManager(PoolShape(SIZE, shapes), prefix_cache=prefix_cache)


def chain(tokens: list[int], salt: str = "") -> PrefixChain:
    return PrefixChain(b"root", SIZE, tokens, salt=salt)


def fill(kv: KvManager, tokens: list[int], salt: str = "", *, read: bool = True) -> BlockTable:
    """A table in which all tokens are computed."""
    table = kv.open(len(tokens), chain(tokens, salt), read=read)
    room = kv.grow(table, 0, kv.cached(table), len(tokens), [])
    assert room >= len(tokens)
    kv.enter(table, len(tokens), step=None)
    return table


def hit(kv: KvManager, tokens: list[int], salt: str = "") -> int:
    table = kv.open(len(tokens), chain(tokens, salt), read=True)
    cached = kv.cached(table)
    kv.close(table)
    kv.check_integrity()
    return cached


def test_growth_appends_blocks_and_says_so() -> None:
    kv = manager((None, 8))
    table = kv.open(6, None, read=True)
    writes: list[BlockWrite] = []
    assert kv.grow(table, 3, 0, 6, writes) == 8
    assert kv.grow(table, 3, 6, 8, writes) == 8
    assert kv.grow(table, 3, 8, 9, writes) == 12
    assert writes == [BlockWrite(3, 0, 0, [1, 2]), BlockWrite(3, 0, 2, [3])]
    assert kv.usage == 3 / 8


def test_growth_goes_as_far_as_blocks_are_there() -> None:
    kv = manager((None, 3), (100, 2))
    table = kv.open(40, None, read=True)
    assert kv.grow(table, 0, 0, 40, []) == 8
    assert kv.grow(table, 0, 8, 40, []) == 8
    kv.check_integrity()


def test_a_prefix_is_shared_and_its_last_token_left() -> None:
    kv = manager((None, 8))
    tokens = list(range(12))
    first = fill(kv, tokens)
    second = kv.open(len(tokens), chain(tokens), read=True)
    assert kv.cached(second) == 11, "the last token is computed again, in a copy of its block"
    assert second.blocks[0] == first.blocks[0][:2]
    assert second.sources == [first.blocks[0][2]]
    third = kv.open(13, chain([*tokens, 99]), read=True)
    assert kv.cached(third) == 12
    for table in (first, second, third):
        kv.close(table)
    kv.check_integrity()
    assert kv.usage == 0
    assert hit(kv, [*tokens, 99]) == 12, "free, but found again"


def test_a_part_of_a_block_is_copied() -> None:
    """The other prompt parts from it in the third block, the next turn goes on in it."""
    kv = manager((None, 20), (6, 20))
    first = fill(kv, list(range(10)))
    kv.leave_rest(first, 10)
    kv.close(first)
    for wanted, found in (([*range(9), 50, 51], 9), (list(range(14)), 10), ([*range(8), 50], 8)):
        table = kv.open(len(wanted), chain(wanted), read=True)
        assert kv.cached(table) == found
        plan = StepPlan(found, [], [], [], [])
        kv.grow(table, 0, found, len(wanted), [])
        kv.writes(table, 0, plan)
        kv.check_integrity()
        targets = {(copy.group, copy.target) for copy in plan.copies}
        assert targets == (
            {(0, table.blocks[0][2]), (1, table.blocks[1][2])} if found > 8 else set()
        )
        kv.close(table)
        kv.settle(found)
    kv.check_integrity()
    assert kv.usage == 0


def test_the_beginning_of_a_full_block_is_copied() -> None:
    """Two prompts that part inside a block share the tokens before."""
    kv = manager((None, 20))
    tokens = list(range(12))
    first = fill(kv, tokens)
    for shared in (1, 5, 6, 7, 11):
        other = [*tokens[:shared], *range(50, 60)]
        table = kv.open(len(other), chain(other), read=True)
        assert kv.cached(table) == shared
        assert table.blocks[0] == first.blocks[0][: shared // SIZE]
        assert table.sources == [first.blocks[0][shared // SIZE]]
        kv.close(table)
    kv.close(first)
    kv.check_integrity()


def test_a_step_copies_nothing_that_it_writes_itself() -> None:
    kv = manager((None, 8))
    table = kv.open(12, chain(list(range(12))), read=True)
    kv.grow(table, 0, 0, 12, [])
    kv.enter(table, 12, step=1)
    assert hit(kv, list(range(12))) == 8
    kv.settle(1)
    assert hit(kv, list(range(12))) == 11


def test_the_books_of_partial_blocks_do_not_grow() -> None:
    kv = manager((None, 8))
    for number in range(1000):
        kv.close(fill(kv, [number] * 9))
    assert kv.partial._count <= 2 * kv.pools[0].total + 64 + 1


def test_salts_do_not_meet() -> None:
    kv = manager((None, 8))
    fill(kv, list(range(12)), salt="a")
    assert hit(kv, list(range(12)), salt="b") == 0
    assert hit(kv, list(range(12)), salt="a") == 11


def test_without_read_nothing_is_found_but_left_for_others() -> None:
    kv = manager((None, 8))
    fill(kv, list(range(9)))
    table = fill(kv, list(range(9)), read=False)
    assert kv.cached(table) != 0  # entered, not found
    assert table.blocks[0][:2] != [1, 2]
    kv.check_integrity()


def test_the_index_can_be_off() -> None:
    kv = manager((None, 8), prefix_cache=False)
    kv.close(fill(kv, list(range(9))))
    assert hit(kv, list(range(9))) == 0


def test_a_prefix_is_evicted_from_its_end() -> None:
    kv = manager((None, 4))
    kv.close(fill(kv, list(range(16))))
    other = fill(kv, [100] * 6)
    assert hit(kv, [*range(16), 99]) == 8
    kv.close(other)


def test_blocks_behind_the_window_are_given_back() -> None:
    kv = manager((None, 10), (6, 10))
    tokens = list(range(20))
    table = kv.open(len(tokens), chain(tokens), read=True)
    kv.grow(table, 0, 0, 16, [])
    kv.enter(table, 16, step=1)
    writes: list[BlockWrite] = []
    kv.grow(table, 0, 16, 20, writes)
    # A query at 16 sees 11 … 16: blocks 0 and 1 are behind it.
    assert writes[0] == BlockWrite(0, 1, 0, [0, 0])
    assert table.blocks[1][:2] == [0, 0]
    assert kv.pools[1].free == 10 - 3
    assert kv.pools[0].free == 10 - 5
    kv.check_integrity()


def test_a_hit_is_what_all_groups_can_serve() -> None:
    kv = manager((None, 10), (6, 10))
    tokens = list(range(20))
    kv.close(fill(kv, tokens))
    probe = [*tokens, 99]
    table = kv.open(len(probe), chain(probe), read=True)
    assert kv.cached(table) == 20
    # A query at 20 sees 15 … 20: block 3 and later.
    assert table.blocks[1][:3] == [0, 0, 0]
    assert all(table.blocks[1][3:])
    kv.close(table)
    keys = chain(tokens).extend(5)
    sliding = kv.pools[1]
    sliding.forget(sliding.index[keys[4]])
    assert hit(kv, probe) == 16
    sliding.forget(sliding.index[keys[2]])  # 16 needs blocks 2 and 3; 8 needs 0 and 1
    assert hit(kv, probe) == 8
    sliding.forget(sliding.index[keys[0]])
    assert hit(kv, probe) == 0


def test_two_windows_agree() -> None:
    kv = manager((5, 10), (9, 10))
    tokens = list(range(24))
    kv.close(fill(kv, tokens))
    keys = chain(tokens).extend(6)
    a, b = kv.pools
    a.forget(a.index[keys[5]])
    b.forget(b.index[keys[4]])
    assert hit(kv, [*tokens, 99]) == 16


def test_a_failed_step_leaves_nothing_in_the_index() -> None:
    kv = manager((None, 10))
    tokens = list(range(16))
    table = kv.open(len(tokens), chain(tokens), read=True)
    kv.grow(table, 0, 0, 16, [])
    for step in range(1, 5):
        kv.enter(table, step * SIZE, step)
    kv.settle(1)
    kv.forget(2)
    assert hit(kv, [*tokens, 99]) == 4
    kv.close(table)
    assert hit(kv, [*tokens, 99]) == 4


def test_forgetting_spares_a_block_that_was_taken_for_other_content() -> None:
    kv = manager((None, 1))
    table = kv.open(5, chain([1] * 5), read=True)
    kv.grow(table, 0, 0, 4, [])
    kv.enter(table, 4, step=7)
    kv.close(table)
    kv.close(fill(kv, [2] * 4))
    kv.forget(7)
    assert hit(kv, [2] * 5) == 4


def test_reset_empties_the_index_also_of_what_runs() -> None:
    kv = manager((None, 10))
    tokens = list(range(16))
    table = kv.open(len(tokens), chain(tokens), read=True)
    kv.grow(table, 0, 0, 16, [])
    kv.enter(table, 8, step=1)
    kv.reset()
    kv.enter(table, 16, step=2)
    kv.close(table)
    assert not kv.pools[0].index
    kv.check_integrity()


def test_capacity_is_what_one_sequence_can_have() -> None:
    assert manager((None, 10)).capacity == 40
    assert manager((None, 10), (6, 3)).capacity == 40
    # Six tokens lie in up to three blocks; with two, only what fits in them for good.
    assert manager((None, 10), (6, 2)).capacity == 8


def test_lookups_are_counted() -> None:
    kv = manager((None, 10))
    kv.count_lookup(10, 8)
    kv.count_lookup(5, 0)
    assert (kv.prefix_queries, kv.prefix_hits) == (15, 8)
