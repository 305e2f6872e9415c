"""Cost of imports: `import headrace` brings nothing heavy, the API process no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "transformers", "msgspec", "fastapi", "jinja2", "tokenizers"}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_headrace_is_light() -> None:
    assert not loaded_by("import headrace") & HEAVY


@pytest.mark.parametrize(
    "statement",
    [
        "from headrace import AsyncEngine, EngineOptions, SamplingParams, RequestOutput",
        "import headrace.engine.process, headrace.engine.loop.start, headrace.engine.loop.build",
        "import headrace.obs.logs, headrace.obs.metrics, headrace.obs.flight",
    ],
)
def test_without_torch(statement: str) -> None:
    assert not loaded_by(statement) & {"torch", "transformers"}
