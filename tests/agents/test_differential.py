"""What llama.cpp's server accepts and we refuse: nothing but what a table gives a reason for.

The corpus is what client libraries sent (`shapes.py` and the loops, kept by `loops/record.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
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


def _short(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for an answer of two tokens, whole: acceptance is what counts."""
    short = {name: value for name, value in body.items() if name != "stream_options"}
    for name in LIMITS:
        if name in short:
            short[name] = 2
    if isinstance(short.get("options"), dict):
        short["options"] = short["options"] | {"num_predict": 2}
    return short | {"stream": False} if "stream" in short else short


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
        process.wait(20)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_what_they_accept_we_accept(theirs: str) -> None:
    refused: list[str] = []
    accepted = 0
    with (
        running(headrace("serve", "--port", "0", "--max-sequences", "8")) as server,
        httpx.Client(timeout=120) as client,
    ):
        for entry in CORPUS:
            body = _short(entry["body"])
            ours = client.post(server.url + entry["path"], json=body)
            if ours.status_code < 400:
                accepted += 1
                continue
            # Theirs is asked only where it matters.
            if client.post(theirs + entry["path"], json=body).status_code < 400:
                words = ours.text[:300]
                if not any(reason in words for reason in REASONS):
                    refused.append(f"{entry['client']} {entry['path']}: {words}")
    assert not refused, "\n".join(sorted(set(refused)))
    assert accepted > len(CORPUS) // 2
