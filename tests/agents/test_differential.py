"""Requests that llama.cpp's server accepts and we refuse: only those with a reason in a table.

The corpus is what client libraries sent (`shapes.py` and the loops, kept by `loops/record.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from environments import LLAMA_CPP, python_of
from processes import headrace, running

from headrace.loader import open_model

HERE = Path(__file__).parent
CORPUS = [json.loads(line) for line in (HERE / "corpus.jsonl").read_text().splitlines()]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
REASONS = {
    "thread is not supported": "the SDK goes on without threads when it is told so",
    "Unknown format": "a strict schema promises each of its keywords",
}
"""Words of our refusal → why it is one though llama.cpp's server takes the request."""


def test_the_corpus_is_of_many_clients() -> None:
    assert len(CORPUS) >= 300
    assert len({entry["client"].partition("/")[0] for entry in CORPUS}) >= 5
    assert len({json.dumps(entry["body"], sort_keys=True) for entry in CORPUS}) >= 240


def _short(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request for an answer of two tokens, whole: acceptance is what counts."""
    short = {name: value for name, value in body.items() if name != "stream_options"}
    if path.startswith("/api/"):
        short["options"] = (short.get("options") or {}) | {"num_predict": 2}
    elif not path.endswith("count_tokens"):
        given = [name for name in LIMITS if name in short]
        for name in given or LIMITS[-1 if path.endswith("responses") else 0 :][:1]:
            short[name] = 2
    return short | {"stream": False} if "stream" in short or path.startswith("/api/") else short


def _asked() -> list[tuple[str, str, dict[str, Any]]]:
    """(client, path, body) of the corpus, short; what became the same once."""
    found = {}
    for entry in CORPUS:
        body = _short(entry["path"], entry["body"])
        key = entry["path"], json.dumps(body, sort_keys=True)
        found.setdefault(key, (entry["client"], entry["path"], body))
    return list(found.values())


@pytest.fixture(scope="module")
def theirs() -> Iterator[str]:
    path = open_model("qwen2.5-coder-0.5b").path
    command = [str(python_of(LLAMA_CPP)), str(HERE / "llamacpp_server.py"), str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http"), "llama.cpp's server did not start"
        yield address
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_what_they_accept_we_accept(theirs: str) -> None:
    asked = _asked()
    with (
        running(headrace("serve", "--port", "0", "--max-sequences", "8")) as server,
        httpx.Client(timeout=500) as client,
        ThreadPoolExecutor(4) as together,
    ):

        def ours(one: tuple[str, str, dict[str, Any]]) -> httpx.Response:
            _, path, body = one
            return client.post(server.url + path, json=body)

        refused = [
            (one, reply.text[:300])
            for one, reply in zip(asked, together.map(ours, asked), strict=True)
            if reply.status_code >= 400
        ]
        # Theirs is asked only where it matters.
        unexplained = [
            f"{who} {path}: {words}"
            for (who, path, body), words in refused
            if not any(reason in words for reason in REASONS)
            and client.post(theirs + path, json=body).status_code < 400
        ]
    assert not unexplained, "\n".join(sorted(set(unexplained)))
    used = {reason for reason in REASONS if any(reason in words for _, words in refused)}
    assert used == set(REASONS), "a reason that explains nothing"
    assert len(refused) < len(asked) // 20
