"""Steps between the runs of PP-OCR: areas, rectangles, crops and texts against plain
computations."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.programs.ocr import boxes, pixels, steps

Array = np.ndarray[Any, Any]


def flooded(mask: Array) -> set[frozenset[tuple[int, int]]]:
    """The connected areas, by a walk from pixel to pixel."""
    left = set(zip(*map(np.ndarray.tolist, np.nonzero(mask)), strict=True))
    found = set()
    while left:
        todo, area = deque([left.pop()]), set[tuple[int, int]]()
        while todo:
            y, x = todo.popleft()
            area.add((y, x))
            near = {(y + b, x + a) for a in (-1, 0, 1) for b in (-1, 0, 1)} & left
            left -= near
            todo += near
        found.add(frozenset(area))
    return found


def ends(area: frozenset[tuple[int, int]]) -> frozenset[tuple[float, float]]:
    """Both ends of each row, as `cores` has them."""
    rows = {y for y, _ in area}
    return frozenset(
        (float(pick(x for row, x in area if row == y)), float(y))
        for y in rows
        for pick in (min, max)
    )


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 24), st.floats(0.05, 0.95))
def test_areas_are_those_of_a_walk(seed: int, height: int, width: int, share: float) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < share
    found = {frozenset(map(tuple, one.tolist())) for one in boxes.cores(mask)}
    assert found == {ends(area) for area in flooded(mask)}


def test_areas_of_combs_and_spirals() -> None:
    """Areas whose rows are joined late, many times over."""
    comb = np.zeros((60, 60), bool)
    comb[:, ::2] = True
    comb[-1] = True
    assert len(list(boxes.cores(comb))) == 1
    spiral = np.zeros((41, 41), bool)
    for ring in range(0, 20, 4):
        spiral[ring : 41 - ring, ring] = spiral[ring, ring : 41 - ring] = True
        spiral[ring : 41 - ring, 40 - ring] = True
        spiral[40 - ring, ring + 2 : 41 - ring] = True
    assert len(list(boxes.cores(spiral))) == len(flooded(spiral))


@pytest.mark.parametrize("size", [40, 80])
def test_areas_are_joined_in_few_rounds(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Rows of teeth on lines that only a spine joins: each line has many neighbours."""
    rounds, merged = list[int](), boxes._merged

    def noted(parent: Array, low: Array, high: Array) -> Array:
        rounds.append(len(low))
        return merged(parent, low, high)

    monkeypatch.setattr(boxes, "_merged", noted)
    comb = np.zeros((size, size), bool)
    for row in range(0, size - 4, 5):
        comb[row : row + 2, 0 : size - 4 : 4] = comb[row + 2] = True
    teeth = comb.copy()
    comb[:, -1] = True
    for mask in (comb, teeth, comb[::-1], comb[:, ::-1], teeth[::-1], comb.T):
        rounds.clear()
        found = {frozenset(map(tuple, one.tolist())) for one in boxes.cores(mask)}
        assert found == {ends(area) for area in flooded(mask)}
        assert len(rounds) <= np.log2(size) + 1


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_no_angle_has_a_smaller_rectangle(seed: int, count: int) -> None:
    points = np.random.default_rng(seed).integers(0, 50, (count, 2)).astype(float)
    corners, side = boxes.smallest_rectangle(points)
    sides = np.linalg.norm(corners - np.roll(corners, -1, 0), axis=1)
    assert sides[0] == pytest.approx(sides[2], abs=1e-6)
    assert min(sides[:2]) == pytest.approx(side, abs=1e-6)
    for angle in np.linspace(0, np.pi / 2, 46):
        axes = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        extent = np.ptp(points @ axes.T, axis=0)
        assert sides[0] * sides[1] <= extent.prod() + 1e-6
    around = points - corners[0]
    for axis, length in zip(
        (corners[1] - corners[0], corners[3] - corners[0]), sides[[0, 3]], strict=True
    ):
        if length > 1e-6:
            along = around @ axis / length
            assert along.min() >= -1e-6
            assert along.max() <= length + 1e-6


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 60))
def test_a_hull_is_that_of_all_points(seed: int, count: int, size: int) -> None:
    points = np.random.default_rng(seed).integers(0, size, (count, 2)).astype(float)
    found = boxes.convex_hull(points)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "PASSES", 0)
        assert np.array_equal(found, boxes.convex_hull(points))


