"""Names of the beginnings of prompts: what two prompts share, their names share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.text_prefixes import GRAIN, NOTHING, secret_of, text_prefixes


def named(secret: bytes = b"", **members: Any) -> list[int]:
    return text_prefixes(json.dumps(members).encode(), secret).keys


@given(st.text(max_size=4000), st.text(max_size=2000), st.text(max_size=2000))
def test_prompts_share_as_many_names_as_whole_grains(same: str, one: str, two: str) -> None:
    texts = [json.dumps(same + rest) for rest in (one, two)]
    shared = next((n for n, pair in enumerate(zip(*texts, strict=False)) if len({*pair}) > 1), None)
    shared = min(map(len, texts)) if shared is None else shared
    first, second = (named(prompt=same + rest) for rest in (one, two))
    equal = [a == b for a, b in zip(first, second, strict=False)]
    assert equal == [(n + 1) * GRAIN <= shared for n in range(len(equal))]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "b"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function"}]},
        {"system": "be brief"},
        {"secret": b"Bearer k"},
    ],
    ids=lambda one: next(iter(one)),
)
def test_what_decides_over_the_cache_decides_over_the_names(other: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a river " * 200}]
    plain = named(model="a", messages=messages)
    assert len(plain) >= 3
    assert not {*plain} & {*named(**{"model": "a", "messages": messages, **other})}
    assert plain == named(model="a", messages=messages, temperature=0.5, seed=3), "nothing else"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 2000,
        b'{"prompt": "' + b"x" * 900,
        b"\xff" * 900,
        b"7" * 900,
        b'{"a":' * 99999,
    ],
)
def test_what_is_no_request_has_no_names(body: bytes) -> None:
    assert text_prefixes(body, b"") == NOTHING
    assert NOTHING.marks(5) == ()


@given(st.integers(1, 5000), st.integers(1, 200_000))
def test_marks_lie_within_the_prompt_and_the_shortest_is_last(tokens: int, size: int) -> None:
    found = text_prefixes(b'{"prompt": "%b"}' % (b"x" * size), b"")
    ends = [end for end, _ in found.marks(tokens)]
    assert ends == sorted(ends, reverse=True)
    assert all(1 <= end <= tokens for end in ends)
    assert [key for _, key in found.marks(tokens)] == found.keys[::-1]


def test_the_secret_is_the_header_that_a_server_reads() -> None:
    assert secret_of([(b"host", b"h"), (b"x-api-key", b"k")]) == b"k"
    assert secret_of([(b"authorization", b"Bearer a"), (b"x-api-key", b"k")]) == b"Bearer a"
    assert secret_of([]) == b""
