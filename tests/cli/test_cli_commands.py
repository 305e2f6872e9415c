"""The `headrace` command from outside: what it prints, where, and its exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from headrace.cli import models
from headrace.loader.cache import CachedModel

SMALL = ("--threads", "1", "--max-sequences", "4", "--kv-memory", "8MiB")


def one_line(text: str) -> str:
    """Return stderr, which must be one clear line."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    assert "Traceback" not in text
    return lines[0]


def test_help_is_quick_and_imports_no_command(run: Any) -> None:
    assert "serve" in run("--help").stdout
    code = (
        "import sys; from headrace.cli.main import main\n"
        "sys.argv = ['headrace', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'pydantic', 'headrace.cli.serve'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_command_has_help_and_every_option_is_a_flag(run: Any) -> None:
    from dataclasses import fields

    from headrace.base.config import EngineOptions, ServerOptions
    from headrace.cli.main import COMMANDS

    for name in COMMANDS:
        done = run(name, "--help")
        assert done.returncode == 0, (name, done.stderr)
    text = run("serve", "--help-all", COLUMNS="200").stdout
    for record in (EngineOptions, ServerOptions):
        for spec in fields(record):
            if spec.name != "model":
                assert f"--{spec.name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pull", "qwen3-0.6b"), "no command 'pull'; here that is headrace models pull;"),
        (("run", "qwen3-0.6b"), "here that is headrace chat;"),
        (("plann",), "no command 'plann'; did you mean plan?"),
        (("plan", "llama-70b", "--devices", "8xH100"), "did you mean llama-3.1-70b?"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_word_of_another_engine_is_answered_with_ours(
    run: Any, words: tuple[str, ...], said: str
) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in one_line(done.stderr)


def test_others_commands_are_answered_with_commands_of_ours() -> None:
    from headrace.cli.main import COMMANDS, ELSEWHERE

    assert not ELSEWHERE.keys() & COMMANDS.keys()
    assert {ours.split()[0] for ours in ELSEWHERE.values()} <= {*COMMANDS, "--help"}


@pytest.mark.parametrize("name", ["serve", "chat", "generate", "explain"])
def test_help_is_one_screen_and_help_all_the_rest(run: Any, name: str) -> None:
    brief = run(name, "--help", COLUMNS="80").stdout
    assert len(brief.splitlines()) <= 42
    assert "--help-all lists them" in brief
    assert "--block-size" not in brief
    assert "--device" in brief
    whole = run(name, "--help-all", COLUMNS="80").stdout
    assert "--block-size" in whole
    assert "lists them" not in whole


@pytest.mark.parametrize("name", ["bench run", "plan", "roofline"])
def test_help_cuts_no_word_at_eighty_columns(run: Any, name: str) -> None:
    text = run(*name.split(), "--help", COLUMNS="80").stdout
    cut = [line for line in text.splitlines() if re.search(r"[^ :]…", line)]
    assert not cut
    assert "--install-completion" not in text
    if name == "bench run":
        for panel in ("Server", "Prompts and answers", "Load", "Judgement"):
            assert f"─ {panel} ─" in text


def test_models_fit_into_eighty_columns(run: Any) -> None:
    lines = run("models", COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith("qwen2.5-coder-0.5b ")]) == 1
    assert len([line for line in lines if line.startswith("  ")]) == 0, "no row is folded"


def test_names_of_models_are_not_markup(run: Any, tmp_path: Path) -> None:
    (tmp_path / "hub" / "[--x]").mkdir(parents=True)
    done = run("models")
    assert done.returncode == 0, done.stderr
    assert "[/x]" in done.stdout


def test_serve_of_no_model_is_one_line(run: Any) -> None:
    done = run("serve", "nope-model", "--port", "0")
    assert "nope-model" in one_line(done.stderr)
    assert done.returncode == 2


def test_version(run: Any) -> None:
    from headrace import __version__

    assert run("--version").stdout.strip() == f"headrace {__version__}"


