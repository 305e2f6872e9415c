"""Environments of their own for client libraries, kept in the cache folder.

Libraries that agree share one. They are made by `uv` (seconds, where pip took minutes), so a clean
checkout needs the package index once; what they are made of is in the folder's name. Where the
index is configured for pip alone, pip makes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from headrace.base.environment import cache_root

MOST = (
    "openai-agents>=0.24,<0.25",
    "pydantic-ai-slim[openai]>=2.68,<3",
    "langgraph>=1.2,<2",
    "langchain-openai>=1.7,<2",
    "anthropic>=2.12,<3",
    "litellm>=1.83,<2",
    "ollama>=0.6,<1",
    "smolagents>=1.26,<2",
)
LLAMA_INDEX = ("llama-index-core>=0.14,<1", "llama-index-llms-openai-like>=0.5,<1")
"""It wants other versions of what the others share."""
LLAMA_CPP = ("xllamacpp>=2026.10",)
"""llama.cpp's own HTTP server, in a wheel."""


OFFLINE = ("NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError")
"""Names in pip's output for an unreachable index."""


def python_of(packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment with these packages.

    Skips the test where the package index cannot be reached; any other failure of pip fails it.
    """
    text = f"{sys.version_info[:2]} {sorted(packages)}"
    folder = cache_root() / "agents" / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    python, done = folder / "bin" / "python", folder / "complete"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another test process may be making it.
        if not done.exists():
            _make(folder, python, packages)
            done.touch()
    return python


def _make(folder: Path, python: Path, packages: tuple[str, ...]) -> None:
    uv = [sys.executable, "-m", "uv"]
    base = [*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)]
    fill = [*uv, "pip", "install", "--quiet", "--python", str(python), *packages]
    if all(_run(command).returncode == 0 for command in (base, fill)):
        return
    venv.create(folder, with_pip=True, clear=False)
    # Not compiled: few of the modules are ever imported.
    made = _run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *packages])
    if made.returncode and any(word in made.stderr for word in OFFLINE):
        pytest.skip(f"NOT TESTED: no package index for {', '.join(packages)}")
    assert made.returncode == 0, made.stderr[-4000:]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
