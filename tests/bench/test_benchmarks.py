"""Every script of `benchmarks/` starts, is listed, and the cheap ones run one round."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOREIGN = {"counted.py", "peers/llama_cpp_logits.py", "peers/openvino_server.py"}
"""Run by other scripts alone, two of them in a peer's environment."""
FILES = sorted(str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py"))
SCRIPTS = [
    name
    for name in FILES
    if name not in FOREIGN and "__main__" in (BENCHMARKS / name).read_text(encoding="utf-8")
]


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_script_has_a_line_in_the_index() -> None:
    rows = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [name for name in FILES if f"`{name}`" not in rows] == []


def test_each_record_has_a_script_or_a_page() -> None:
    root = BENCHMARKS.parent
    readers = [root / "Makefile"]
    for folder in ("benchmarks", "docs", "src", "tests"):
        readers += (one for one in (root / folder).rglob("*") if one.suffix in (".md", ".py"))
    said = "\n".join(one.read_text(encoding="utf-8") for one in readers)
    records = [one.name for one in (BENCHMARKS / "results").glob("*.json")]
    assert [name for name in records if name not in said] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts(name: str) -> None:
    if name.startswith("gpu_"):
        pytest.importorskip("triton", reason="there is no Triton for this platform")
    assert run(name, "--help")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cpu_kernels.py", ("--rounds", "1")),
        ("cpu_peers.py", ("--rounds", "1", "--tiny")),
        ("speculation.py", ("--rounds", "1", "--rows", "1", "2", "--context", "64")),
        (
            "speculation_speed.py",
            ("--rounds", "1", "--at-once", "1", "--tokens", "8", "--classes", "code-edit"),
        ),
        ("speech.py", ("--rounds", "1")),
        ("../tests/faults/mutate.py", ("--count", "20")),
        ("roofline/published.py", ()),
    ],
)
def test_one_round(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    if name == "speech.py" and shutil.which("espeak-ng") is None:
        pytest.skip("there is no espeak-ng")
    found = tmp_path / "found.json"
    output = (str(found),) if name.startswith("roofline/") else ("--json", str(found))
    run(name, *arguments, *output)
    assert json.loads(found.read_text())
