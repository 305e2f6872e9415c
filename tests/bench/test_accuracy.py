"""Perplexity: figures that can be worked out by hand."""

from __future__ import annotations

import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.bench.accuracy import default_prompts, perplexity, stdlib_corpus, windows
from headrace.bench.job import Target


class Scorer(BaseHTTPRequestHandler):
    """Every word has the log-probability -2, the generated token -9."""

    protocol_version = "HTTP/1.1"
    broken = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = body["prompt"].split()
        values: list[float | None] = [None, *([-2.0] * (len(words) - 1)), -9.0]
        choice: dict[str, Any] = {
            "text": "a b",
            "logprobs": {"token_logprobs": values, "tokens": ["a", " b"]},
        }
        if self.broken:
            choice = {"text": "x", "logprobs": None}
        data = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def target() -> Any:
    Scorer.broken = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Target(f"http://127.0.0.1:{server.server_port}", "m")
    server.shutdown()
    server.server_close()


def test_perplexity(target: Target) -> None:
    text = "\n".join(f"these are five words {n}" for n in range(100))
    found = perplexity(target, text, "test", characters=240, limit=5)
    assert found.value == pytest.approx(math.exp(2))
    assert found.windows == 5
    assert found.tokens == sum(len(piece.split()) - 1 for piece in windows(text, 240, 5))
    Scorer.broken = True
    with pytest.raises(HeadraceError, match="log-prob"):
        perplexity(target, text, "test")
    with pytest.raises(InvalidRequest, match="empty"):
        perplexity(target, " ", "test")


def test_the_corpus_is_there_and_always_the_same() -> None:
    text, name = stdlib_corpus()
    assert len(text) > 40_000
    assert "Python" in name
    assert stdlib_corpus()[0] == text
    assert len(default_prompts(8)) == 8
