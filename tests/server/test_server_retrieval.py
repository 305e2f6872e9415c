"""`/v1/recommend` of a language model with a catalogue, by a real server."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from processes import Running, api_pid, kill, serving

from tiny import catalogue, families
from tiny.kept import Kept

pytestmark = pytest.mark.slow
EXACT = "--quantise none --kv-dtype float32"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("items") / "items.jsonl"


@pytest.fixture(scope="module")
def paths(file: Path) -> catalogue.Paths:
    """Half of the ids are given as tokens of the vocabulary."""
    found = catalogue.make(file)
    lines = [
        {"item": name, "ids": [path[0], *(f"t{index}" for index in path[1:])]}
        for name, path in found.items()
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return found


@pytest.fixture(scope="module")
def folder(kept: Kept) -> Path:
    return kept(families.make, "qwen3")


@pytest.fixture(scope="module")
def server(folder: Path, file: Path, paths: catalogue.Paths) -> Any:
    with serving(folder, f"{EXACT} --items {file}") as server:
        yield server


def ask(server: Running, status: int = 200, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/recommend", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_items_after_a_history(server: Running, folder: Path, paths: catalogue.Paths) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    names = list(paths)
    body = {"prompt": [5, 17, 200], "history": names[:9], "k": 12, "beams": 20}
    found = ask(server, **body)
    ids = [5, 17, 200, *(index for name in names[:9] for index in paths[name])]
    wanted = catalogue.plain_beams(model, ids, paths, 20)[:12]
    assert [tuple(one["ids"]) for one in found["items"]] == [path for path, _ in wanted]
    assert [one["score"] for one in found["items"]] == pytest.approx(
        [score for _, score in wanted], abs=2e-4
    )
    assert all(tuple(one["ids"]) == paths[one["item"]] for one in found["items"])
    assert found["usage"]["prompt_tokens"] == 30
    assert ask(server, prompt=ids, k=12, beams=20)["items"] == found["items"]
    assert len(ask(server, prompt="t5 t17")["items"]) == 10


def test_many_at_once_beside_texts(server: Running, paths: catalogue.Paths) -> None:
    names = list(paths)
    bodies = [{"history": names[n : n + 12], "k": 5 + n, "beams": 64 * (n + 1)} for n in range(6)]
    alone = [ask(server, **body)["items"] for body in bodies]

    def text(_: int) -> str:
        body = {"prompt": [3, 1, 4], "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        found: str = reply.json()["choices"][0]["text"]
        return found

    wanted = text(0)
    with ThreadPoolExecutor(10) as pool:
        texts = pool.map(text, range(4))
        assert list(pool.map(lambda body: ask(server, **body)["items"], bodies)) == alone
        assert set(texts) == {wanted}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"history": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"history": ["item-1", "item-x"]}, "history.1"),
        ({"history": ["item-1"], "k": 0}, "k"),
        ({"history": ["item-1"], "k": 513}, "k"),
        ({"history": ["item-1"], "beams": 0}, "beams"),
        ({"history": ["item-1"], "beams": 513}, "beams"),
        ({"history": ["item-1"], "k": 9, "beams": 8}, "beams"),
        ({"history": ["item-1"] * 2000}, "history"),
        ({"prompt": [1] * 4095}, "prompt"),
        ({"history": ["item-1"], "timeout": 0}, "timeout"),
        ({"history": ["item-1"], "candidates": {"item": [1]}}, "candidates"),
        ({"history": ["item-1"], "top_k": 3}, "top_k"),
        ({"history": ["item-1"], "cache_salt": "x" * 300}, "cache_salt"),
    ],
)
def test_what_cannot_be_retrieved(server: Running, body: dict[str, Any], param: str) -> None:
    error = ask(server, 400, **body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_deadline_ends_the_search(server: Running, paths: catalogue.Paths) -> None:
    body: dict[str, Any] = {"history": [*paths] * 4, "k": 1, "beams": 512}
    error = ask(server, 504, **body, timeout=0.01)["error"]
    assert (error["type"], error["code"]) == ("deadline_error", "deadline_missed")
    assert len(ask(server, **body, timeout=60)["items"]) == 1
    end = time.monotonic() + 20
    while running(server):
        assert time.monotonic() < end, "a search goes on that nobody waits for"
        time.sleep(0.05)


def running(server: Running) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = [one for one in text.splitlines() if one.startswith("vllm:num_requests_running")]
    assert lines
    return sum(float(one.split()[-1]) for one in lines)


def test_a_dead_engine_begins_the_search_again(folder: Path, file: Path, paths: Any) -> None:
    with serving(folder, f"{EXACT} --items {file} --step-tokens 16") as server:
        body = {"history": [*paths] * 3, "k": 7, "beams": 512}
        wanted = ask(server, **body)["items"]
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(ask, server, **{**body, "cache_salt": "anew"})
            while not running(server):
                assert not coming.done()
            kill(psutil.Process(api_pid(server)).children()[0].pid)
            assert coming.result()["items"] == wanted


def test_a_model_without_a_catalogue_recommends_nothing(folder: Path) -> None:
    with serving(folder, EXACT) as server:
        error = ask(server, 400, history=["a"])["error"]
        assert (error["param"], error["code"]) == ("model", "unsupported_model")


def test_a_catalogue_that_changed_under_a_restarted_engine_is_not_read(
    folder: Path, file: Path, paths: Any
) -> None:
    """Its places would name other items here."""
    from headrace.base.errors import EngineFault
    from headrace.base.items import read_catalogue
    from headrace.server.retrieval import catalogue_of

    items = read_catalogue(file, 1000, lambda token: int(token[1:]))
    identity = SimpleNamespace(options={"items": items.digest})
    service: Any = SimpleNamespace(engine=SimpleNamespace(items=items, identity=identity))
    assert catalogue_of(service) is items
    identity.options["items"] = "another"
    with pytest.raises(EngineFault, match="has changed since the start"):
        catalogue_of(service)
