"""Every example in the documents is run, or parsed by the real command line where it needs what is
not here; the reason stands beside each that is not run. An example that no rule knows fails.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
from starlette.requests import Request
from typer.testing import CliRunner

from headrace.base.config import ServerOptions
from headrace.cli.main import application
from headrace.server.app import create_app
from headrace.server.hearing.form import read_form
from headrace.server.routes.images import ImagesBody
from headrace.server.routes.recommend import RecommendBody
from headrace.server.speech_fields import SpeechBody
from tiny import bytewise
from tiny.kept import Kept

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "server"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:headrace|python|pytest|make) [^`]+)`")
DRAWINGS = ("models/<catalog name>", "API process ──")
"""Beginnings of blocks that show no command."""
RUN = ("roofline MODEL --hardware", "roofline deepseek-v3", "simulate MODEL --replicas", "plan ")
"""Commands that need neither model, server nor time: run to their end, for a known model."""
KNOWN = "llama-3.1-8b"
PARSED = {
    "bench": "needs a server; run against the mock by tests/bench",
    "quantise": "makes a model; tests/quantise on tiny ones",
    "convert": "makes a model; tests/quantise on tiny ones",
    "cache": "of what is on the disk; tests/cli",
    "chat": "needs a terminal; tests/cli",
    "clients": "needs a server; tests/cli",
    "draw": "needs a model that draws; tests/server/test_server_images.py on a tiny one",
    "explain": "needs the default model; tests/cli on a tiny one",
    "factory": "builds the default model; tests/factory on a tiny one",
    "generate": "needs the default model; tests/cli on a tiny one",
    "programs": "needs the extra programs; tests/cli on a small file",
    "keys": "writes a file of keys; tests/cli",
    "models": "asks for what is on the disk; tests/cli",
    "plan": "placeholders only; the block of docs/roofline.md is run",
    "profile": "times this machine; tests/cli",
    "replay": "needs a record; tests/engine/test_replay.py",
    "roofline": "measures this machine; tests/roofline",
    "speak": "needs a model that speaks; tests/cli on a tiny one",
    "route": "serves until it is told to stop; tests/route",
    "serve": "serves until it is told to stop; tests/server/test_server_process.py",
    "simulate": "placeholders only; the block of docs/roofline.md is run",
    "top": "needs a server; tests/cli/test_top.py",
    "transcribe": "needs a model of speech; tests/speech",
}
ELSEWHERE = {
    "headrace serve --from": "tests/cli/test_translate.py has such lines",
    "headrace plan --from": "tests/cli/test_plan_from.py has such lines",
    "lm/bin/": "a foreign program, from an index; benchmarks/CHANGELOG.md has its figures",
    "python -m venv lm": "a foreign program, from an index",
    "cp benchmarks/lm_eval": "prepares the foreign program",
    "export ": "prepares the foreign program",
    "podman ": "a foreign program; the image was tried with it by hand",
    "ray start": "a foreign program; tests/factory/test_factory_cluster.py starts one by itself",
    "helm install": "a foreign program; tests/factory/test_factory_chart.py renders the chart",
    "curl -X POST localhost:8000/v1/load_lora_adapter": "tests/server/test_server_adapters.py",
}


def lines_of(block: str) -> Iterator[str]:
    """Commands of a block, continued lines joined, without what is said behind them."""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        for part in re.split(r"\s{3,}(?=headrace )", re.sub(r"\s#\s.*", "", line)):
            if part.strip():
                yield part.strip()


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every block without a language, and of code within a line."""
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        for language, block in FENCED.findall(text):
            if not language and not block.startswith(DRAWINGS):
                yield from ((name, line) for line in lines_of(block))
        for line in INLINE.findall(FENCED.sub("", text)):
            yield name, " ".join(line.split())


EXAMPLES = sorted(set(commands()))
LONG = ("headrace plan MODEL --", "headrace simulate MODEL --replicas")
"""Commands that simulate for tens of seconds."""


def words_of(command: str) -> list[str]:
    """Arguments of `headrace`, with what may be left out left in and dots left out."""
    words = shlex.split(re.sub(r"[\[\]]| …", " ", command))
    words = words[words.index("headrace") + 1 :]
    return [word.split("|")[0] if "|" in word and "<" not in word else word for word in words]