@pytest.mark.slow
def test_generate_streams_to_stdout(run: Any, model: Path) -> None:
    first = run(
        "generate", str(model), "the water", "--max-tokens", "8", "--temperature", "0", *SMALL
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    piped = run(
        "generate",
        str(model),
        "-",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--json",
        *SMALL,
        stdin="the water",
    )
    answer = json.loads(piped.stdout)
    assert answer["text"] + "\n" == first.stdout
    assert answer["finish_reason"] == "length"
    assert answer["completion_tokens"] == 8
    assert answer["prompt_tokens"] > 0


def test_a_config_file_equals_flags(run: Any, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(f'model = "{model}"\nmax-sequences = 3\nprefix_cache = false\n')
    shown = json.loads(run("explain", "--json", "--config", str(config)).stdout)
    assert shown["options"]["max_sequences"] == 3
    assert shown["options"]["prefix_cache"] is False
    flags = ("--max-sequences", "5", "--prefix-cache")
    shown = json.loads(run("explain", "--json", "--config", str(config), *flags).stdout)
    assert shown["options"]["max_sequences"] == 5
    assert shown["options"]["prefix_cache"] is True


def test_explain_tells_memory_and_reasons(run: Any, model: Path) -> None:
    done = run("explain", str(model), "--threads", "1", "--kv-memory", "8MiB")
    assert done.returncode == 0, done.stderr
    for word in ("KV pool", "weights", "device", "cpu", "llama", "set", "at their defaults:"):
        assert word in done.stdout
    names = " ".join(done.stdout.partition("at their defaults:")[2].split())
    assert "prefix_cache, policy" in names, "what nobody chose has no row"
    assert not re.search("^prefix_cache ", done.stdout, re.MULTILINE)
    shown = json.loads(run("explain", str(model), "--json").stdout)
    assert sum(shown["memory"]["parts"].values()) == shown["memory"]["available"]
    decided = {decision["name"]: decision for decision in shown["decisions"]}
    assert decided["tokenizer"]["value"] in done.stdout
    assert decided["tokenizer"]["reason"]
    assert "until steps show more" in decided["drafts that pay"]["reason"]
    assert decided["disk"]["value"].endswith(" MB")
    assert "repacked" in decided["disk"]["reason"]


def test_a_name_is_no_style(run: Any, model: Path, tmp_path: Path) -> None:
    named = tmp_path / "[red]x[bold]"
    named.symlink_to(model)
    done = run("explain", str(named))
    assert done.returncode == 0, done.stderr
    assert "[red]x[bold]" in done.stdout


def test_no_console_takes_texts_for_styles() -> None:
    from headrace import cli

    for path in Path(cli.__path__[0]).glob("*.py"):
        for made in re.findall(r"\bConsole\(.*", path.read_text()):
            assert "markup=False" in made, f"{path.name}: {made}"


def test_explain_tells_of_no_drafts_where_there_are_none(run: Any, model: Path) -> None:
    shown = json.loads(run("explain", str(model), "--speculate", "off", "--json").stdout)
    decided = {decision["name"]: decision for decision in shown["decisions"]}
    assert "drafts that pay" not in decided


def test_serve_dry_run_starts_nothing(run: Any, model: Path) -> None:
    done = run("serve", str(model), "--dry-run", "--port", "1234")
    assert done.returncode == 0, done.stderr
    assert "1234" in done.stdout


def test_models_lists_the_catalog(run: Any) -> None:
    text = run("models").stdout
    assert "qwen2.5-coder-0.5b" in text
    assert "Apache-2.0" in text
    listed = json.loads(run("models", "--json").stdout)
    assert [entry["name"] for entry in listed if entry["default"]] == ["qwen2.5-coder-0.5b"]
    assert not any(entry["complete"] for entry in listed)
    for title in ("Chat", "Code", "Embeddings", "Reranking", "Speech to text"):
        assert f"\n{title}" in text
    assert "that are free here" in text


def test_a_file_elsewhere_is_on_the_disk_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is not known: nobody says that it fits."""
    (here := tmp_path / "here").write_text("")
    found = [
        CachedModel(str(path), "", "", 0, 0, False, path, packed=5)
        for path in (here, tmp_path / "away")
    ]
    monkeypatch.setattr(models, "cached_models", lambda _: found)
    rows = CliRunner().invoke(models.command, []).stdout.replace("\n", "")
    assert "fits " not in rows.partition("fits: ")[0]
    assert "on disk" in rows
    assert "gone" in rows


def test_serve_without_a_model_proposes_one(run: Any) -> None:
    done = run("serve", "--offline")
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith("serving qwen2.5-coder-0.5b, the default")
    assert run("serve", "qwen2.5-coder-0.5b", "--offline").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("generate", "no-such-model", "x"), 2, "no-such-model"),
        (("generate", "a", "b", "c"), 2, "quotes"),
        (("generate", "", "--url", "http://127.0.0.1:9"), 2, "empty"),
        (("generate", "x", "--url", "http://127.0.0.1:9"), 69, "cannot reach"),
        (("top", "http://127.0.0.1:9", "--once"), 69, "cannot reach"),
        (("chat", "--url", "http://127.0.0.1:9"), 69, "cannot reach"),
        (("explain", "x.gguf"), 2, "x.gguf"),
        (("explain", "--config", "no.toml"), 2, "no.toml"),
        (("explain", "--device", "tpu"), 2, "auto, cpu, cuda"),
        (("explain", "--max-sequences", "0"), 2, "at least 1"),
        (("explain", "--kv-memory", "much"), 2, "kv_memory"),
        (("models", "remove", "qwen2.5-coder-0.5b"), 2, "not in the cache"),
        (("models", "pull", "nothing"), 2, "nothing"),
        (("generate", "--offline", "x"), 4, "offline"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_an_error_is_one_line_and_its_status(
    run: Any, arguments: tuple[str, ...], status: int, words: str, model: Path
) -> None:
    if arguments[0] == "explain" and "--kv-memory" in arguments:
        arguments = (*arguments, str(model))
    done = run(*arguments)
    assert words in one_line(done.stderr)
    assert done.returncode == status
    assert done.stdout == ""


def test_a_damaged_model_is_one_line(run: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    done = run("generate", str(broken), "x")
    assert "broken.gguf" in one_line(done.stderr)
    assert done.returncode == 3


def test_an_unknown_key_in_the_config(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("colour = 1\n")
    assert "colour" in one_line(run("explain", "--config", str(config)).stderr)
    config.write_text("port = [\n")
    assert "TOML" in one_line(run("explain", "--config", str(config)).stderr)


def test_usage_errors_suggest(run: Any) -> None:
    done = run("srve")
    assert done.returncode == 2
    assert "serve" in done.stderr
    done = run("serve", "--prt", "1")
    assert done.returncode == 2
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--max-model-len", "4096"), "here that is --max-context"),
        (("serve", "--tensor-parallel-size", "2"), "here that is --layout (TP2)"),
        (("serve", "--gpu-memory-utilization", "0.9"), "here that is --kv-memory"),
        (("serve", "--ctx-size", "1"), "here that is --max-context"),
        (("explain", "--quantize", "tiny"), "quantise must be one of"),
        (("serve", "--api-key", "x"), "here that is --keys"),
        (("generate", "--n-predict", "8", "x"), "here that is --max-tokens"),
        (("chat", "--max-tokns", "8"), "did you mean --max-tokens?"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_flags_of_other_engines_are_answered_with_ours(
    run: Any, words: tuple[str, ...], said: str
) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_a_config_files_option_is_answered_alike(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("max-num-seqs = 1\n")
    said = one_line(run("explain", "--config", str(config)).stderr)
    assert said.endswith("; here that is max_sequences")


def test_a_model_of_nearly_that_name_is_told(run: Any) -> None:
    said = one_line(run("serve", "qwen2.5-coder-0.5", "--port", "0").stderr)
    assert "; did you mean qwen2.5-coder-0.5b?" in said


def test_debug_shows_the_traceback(run: Any) -> None:
    assert "Traceback" in run("explain", "none", HEADRACE_DEBUG="1").stderr


@pytest.mark.slow
def test_completion_knows_commands_and_flags(run: Any) -> None:
    def complete(words: str, count: int) -> str:
        return str(
            run(_HEADRACE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count)).stdout
        )

    assert "serve" in complete("headrace s", 1)
    assert "--drain-seconds" in complete("headrace serve --dr", 2)
    assert "priority" in complete("headrace serve --policy p", 3)


@pytest.mark.slow
def test_chat_answers_piped_lines(run: Any, model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "/system Be brief.",
        "hello",
        "/params temperature 0",
        "/params",
        "again",
        f"/save {saved}",
        "/nonsense",
    ]
    done = run(
        "chat", str(model), "--max-tokens", "5", "--seed", "1", *SMALL, stdin="\n".join(lines)
    )
    assert done.returncode == 2
    assert "/nonsense" in one_line(done.stderr)
    assert "temperature 0.0" in done.stdout
    roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


HELD = """
import asyncio, os
from headrace.cli import main, voice

pieces = voice.LocalVoice._pieces
waited = False

async def held(self, *given):
    global waited
    async for piece in pieces(self, *given):
        yield piece
        if piece.text and not waited:
            waited = True
            os.write(2, b"HELD")
            await asyncio.sleep(3600)

voice.LocalVoice._pieces = held
main.main()
"""
"""The command whose first answer stops after its first piece of text."""


def terminal(command: list[str], cache: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"HEADRACE_CACHE": str(cache), "TERM": "xterm", "COLUMNS": "100"},
        preexec_fn=_own_terminal,
    )
    os.close(theirs)
    return process, ours


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(ours: int, words: bytes, seconds: float = 240) -> bytes:
    seen = b""
    end = time.monotonic() + seconds
    while words not in seen:
        assert time.monotonic() < end, seen
        if select.select([ours], [], [], 0.2)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:
                raise AssertionError(f"the terminal closed after {seen!r}") from None
            if b"\x1b[6n" in part:
                os.write(ours, b"\x1b[1;1R")  # where is the cursor? A terminal answers.
            seen += part
    return seen


def drain(ours: int) -> bytes:
    """Read until the other side closes: a full pseudo-terminal would hold its writer."""
    seen = b""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if select.select([ours], [], [], 0.2)[0]:
                part = os.read(ours, 65536)
                if b"\x1b[6n" in part:
                    os.write(ours, b"\x1b[1;1R")
                seen += part
        except OSError:
            break
    return seen


@pytest.mark.slow
def test_chat_on_a_terminal(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HELD, "chat", str(model), *SMALL, "--temperature", "0"]
    process, ours = terminal(command, tmp_path)
    try:
        read_until(ours, "›".encode())
        os.write(ours, b"one\x1b\rtwo\r")  # Alt-Enter breaks the line
        read_until(ours, b"HELD")
        os.write(ours, b"\x03")
        read_until(ours, "›".encode())
        os.write(ours, f"/save {tmp_path}/t.json\r".encode())
        seen = read_until(ours, b"messages in")
        if "›" not in seen.decode("utf-8", "replace").rpartition("messages in")[2]:
            read_until(ours, "›".encode())
        os.write(ours, b"\x04")
        drain(ours)
        assert process.wait(120) == 0
    finally:
        process.kill()
        os.close(ours)
    messages = json.loads((tmp_path / "t.json").read_text())["messages"]
    assert messages[0] == {"role": "user", "content": "one\ntwo"}
    history = tmp_path / "chat_history"
    assert "two" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_ctrl_c_exits_130_while_an_answer_comes(model: Path, tmp_path: Path) -> None:
    greedy = ["--temperature", "0"]  # A drawn answer may be empty.
    command = [sys.executable, "-c", HELD, "generate", str(model), "water", *SMALL, *greedy]
    process, ours = terminal(command, tmp_path)
    try:
        read_until(ours, b"HELD")
        os.write(ours, b"\x03")
        seen = drain(ours)
        assert process.wait(120) == 130
        assert b"Traceback" not in seen
    finally:
        process.kill()
        os.close(ours)


@pytest.mark.slow
def test_ctrl_c_while_the_model_loads(run: Any, model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # It is past its own imports when it forks the process that loads.
    end = time.monotonic() + 120
    while not psutil.Process(process.pid).children():
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
