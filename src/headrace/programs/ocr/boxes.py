"""Boxes of text lines in a detector's map (differentiable binarisation, Liao et al. 2020).

The map has for each pixel the odds that it is in the core of a line. Connected pixels above a
threshold are a line; its box is the smallest rectangle around them, at any angle, grown by what
the core was shrunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Points = npt.NDArray[np.float64]
"""[n, 2]: x, y."""
Integers = npt.NDArray[np.int64]
IN_LINE, KEPT = 0.3, 0.5
"""Odds from which a pixel is in a line, and mean odds from which a box is kept."""
GROWN = 1.6
"""Factor of a box's area over its perimeter, by which it is grown on each side."""
ARC = 0.25
"""Pixels by which a round corner's points may be inside it."""
LEAST_CORE, LEAST_BOX, LEAST_SIDE = 3, 5, 4
"""Shorter side of a core and of a grown box in the map, and sides of a box in the picture."""
PASSES = 4
"""Passes over a chain of points that leave out those that are not of a convex hull."""
MOST_BOXES = 1000
"""Cores that are looked at, the largest first."""


def text_boxes(odds: Floats, width: int, height: int) -> list[Floats]:
    """Return the boxes of a map [h, w] in a picture of this size, as corners [4, 2] (x, y;
    clockwise from the upper left one), in reading order."""
    rows, columns = odds.shape
    sums = np.zeros((rows, columns + 1))
    np.cumsum(odds, axis=1, out=sums[:, 1:])
    found = []
    for points in cores(_thickened(odds > IN_LINE)):
        core, side = smallest_rectangle(points)
        if side < LEAST_CORE or not mean_within(sums, core) >= KEPT:  # NaN is not.
            continue
        wide, high = (float(np.linalg.norm(core[0] - core[at])) for at in (1, 3))
        distance = wide * high * GROWN / (2 * (wide + high))
        grown, side = smallest_rectangle(_grown(np.trunc(core), distance))
        if side < LEAST_BOX:
            continue
        scaled = np.rint(grown / (columns, rows) * (width, height))
        box = np.clip(_ordered(scaled), 0, (width - 1, height - 1)).astype(np.float32)
        if min(int(np.linalg.norm(box[0] - box[at])) for at in (1, 3)) >= LEAST_SIDE:
            found.append(box)
    return in_reading_order(found)


def _thickened(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Add to each pixel the ones right of it, below it and between."""
    found = mask.copy()
    found[1:] |= mask[:-1]
    found[:, 1:] |= found[:, :-1].copy()
    return found


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Pixels of a mask, as stretches of its rows."""

    row: Integers
    first: Integers
    last: Integers


def cores(mask: npt.NDArray[np.bool_]) -> Iterator[Points]:
    """Yield the connected areas of a mask, corners included, as the ends of their rows; of more
    than `MOST_BOXES` the largest."""
    found = _stretches(mask)
    if not len(found.row):
        return
    _, label = np.unique(_joined(found, mask.shape[1]), return_inverse=True)
    area = np.bincount(label, found.last - found.first + 1)
    order = np.argsort(label, kind="stable")
    begins = np.searchsorted(label[order], np.arange(len(area) + 1))
    for one in np.argsort(-area, kind="stable")[:MOST_BOXES]:
        mine = order[begins[one] : begins[one + 1]]
        row, first, last = found.row[mine], found.first[mine], found.last[mine]
        new = np.flatnonzero(np.diff(row, prepend=-1))
        left, right = np.minimum.reduceat(first, new), np.maximum.reduceat(last, new)
        ends = np.concatenate([left, right]), np.concatenate([row[new], row[new]])
        yield np.stack(ends, 1).astype(np.float64)


def _stretches(mask: npt.NDArray[np.bool_]) -> _Stretches:
    height, width = mask.shape
    padded = np.zeros((height, width + 2), bool)
    padded[:, 1:-1] = mask
    row, column = np.nonzero(padded[:, 1:] != padded[:, :-1])
    return _Stretches(row[0::2], column[0::2], column[1::2] - 1)


def _joined(found: _Stretches, width: int) -> Integers:
    """Return for each stretch a number that connected ones share."""
    one, other = _neighbours(found, width)
    parent = np.arange(len(found.row))
    while True:
        low, high = np.minimum(parent[one], parent[other]), np.maximum(parent[one], parent[other])
        apart = low != high
        if not apart.any():
            return parent
        one, other, low, high = one[apart], other[apart], low[apart], high[apart]
        parent = _merged(parent, low, high)


def _merged(parent: Integers, low: Integers, high: Integers) -> Integers:
    """Join each root with at least one of its neighbours; return the new root of each stretch.
    `low`, `high`: pairs of neighbouring roots, the smaller one first.

    Roots hang themselves on smaller ones. Those that neither hang nor bear another have only larger
    neighbours and hang themselves on one (Shiloach and Vishkin 1982): the roots of an area become
    half as many at least, so rounds are few whatever the mask.
    """
    parent = parent.copy()
    hangs, bears = (np.zeros(len(parent), bool) for _ in range(2))
    np.minimum.at(parent, high, low)
    hangs[high] = True
    bears[parent[high]] = True
    alone = ~(hangs[low] | bears[low])
    parent[low[alone]] = high[alone]
    while not np.array_equal(next_ := parent[parent], parent):
        parent = next_
    return parent


def _neighbours(found: _Stretches, width: int) -> tuple[Integers, Integers]:
    """Return the pairs of stretches that touch in two rows, also at a corner."""
    across = width + 2
    below = (found.row + 1) * across
    begin = np.searchsorted(found.row * across + found.last, below + found.first - 1, "left")
    end = np.searchsorted(found.row * across + found.first, below + found.last + 1, "right")
    count = np.maximum(end - begin, 0)
    one = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(one)) - np.repeat(np.cumsum(count) - count, count)
    return one, begin[one] + within