def parse(words: list[str]) -> None:
    """Read the arguments as the command line does; nothing is called."""
    command: Any = typer.main.get_command(application).commands[words[0]]  # type: ignore[attr-defined]
    context = command.make_context(words[0], words[1:], resilient_parsing=len(words) == 1)
    while hasattr(context.command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest:
            return
        name, command, arguments = context.command.resolve_command(context, rest)
        bare = not arguments
        context = command.make_context(name, arguments, parent=context, resilient_parsing=bare)


def marked() -> Iterator[Any]:
    for page, command in EXAMPLES:
        marks = [pytest.mark.slow] if command.startswith(LONG) else []
        yield pytest.param(page, command, id=f"{page} {command}", marks=marks)


@pytest.mark.parametrize(("page", "command"), list(marked()))
def test_a_command(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(command.startswith(other) for other in ELSEWHERE) or command.startswith("curl "):
        return  # The other requests are sent below.
    if re.match(r"(HEADRACE_\w+=\S+ )?(nice -n -10 )?headrace ", command):
        words = words_of(command)
        if words[0].startswith("-") or words[-1] == "--help":
            return
        known = any(" ".join(words).startswith(one) for one in RUN) and "--" in command
        if known and "FILE" not in words:  # The reader's own, as a trace of prefixes is.
            words = [KNOWN if word == "MODEL" else word for word in words]
            words = [word for word in words if word not in ("--html", "--png", "F")]
            monkeypatch.chdir(tmp_path)  # Some write files.
            done = CliRunner().invoke(application, words)
            assert done.exit_code == 0, done.output
            return
        assert words[0] in PARSED, f"{page}: no rule for {command!r}"
        parse(words)
    elif command.startswith("make "):
        target = command.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif command.startswith(("python ", "pytest ")):
        for word in shlex.split(command):
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), f"{page} names {word}"
            if word.startswith("headrace."):
                assert (ROOT / "src" / (word.replace(".", "/") + ".py")).is_file()
    else:
        pytest.fail(f"{page}: no rule for {command!r}")


def test_no_rule_outlives_its_example() -> None:
    text = "\n".join(command for _, command in EXAMPLES)
    assert not [rule for rule in (*RUN, *ELSEWHERE) if rule not in text]
    assert not [name for name in PARSED if f"headrace {name}" not in text]


def requests() -> list[str]:
    return [
        line
        for _, line in EXAMPLES
        if line.startswith("curl ") and not line.startswith("curl -X") and " -F " not in line
    ]


@pytest.mark.parametrize("command", [line for _, line in EXAMPLES if " -F " in line])
async def test_a_form(command: str) -> None:
    """A form that `curl` would send is one that the route of sounds takes."""
    request = httpx.Request(
        "POST",
        "http://test",
        data={
            name: value
            for word in shlex.split(command)
            for name, equals, value in [word.partition("=")]
            if equals and name != "file"
        },
        files={"file": b"RIFF"},
    )
    app = create_app(None, ServerOptions())
    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(k.lower(), v) for k, v in request.headers.raw],
        "app": app,
    }
    body = request.read()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    file, form = await read_form(Request(scope, receive), 1000)
    assert file == b"RIFF"
    assert form.model_dump(exclude_defaults=True) or command.endswith("talk.wav")


@pytest.mark.parametrize("command", requests())
async def test_a_request(command: str) -> None:
    """The application answers `curl`'s request, over an engine that says one thing."""
    from server_fake import FakeEngine  # Beside the tests of the server.

    words = shlex.split(command)
    path = "/" + words[1].partition("/")[2]
    body = json.loads(words[words.index("-d") + 1])
    options = ServerOptions(max_body=100_000, max_concurrent=4)
    app = create_app(FakeEngine(), options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(path, json=body)
    kinds = {
        "/v1/audio/speech": SpeechBody,
        "/v1/images/generations": ImagesBody,
        "/v1/recommend": RecommendBody,
    }
    if path in kinds:  # It is understood; only the engine neither speaks nor draws nor ranks.
        assert kinds[path].model_validate(body)
        assert reply.json()["error"]["code"] == "unsupported_model", reply.text
        return
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"]


def programs() -> list[Any]:
    found = []
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text()):
            assert language in ("", "python"), f"{page}: no rule for {language!r}"
            if language:
                small = "qwen2.5-coder-0.5b" in block
                marks = () if small else (pytest.mark.model, pytest.mark.slow)
                found.append(pytest.param(block, id=page.stem, marks=marks))
    return found


@pytest.mark.parametrize("program", programs())
def test_a_program(program: str, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """The default model's programs run on a tiny one; the others on the model that they name."""
    if "qwen2.5-coder-0.5b" in program:
        program = program.replace("qwen2.5-coder-0.5b", str(kept(bytewise.make)))
    names: dict[str, Any] = {}
    try:
        exec(compile(program, "example", "exec"), names)
    finally:
        if "llm" in names:
            names["llm"].close()
    if "print(" in program:
        assert capsys.readouterr().out
