"""Token ids of large bodies: in arrays, as they were sent; what is wrong is told as ever."""

from __future__ import annotations

import json
from array import array
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import InvalidRequest
from headrace.server.app import create_app
from headrace.server.body import PIECE, parse, take_ids
from headrace.server.routes.completions.schema import CompletionBody
from headrace.server.routes.tokenize import DetokenizeBody

MANY = [number % 997 for number in range(PIECE)]


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50)
    | st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=9),
    indent=st.none() | st.integers(0, 3),
)
def test_what_is_taken_is_what_was_sent(ids: list[Any], indent: int | None) -> None:
    body = json.dumps({"n": 1, "prompt": ids, "user": {"a": "]["}}, indent=indent).encode()
    taken = take_ids(body, "prompt")
    assert taken is not None
    rest, found = taken
    nested = isinstance(ids[0], list)
    assert (list(map(list, found)) if nested else list(found)) == ids
    assert json.loads(rest) == {"n": 1, "prompt": [[0]] if nested else [0], "user": {"a": "]["}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"1,2"}',
        b'{"prompt":[]}',
        b'{"prompt":[1,"2"]}',
        b'{"prompt":[1.5]}',
        b'{"prompt":[[1],2]}',
        b'{"prompt":[[1],[2,[3]]]}',
        b'{"prompt":[1,[2]]}',
        b'{"n":1}',
        b"[1]",
        b'{"prompt":[2147483648]}',
        b'{"prompt":[1,}',
        b"",
        b"[" * 20_000,
        b'{"prompt":[true]}',
        b'{"prompt":[[1]"a"]}',
        b'{"prompt":[["a"]]}',
        b'{"prompt":[[1],{}]}',
    ],
)
def test_anything_else_is_left_to_parsing(body: bytes) -> None:
    assert take_ids(body, "prompt") is None


def test_a_large_body_has_arrays() -> None:
    body = json.dumps({"prompt": MANY, "seed": 7}).encode()
    made = parse(body, CompletionBody)
    assert isinstance(made.prompt, array)
    assert (list(made.prompt), made.seed) == (MANY, 7)
    made = parse(json.dumps({"prompt": [MANY, [5]]}).encode(), CompletionBody)
    assert [list(ids) for ids in made.prompt] == [MANY, [5]]  # type: ignore[arg-type]
    assert list(parse(json.dumps({"tokens": MANY}).encode(), DetokenizeBody).tokens) == MANY
    for wrong in ([*MANY, "x"], [*MANY, 2**70], [MANY, 5]):
        with pytest.raises(InvalidRequest, match="prompt"):
            parse(json.dumps({"prompt": wrong}).encode(), CompletionBody)
    with pytest.raises(InvalidRequest, match="tokens"):
        parse(json.dumps({"tokens": [MANY]}).encode(), DetokenizeBody)
    with pytest.raises(InvalidRequest, match="unknown"):
        parse(json.dumps({"prompt": MANY, "unknown": 1}).encode(), CompletionBody)


async def test_they_are_served() -> None:
    engine = FakeEngine()
    engine.max_context = 2 * PIECE
    app: Any = create_app(engine, ServerOptions())  # type: ignore[arg-type]
    engine._input._max_context = engine.max_context
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for prompt in (MANY, [MANY, [65, 66]]):
            body = {"prompt": prompt, "max_tokens": 1, "echo": True, "return_token_ids": True}
            reply = (await client.post("/v1/completions", json=body)).json()
            sent = prompt if isinstance(prompt[0], list) else [prompt]
            got = [choice["token_ids"][:-1] for choice in reply["choices"]]
            assert got == sent
            assert [seen[0] for seen in engine.seen[-len(sent) :]] == sent
        reply = (await client.post("/detokenize", json={"tokens": [97] * PIECE})).json()
        assert reply["prompt"] == "a" * PIECE
        refused = await client.post("/v1/completions", json={"prompt": [*MANY, 5000]})
        assert refused.json()["error"]["message"] == "token ids must be from 0 to 999, not 5000"
        long = await client.post("/v1/completions", json={"prompt": MANY * 3})
        assert long.json()["error"]["code"] == "context_length_exceeded"
