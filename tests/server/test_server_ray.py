"""Ranks that Ray places: a cluster of this machine, whose nodes are killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import Running, headrace, running
from test_server_ranks import answers, streaming

from headrace.base.config import EngineOptions
from headrace.base.errors import EngineDead
from headrace.dist.hosts import HostPort
from headrace.engine.ranks import placing
from headrace.engine.ranks.joining import Patience, lead
from headrace.engine.ranks.joins import Joins, RanksAsked
from headrace.engine.ranks.launch import RankPlace
from tiny import bytewise
from tiny.kept import Kept

pytestmark = pytest.mark.slow

FIRST = RankPlace(0, 2, HostPort("here", 0), b"k" * 32)


@pytest.fixture(scope="module")
def model(kept: Kept) -> Path:
    return kept(bytewise.make)


def serve(model: Path, cache: Path, *more: str) -> list[str]:
    return headrace(
        *("serve", str(model), "--cache-dir", str(cache), "--threads", "1", "--offline"),
        *("--kv-memory", "16MiB", "--max-context", "512", "--port", "0", *more),
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, on whose host a server is, and two nodes with another address each."""
    pytest.importorskip("ray", reason="NOT TESTED: pip install ray")
    from ray.cluster_utils import Cluster

    least = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **least})
    for number in (2, 3):
        made.add_node(node_ip_address=f"127.0.0.{number}", **least)
    made.wait_for_nodes(timeout=120)
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    made.shutdown()


def ranks_on(node: Any) -> list[psutil.Process]:
    """Actors of this node that serve as a rank."""
    (raylet,) = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    return [one for one in children if "RayRank.follow" in " ".join(one.cmdline())]


def again(server: Running) -> list[Any]:
    """Answers, as soon as there is an engine again."""
    end = time.monotonic() + 120
    while httpx.get(f"{server.url}/health").status_code != 200:
        assert time.monotonic() < end, "\n".join(server.lines)
        time.sleep(0.1)
    return answers(server.url)


@pytest.fixture
def unconnected(cluster: Any) -> Iterator[None]:
    """This process leaves the cluster behind a test that joins it."""
    yield
    sys.modules["ray"].shutdown()


@pytest.mark.usefixtures("unconnected")
def test_what_has_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "PLACE_SECONDS", 1.0)
    asked = RanksAsked(EngineOptions(threads=9), FIRST)
    with pytest.raises(EngineDead, match=r"no room .* within 1 s for 2 ranks of 9 CPUs each, one"):
        placing.place(asked)


@pytest.mark.usefixtures("unconnected")
def test_a_host_without_the_model_is_named(tmp_path: Path) -> None:
    """Rank 0 hears it at once, and does not wait for who cannot come."""
    options = EngineOptions(model=str(tmp_path / "none"), threads=1, offline=True)
    with ThreadPoolExecutor(1) as thread:

        def call(port: int) -> None:
            first = replace(FIRST, leader=HostPort("", port))
            thread.submit(placing.place, RanksAsked(options, first))

        with pytest.raises(EngineDead, match=r"rank 1 of 2, placed by Ray, ended: .*none"):
            lead(FIRST, Joins(0, 2, "", "", "", "", 0), Patience(60), call)


def test_ranks_on_nodes_answer_as_one_process_and_outlive_nodes(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    with running(serve(model, tmp_path / "alone")) as alone:
        expected = answers(alone.url)
    ray = ("--layout", "TP2", "--launcher", "ray")
    with running(serve(model, tmp_path / "ray", *ray)) as server:
        assert answers(server.url) == expected
        nodes = {bool(ranks_on(node)): node for node in cluster.worker_nodes}
        assert set(nodes) == {True, False}

        lines = streaming(server.url)
        next(lines)
        cluster.remove_node(nodes[True], allow_graceful=False)
        told = "\n".join(lines)
        assert "rank 1 of 2" in told, told
        assert again(server) == expected
        (rank,) = ranks_on(nodes[False])

        # The head's end is nobody's: the same processes serve on.
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        for _ in range(10):
            assert answers(server.url) == expected
            time.sleep(1)
        assert rank.is_running()

        server.signal()
        assert server.wait() == 0
        end = time.monotonic() + 20
        while ranks_on(nodes[False]):  # The actor may stay: without a head nobody ends it.
            assert time.monotonic() < end
            time.sleep(0.1)