def _grown(corners: Points, distance: float) -> Points:
    """Return points of a quadrilateral's outline that was moved outwards, with round corners, at
    whole pixels: those of the Clipper library, so that boxes are those of the oracle."""
    edges = np.roll(corners, -1, 0) - corners
    lengths = np.maximum(np.linalg.norm(edges, axis=1, keepdims=True), 1e-9)
    after = np.stack([edges[:, 1], -edges[:, 0]], 1) / lengths
    found = []
    for corner, one, other in zip(corners, np.roll(after, 1, 0), after, strict=True):
        turn = np.arctan2(one[0] * other[1] - one[1] * other[0], one @ other)
        arc = np.pi / np.arccos(1 - min(1.0, ARC / max(distance, ARC))) / (2 * np.pi)
        steps = max(1, round(arc * abs(turn)))
        angles = np.arange(steps) / (2 * np.pi * arc) * np.sign(turn) if arc else np.zeros(1)
        cos, sin = np.cos(angles), np.sin(angles)
        normals = np.stack([one[0] * cos - one[1] * sin, one[0] * sin + one[1] * cos], 1)
        found.append(corner + distance * np.concatenate([normals, other[None]]))
    points: Points = np.concatenate(found)
    return np.trunc(points + np.copysign(0.5, points))


def smallest_rectangle(points: Points) -> tuple[Points, float]:
    """Return the corners [4, 2] of the smallest rectangle around points, and its shorter side. One
    of its sides is along one of the convex hull (Freeman and Shapira 1975)."""
    hull = convex_hull(points)
    edges = np.roll(hull, -1, 0) - hull
    lengths = np.linalg.norm(edges, axis=1)
    along = edges[lengths > 0] / lengths[lengths > 0, None]
    if not len(along):
        along = np.array([[1.0, 0.0]])
    normal = np.stack([-along[:, 1], along[:, 0]], 1)
    one, other = hull @ along.T, hull @ normal.T
    low = np.stack([one.min(0), other.min(0)], 1)
    high = np.stack([one.max(0), other.max(0)], 1)
    best = int(np.argmin(np.prod(high - low, 1)))
    axes = np.stack([along[best], normal[best]])
    (a, b), (c, d) = low[best], high[best]
    corners = np.array([[a, b], [c, b], [c, d], [a, d]]) @ axes
    return _ordered(corners), float((high - low)[best].min())


def convex_hull(points: Points) -> Points:
    """Return the corners of the convex hull, in order around it (Andrew 1979)."""
    ordered = np.unique(points, axis=0)
    if len(ordered) < 3:
        return ordered
    found: list[list[float]] = []
    for way in (ordered, ordered[::-1]):
        chain: list[list[float]] = []
        for x, y in _outer(way).tolist():
            while len(chain) > 1:
                (px, py), (qx, qy) = chain[-2:]
                if (qx - px) * (y - py) > (qy - py) * (x - px):
                    break
                chain.pop()
            chain.append([x, y])
        found += chain[:-1]
    return np.array(found)


def _outer(way: Points) -> Points:
    """Leave out points of a chain that are on the line of their neighbours or inside it, a few
    times over: a core has two points in each row, and most are."""
    for _ in range(PASSES):
        one, two = np.diff(way[:-1], axis=0), np.diff(way[1:], axis=0)
        kept = np.ones(len(way), bool)
        kept[1:-1] = one[:, 0] * two[:, 1] > one[:, 1] * two[:, 0]
        if kept.all():
            break
        way = way[kept]
    return way


def _ordered(corners: Points) -> Points:
    """Order corners clockwise from the upper left one: the two at the left, the upper one first."""
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    left, right = (pair[np.argsort(pair[:, 1], kind="stable")] for pair in (by_x[:2], by_x[2:]))
    return np.array([left[0], right[0], right[1], left[1]])


def mean_within(sums: Points, corners: Points) -> float:
    """Return the mean of a map within a convex quadrilateral, its edge included. `sums` [h, w + 1]:
    each row's sums from its begin."""
    corners = np.trunc(corners)
    rows, columns = sums.shape[0], sums.shape[1] - 1
    (x0, y0), (x1, y1) = (
        np.clip(most(0), 0, (columns - 1, rows - 1)) for most in (corners.min, corners.max)
    )
    y = np.arange(int(y0), int(y1) + 1)
    low, high = np.full(len(y), x0), np.full(len(y), x1)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
        dx, dy = bx - ax, by - ay
        # Half a pixel around the edge is on it.
        edge = dx * (y - ay) + 0.5 * max(abs(dx), abs(dy))
        if dy > 0:
            high = np.minimum(high, ax + edge / dy)
        elif dy < 0:
            low = np.maximum(low, ax + edge / dy)
    first, last = np.ceil(low).astype(int), np.floor(high).astype(int)
    kept = last >= first
    y, first, last = y[kept], first[kept], last[kept] + 1
    count = int((last - first).sum())
    return float((sums[y, last] - sums[y, first]).sum() / count) if count else 0.0


def in_reading_order(boxes: list[Floats]) -> list[Floats]:
    """Order boxes from top to bottom; those less than ten pixels apart from left to right."""
    # Numbers of Python: one of numpy is far slower, and there may be a million comparisons.
    found = sorted((float(box[0][1]), float(box[0][0]), at) for at, box in enumerate(boxes))
    for at in range(len(found) - 1):
        for place in range(at, -1, -1):
            above, below = found[place], found[place + 1]
            if not (abs(below[0] - above[0]) < 10 and below[1] < above[1]):
                break
            found[place], found[place + 1] = below, above
    return [boxes[at] for *_, at in found]
