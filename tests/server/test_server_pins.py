"""Prompts that an operator pins: from a file, by a route, across a restart, and let go again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Running, headrace, running
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import InvalidRequest
from headrace.cli import cache
from headrace.server.app import create_app
from headrace.server.keys import Key, hash_of, new_key, write_keys
from tiny import bytewise
from tiny.kept import Kept

PROMPT = [(place * 7) % 250 for place in range(70)]


@contextmanager
def serving(model: Path, folder: Path, file: Path, *more: str) -> Iterator[tuple[Running, str]]:
    flags = ["serve", str(model), "--offline", "--port=0", "--operator-port=0", "--threads=1"]
    flags += ["--kv-memory=2MiB", "--context-cache=16MiB", f"--cache-dir={folder}"]
    with running(headrace(*flags, f"--pinned-prompts={file}", *more)) as server:
        yield server, server.await_line(r"operator: (http://\S+)").group(1)


def pinned(operator: str, count: int) -> dict[str, Any]:
    """The pins by name, once so many were asked for."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pins = httpx.get(operator + "/operate/pins").json()["pins"]
        if sum(pin["tokens"] > 0 for pin in pins) == count:
            return {pin["name"]: pin for pin in pins}
        time.sleep(0.05)
    raise AssertionError(f"not asked for: {pins}")


def cached(server: Running, prompt: list[int]) -> int:
    body = {"prompt": prompt, "max_tokens": 1}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_pinned_prompts_are_there_and_stay(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, file = kept(bytewise.make), tmp_path / "pins"
    file.write_text(json.dumps({"name": "policy", "prompt": PROMPT}) + "\n")
    with serving(tiny, tmp_path, file) as (server, operator):
        assert pinned(operator, 1)["policy"]["cached_tokens"] == 0
        assert cached(server, PROMPT) == 69
        other = {"name": "greeting", "prompt": PROMPT[::-1]}
        reply = httpx.post(operator + "/operate/pins", json=other, timeout=60)
        assert (reply.status_code, reply.json()["tokens"]) == (200, 70)
        cache.pins(operator)
        shown = capsys.readouterr().out
        assert "policy" in shown
        assert "greeting" in shown
        # Many times the pool: what nobody pinned goes, and is computed sooner than it is loaded.
        for number in range(60):
            cached(server, [number, *PROMPT, *PROMPT])
        assert cached(server, [3, *PROMPT, *PROMPT]) <= 16
        assert cached(server, PROMPT) >= 64
        assert cached(server, PROMPT[::-1]) >= 64
        assert httpx.delete(operator + "/operate/pins/greeting").status_code == 200
        assert httpx.delete(operator + "/operate/pins/greeting").status_code == 404
        assert set(pinned(operator, 1)) == {"policy"}
        wrong = {"name": "long", "prompt": [1] * 100_000}
        refused = httpx.post(operator + "/operate/pins", json=wrong, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
        both = {"name": "both", "prompt": "a", "messages": []}
        assert httpx.post(operator + "/operate/pins", json=both).status_code == 400
    with serving(tiny, tmp_path, file) as (server, operator):
        assert set(pinned(operator, 1)) == {"policy"}
        assert cached(server, PROMPT) == 69


async def test_a_pin_belongs_to_the_callers_of_one_key(tmp_path: Path) -> None:
    keys, file = tmp_path / "keys.toml", tmp_path / "pins"
    write_keys(keys, [Key("user", hash_of(new_key()))])
    for key, problem in (("", "none of this server's"), ("stranger", "none of this"), ("user", "")):
        file.write_text(json.dumps({"prompt": "x", "key": key}) + "\n")
        options = ServerOptions(keys=str(keys), pinned_prompts=str(file))
        if problem:
            with pytest.raises(InvalidRequest, match=problem):
                create_app(FakeEngine(), options)  # type: ignore[arg-type]
            continue
        app = create_app(FakeEngine(), options)  # type: ignore[arg-type]
        [pin] = app.state.pins
        assert (await app.state.pins.add(pin)).status == 200
        assert pin.tokens == 1
    file.write_text("{}\n")
    with pytest.raises(InvalidRequest, match="line 1"):
        create_app(FakeEngine(), ServerOptions(pinned_prompts=str(file)))  # type: ignore[arg-type]
