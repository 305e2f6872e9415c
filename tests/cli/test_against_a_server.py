"""Commands that talk to a running server: what they count, and how they end where nobody reads."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import Running, fake_server, headrace, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_server(delay=0.01)) as server:
        yield server


@pytest.mark.parametrize(("more", "prompt"), [((), 1), (("--chat",), len("<user>x"))])
def test_generate_reports_what_the_server_counted(
    run: Any, server: Running, more: tuple[str, ...], prompt: int
) -> None:
    done = run("generate", "x", "--url", server.url, "--max-tokens", "9", "--json", *more)
    answer = json.loads(done.stdout)
    assert (answer["completion_tokens"], answer["prompt_tokens"]) == (9, prompt)
    assert answer["cached_tokens"] == 3
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("words", "reader"),
    [
        (("generate", "x", "--max-tokens", "400", "--url", "URL"), "head -c 5"),
        (("generate", "x", "--json", "--max-tokens", "4", "--url", "URL"), "true"),
        (("chat", "--max-tokens", "400", "--url", "URL"), "head -c 5"),
        (("top", "URL", "--json"), "head -c 5"),
        (("top", "URL", "--once"), "true"),
        (("models",), "true"),
        (("--help",), "true"),
        (("serve", "--help"), "head -c 5"),
        (("explain", "--json", "MODEL"), "true"),
        (("keys", "list", "--help"), "true"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_reader_that_leaves_is_met_with_silence(
    server: Running, words: tuple[str, ...], reader: str, model: Path
) -> None:
    places = {"URL": server.url, "MODEL": str(model)}
    command = shlex.join(headrace(*(places.get(word, word) for word in words)))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; echo hello | {command} | {reader}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    # 1: it met the closed pipe; 0: it had written all before.
    assert done.returncode in (0, 1)
