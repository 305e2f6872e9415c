"""The fault table, its quick rows: nothing hangs, nothing is lost that the documentation promises.

`make faults` tries the others too and writes the table of docs/reliability.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import fault_gateway
import fault_programs
import fault_rows
import fault_servers
import pytest
from fault_client import Row
from table import kept

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fault_rows.Place]:
    with fault_rows.place(tmp_path_factory.mktemp("faults")) as place:
        yield place


@pytest.mark.parametrize("name", fault_rows.QUICK)
def test_a_fault(server: fault_rows.Place, name: str) -> None:
    row = asyncio.run(fault_rows.QUICK[name](server))
    if row is None:
        pytest.skip("what this fault needs of the system is not to be had here")
    assert not row.broken(timed=False), row
    assert row.facts["after"] == "answered"


OWN = fault_servers.QUICK | fault_gateway.QUICK | fault_programs.QUICK


@pytest.mark.parametrize("name", OWN)
def test_a_fault_of_a_server_of_its_own(tmp_path: Path, name: str) -> None:
    row = asyncio.run(OWN[name](tmp_path))
    if row is None:
        pytest.skip("what this fault needs of the system is not to be had here")
    assert not row.broken(timed=False), row
    assert row.facts["after"] == "answered"


def test_rows_that_were_not_tried_stay() -> None:
    first, second = Row("kill", "x", sent=1), Row("stop", "y", sent=2)
    before = [{**asdict(row), "broken": []} for row in (first, second)]
    again, new = Row("stop", "y", sent=3), Row("fill", "z")
    assert kept(before, [new, again]) == [first, again, new]


def test_a_broken_promise_is_told() -> None:
    row = Row("kill", "x", limits={"seconds": 1.0}).count(["answered", "hung", "lost"])
    row.facts["seconds"] = 2.0
    assert (row.sent, row.answered) == (3, 1)
    assert row.broken() == ["1 hung", "1 lost", "seconds is 2.0, at most 1"]
    row.limits = {"x_seconds": 1.0}
    assert row.broken(timed=False) == ["1 hung", "1 lost"]
    row.may_lose = True
    assert "1 lost" not in row.broken()
    assert Row("kill", "y", limits={"seconds": 1.0}).broken() == ["seconds is None, at most 1"]
