"""Searches in the scheduler: one right answer each, whatever runs, waits, fails or is ended."""

from __future__ import annotations

import random
from typing import Any

import pytest
from control_plane_harness import VOCAB, Driver, expected, identity, log_share

from headrace.base.errors import ContextOverflow
from headrace.base.items import ItemCatalogue, RetrievalWish
from headrace.base.outputs import FoundItems
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import GroupShape, PoolShape
from headrace.sched import Limits

LEVELS = 3


def catalogue_of(items: int, seed: int = 0) -> ItemCatalogue:
    rng, paths = random.Random(seed), set[tuple[int, ...]]()
    while len(paths) < items:
        paths.add(tuple(rng.randrange(8) + 9 * level for level in range(LEVELS)))
    return ItemCatalogue([(path, f"item {path}") for path in sorted(paths)])


def driver_of(seed: int, *, blocks: int, windows: bool = False, **limits: int) -> Driver:
    bounds = {"rows": 5, "step_tokens": 24, "max_context": 64, "max_waiting": 64, **limits}
    groups = [GroupShape("full", (0,), None, blocks)]
    if windows:
        groups.append(GroupShape("sliding", (1,), 9, blocks))
    made = Limits(**bounds, catalogue=catalogue_of(60, seed))  # type: ignore[arg-type]
    return Driver(made, PoolShape(4, tuple(groups)), seed=seed)


def search(name: str, prompt: list[int], items: int, beams: int, salt: str = "") -> Request:
    wish = RetrievalWish(items, beams)
    spec = RequestSpec(SamplingParams(max_tokens=1), seed=1, task="items", retrieval=wish)
    return Request(name, prompt, spec, cache_salt=salt)


def found(catalogue: ItemCatalogue, request: Request) -> FoundItems:
    """The answer, by every path's tokens from the start."""
    wish = request.spec.retrieval
    assert wish is not None
    start: object = (request.cache_salt, None)
    for place, token in enumerate(request.prompt):
        start = identity(start, token, request.spec, place)
    paths = [tuple(catalogue.path(item)) for item in range(len(catalogue))]
    kept: list[tuple[tuple[int, ...], Any, float]] = [((), start, 0.0)]
    for depth in range(LEVELS):
        after = [
            (-(score + log_share(at, token)), place, token)
            for place, (path, at, score) in enumerate(kept)
            for token in sorted({p[depth] for p in paths if p[:depth] == path})
        ]
        after.sort()
        kept = [
            (
                (*kept[place][0], token),
                identity(kept[place][1], token, request.spec, len(request.prompt) + depth),
                -score,
            )
            for score, place, token in after[: wish.beams]
        ]
    best = kept[: wish.items]
    return FoundItems([paths.index(path) for path, _, _ in best], [score for *_, score in best])


def prompts(rng: random.Random) -> list[int]:
    """Many share a beginning."""
    shared = [random.Random(rng.randrange(2)).randrange(VOCAB) for _ in range(rng.randrange(30))]
    return [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12)))]


@pytest.mark.parametrize("seed", range(24))
def test_every_search_has_its_answer(seed: int) -> None:
    rng = random.Random(seed)
    shape = {"depth": 1 + seed % 2, "rows": rng.choice([1, 3, 8]), "drafts": 2 * (seed % 3 == 2)}
    blocks = rng.choice([18, 40, 200])
    driver = driver_of(seed, blocks=blocks, windows=seed % 4 == 3, **shape)
    catalogue = driver.scheduler.limits.catalogue
    assert catalogue is not None
    asked, aborted = list[Request](), set[str]()
    for number in range(20):
        salt = rng.choice(["", "other"])
        if rng.random() < 0.6:
            beams = rng.choice([1, 2, 7, 64, 512])
            request = search(f"s{number}", prompts(rng), rng.randint(1, beams), beams, salt)
        else:
            spec = RequestSpec(SamplingParams(max_tokens=9, temperature=0.0), seed=1, stop_ids=(7,))
            request = Request(f"t{number}", prompts(rng), spec, cache_salt=salt)
        asked.append(request)
        driver.add(request)
        for _ in range(rng.randrange(6)):
            driver.step(fails=seed % 3 == 1 and rng.random() < 0.05)
        if rng.random() < 0.15:
            name = rng.choice(asked).id
            if (name, 0) not in driver.finish:
                aborted.add(name)
                driver.abort(name)
        if rng.random() < 0.1:
            driver.scheduler.reset()
    driver.run()
    whole = 0
    for request in asked:
        end = driver.finish[request.id, 0]
        if request.id in aborted:
            assert end.finish == "abort"
        elif end.finish == "error":
            assert end.error == "the step failed"
        elif request.spec.retrieval is not None:
            whole += 1
            assert end.output == found(catalogue, request)
        else:
            tokens, finish = expected(request, 0, driver.scheduler.max_context)
            assert (driver.out[request.id, 0], end.finish) == (tokens, finish)
    assert whole > 2


def test_a_level_computes_one_token_a_beam() -> None:
    driver = driver_of(0, blocks=400, rows=4, step_tokens=64)
    prompt = [3] * 21
    driver.add(search("one", prompt, 1, 64))
    driver.run()
    catalogue = driver.scheduler.limits.catalogue
    assert catalogue is not None
    nodes = [len({tuple(catalogue.path(item)[:d]) for item in range(60)}) for d in (1, 2)]
    assert sum(plan.tokens for plan in driver.plans) == len(prompt) + sum(nodes)
    assert max(len(plan.rows) for plan in driver.plans) == 4


def test_few_beams_wait_at_a_time() -> None:
    """The queue holds no more of a search than may run, and its head start is for life."""
    driver = driver_of(1, blocks=400, rows=2)
    driver.add(search("one", [3] * 21, 1, 512))
    driver.add(search("two", [4] * 21, 1, 512))
    while driver.scheduler.has_work:
        driver.step()
        assert driver.scheduler.waiting <= 4
    ends = [delta.request_id for delta in driver.deltas if delta.finish is not None]
    assert ends == ["one", "two"]


def test_a_failed_step_ends_a_search_once() -> None:
    driver = driver_of(2, blocks=400, rows=4)
    driver.add(search("one", [3] * 9, 1, 64))
    driver.step()
    driver.step(fails=True)
    driver.run()
    assert [delta.finish for delta in driver.deltas] == ["error"]


def test_a_prompt_without_room_for_an_item() -> None:
    driver = driver_of(3, blocks=400)
    driver.add(search("fits", [1] * 61, 2, 2))
    with pytest.raises(ContextOverflow, match="62 tokens and an item 3"):
        driver.add(search("one", [1] * 62, 2, 2))
    driver.run()
    assert driver.finish["fits", 0].output is not None
