"""An installation without the extras: what commands list, and what they say that they lack."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from budgets import trees
from headrace.base.errors import PackageAbsent
from headrace.base.extras import install
from messages import text

BARE = """
import importlib.metadata, sys
from headrace.base import extras

MODULES = (
    "av cryptography cyclonedx duckdb grpc matplotlib mlperf_loadgen opentelemetry oras packageurl "
    "packaging ray redis securesystemslib soundfile soxr torch websockets zmq"
)
sys.modules |= dict.fromkeys(MODULES.split())
EXTRAS = "audio av bench cache events factory fleet picker ray split telemetry torch".split()
gone = {extras._NAME.match(one)[0] for one in extras._packages(*EXTRAS)}
real = importlib.metadata.version

def version(name):
    if name in gone:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
from headrace.cli.main import main
main()
"""


def bare(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command where neither an extra's modules nor its packages are there."""
    command = [sys.executable, "-c", BARE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def test_the_factory_lists_its_commands_without_its_packages() -> None:
    done = bare("factory", "--help")
    assert done.returncode == 0, done.stderr
    for name in ("build", "image", "verify", "promote", "watch"):
        assert re.search(rf"^\W*{name} +[A-Z]", done.stdout, re.MULTILINE), done.stdout


def test_every_listed_command_of_the_factory_is_there() -> None:
    import typer.main

    from headrace.cli import factory, factory_build, factory_fleet, factory_ship, factory_store

    homes = {
        "build": factory_build,
        "ship": factory_ship,
        "store": factory_store,
        "fleet": factory_fleet,
    }
    for home, names in factory.COMMANDS.items():
        assert typer.main.get_group(homes[home].command).commands.keys() == names.keys()


EVERY_HELP = """
from headrace.cli.main import COMMANDS
for name in COMMANDS:
    sys.argv = ["headrace", name, "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, name
"""


def test_help_of_every_command_needs_no_extra() -> None:
    code = BARE.removesuffix("main()\n") + EVERY_HELP
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FACTORY = "securesystemslib cryptography cyclonedx-python-lib packageurl-python packaging oras"


@pytest.mark.parametrize(
    ("arguments", "lacks"),
    [
        (("factory", "verify"), FACTORY),
        (("factory", "watch"), f"{FACTORY} duckdb"),
        (("roofline", "--calibrate"), "torch"),
        (
            ("route", "http://127.0.0.1:9", "--port", "0", "--endpoint-picker", "[::1]:0"),
            "grpcio protobuf",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_all_that_is_missing_is_named_with_one_command(
    arguments: tuple[str, ...], lacks: str
) -> None:
    done = bare(*arguments)
    assert done.returncode == PackageAbsent.exit_code, done.stderr
    assert len(done.stderr.splitlines()) == 1
    command = shlex.split(done.stderr.partition("pip install ")[2])
    assert [re.split(r"[<>=[]", word)[0] for word in command] == lacks.split()


def test_a_sound_names_both_of_the_packages_that_it_needs(tmp_path: Any) -> None:
    (tmp_path / "talk.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(64))
    code = BARE.replace("from headrace.cli.main import main\nmain()", "") + (
        "import sys; from headrace.media import audio, confined\n"
        "confined.run_child = lambda *given: {'absent': 'soxr'}\n"
        "from headrace.base.errors import PackageAbsent\n"
        "try: audio.decode(open(sys.argv[1], 'rb').read(), audio.AudioLimits())\n"
        "except PackageAbsent as absent: print(absent.message)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "talk.m4a")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "needs soundfile, soxr, websockets and av, which are not installed" in done.stdout, done


def test_what_is_not_installed_is_what_is_installed() -> None:
    """All is there: the whole extra is named, each requirement as it is declared."""
    assert re.fullmatch(r"pip install 'torch\S+'", install("torch"))
    assert install("fleet").count("duckdb") == 1
    assert "oras" in install("fleet")


def test_no_message_installs_a_project_of_our_name() -> None:
    """No index has one that is ours: whoever takes the name there would be installed."""
    for module, tree in trees().items():
        for node in ast.walk(tree):
            found = text(node) if isinstance(node, ast.Constant | ast.JoinedStr) else None
            assert found is None or not re.search(r"pip install\W+headrace\b", found), module
