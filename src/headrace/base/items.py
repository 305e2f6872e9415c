"""The catalogue of items that a language model retrieves by their semantic ids (OneRec, 2025).

An item has a path: a fixed number of token ids, its semantic ids from coarse to fine. All paths
form a trie, kept as arrays: level d has a token for each node of depth d + 1, sorted within a
parent, and for each node of depth d the place of its first child. A leaf is an item, in the order
of paths. Needs neither torch nor numpy.

The file is in JSON lines, one item each: `{"item": "B07", "ids": [151700, "<b_12>", "<c_7>"]}`. An
id is a number, or a token of the model's vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .errors import OptionError, file_errors

MOST_ITEMS = 2**20
MOST_LEVELS = 8
MOST_BEAMS = 512
MOST_NAME = 256
"""Characters of an item's name."""
MOST_LINE = 16_384
"""Bytes of a line."""

Path_ = tuple[int, ...]
TokenIds = Callable[[str], int | None]


class RetrievalWish(NamedTuple):
    """Items that a request wants."""

    items: int
    """Largest number of items."""
    beams: int
    """Paths kept after each level."""


class BeamRow(NamedTuple):
    """A beam in a worker's row, whose prompt ends with the beam's path."""

    search: int
    """Number that the beams of a search share."""
    place: int
    """Its place among the beams of its level, the best first."""
    score: float
    """Log-probability of its path."""
    most: int
    """Continuations that the search keeps."""
    legal: bytes
    """int32 of this machine's byte order: the ids that may follow, ascending."""


class ItemCatalogue:
    """Items by path and by name."""

    def __init__(self, items: Sequence[tuple[Path_, str]]) -> None:
        """`items`: (path, name), sorted, no path and no name twice, all paths of one length."""
        self.levels = len(items[0][0])
        self.names = [name for _, name in items]
        self.places = {name: place for place, name in enumerate(self.names)}
        """Place of each item, by name."""
        self._paths = array("i")
        self._tokens = [array("i") for _ in range(self.levels)]
        self._first = [array("i") for _ in range(self.levels)]
        digest = hashlib.sha256()
        before: Path_ = ()
        for path, name in items:
            digest.update(json.dumps([name, path]).encode())
            self._paths.extend(path)
            pairs = enumerate(zip(path, before, strict=False))
            same = next((depth for depth, (one, other) in pairs if one != other), 0)
            for depth in range(same, self.levels):
                if depth + 1 < self.levels:
                    self._first[depth + 1].append(len(self._tokens[depth + 1]))
                self._tokens[depth].append(path[depth])
            before = path
        self._first[0].append(0)
        for first, tokens in zip(self._first, self._tokens, strict=True):
            first.append(len(tokens))
        self.digest = digest.hexdigest()[:16]
        """16 hexadecimal digits that follow from items and paths, whatever their order."""

    def __len__(self) -> int:
        return len(self.names)

    def path(self, item: int) -> list[int]:
        """Return the semantic ids of an item."""
        return self._paths[item * self.levels : (item + 1) * self.levels].tolist()

    def after(self, depth: int, node: int) -> array[int]:
        """Return the tokens that continue a node, ascending; the root is node 0 of depth 0."""
        return self._tokens[depth][self._first[depth][node] : self._first[depth][node + 1]]

    def child(self, depth: int, node: int, token: int) -> int:
        """Return the node below a node that one of its tokens leads to; below the last level, the
        item."""
        low, high = self._first[depth][node], self._first[depth][node + 1]
        return bisect_left(self._tokens[depth], token, low, high)


def read_catalogue(path: Path, vocabulary: int, token_id: TokenIds) -> ItemCatalogue:
    """Read and check a catalogue. `vocabulary`: ids are below this; `token_id`: id of a token, or
    None.

    Raises `OptionError` naming the line: no JSON, an item or a path that was there before, another
    number of ids, an id or a token that the model does not have, too many items.
    """
    items: dict[Path_, str] = {}
    names: dict[str, int] = {}
    with file_errors(OptionError, "cannot read the catalogue", "items"), path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if not line.strip():
                continue
            name, ids = _item(line, number, vocabulary, token_id)
            if len(items) == MOST_ITEMS:
                raise _wrong(number, f"there are more than {MOST_ITEMS:,} items")
            if name in names:
                raise _wrong(number, f"item {name!r:.100} is in line {names[name]} already")
            if ids in items:
                raise _wrong(number, f"items {items[ids]!r:.100} and {name!r:.100} have equal ids")
            if (first := next(iter(items), ids)) and len(first) != len(ids):
                raise _wrong(number, f"{name!r:.100} has {len(ids)} ids, others {len(first)}")
            items[ids], names[name] = name, number
    if not items:
        raise OptionError(f"the catalogue {path} has no items", param="items")
    return ItemCatalogue(sorted(items.items()))


def _item(line: bytes, number: int, vocabulary: int, token_id: TokenIds) -> tuple[str, Path_]:
    """Return the name and the path of a line."""
    if len(line) > MOST_LINE:
        raise _wrong(number, f"a line has at most {MOST_LINE:,} bytes")
    try:
        read: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise _wrong(number, "it is not JSON") from None
    if not isinstance(read, dict) or read.keys() != {"item", "ids"}:
        raise _wrong(number, 'it must be {"item": NAME, "ids": [ID, ...]}')
    name, ids = read["item"], read["ids"]
    if not isinstance(name, str) or not 1 <= len(name) <= MOST_NAME:
        raise _wrong(number, f"item must be a text of 1 to {MOST_NAME} characters")
    if not isinstance(ids, list) or not 1 <= len(ids) <= MOST_LEVELS:
        raise _wrong(number, f"ids must be a list of 1 to {MOST_LEVELS}")
    path = []
    for given in ids:
        found = token_id(given) if isinstance(given, str) else given
        if type(found) is not int or not 0 <= found < vocabulary:
            what = "a token" if isinstance(given, str) else f"an id from 0 to {vocabulary - 1}"
            raise _wrong(number, f"{given!r:.60} is not {what} of the model")
        path.append(found)
    return name, tuple(path)


def _wrong(line: int, why: str) -> OptionError:
    return OptionError(f"line {line} of the catalogue: {why}", param="items")
