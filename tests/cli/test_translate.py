"""Lines of other engines as ours: values, what is left out and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.config import EngineOptions, ServerOptions
from headrace.base.errors import OptionError
from headrace.base.other_engines import ENGINES, FURTHER
from headrace.base.sampling import SamplingParams
from headrace.cli.plan_launch import FLAGS
from headrace.cli.serve import command
from headrace.cli.translate import TURNS, listed, translate
from headrace.server.keys import hash_of, read_keys

USUAL = (
    "vllm serve --model org/name --served-model-name one two --max-model-len 4k "
    "--tensor-parallel-size 2 --gpu-memory-utilization 0.9 --max-num-seqs 32 "
    "--max-num-batched-tokens 2048 --dtype half --quantization awq --kv-cache-dtype fp8 "
    "--enable-prefix-caching --port 8001 --host 0.0.0.0 --trust-remote-code"
)


def test_every_row_names_one_of_our_fields_and_a_conversion() -> None:
    kinds = EngineOptions, ServerOptions, SamplingParams
    ours = {spec.name for kind in kinds for spec in fields(kind)}
    for words in (FURTHER, *ENGINES.values()):
        names = [name for word in words for name in word.names]
        assert len(names) == len(set(names))
        for word in words:
            assert word.turn in TURNS, word
            assert not word.ours or word.ours in ours, word
            assert word.values in ("flag", "one", "many", "switch"), word
            assert word.ours or word.note, word


def test_an_engines_options_are_listed_with_ours() -> None:
    lines = listed("vllm").splitlines()
    assert len(lines) == 1 + len(ENGINES["vllm"])
    rows = [line.split() for line in lines]
    assert ["--max-model-len", "--max-context"] in rows
    assert ["--tensor-parallel-size", "-tp", "--layout", "TP2"] in rows
    with pytest.raises(OptionError, match="from must be one of"):
        listed("triton")


OLDER = {
    "vllm": """
        --speculative-model --disable-log-requests --enable-reasoning --task --swap-space
        --lora-modules --allowed-origins --ssl-certfile --ssl-keyfile --ssl-ca-certs
        --uvicorn-log-level --disable-uvicorn-access-log --enable-auto-tool-choice
        --tool-call-parser --chat-template
    """,
    "sglang": "--tp --pp --dp --cuda-graph-max-bs --tool-call-parser --reasoning-parser",
}
"""Names that older versions have or had; vLLM's of the front end are fields of a record there."""


@pytest.mark.parametrize("engine", OLDER)
def test_names_are_those_that_the_engine_publishes(engine: str) -> None:
    published = json.loads(FLAGS.read_text())[engine]["flags"]
    known = {*" ".join(published).split(), *OLDER[engine].split()}
    names = {name for word in ENGINES[engine] for name in word.names if name.startswith("--")}
    assert names <= known


