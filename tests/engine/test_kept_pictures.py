"""Kept pictures: found by their owner alone, bounded, and given up for who lacks room."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import Overloaded, TooLarge
from headrace.dist.payloads import SealedInputs, read_payload
from headrace.engine.clients.kept_pictures import KeptPictures, PreparedPicture, PreparedTile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sealed memory is Linux's")
UNITS, WIDTH = 4, 12
LEVELS = np.arange(3 * 256, dtype=np.float32).reshape(3, 256)
ONE = 16 + LEVELS.nbytes + 3 * UNITS * WIDTH
"""Bytes of a picture of three tiles."""


def picture(seed: int) -> PreparedPicture:
    draw = np.random.default_rng(seed)
    tiles = draw.integers(0, 256, (3, UNITS, WIDTH), dtype=np.uint8)
    return PreparedPicture([PreparedTile(tile, tile.tobytes()[:8], 2, 0) for tile in tiles], 1, 2)


def name(owner: str, seed: int) -> tuple[str, bytes, bool]:
    return owner, bytes([seed]), False


def test_a_kept_picture_gives_the_pixels_of_each_tile() -> None:
    kept = KeptPictures(SealedInputs(), LEVELS)
    made = picture(1)
    held = kept.hold(name("a", 1), *made)
    assert kept.find(name("a", 1)) is held
    assert kept.find(name("b", 1)) is None, "another owner's"
    assert kept.find(("a", bytes([1]), True)) is None, "another size"
    assert (held.rows, held.columns, held.units) == (1, 2, UNITS)
    assert (held.each, held.length, held.grid) == (2, 6, 0)
    for number, tile in enumerate(made.tiles):
        assert held.digests[number] == tile.digest
        third = WIDTH // 3
        wanted = [LEVELS[at][tile.patches[:, at * third : (at + 1) * third]] for at in range(3)]
        assert np.array_equal(read_payload(held.source(number)), np.concatenate(wanted, 1))


def test_the_least_recently_used_go_first() -> None:
    payloads = SealedInputs()
    for kept in (
        KeptPictures(payloads, LEVELS, most=2 * ONE),
        KeptPictures(payloads, LEVELS, most_pictures=2),
    ):
        for seed in (1, 2):
            kept.hold(name("a", seed), *picture(seed))
        assert kept.find(name("a", 1))
        kept.hold(name("a", 3), *picture(3))
        assert [bool(kept.find(name("a", seed))) for seed in (1, 2, 3)] == [True, False, True]
        kept.hold(name("a", 3), *picture(3))
        assert (len(kept), kept.bytes, payloads.bytes) == (2, 2 * ONE, 2 * ONE)
        kept.clear()
        assert (len(kept), kept.bytes, payloads.bytes) == (0, 0, 0)


def test_one_that_is_larger_than_all_that_is_kept_is_not_kept() -> None:
    payloads = SealedInputs()
    kept = KeptPictures(payloads, LEVELS, most=ONE - 1)
    held = kept.hold(name("a", 1), *picture(1))
    assert (len(kept), payloads.bytes) == (0, ONE)
    del held
    assert payloads.bytes == 0


def test_kept_ones_go_where_a_request_lacks_room() -> None:
    payloads = SealedInputs(most=3 * ONE, most_of_one=2 * ONE)
    kept = KeptPictures(payloads, LEVELS)
    for owner, seed in (("b", 1), ("a", 2), ("a", 3), ("a", 4)):
        kept.hold(name(owner, seed), *picture(seed))
    assert kept.find(name("b", 1)), "the owner's own ones go first"
    assert not kept.find(name("a", 2))
    used = [kept.hold(name("a", seed), *picture(seed)) for seed in (5, 6)]
    with pytest.raises(Overloaded):
        kept.hold(name("a", 7), *picture(7))
    assert payloads.bytes == 2 * ONE, "those of requests in work stay"
    assert np.array_equal(read_payload(used[0].source(0)), read_payload(used[0].source(0)))
    with pytest.raises(TooLarge):
        KeptPictures(SealedInputs(most_of_one=ONE - 1), LEVELS).hold(name("a", 1), *picture(1))


def test_open_files_are_given_up_too() -> None:
    payloads = SealedInputs(most_open=4)
    kept = KeptPictures(payloads, LEVELS)
    for seed in range(5):
        kept.hold(name("a", seed), *picture(seed))
    assert len(kept) == 2
    before = len(list(Path("/proc/self/fd").iterdir()))
    for seed in range(5, 9):
        kept.hold(name("a", seed), *picture(seed))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
