"""MLPerf's Whisper through the real LoadGen, against a server that says what it is told."""

from __future__ import annotations

import io
import json
import re
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest
from headrace.bench.mlperf_hearing import AT_ONCE, word_accuracy
from headrace.cli.bench import command

pytest.importorskip("mlperf_loadgen")
pytest.importorskip("soundfile", reason="needs the extra audio")
SAID = ["The train is late.", "Nobody knows why, it rains.", "A third text of six words.", "Four."]


class EarServer(ThreadingHTTPServer):
    """Hears in `talk3.wav` what `texts[3]` says, two tokens a word; counts who is there at once."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.texts, self.forms = texts, list[bytes]()
        self.inside = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: EarServer

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "ear", "owned_by": "test"}]})

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.inside += 1
            self.server.most = max(self.server.most, self.server.inside)
        form = self.rfile.read(int(self.headers["content-length"]))
        self.server.forms.append(form)
        number = re.search(rb"talk(\d)\.wav", form)
        assert number is not None
        text = self.server.texts[int(number[1])]
        with self.server.lock:
            self.server.inside -= 1
        if not text:
            self._say(503, {"error": {"message": "full"}})
            return
        segments = [{"text": text, "tokens": [1] * 2 * len(text.split())}]
        self._say(200, {"text": text, "segments": segments})

    def _say(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[EarServer]:
    with EarServer(list(SAID)) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number, text in enumerate(SAID):
        held = io.BytesIO()
        with wave.open(held, "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(np.zeros(1600 * (number + 1), "<i2").tobytes())
        (folder / f"talk{number}.wav").write_bytes(held.getvalue())
        (folder / f"talk{number}.txt").write_text(text)
    return folder


def run(server: EarServer, sounds: Path, out: Path, *more: str) -> Any:
    words = ["mlperf", "Offline", "--url", server.url, "--sounds", str(sounds), "-o", str(out)]
    return CliRunner().invoke(command, [*words, "--seconds", "1", *more])


@pytest.mark.slow
def test_accuracy_is_that_of_the_words(server: EarServer, sounds: Path, tmp_path: Path) -> None:
    server.texts[2] = "a third text of five words"
    done = run(server, sounds, tmp_path, "--mode", "accuracy", "--language", "en")
    assert done.exit_code == 0, done.output
    # One of 16 words.
    assert "word_accuracy: 93.750 % against the data set" in done.output
    folder = tmp_path / "results" / "this" / "ear" / "Offline" / "accuracy"
    logged = json.loads((folder / "mlperf_log_accuracy.json").read_text())
    assert sorted(bytes.fromhex(one["data"]).decode() for one in logged) == sorted(server.texts)
    assert {one["token_count"] for one in logged} == {2 * len(text.split()) for text in SAID}
    assert "word_accuracy" in (folder / "accuracy.txt").read_text()
    assert all(b'name="language"\r\n\r\nen\r\n' in form for form in server.forms)


@pytest.mark.slow
def test_performance(server: EarServer, sounds: Path, tmp_path: Path) -> None:
    done = run(server, sounds, tmp_path, "--queries", "40")
    assert done.exit_code == 0, done.output
    assert "Tokens per second" in done.output
    assert len(server.forms) >= 40
    assert server.most <= AT_ONCE
    tested = run(server, sounds, tmp_path, "--test", "TEST07", "--accuracy-threshold", "99")
    assert tested.exit_code == 0, tested.output
    server.texts[0] = "Something else altogether."
    failed = run(server, sounds, tmp_path, "--test", "TEST07", "--accuracy-threshold", "99")
    assert "TEST07 FAILED" in failed.output


@pytest.mark.slow
def test_failures_are_told(server: EarServer, sounds: Path, tmp_path: Path) -> None:
    server.texts[1] = ""
    done = run(server, sounds, tmp_path)
    assert "HTTP 503" in str(done.exception)


def test_only_offline_and_one_source(server: EarServer, sounds: Path) -> None:
    for words, what in (
        (["Server", "--sounds", str(sounds)], "Offline"),
        (["Offline", "--sounds", str(sounds), "--trace", "sharegpt:x"], "one of"),
        (["Offline", "--sounds", str(sounds), "--test", "TEST06"], "TEST06"),
        (["Offline", "--sounds", str(sounds / "none")], "no folder"),
    ):
        done = CliRunner().invoke(command, ["mlperf", *words, "--url", server.url])
        assert isinstance(done.exception, InvalidRequest)
        assert what in done.exception.message


def test_word_accuracy() -> None:
    assert word_accuracy({0: "a b", 1: "c"}, ["A b!", "d"]) == pytest.approx(100 * 2 / 3)
    assert word_accuracy({0: "a"}, [None]) is None
    assert word_accuracy({}, []) is None
