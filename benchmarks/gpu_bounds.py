"""Inner loops whose bounds the compiler took out of the loop around them.

Where an outer loop carries an integer from turn to turn and an inner loop begins with it, Triton
(3.6.0 and 3.7.1) has taken the integer's first value for all of them on its way from TTIR to TTGIR:
every turn then does the first one's work. The interpreter does as the source says, so nothing but
the compiler's own text shows it. An inner loop may be bounded by a carried number in TTIR only if
the same bound in TTGIR still depends on something that changes from turn to turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = r"%[\w$.-]+(?:#\d+)?"
_NAMES = re.compile(_NAME)
_FOR = re.compile(
    rf"scf\.for (?:unsigned )?(?P<variable>{_NAME}) = (?P<low>{_NAME}) to (?P<high>{_NAME}) "
    rf"step (?P<step>{_NAME})(?: iter_args\((?P<carried>[^)]*)\))?"
)
_RESULT = re.compile(r"^(%[\w$.-]+)(?::(\d+))? = ")
_PLACE = re.compile(r"\s*loc\(#?\w+\)$")
_PARTS = ("begin", "end", "step")
CHANGING = ("tt.load", "tt.atomic", "tt.experimental", "tt.descriptor", "ttg.local_load")
"""What may give another number each time that it is asked."""


@dataclass(slots=True, eq=False)
class Value:
    """A number of the program."""

    sources: list[Value] = field(default_factory=list)
    loop: Loop | None = None
    """Innermost loop that it is made in, or whose variable or carried number it is."""
    varies: bool = False
    """Does it change from turn to turn of that loop by itself?"""


@dataclass(slots=True, eq=False)
class Loop:
    around: Loop | None
    bounds: tuple[Value, Value, Value]
    carried: list[Value]
    results: list[Value]


@dataclass(slots=True)
class _Region:
    names: dict[str, Value]
    loop: Loop | None
    results: list[Value]
    """What a yield of this region gives."""


def lost_bounds(ttir: str, ttgir: str) -> list[str]:
    """Bounds that depend on what a loop around carries, by `ttir`, and by `ttgir` on nothing that
    changes in it."""
    before, after = list(_pairs(ttir)), list(_pairs(ttgir))
    asked = [
        {part for part in range(3) if _reaches(inner.bounds[part], set(outer.carried))}
        for inner, outer in before
    ]
    if not any(asked):
        return []
    if len(before) != len(after):
        return [f"{len(before)} loops in loops became {len(after)}: their bounds cannot be told"]
    return [
        f"loop {number}: its {_PARTS[part]} depends no more on the loop around it"
        for number, (parts, (inner, outer)) in enumerate(zip(asked, after, strict=True))
        for part in sorted(parts)
        if not _changes(inner.bounds[part], outer)
    ]


def _pairs(text: str) -> Iterator[tuple[Loop, Loop]]:
    """Every loop with each of those around it."""
    for inner in read_loops(text):
        outer = inner.around
        while outer is not None:
            yield inner, outer
            outer = outer.around


def read_loops(text: str) -> list[Loop]:
    """The `scf.for` of a module in MLIR's text, in their order."""
    loops: list[Loop] = []
    regions = [_Region({}, None, [])]

    def find(name: str) -> Value:
        for region in reversed(regions):
            if name in region.names:
                return region.names[name]
            if (first := region.names.get(name.partition("#")[0])) is not None:
                return first
        return Value()  # An argument of the kernel.

    for line in text.splitlines():
        line = _PLACE.sub("", line.strip())
        if line.startswith("}"):
            closed = regions.pop()
            if line.endswith("{"):  # else
                regions.append(_Region({}, regions[-1].loop, closed.results))
            continue
        opens, here = line.endswith(("{", "({")), regions[-1]
        given = _RESULT.match(line)
        count = int(given[2] or 1) if given else 0
        body = line[given.end() :] if given else line
        made = _FOR.match(body)
        if made:
            pairs = _NAMES.findall(made["carried"] or "")
            carried = [Value([find(first)]) for first in pairs[1::2]]
            variable = Value(varies=True)
            bounds = (find(made["low"]), find(made["high"]), find(made["step"]))
            loop = Loop(here.loop, bounds, carried, [Value([each, *bounds]) for each in carried])
            for value in (variable, *carried):
                value.loop = loop
            results = loop.results
        elif body.startswith("scf.yield"):
            for number, name in enumerate(_NAMES.findall(body.partition(" : ")[0])):
                if number < len(here.results):
                    here.results[number].sources.append(find(name))
                if here.loop is not None and here.results is here.loop.results:
                    _carry(here.loop.carried[number], find(name))
            continue
        else:
            sources = [find(name) for name in _NAMES.findall(body)]
            varies = body.lstrip('"').startswith(CHANGING)
            results = [Value(list(sources), here.loop, varies) for _ in range(count)]
        if given:
            here.names |= {f"{given[1]}#{n}": value for n, value in enumerate(results)}
            here.names |= {given[1]: results[0]} if count == 1 else {}
        if opens and made:
            names = dict(zip([made["variable"], *pairs[::2]], [variable, *carried], strict=True))
            regions.append(_Region(names, loop, results))
            loops.append(loop)
        elif opens:
            regions.append(_Region({}, here.loop, results))
    return loops


def _carry(value: Value, following: Value) -> None:
    """What a loop carries is `following` in the next turn; the same number does not vary."""
    value.sources.append(following)
    value.varies = following is not value


def _reaches(value: Value, wanted: set[Value]) -> bool:
    """Is it made of one of these that varies?"""
    return any(each in wanted and each.varies for each in _closure(value))


def _changes(value: Value, outer: Loop) -> bool:
    """Is it made of something that varies inside `outer`?"""
    return any(each.varies and _within(each.loop, outer) for each in _closure(value))


def _closure(value: Value) -> set[Value]:
    found, ways = {value}, [value]
    while ways:
        for source in ways.pop().sources:
            if source not in found:
                found.add(source)
                ways.append(source)
    return found


def _within(loop: Loop | None, outer: Loop) -> bool:
    while loop is not None and loop is not outer:
        loop = loop.around
    return loop is outer
