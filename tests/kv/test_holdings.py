"""A router's knowledge of a pool equals the pool's index, after any history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import BlockWrite, GroupShape, PoolShape
from headrace.kv import BlockTable, KvManager

SIZE = 4


def manager(blocks: int, window: int | None = None) -> KvManager:
    windows = (window, None) if window else (None,)
    groups = tuple(GroupShape(f"g{n}", (n,), one, blocks) for n, one in enumerate(windows))
    return KvManager(PoolShape(SIZE, groups))


class Router:
    """A listener's knowledge, from the reports alone."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self.held: set[int] = set()
        self.blocks: dict[bytes, list[int]] = {}
        """Block → the tokens of its whole prefix."""
        kv.holdings.log_blocks()

    def listen(self) -> None:
        news = self._kv.holdings.take()
        if news is not None:
            held, gone, blocks = news
            assert not {*held} & {*gone}
            self.held = (self.held | {*held}) - {*gone}
            for key, tokens, parent in blocks:
                if not tokens:
                    del self.blocks[key]
                else:
                    assert key not in self.blocks
                    assert len(tokens) == SIZE
                    # Its parent may be behind a window, or have been given up before it.
                    before = [] if parent is None else self.blocks.get(parent, [-1])
                    self.blocks[key] = [*before, *tokens]


def prompt_of(family: int, length: int) -> list[int]:
    return [family * 1000 + n for n in range(length)]


def marks_of(family: int, length: int) -> tuple[tuple[int, int], ...]:
    return tuple((end, family * 1000 + end) for end in range(length, 0, -3))


def run(kv: KvManager, family: int, length: int, step: int) -> BlockTable | None:
    spec = RequestSpec(SamplingParams(), seed=0)
    tokens = prompt_of(family, length)
    chain = kv.chain(Request("r", tokens, spec, marks=marks_of(family, length)), tokens)
    table = kv.open(length, chain, read=True)
    writes: list[BlockWrite] = []
    if kv.grow(table, 0, 0, length, writes) < length:
        kv.close(table)
        return None
    kv.enter(table, length, step)
    return table


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("run", "close", "settle", "fail", "reset", "listen")),
            st.integers(0, 4),
            st.integers(1, 30),
        ),
        max_size=40,
    ),
    st.sampled_from((None, 6)),
)
def test_news_are_what_the_index_holds(
    history: list[tuple[str, int, int]], window: int | None
) -> None:
    kv = manager(20, window)
    router = Router(kv)
    tables: list[BlockTable] = []
    keys: dict[int, set[bytes]] = {}
    for step, (what, family, length) in enumerate(history):
        if what == "run" and len(tables) < 3:
            table = run(kv, family, length, step)
            if table is not None:
                tables.append(table)
                assert table.chain is not None
                for end, mark in marks_of(family, length):
                    if end <= length // SIZE * SIZE:
                        keys.setdefault(mark, set()).add(table.chain.keys[(end - 1) // SIZE])
        elif what == "close" and tables:
            kv.close(tables.pop(0))
        elif what == "settle":
            for number in [*kv.unsettled]:
                kv.settle(number)
        elif what == "fail":
            kv.forget(min(kv.unsettled, default=0))
        elif what == "reset":
            kv.reset()
        elif what == "listen":
            router.listen()
    router.listen()
    index = kv.pools[-1].index
    named = {one for one in index if one in router.blocks}
    assert named == router.blocks.keys(), "every block that is told is there"
    for table in tables:
        if table.chain is not None:
            for at, one in enumerate(table.chain.keys[: table.entered]):
                if one in index:
                    told = router.blocks[one]
                    assert told[-SIZE:] == table.chain.plain(at * SIZE, (at + 1) * SIZE)
                    assert told[0] == -1 or len(told) == (at + 1) * SIZE
    for mark in router.held:
        assert keys[mark] & index.keys(), "what is told is there"
    for table in tables:
        if table.chain is None:
            continue  # A reset: it leaves nothing behind.
        held = {mark for mark, names in keys.items() if names & {*table.chain.keys} & {*index}}
        assert held <= router.held, "what is there is told"
    kv.check_integrity()


def test_a_mark_goes_with_its_block_and_comes_back_with_it() -> None:
    kv = manager(6)
    router = Router(kv)
    for family in (1, 2, 1):
        table = run(kv, family, 16, family)
        assert table is not None
        kv.settle(family)
        kv.close(table)
        router.listen()
        assert {mark // 1000 for mark in router.held} >= {family}
        whole = {mark for _, mark in marks_of(family, 16)}
        assert whole <= router.held
