"""The weight of JSON is what a parser would make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base import weight
from headrace.base.errors import TooLarge
from headrace.base.weight import Weight, weigh


def counted(value: Any) -> tuple[int, int]:
    """(objects and lists, items of those, less one for each) of a parsed text."""
    if isinstance(value, dict):
        inner = [counted(item) for item in value.values()]
    elif isinstance(value, list):
        inner = [counted(item) for item in value]
    else:
        return 0, 0
    return 1 + sum(c for c, _ in inner), max(len(inner) - 1, 0) + sum(i for _, i in inner)


texts = st.text(st.sampled_from('a",[]{}:\\\n é水0')) | st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=60,
)


@settings(max_examples=120, deadline=None)
@given(values, st.booleans(), st.sampled_from([1, 2, 3, 7, 64, weight.PIECE]))
def test_everything_is_counted(value: Any, ascii: bool, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    before, weight.PIECE = weight.PIECE, piece
    try:
        exact = weight._exact(text)
        rough = Weight(*weight._counted(text))
    finally:
        weight.PIECE = before
    containers, commas = counted(value)
    assert exact.containers == containers
    assert exact.values + exact.numbers - exact.containers == commas
    assert rough.containers >= containers
    assert rough.values - rough.containers >= commas


def test_numbers_in_lists_count_apart() -> None:
    text = json.dumps({"prompt": list(range(9000)), "stop": ["a", "b", 1, True, None]}).encode()
    found = weigh(text)
    assert found.containers == 3
    assert 8900 < found.numbers <= 9001
    assert found.values < 120


def test_what_is_too_heavy_is_named() -> None:
    found = weigh(b"[" + b"[]," * 5000 + b"[]]")
    found.verify(Weight(6000, 20_000, 0), "it")
    with pytest.raises(TooLarge, match="it has more than 5000 objects and lists") as caught:
        found.verify(Weight(5000, 20_000, 0), "it", "field")
    assert caught.value.param == "field"
