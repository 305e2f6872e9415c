"""A server that dies under streams: what `headrace bench failover` says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.bench.failover import by_command, failover, sessions_of
from headrace.bench.job import Target
from headrace.bench.mock import Behaviour, MockServer
from headrace.cli.bench import command
from tiny import talker
from tiny.kept import Kept

SLOW = Behaviour(ttft=0.0, itl=0.02)


def quiet(_part: str) -> None:
    """Say nothing."""


def test_without_another_server_the_streams_are_lost() -> None:
    with MockServer(SLOW) as server:
        target = Target(server.url, "mock")
        found = failover(target, sessions_of(4, 40), lambda: server.__exit__(), quiet)
    assert found.in_work == 4
    assert (found.equal, found.unlike) == (0, 0)
    assert found.failed
    assert found.moved is None, "a server's metrics do not tell what a gateway's tell"
    assert not found.kept


def test_a_server_that_lives_keeps_everything() -> None:
    with MockServer(SLOW) as server:
        found = failover(Target(server.url, "mock"), sessions_of(2, 20), lambda: None, quiet)
    assert found.equal == found.in_work == 2
    assert found.kept
    assert found.usual > 0


def test_an_error_without_a_death_is_not_laid_to_it() -> None:
    with (
        MockServer(Behaviour(error_rate=1.0)) as server,
        pytest.raises(HeadraceError, match="without any death"),
    ):
        failover(Target(server.url, "mock"), sessions_of(2, 5), lambda: None, quiet)


@pytest.mark.parametrize(
    ("line", "said"),
    [("", "empty"), ("'", "no command"), ("/nowhere/kill", "No such file"), ("false", "with 1")],
)
def test_a_kill_that_kills_nothing_is_named(line: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        by_command(line)()
    assert caught.value.param == "kill"


def test_url_and_kill_go_together() -> None:
    for flags in (["--url", "http://127.0.0.1:1"], ["--kill", "true"]):
        done = CliRunner().invoke(command, ["failover", *flags])
        assert isinstance(done.exception, InvalidRequest)


def test_a_gateway_of_the_user_is_asked(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    line = f"{sys.executable} -c \"open('{marker}', 'w')\""
    with MockServer(SLOW) as server:
        flags = ["--url", server.url, "--kill", line, "--streams", "3", "--output", "60"]
        done = CliRunner().invoke(command, ["failover", *flags])
    assert done.exit_code == 0, done.output
    assert marker.exists()
    assert "3 answers equal the undisturbed ones, 0 differ" in done.stdout


@pytest.mark.slow
def test_servers_of_its_own_lose_and_repeat_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    model = kept(talker.make, hidden=512)
    done = CliRunner().invoke(
        command, ["failover", str(model), "--streams", "8", "--output", "300", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["kept"]
    assert told["equal"] == told["streams"] == 8
    assert told["in_work"] >= 1
    assert told["moved"] >= 1
