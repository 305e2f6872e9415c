"""Checkpoints of states: where steps make them, who finds them, and that all are given back."""

from __future__ import annotations

import pytest

from headrace.base.step import BlockCopy, GroupShape, PoolShape, StateKeep, StepPlan
from headrace.kv import BlockTable, KvManager, PrefixChain

SIZE = 4
KV, STATE = 0, 1
"""Groups: layers that attend to everything, layers with a state."""


def manager(states: int = 8) -> KvManager:
    full = GroupShape("full", (0,), None, 40)
    return KvManager(
        PoolShape(SIZE, (full, GroupShape("state", (1,), None, states + 1, state=True)))
    )


def opened(kv: KvManager, tokens: list[int]) -> BlockTable:
    return kv.open(len(tokens), PrefixChain(b"root", SIZE, tokens), read=True)


def computed(kv: KvManager, tokens: list[int], step: int) -> tuple[BlockTable, StepPlan]:
    """A table and the step that computes all of its tokens, planned as the scheduler does."""
    table = opened(kv, tokens)
    start = kv.cached(table)
    plan = StepPlan(step, [0], [start], [len(tokens) - start], [True])
    assert kv.grow(table, 0, start, len(tokens), []) >= len(tokens)
    kv.writes(table, 0, plan)
    kv.enter(table, len(tokens), step)
    kv.keep(table, 0, start, plan)
    kv.check_integrity()
    return table, plan


def done(kv: KvManager, table: BlockTable, step: int) -> None:
    kv.settle(step)
    kv.close(table)
    kv.check_integrity()


def found(kv: KvManager, tokens: list[int]) -> int:
    table = opened(kv, tokens)
    hit = kv.cached(table)
    kv.close(table)
    kv.check_integrity()
    return hit


def test_the_last_block_boundary_of_a_prompt_is_found_once_its_step_succeeded() -> None:
    kv, tokens = manager(), list(range(10))
    first, plan = computed(kv, tokens, 1)
    (kept,) = plan.keeps
    assert kept == StateKeep(0, 8, kept.block)
    assert kept.block != first.blocks[STATE][0]
    assert not plan.copies
    assert found(kv, tokens) == 0, "its step may fail"
    done(kv, first, 1)
    assert found(kv, tokens) == 8
    assert found(kv, [*tokens, 50, 51, 52]) == 8
    assert found(kv, tokens[:8]) == 0, "its last token is to be computed from a state before it"
    second, plan = computed(kv, tokens, 2)
    assert second.blocks[KV][:2] == [1, 2]
    assert plan.starts == [8]
    assert plan.copies == [BlockCopy(STATE, kept.block, second.blocks[STATE][0])]
    assert not plan.keeps, "this one is there"
    done(kv, second, 2)
    assert kv.usage == 0


def test_where_another_text_parted_is_a_checkpoint_too() -> None:
    kv = manager()
    first, plan = computed(kv, list(range(14)), 1)
    (last,) = plan.keeps
    done(kv, first, 1)
    parted = [*range(8), *range(50, 56)]
    second, plan = computed(kv, parted, 2)
    assert plan.starts == [0], "KV is there, but no state"
    assert [keep.at for keep in plan.keeps] == [8, 12]
    middle, _ = plan.keeps
    done(kv, second, 2)
    third, plan = computed(kv, [*range(8), *range(70, 73)], 3)
    assert plan.starts == [8]
    assert plan.copies == [BlockCopy(STATE, middle.block, third.blocks[STATE][0])]
    done(kv, third, 3)
    fourth, plan = computed(kv, [*range(14), 99], 4)
    assert plan.starts == [12]
    assert plan.copies == [BlockCopy(STATE, last.block, fourth.blocks[STATE][0])]
    done(kv, fourth, 4)


def test_a_checkpoint_waits_for_the_chunk_that_reaches_it() -> None:
    kv, tokens = manager(), list(range(10))
    table = opened(kv, tokens)
    kv.grow(table, 0, 0, 10, [])
    seen = []
    for start, count in ((0, 7), (7, 1), (8, 2)):
        plan = StepPlan(start, [0], [start], [count], [False])
        kv.keep(table, 0, start, plan)
        seen.append([keep.at for keep in plan.keeps])
    assert seen == [[], [8], []]
    done(kv, table, 7)


@pytest.mark.parametrize("how", ["forget", "reset"])
def test_a_checkpoint_of_a_failed_step_is_given_back(how: str) -> None:
    kv, tokens = manager(), list(range(10))
    free = kv.free
    table, plan = computed(kv, tokens, 5)
    assert plan.keeps
    kv.forget(5) if how == "forget" else kv.reset()
    kv.settle(5)
    kv.close(table)
    kv.check_integrity()
    assert kv.free == free
    assert found(kv, tokens) == 0


def test_running_sequences_come_before_checkpoints() -> None:
    kv = manager(states=2)
    tables = []
    for step, begin in enumerate((0, 100)):
        table, plan = computed(kv, list(range(begin, begin + 10)), step)
        tables.append(table)
        kv.settle(step)
        assert len(plan.keeps) == (0 if step else 1)
    assert found(kv, list(range(10))) == 0, "the second sequence took the place of the checkpoint"
    third = opened(kv, list(range(200, 210)))
    assert kv.grow(third, 0, 0, 10, []) == 0, "no state is free"
    assert not kv.has_room(10, 10, 0, 0.0)
    for table in (*tables, third):
        kv.close(table)
    kv.check_integrity()
