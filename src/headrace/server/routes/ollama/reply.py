"""Formats of Ollama's answers: lines of JSON, errors, times in nanoseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from ....base.errors import HeadraceError
from ...connection import EventStream
from ...errors import error_headers
from ...wire import encode, json_response

YEAR = 365 * 86_400.0


def now() -> str:
    """Return the time in Go's format."""
    return stamp(time.time())


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def line(value: Any) -> bytes:
    return encode(value) + b"\n"


def error_reply(error: HeadraceError) -> Response:
    """Return the error in Ollama's format."""
    return json_response(
        {"error": error.message}, status=error.status, headers=error_headers(error)
    )


def error_line(error: HeadraceError) -> bytes:
    return line({"error": error.message})


class LineStream(EventStream):
    """Stream of JSON lines. No keep-alive comments are sent: a line that is not an object would
    break a client."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: Any) -> None:
        super().__init__(lines, keep_alive=YEAR, error_frame=error_line, error_reply=error_reply)


class Clock:
    """Durations of an answer, in nanoseconds, under Ollama's names."""

    def __init__(self) -> None:
        self._begin = time.perf_counter_ns()
        self._first = 0

    def token(self) -> None:
        """Mark a token; the first call ends the prompt's evaluation."""
        self._first = self._first or time.perf_counter_ns()

    def durations(self, prompt: int, output: int) -> dict[str, int]:
        end = time.perf_counter_ns()
        first = self._first or end
        return {
            "total_duration": end - self._begin,
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": first - self._begin,
            "eval_count": output,
            "eval_duration": end - first,
        }