def test_few_points_of_an_area_are_walked() -> None:
    y, x = np.mgrid[:400, :400]
    for mask in (x < 20, abs(x - y) < 9, (x - 200) ** 2 + (y - 200) ** 2 < 150**2):
        (points,) = boxes.cores(mask)
        ordered = np.unique(points, axis=0)
        for way in (ordered, ordered[::-1]):
            assert len(boxes._outer(way)) < len(points) / 2 + 2


@given(st.integers(0, 2**32))
def test_a_mean_is_over_the_pixels_within(seed: int) -> None:
    draw = np.random.default_rng(seed)
    odds = draw.random((30, 40)).astype(np.float32)
    sums = np.pad(np.cumsum(odds, 1, dtype=float), ((0, 0), (1, 0)))
    x0, x1 = np.sort(draw.integers(0, 40, 2))
    y0, y1 = np.sort(draw.integers(0, 30, 2))
    upright = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], float)
    expected = odds[y0 : y1 + 1, x0 : x1 + 1].mean()
    assert boxes.mean_within(sums, upright) == pytest.approx(expected, rel=1e-5)
    tilted, _ = boxes.smallest_rectangle(draw.integers(0, 30, (6, 2)).astype(float))
    assert (
        odds.min() <= boxes.mean_within(sums, tilted) + 1e-6 or boxes.mean_within(sums, tilted) == 0
    )


def map_of(*lines: tuple[int, int, int, int]) -> Array:
    """A detector's map with these cores (left, top, right, bottom)."""
    made = np.zeros((128, 256), np.float32)
    for left, top, right, bottom in lines:
        made[top:bottom, left:right] = 0.9
    return made


def test_boxes_are_grown_and_in_reading_order() -> None:
    found = boxes.text_boxes(
        map_of((150, 24, 240, 34), (10, 20, 100, 30), (10, 80, 200, 90)), 512, 256
    )
    assert [box[0].tolist() for box in found] == [
        pytest.approx(one, abs=4) for one in ([6, 26], [286, 34], [6, 146])
    ]
    for box in found:
        assert box[3][1] - box[0][1] > 2 * 10, "a core is grown"
    assert boxes.text_boxes(map_of(), 512, 256) == []
    assert boxes.text_boxes(map_of((10, 20, 12, 21)), 512, 256) == []
    assert boxes.text_boxes(np.full((64, 64), np.nan, np.float32), 64, 64) == []


def test_a_map_without_end_of_areas_is_bounded() -> None:
    odds = np.zeros((300, 300), np.float32)
    odds[::4, ::4] = 1
    assert len(list(boxes.cores(odds > 0))) == boxes.MOST_BOXES
    nested = np.zeros((400, 400), np.float32)
    for at in range(0, 396, 4):
        nested[at, at:] = nested[at:, at] = nested[at + 1, at:] = nested[at:, at + 1] = 1
    page = steps.Page.of(np.zeros((1600, 1600, 3), np.uint8), 1600, 1600)
    with pytest.raises(InvalidRequest, match=r"lines overlap: .* at most 16,000,000 are read"):
        page.boxes(nested)


def test_a_crop_of_an_upright_box_is_the_picture() -> None:
    picture = np.random.default_rng(1).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    box = np.array([[5, 7], [45, 7], [45, 27], [5, 27]], np.float32)
    found = pixels.crop(picture, box)
    assert found is not None
    assert np.array_equal(found, picture[7:27, 5:45])
    beyond = pixels.crop(picture, box + np.float32([30, 25]))
    assert beyond is not None
    assert beyond.shape == (20, 40, 3)
    assert np.array_equal(beyond[:8, :25], picture[32:, 35:])
    line = np.array([[0, 0], [10, 0], [20, 0], [30, 0]], np.float32)
    assert pixels.crop(picture, line) is None
    assert pixels.crop(picture, np.zeros((4, 2), np.float32)) is None


