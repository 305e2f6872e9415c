"""Agents for real: each library's own loop against the default model, to its right end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from environments import LLAMA_INDEX, MOST, python_of
from processes import Running, headrace, running

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1800)]

LOOPS = [
    ("openai_agents",),
    ("openai_agents", "responses"),
    ("pydantic_ai",),
    ("langgraph",),
    ("litellm", "openai"),
    ("litellm", "hosted_vllm"),
    ("litellm", "anthropic"),
    ("litellm", "ollama_chat"),
    ("litellm_bridge",),
    ("anthropic",),
    ("smolagents",),
    ("ollama",),
    ("llama_index",),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(headrace("serve", "--port", "0", "--max-sequences", "4")) as server:
        yield server


@pytest.mark.parametrize("loop", LOOPS, ids="-".join)
def test_the_loop_ends_with_the_tools_result(server: Running, loop: tuple[str, ...]) -> None:
    name, *more = loop
    python = python_of(LLAMA_INDEX if name == "llama_index" else MOST)
    script = HERE / "loops" / f"with_{name}.py"
    done = subprocess.run(
        [str(python), str(script), server.url, "qwen2.5-coder-0.5b", *more],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found["calls"]) == {"Paris"}
    assert "17" in found["answer"], found
