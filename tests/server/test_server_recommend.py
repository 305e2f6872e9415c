"""`/v1/recommend` by a real server: torch's scores, and typed answers to what cannot be ranked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from processes import Running, serving
from starlette.requests import Request

from headrace.base.config import ServerOptions
from headrace.base.errors import Overloaded
from headrace.loader.open import open_model
from headrace.server.body import BodiesInFlight
from headrace.server.routes import recommend as route
from headrace.server.service import Service
from tiny import families, ranker
from tiny.kept import Kept

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "shop"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return ranker.make(folder, rows="int8")


@pytest.fixture(scope="module")
def server(folder: Path, model: Any, kept: Kept) -> Any:
    chat = str(kept(families.make, "qwen2"))
    with serving(folder, "--quantise none", chat) as server:
        yield server


def ask(server: Running, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/recommend", json={"model": "shop", **body}, timeout=60)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


def requests(*sizes: int) -> list[dict[str, Any]]:
    draws = np.random.default_rng(11)
    return [ranker.requested(draws, size) for size in sizes]


def test_scores_and_order(server: Running, model: Any) -> None:
    for body in requests(1, 40):
        found = ask(server, {**body, "top_k": 5})
        wanted = 1 / (1 + np.exp(-np.array(ranker.scored(model, body))))
        assert np.abs(np.array(found["scores"]) - wanted).max() <= 1e-5
        best = sorted(range(len(wanted)), key=lambda place: -found["scores"][place])[:5]
        assert found["order"] == best
        assert found["usage"]["candidates"] == len(wanted)


def test_beside_each_other_and_a_text(server: Running) -> None:
    """2,048 candidates are cut into steps; small requests and a text go on meanwhile."""
    bodies = requests(2048, 3, 700, 1)
    alone = [ask(server, body)["scores"] for body in bodies]

    def text(_: int) -> str:
        asked = {"model": "qwen2", "prompt": "the mill", "max_tokens": 8, "temperature": 0}
        names = httpx.get(f"{server.url}/v1/models").json()["data"]
        asked["model"] = next(one["id"] for one in names if one["id"] != "shop")
        reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        assert reply.status_code == 200, reply.text
        found: str = reply.json()["choices"][0]["text"]
        return found

    wanted = text(0)
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(text, range(3))
        assert list(pool.map(lambda body: ask(server, body)["scores"], bodies)) == alone
        assert set(texts) == {wanted}


def test_an_empty_history_and_unseen_ids(server: Running, model: Any) -> None:
    (body,) = requests(4)
    body["context"] |= {"history": {"ids": [], "weights": []}, "seen": [], "user": 2**62}
    body["candidates"] |= {"item": [5, 2**40, 90, 3], "tags": [[], [], [], []]}
    found = ask(server, body)["scores"]
    body["context"]["user"] = 0
    body["candidates"]["item"] = [5, 1, 1, 3]
    assert found == ask(server, body)["scores"]


@pytest.mark.parametrize(
    ("of", "name", "value", "param"),
    [
        ("context", "history", [91], "context.history"),
        ("context", "seen", [3, -1], "context.seen"),
        ("context", "seen", [2**70], "context.seen"),
        ("context", "user", -(2**70), "context.user"),
        ("context", "seen", list(range(41)), "context.seen"),
        ("context", "hour", "noon", "context.hour"),
        ("candidates", "tags", [[1], [7]], "candidates.tags.1"),
        ("candidates", "item", [1, 2, 3], "candidates.item"),
        ("candidates", "item", None, "candidates.item"),
        ("candidates", "colour", [1, 2], "candidates.colour"),
    ],
)
def test_what_cannot_be_ranked(server: Running, of: str, name: str, value: Any, param: str) -> None:
    (body,) = requests(2)
    body[of][name] = value
    error = ask(server, body, 400)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_scores_that_are_no_numbers_are_of_their_request(server: Running) -> None:
    huge, sane = requests(600, 600)
    wanted = ask(server, sane)["scores"]
    huge["candidates"]["price"] = [3.4e38] * 600
    huge["context"]["history"] = {"ids": [1, 2], "weights": [3.4e38, -3.4e38]}
    with ThreadPoolExecutor(4) as pool:
        wrong = [pool.submit(ask, server, huge, 400) for _ in range(2)]
        assert [one.result() for one in [pool.submit(ask, server, sane) for _ in range(2)]]
        assert {one.result()["error"]["param"] for one in wrong} == {"candidates"}
    assert ask(server, sane)["scores"] == wanted


async def test_repeated_features_count_among_the_bytes_that_are_held(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that all candidates share lies there once for each, whatever the body's size."""
    (body,) = requests(200)
    body["context"]["history"] = []
    engine = SimpleNamespace(files=open_model(str(folder)), max_context=2048)
    service = Service(ServerOptions())
    service._engine, service._names = engine, ["shop"]  # type: ignore[assignment]
    service.bodies = BodiesInFlight(5_000)

    async def entered(*_: object) -> object:
        return service, route.RecommendBody(**body)

    monkeypatch.setattr(route, "entered", entered)
    scope: dict[str, Any] = {"type": "http", "headrace.request_id": "one"}
    with pytest.raises(Overloaded, match="hold as many bytes"):
        await route.recommend(Request(scope))
    assert not service.bodies.held
    service.hands.close()


def test_too_many_none_and_the_wrong_model(server: Running) -> None:
    (body,) = requests(2)
    many = {name: column * 1025 for name, column in body["candidates"].items()}
    error = ask(server, {**body, "candidates": many}, 400)["error"]
    assert error["message"] == "candidates has 2050 candidates; allowed: from 1 to 2048"
    none = {name: [] for name in body["candidates"]}
    assert ask(server, {**body, "candidates": none}, 400)["error"]["param"] == "candidates"
    assert ask(server, {**body, "candidates": [1]}, 400)["error"]["param"] == "candidates"
    assert ask(server, {**body, "top_k": 0}, 400)["error"]["param"] == "top_k"
    names = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
    other = next(name for name in names if name != "shop")
    error = ask(server, {**body, "model": other}, 400)["error"]
    assert (error["code"], error["param"]) == ("unsupported_model", "model")
    for path, asked in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "Hi"}),
        ("embeddings", {"input": "Hi"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ):
        reply = httpx.post(f"{server.url}/v1/{path}", json={"model": "shop", **asked})
        assert reply.status_code == 400, (path, reply.text)
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {one["id"]: one.get("task") for one in listed}["shop"] == "recommendation"
    assert ask(server, body)["usage"]["candidates"] == 2