def test_the_usual_line_of_vllm() -> None:
    line = translate("vllm", USUAL.split())
    assert shlex.join(line.arguments) == (
        "org/name --served-name one,two --max-context 4000 --max-sequences 32 --step-tokens 2048 "
        "--dtype float16 --kv-dtype fp8 --prefix-cache --port 8001 --host 0.0.0.0 --layout TP2"
    )
    left = [note.partition(":")[0] for note in line.notes]
    assert left == ["--gpu-memory-utilization", "--quantization", "--trust-remote-code"]


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("vllm", "org/name --max-model-len=1K", "org/name --max-context 1024"),
        (
            "vllm",
            "docker run --runtime nvidia --gpus all -v /d/vllm:/root/.cache -e HF_TOKEN=s3cret "
            "-p 8000:8000 --ipc=host vllm/vllm-openai:v0.33.0 --model org/name -tp 2",
            "org/name --layout TP2",
        ),
        (
            "sglang",
            "sudo podman run --name sglang -v sglang:/root lmsysorg/sglang:latest "
            "python3 -m sglang.launch_server --model-path m --port 30000",
            "m --port 30000",
        ),
        ("vllm", "org/name --max_model_len -1", "org/name"),
        ("vllm", "m --no-enable-prefix-caching", "m --no-prefix-cache"),
        ("vllm", "m -tp 4 --enable-expert-parallel", "m --layout TP4.EP4"),
        ("vllm", "m -tp 1 -pp 2", "m --layout PP2"),
        ("vllm", "m -dp 1", "m"),
        ("vllm", "m --spec-method ngram --spec-tokens 4", "m --speculate ngram"),
        ("vllm", "m --spec-method draft_model --spec-model d", "m --draft-model d"),
        ("sglang", "--model m --disable-overlap-schedule", "m --depth 1"),
        ("vllm", "m -tp 2 --no-enable-expert-parallel", "m --layout TP2"),
        ("ollama", "OLLAMA_DEBUG=0 ollama serve", ""),
        ("ollama", "OLLAMA_DEBUG=1 ollama serve", "--log-level debug"),
        ("vllm", "m --enable-lora --max-loras 4", "m --max-adapters 4"),
        ("vllm", "m --max-loras 4 --enable-lora", "m --max-adapters 4"),
        ("vllm", 'm -sc {"method":"ngram"}', "m --speculate ngram"),
        ("vllm", 'm --speculative-config {"model":"d"}', "m --draft-model d"),
        ("vllm", 'm --allowed-origins ["https://a"]', "m --cors-origins https://a"),
        ("vllm", "m --uvicorn-log-level trace", "m --log-level debug"),
        ("vllm", "m --distributed-executor-backend ray", "m --launcher ray"),
        ("vllm", "python3 -m vllm.entrypoints.openai.api_server --model m", "m"),
        (
            "sglang",
            "python -m sglang.launch_server --model-path m --tp 2 --context-length 8192 "
            "--mem-fraction-static 0.8 --disable-radix-cache --page-size 64",
            "m --max-context 8192 --no-prefix-cache --block-size 64 --layout TP2",
        ),
        ("sglang", "--model m --speculative-algorithm NEXTN", "m --draft-model mtp"),
        ("sglang", "--model m --schedule-policy lpm --page-size 1", "m"),
        (
            "llama.cpp",
            "./llama-server -m a.gguf -c 8192 -np 4 -t 2 -ngl 0 -fa -ctk q8_0 -ctv q4_0",
            "a.gguf --max-context 2048 --max-sequences 4 --threads 2 --device cpu --kv-dtype k8v4",
        ),
        (
            "llama.cpp",
            "-m a.gguf -c 8192 -np 4 -kvu -fa on",
            "a.gguf --max-context 8192 --max-sequences 4",
        ),
        ("llama.cpp", "-hf o/n:Q4_0 -hff x.gguf -np -1 -t -1", "o/n:x.gguf"),
        ("llama.cpp", "-m a.gguf -ts 1,1", "a.gguf --layout TP2"),
        (
            "ollama",
            "OLLAMA_HOST=0.0.0.0:11434 OLLAMA_NUM_PARALLEL=2 ollama run hf.co/o/n:Q4_K_M",
            "o/n:Q4_K_M --host 0.0.0.0 --port 11434 --max-sequences 2",
        ),
        (
            "ollama",
            "FROM ./a.gguf PARAMETER num_ctx 4096 PARAMETER temperature 0.5",
            "./a.gguf --max-context 4096",
        ),
        ("ollama", "ollama run smollm2:135m", "smollm2-135m"),
        ("ollama", "OLLAMA_HOST=::1 ollama serve", "--host ::1"),
        ("ollama", "OLLAMA_HOST=[::1]:80 ollama serve", "--host ::1 --port 80"),
        ("ollama", "OLLAMA_HOST=:8000 ollama serve", "--port 8000"),
        ("ollama", "OLLAMA_HOST=http://a:11434/ ollama serve", "--host a --port 11434"),
        ("ollama", "OLLAMA_HOST=https://a ollama serve", "--host a --port 443"),
    ],
)
def test_values(engine: str, given: str, expected: str) -> None:
    assert shlex.join(translate(engine, given.split()).arguments) == expected


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("vllm", "m --max-modl-len 4", "did you mean --max-model-len?"),
        ("vllm", "m other", "other is not known here"),
        ("vllm", "m --max-model-len", "needs a value"),
        ("vllm", "m --max-model-len many", "only numbers"),
        ("vllm", "m -dp 2", "headrace route"),
        ("vllm", "docker run -p 8000:8000 own/image --model m", "no image of vllm"),
        ("vllm", "m --tokenizer t", "model's folder"),
        ("vllm", "m --kv-cache-dtype fp8_e5m2", "only "),
        ("vllm", "m -sc {", "JSON"),
        ("vllm", "m --api-key=", "is empty"),
        ("llama.cpp", "-m a -ctk f16 -ctv q8_0", "one type"),
        ("llama.cpp", "-m a -ts 3,1", "equal parts"),
        ("llama.cpp", "-m a --api-key-file /nowhere", "cannot read /nowhere"),
        ("ollama", "FROM a SYSTEM hi", "fields of a request"),
        ("vllm", "m --allowed-origins [1]", "--allowed-origins [1]: only lists of strings"),
        ("vllm", f"m --max-model-len {'9' * 400}", "--max-model-len 999"),
        ("vllm", f"m -tp {'9' * 5000}", "-tp 999"),
        ("vllm", f"m --speculative-config {'[' * 100_000}", "--speculative-config [[["),
        ("vllm", "HF_TOKEN=secret m other", "other is not known here"),
        ("ollama", "OLLAMA_HOST=a:b ollama serve", "OLLAMA_HOST a:b"),
        ("llama.cpp", "-m a -c 2 -np 4", "--ctx-size 2"),
        ("tgi", "m", "from must be one of vllm, sglang, llama.cpp, ollama"),
    ],
)
def test_what_is_refused(engine: str, given: str, said: str) -> None:
    with pytest.raises(OptionError, match=r".") as caught:
        translate(engine, given.split())
    assert said in caught.value.message
    assert caught.value.param == "from"


