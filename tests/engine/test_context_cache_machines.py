"""Block files of one kind of machine are read by another: the same bytes, and the same answer.

The other is a Python for aarch64, with this package, its libraries built for aarch64 and what it
imports, run by an emulator or a machine; `HEADRACE_OTHER_PYTHON` names its command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny import bytewise, families
from tiny.kept import Kept

OTHER = os.environ.get("HEADRACE_OTHER_PYTHON", "")
LIFE = """
import json, platform, sys
from headrace import LLM, SamplingParams
from headrace.kv import tiers
model, folder, kv_dtype, tiers.CANARY = *sys.argv[1:4], int(sys.argv[4])
tiers.LATENCY = -1e9
options = dict(device="cpu", threads=1, kv_memory="2MiB", max_sequences=4, step_tokens=256)
options |= dict(max_context=256, kv_dtype=kv_dtype, context_cache="64MiB", offline=True)
prompt = [(place * 7) % 250 for place in range(70)]
params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
with LLM(model, **options, cache_dir=folder) as llm:
    context = llm._built.context
    context.settle()
    output = llm.generate([prompt], params)[0]
    context.settle()
    stats = context.tiers.stats
    found = dict(machine=platform.machine(), tokens=list(output.outputs[0].token_ids))
    found |= dict(cached=output.cached_tokens, written=stats.written_blocks, loads=stats.loads)
    found |= dict(damaged=stats.damaged, checked=stats.checked, wrong=stats.wrong)
print(json.dumps(found))
"""


def life(python: str, *arguments: object) -> dict[str, Any]:
    command = [*python.split(), "-c", LIFE, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not OTHER, reason="HEADRACE_OTHER_PYTHON names no Python of another machine")
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        *((None, dtype) for dtype in ("bfloat16", "float32", "int8", "k8v4")),
        *((family, "bfloat16") for family in ("deepseek_v3", "gemma3", "qwen3_next", "lfm2")),
    ],
)
def test_another_machine_reads_what_this_one_wrote(
    kept: Kept, tmp_path: Path, family: str | None, kv_dtype: str
) -> None:
    model, plain = tmp_path / "model", kept(bytewise.make)
    shutil.copytree(plain if family is None else kept(families.make, family), model)
    shutil.copy(plain / "tokenizer.json", model)
    here = life(sys.executable, model, tmp_path, kv_dtype, 1 << 30)
    assert here["written"] >= 5
    there = life(OTHER, model, tmp_path, kv_dtype, 1 << 30)
    assert there["machine"] != here["machine"]
    assert there["tokens"] == here["tokens"]
    assert there["cached"] >= 48
    assert (there["loads"], there["damaged"]) == (1, 0)
    # What the other one computes of a block is, bit for bit, what was written here.
    compared = life(OTHER, model, tmp_path, kv_dtype, 1)
    assert compared["tokens"] == here["tokens"]
    assert (compared["checked"], compared["wrong"]) == (1, 0)
