"""`benchmarks/count.py`: what it reads from Callgrind's dumps, and a whole run of a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.kernels.cpu.library import LibraryAbsent, load
from headrace.loader import open_model
from tiny.bytewise import byte_symbols
from tiny.gguf_files import write_gguf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import callgrind  # noqa: E402 - lies beside count.py
import count  # noqa: E402

LIBRARY = "_headrace_cpu.so"
DUMP = """\
# callgrind format
version: 1
part: 1

desc: LL cache: 33554432 B, 64 B, 16-way associative
desc: Trigger: Client Request: decode 1

positions: line
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
summary: 1300 0 0 0 0 0 3 40 2

ob=(1) /usr/bin/python3
fl=(1) ???
fn=(1) _PyEval_EvalFrameDefault
0 300 100
+4 60
cob=(2) /usr/lib/libffi.so
cfn=(2) ffi_call
calls=1 0
* 940 0 0 0 0 0 3 40 2

ob=(2)
fn=(2)
0 40
cob=(3) /somewhere/_headrace_cpu.so
cfn=(3) hr_run
calls=2 16
0 900 0 0 0 0 0 1 40 1

ob=(3)
fn=(3)
0 100
cfn=(4) op_linear(HrLinear const&)
calls=2 0
0 800

fn=(4)
0 700 0 0 0 0 0 0 40
cob=(4) /usr/lib/libc.so.6
cfn=(5) memcpy
calls=9 0
0 100

ob=(4)
fn=(5)
0 100

totals: 1300
part: 2

desc: Trigger: Program termination
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
summary: 7
"""


def test_a_dump_is_read() -> None:
    part, rest = callgrind.read_parts(DUMP.splitlines(keepends=True), LIBRARY)
    assert part.name == "decode 1"
    # What the library calls is inside of it, what leads to it is not.
    assert part.inside.instructions == 900
    assert part.inside.fetched == 64 * 42
    assert part.functions == {"hr_run": 100, "op_linear(HrLinear const&)": 700}
    assert part.objects == {
        "/usr/bin/python3": 360,
        "/usr/lib/libffi.so": 40,
        "/usr/lib/libc.so.6": 0,
    }
    assert part.outside == 1300 - 900, "the summary without what is inside"
    assert (rest.name, rest.outside, rest.inside.instructions) == ("", 0, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no part"),
        ("part: 1\nevents: Ir\nfn=(7)\n", "line 3"),
        ("part: 1\nevents: Ir\n0 many\n", "line 3"),
    ],
)
def test_what_is_no_dump_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(callgrind.read_parts(text.splitlines(), LIBRARY))


def test_without_valgrind_a_request_does_nothing() -> None:
    marks = callgrind.Marks()
    assert not marks.under_valgrind
    marks.start()
    marks.dump("nothing")
    marks.stop()


def work(kernels: int, host: int | None, lines: int) -> Any:
    counts = callgrind.Counts({"Ir": kernels, "DLmr": lines})
    return count.Work("decode 1", 1, 1, counts, host, 1.0, {}, Counter(), Counter())


def test_rounds_are_compared() -> None:
    rounds = [[work(1000, 50, 10)], [work(1001, 50, 10)], [work(999, 51, 10)]]
    found = count.difference(rounds)
    assert found == pytest.approx(
        {"kernel_instructions": 2 / 999, "host_instructions": 1 / 50, "read_bytes": 0.0}
    )
    assert "host_instructions" not in count.difference([[work(5, None, 1)], [work(5, None, 1)]])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--rows", "0"], "no whole number above zero"),
        (["--steps", "four"], "no whole number above zero"),
        (["--cache", "33"], "a power of two"),
        (["--prefill", "1"], "at least 2"),
    ],
)
def test_options_that_make_no_sense(
    line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        count.main(line)
    assert refused.value.code == 2
    assert words in capsys.readouterr().err


def tiny_model(path: Path) -> Path:
    """Two random layers and a vocabulary of single bytes, as a GGUF file."""
    layers, width, inner, rng = 2, 64, 128, np.random.default_rng(0)
    tokens = [*sorted(byte_symbols()), "ab"]
    metadata = {
        "llama.block_count": layers,
        "llama.context_length": 512,
        "llama.embedding_length": width,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    tensors = {"output_norm.weight": np.ones(width, np.float32)}
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width)}
    for layer in range(layers):
        matrices = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
        matrices |= {"ffn_gate": (inner, width), "ffn_up": (inner, width)}
        matrices["ffn_down"] = width, inner
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in matrices.items()}
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(width, np.float32)
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = rng.normal(0, 0.1, shape).astype(np.float32)
    kinds = {"norm.weight": "F32", "": "Q8_0"}
    return write_gguf(path, "llama", metadata, tensors, kinds)


def test_records_belong_to_operators(tmp_path: Path) -> None:
    expectation = count.Expectation(open_model(str(tiny_model(tmp_path / "tiny.gguf"))))
    names = (
        "linear 192×64 Q8_0",
        "linear 64×128 Q8_0",
        "gate_up 256×64 Q8_0",
        "norm",
        "linear 257×64 Q8_0",
    )
    labels = [expectation.label(name) for name in names]
    assert labels == ["qkv", "down", "gate_up", "norm", "head"]
    expected = expectation.of(expectation.decode(1, 10))
    assert expected["down"] == 2 * 64 * 128 * 34 // 32, "Q8_0: 34 bytes for 32 numbers"
    assert expected["attention"] > expectation.of(expectation.decode(1, 5))["attention"] > 0


@pytest.mark.slow
def test_a_whole_run_of_a_tiny_model(tmp_path: Path) -> None:
    """Two rounds: what they count is the same, and more than nothing everywhere."""
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind")
    try:
        load()
    except LibraryAbsent as absent:
        pytest.skip(str(absent))
    model, found = tiny_model(tmp_path / "tiny.gguf"), tmp_path / "found.json"
    line = [
        "--model",
        str(model),
        "--rows",
        "1",
        "3",
        "--prefill",
        "20",
        "--context",
        "8",
        "--rounds",
        "2",
        "--json",
        str(found),
        "--offline",
    ]
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "count.py"), *line],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    counted = json.loads(found.read_text())
    assert counted["level"] == "avx2"
    assert [work["work"] for work in counted["rounds"][0]] == ["decode 1", "decode 3", "prefill 20"]
    one, three, prompt = counted["rounds"][0]
    for each in (one, three, prompt):
        summed = sum(operator["instructions"] for operator in each["operators"].values())
        assert each["kernel_instructions"] == pytest.approx(summed, rel=0.2)
        assert {"qkv", "attention", "gate_up", "down", "head"} <= each["operators"].keys()
    assert one["kernel_instructions"] < three["kernel_instructions"] < prompt["kernel_instructions"]
    assert one["host_instructions"] > 10_000
    assert counted["difference_of_rounds"]["kernel_instructions"] < 1e-3
    assert counted["difference_of_rounds"]["host_instructions"] < 1e-2


@pytest.mark.slow
def test_without_valgrind_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load()
    except LibraryAbsent as absent:
        pytest.skip(str(absent))
    monkeypatch.setattr(count.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"no `valgrind` on the path.*apt install valgrind"):
        count.main(["--model", str(tiny_model(tmp_path / "tiny.gguf")), "--offline"])
