"""Drawings that the eye for SmolLM2 is trained on: seeded, and they show what their values say."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")

from tiny.eye import ATTRIBUTES, COLOURS, HELD_OUT, SIDE, SIZES, draw


def test_a_seed_gives_the_same_drawing_and_none_of_those_held_out() -> None:
    one, again, other = draw(7), draw(7), draw(HELD_OUT + 7)
    assert one.values == again.values
    assert np.array_equal(one.pixels, again.pixels)
    assert one.pixels.shape == (SIDE, SIDE, 3)
    assert not np.array_equal(one.pixels, other.pixels)


def test_a_drawing_shows_its_values() -> None:
    """Pixels of the colour lie in the half that `place` names, and are more for more shapes; the
    digit's are in the other half."""
    areas: dict[tuple[int, int], list[int]] = {}
    seen = set()
    for seed in range(300):
        drawing = draw(seed)
        colour, shape, count, digit, place = drawing.values
        seen.add(digit)
        pixels = drawing.pixels.astype(int)
        near = np.abs(pixels - list(COLOURS.values())[colour]).max(2) < 60
        dark = pixels.max(2) < 90
        half = slice(0, SIDE // 2) if place in (0, 2) else slice(SIDE // 2, SIDE)
        where = (slice(None), half) if place < 2 else (half, slice(None))
        assert near[where].sum() > 0.7 * near.sum() > 0
        assert dark[where].sum() < 0.2 * dark.sum()
        areas.setdefault((shape, count), []).append(int(near.sum()))
    for shape in range(SIZES[1]):
        means = [np.mean(areas[shape, count]) for count in range(SIZES[2])]
        assert means == sorted(means)
    assert seen == set(range(10))
    assert list(ATTRIBUTES) == ["colour", "shape", "count", "digit", "place"]
