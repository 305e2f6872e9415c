"""OpenVINO GenAI behind `/v1/completions`, so that it can be a peer: the library has no server.

    $OPENVINO_ENV/bin/python benchmarks/peers/openvino_server.py MODEL_FOLDER --port P --threads 2

Needs only `openvino-genai` beside the standard library. One thread steps a continuous batching
pipeline; a thread per connection feeds it and streams what comes. Prompts are token ids or text.
Knows what the bench sends (greedy, `max_tokens`, `ignore_eos`, streaming) and nothing more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, folder: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.tokenizer = self.pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self.stepped = threading.Condition()
        threading.Thread(target=self._loop, daemon=True).start()

    def ask(self, prompt: str | list[int], tokens: int, ignore_eos: bool) -> tuple[Any, int]:
        """(handle, prompt tokens)."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, ignore_eos, False
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt).input_ids
        else:
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        with self._lock:
            handle = self.pipeline.add_request(next(self._numbers), ids, config)
        self._work.set()
        return handle, int(ids.shape[1])

    def _loop(self) -> None:
        while True:
            self._work.wait()
            with self._lock:
                if not self.pipeline.has_non_finished_requests():
                    self._work.clear()
                    continue
                self.pipeline.step()
            with self.stepped:
                self.stepped.notify_all()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    name: str

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._whole(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})
        else:
            self._whole(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or not body.get("stream"):
            self._whole(400, {"error": {"message": "only streamed completions"}})
            return
        handle, prompt_tokens = self.engine.ask(
            body["prompt"], int(body["max_tokens"]), bool(body.get("ignore_eos"))
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count, running = 0, openvino_genai.GenerationStatus.RUNNING
        while True:
            # Read the status first: what was made before it changed can still be read.
            over = handle.get_status() != running
            while handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids:
                        count += 1
                        self._event([{"index": 0, "text": self.engine.tokenizer.decode([token])}])
            if over:
                break
            with self.engine.stepped:
                self.engine.stepped.wait(0.05)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
        self._event([{"index": 0, "text": "", "finish_reason": "length"}])
        self._event([], usage)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> None:
        value: dict[str, Any] = {"object": "text_completion", "choices": choices}
        if usage is not None:
            value["usage"] = usage
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _whole(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    Handler.engine = Engine(arguments.model, arguments.threads)
    Handler.name = Path(arguments.model).name
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