def test_a_key_is_kept_as_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    line = translate("vllm", ["m", "--api-key", "first", "second", "--port", "1"])
    path = Path(line.arguments[line.arguments.index("--keys") + 1])
    assert not any(tmp_path.iterdir()), "the line may still be refused"
    line.write_key_file()
    assert [key.hash for key in read_keys(path)] == [hash_of("first"), hash_of("second")]
    assert path.stat().st_mode & 0o777 == 0o600
    assert "first" not in shlex.join(line.arguments) + path.read_text()
    again = translate("vllm", ["m", "--api-key", "first", "second"])
    assert again.arguments[again.arguments.index("--keys") + 1] == str(path)
    listed = tmp_path / "secrets"
    listed.write_text("# a list\nfirst\nsecond\n")
    same = translate("llama.cpp", ["-m", "m", "--api-key-file", str(listed)])
    assert same.options["keys"] == str(path)


def test_variables_before_the_program_are_named_without_their_values() -> None:
    words = ["HF_TOKEN=secret", "CUDA_VISIBLE_DEVICES=0", "vllm", "serve", "org/m"]
    line = translate("vllm", words)
    assert line.arguments == ["org/m"]
    assert line.notes == [
        "HF_TOKEN: set it in the environment of headrace",
        "CUDA_VISIBLE_DEVICES: set it in the environment of headrace",
    ]
    assert translate("ollama", ["A=b", "OLLAMA_DEBUG=1", "ollama", "serve"]).options == {
        "log_level": "debug"
    }


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--max-sequences", "0")])
def test_keys_are_written_only_when_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headrace.cli.serve.take_ports", lambda server: [])
    monkeypatch.setattr("headrace.cli.serve.keep", lambda run, imports: 0)
    words = ["--from", "vllm", "--port", "0", *more, "--", str(model), "--api-key", "secret"]
    done = CliRunner().invoke(command, words)
    assert (done.exit_code == 0) is (more != ("--max-sequences", "0")), done.output
    assert len([*tmp_path.glob("keys/*.toml")]) == (not more)


def test_serve_prints_the_line_and_takes_our_options(run: Any, model: Path) -> None:
    done = run(
        *("serve", "--dry-run", "--from", "vllm", "--threads", "1", "--"),
        *("vllm", "serve", str(model), "--max-model-len", "64", "--trust-remote-code"),
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first == f"headrace serve {model} --max-context 64 --dry-run --threads 1"
    assert second.startswith("left out --trust-remote-code: no code of a model's folder")
    assert "max_context" in done.stdout
    alone = run("serve", "--from", "vllm", str(model))
    assert alone.returncode == 2
    assert "then -- and its line" in alone.stderr