def test_a_tilted_crop_is_upright() -> None:
    """A ramp along a tilted box rises along the crop."""
    y, x = np.mgrid[:80, :120]
    angle = np.radians(20)
    ramp = np.cos(angle) * x + np.sin(angle) * y
    picture = np.repeat(ramp[..., None], 3, 2).astype(np.uint8)
    along, down = (
        np.array([np.cos(angle), np.sin(angle)]),
        np.array([-np.sin(angle), np.cos(angle)]),
    )
    corner = np.array([30.0, 15.0])
    box = np.array(
        [corner, corner + 60 * along, corner + 60 * along + 20 * down, corner + 20 * down]
    )
    found = pixels.crop(picture, box.astype(np.float32))
    assert found is not None
    wanted = corner @ along + np.arange(found.shape[1])
    assert np.abs(found[..., 0] - wanted).max() < 1.5


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 40), st.integers(1, 40))
def test_resampling_keeps_a_ramp(height: int, width: int, rows: int, columns: int) -> None:
    ramp = (10 * np.arange(width) + 3 * np.arange(height)[:, None])[..., None].repeat(3, 2)
    found = pixels.resized(ramp.astype(np.uint8), columns, rows)
    x = np.clip((np.arange(columns) + 0.5) * width / columns - 0.5, 0, width - 1)
    y = np.clip((np.arange(rows) + 0.5) * height / rows - 0.5, 0, height - 1)
    wanted = 10 * x + 3 * y[:, None]
    assert np.abs(found[..., 0] - wanted).max() <= 0.51


@settings(max_examples=30)
@given(st.integers(1, 2000), st.integers(1, 2000))
def test_the_detectors_input_is_bounded(width: int, height: int) -> None:
    picture = np.broadcast_to(np.uint8(0), (height, width, 3))
    if max(width, height) > 100 * min(width, height):
        with pytest.raises(InvalidRequest, match="at most 100 times"):
            steps.Page.of(picture, width, height)
        return
    columns, rows = steps.Page.of(picture, width, height).detected
    assert rows % 32 == columns % 32 == 0
    assert min(rows, columns) >= 704
    assert rows * columns <= 4_200_000


def test_numbers_of_the_inputs() -> None:
    line = np.zeros((24, 50, 3), np.uint8)
    line[..., 0] = 255
    asked = steps.for_reader(line)
    assert asked.shape == (1, 3, 48, 320)
    assert asked[0, :, 0, 0].tolist() == [-1, -1, 1], "blue comes first"
    assert asked[0, :, :, 100:].tolist() == np.zeros((3, 48, 220)).tolist()
    assert steps.for_classifier(line).shape == (1, 3, 48, 192)
    wide = np.array([[0, 0], [400, 0], [400, 20], [0, 20]], np.float32)
    assert steps.reader_width(wide) == 960
    assert steps.reader_width(wide[:, ::-1]) == 960, "one that runs downwards is turned"
    assert steps.upside_down(np.array([0.05, 0.95], np.float32))
    assert not steps.upside_down(np.array([0.2, 0.8], np.float32))


def test_a_text_is_its_best_path() -> None:
    odds = np.full((7, 4), 0.1, np.float32)
    for at, best in enumerate((0, 1, 1, 0, 1, 2, 3)):
        odds[at, best] = 0.5 + at / 20
    text, score = steps.text_of(odds, ("", "a", "b", " "))
    assert text == "aab "
    assert score == pytest.approx(np.mean([0.55, 0.7, 0.75, 0.8]))
    assert steps.text_of(odds[:1], ("", "a", "b", " ")) == ("", 0.0)
