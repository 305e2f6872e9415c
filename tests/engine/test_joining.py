"""Joining of ranks that a launcher started: finding each other, and reports of missing ones."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import EngineDead, OptionError, PackageAbsent
from headrace.dist.channel import Channel
from headrace.dist.hosts import HostPort
from headrace.engine import messages
from headrace.engine.ranks import following, placing
from headrace.engine.ranks import joining as ranks_joining
from headrace.engine.ranks.joining import Circle, Patience, join, lead
from headrace.engine.ranks.joins import Joins, RanksAsked
from headrace.engine.ranks.launch import RankPlace, first_node, place_of
from ports import two_ports

HERE = "127.0.0.1"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": HERE, "MASTER_PORT": "4000"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
WORKER_SET = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost"}


def options(**more: Any) -> EngineOptions:
    return EngineOptions(layout="TP2", launcher="env", **more)


@pytest.mark.parametrize(
    ("said", "rank", "leader"),
    [
        (TORCHRUN, 1, HostPort(HERE, 4000)),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 1, HostPort(HERE, 4001)),
        (SLURM, 0, HostPort("localhost", 29500)),
        ({**SLURM, "SLURM_JOB_ID": "1234567"}, 0, HostPort("localhost", 34067)),
        ({**SLURM, "MASTER_ADDR": HERE, "MASTER_PORT": "5"}, 0, HostPort(HERE, 5)),
        (WORKER_SET, 1, HostPort("localhost", 29500)),
    ],
)
def test_what_launchers_say(said: dict[str, str], rank: int, leader: HostPort) -> None:
    place = place_of(options(), said)
    assert (place.rank, place.ranks, place.leader, place.key) == (rank, 2, leader, b"")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[3],b", "gpu3"),
        ("a,b", "a"),
        ("n[1-4]-ib", "n1-ib"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("said", "more", "param", "why"),
    [
        ({}, {}, "launcher", "no launcher says"),
        ({**TORCHRUN, "RANK": "two"}, {}, "launcher", "RANK is no number: 'two'"),
        ({**TORCHRUN, "RANK": "2"}, {}, "launcher", "rank 2 of 2"),
        ({**TORCHRUN, "WORLD_SIZE": "3"}, {}, "layout", "of 2 processes.* started 3"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, {}, "launcher", "names no nodes"),
        ({**TORCHRUN, "MASTER_ADDR": "10.0.0.1"}, {}, "rank_key", "want a key"),
        (TORCHRUN, {"rank_key": "/nowhere"}, "rank_key", "/nowhere cannot be read: No such"),
    ],
)
def test_what_is_wrong_is_named(
    said: dict[str, str], more: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(OptionError, match=why) as raised:
        place_of(options(**more), said)
    assert raised.value.param == param


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    with pytest.raises(OptionError, match="6 bytes"):
        place_of(options(rank_key=str(tmp_path / "key")), TORCHRUN)


def places(ranks: int) -> list[RankPlace]:
    leader = HostPort(HERE, two_ports())
    return [RankPlace(rank, ranks, leader, b"k" * 32) for rank in range(ranks)]


def said(place: RankPlace, **more: Any) -> Joins:
    known = {"version": "1", "kernels": "k", "layout": "TP", "weights": "w", "port": 0}
    return Joins(place.rank, place.ranks, **{**known, **more})


def until(true: Callable[[], object]) -> None:
    while not true():
        time.sleep(0.01)


def joining(thread: ThreadPoolExecutor, place: RankPlace, **more: Any) -> Future[Any]:
    def come() -> tuple[Circle, Channel]:
        return join(place, lambda port: said(place, **{"port": port, **more}), Patience(20))

    return thread.submit(come)


def test_all_meet_all() -> None:
    first, *others = places(3)
    with ThreadPoolExecutor(3) as threads:
        coming = [joining(threads, place) for place in others]
        circle, channels = lead(first, said(first), Patience(20))
        joined = [one.result(20) for one in coming]
    assert circle.names[1:] == [f"rank {rank} of 3 ({HERE})" for rank in (1, 2)]
    # Who goes is named by all others, and by how.
    joined[0][0].close()
    until(lambda: circle.lost and joined[1][0].lost)
    for one in (circle, joined[1][0]):
        with pytest.raises(EngineDead, match=r"rank 1 of 3 \(127\.0\.0\.1\) closed its conn"):
            one.check()
    for channel in (*channels, *(channel for _, channel in joined)):
        channel.close()
    circle.close()
    joined[1][0].close()


@pytest.mark.parametrize("stops", [True, False])
def test_a_rank_that_sees_another_leave_awaits_the_word_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(
        following, "joins", lambda place, options, files, port: said(place, port=port)
    )
    first, second, third = places(3)
    files: Any = None
    with ThreadPoolExecutor(2) as threads:
        coming = joining(threads, second)
        rank = threads.submit(following.follow, options(), files, third, patience=Patience(20))
        circle, channels = lead(first, said(first), Patience(20))
        other, channel = coming.result(20)
        other.close()
        channel.close()
        until(lambda: circle.lost)
        if stops:
            time.sleep(0.2)  # The third has seen it, too.
            channels[1].send(messages.Stop())
            rank.result(20)
        else:
            with pytest.raises(EngineDead, match=r"rank 1 of 3.* closed its connection"):
                rank.result(20)
        for one in channels:
            one.close()
        circle.close()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"version": "2"}, r"rank 1 of 2 \(127.0.0.1\) is Headrace 2, rank 0 1"),
        ({"weights": "other"}, "has weights of digest other, rank 0 w"),
        ({"kernels": "old"}, "has kernels built from old, rank 0 k"),
        ({"layout": "PP2"}, "has the layout PP2, rank 0 TP"),
    ],
)
def test_who_is_something_else_ends_both(more: dict[str, Any], why: str) -> None:
    first, second = places(2)
    with ThreadPoolExecutor(1) as thread:
        coming = joining(thread, second, **more)
        with pytest.raises(OptionError, match=why):
            lead(first, said(first), Patience(20))
        with pytest.raises(OptionError, match=why):
            coming.result(20)


def test_who_does_not_come_is_named() -> None:
    first, _, third = places(3)
    here = threading.Event()

    def come() -> tuple[Circle, Channel]:
        def describe(port: int) -> Joins:
            here.set()
            return said(third, port=port)

        return join(third, describe, Patience(20))

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(come)
        with pytest.raises(EngineDead, match=r"rank 1 of 3 did not come to .* within 1 s"):
            lead(first, said(first), Patience(1), lambda port: until(here.is_set))
        with pytest.raises(EngineDead, match="rank 1 of 3 did not come"):
            coming.result(20)


def test_no_leader_is_named() -> None:
    first, second = places(2)
    where = f"{HERE}:{first.leader.port}"
    with pytest.raises(EngineDead, match=f"rank 0 of 2: {where} was not reached in 0.5 s"):
        join(second, lambda port: said(second), Patience(0.5))


def test_another_key_comes_to_nothing() -> None:
    first, second = places(2)
    stranger = RankPlace(1, 2, second.leader, b"x" * 32)
    with ThreadPoolExecutor(1) as thread:
        coming = joining(thread, stranger)
        with pytest.raises(EngineDead, match="rank 1 of 2 did not come"):
            lead(first, said(first), Patience(0.5), lambda port: until(coming.done))
        with pytest.raises(EngineDead, match="key"):
            coming.result(20)


def test_ray_is_told_where_rank_0_is_and_a_key() -> None:
    asked = EngineOptions(layout="TP3", launcher="ray")
    one, two = place_of(asked), place_of(asked)
    assert (one.rank, one.ranks, one.leader.port, len(one.key)) == (0, 3, 0, 32)
    assert one.key != two.key
    with pytest.raises(OptionError, match="a key for each start") as raised:
        place_of(replace(asked, rank_key="/key"))
    assert raised.value.param == "rank_key"
    with pytest.raises(OptionError, match="at most 64 ranks"):
        place_of(replace(asked, layout="TP65"))


def test_without_ray_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    first = places(2)[0]

    def call(port: int) -> None:
        asked = RanksAsked(options(), replace(first, leader=HostPort(HERE, port)))
        with pytest.raises(PackageAbsent) as raised:
            placing.place(asked)
        placing.tell(asked, raised.value)

    with pytest.raises(PackageAbsent, match=r"Ray places need ray, .* pip install 'ray"):
        lead(first, said(first), Patience(20), call)


def test_a_second_of_the_same_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = places(3)
    admit, admitted = ranks_joining._admitted, threading.Event()

    def seen(*given: Any) -> Any:
        came = admit(*given)
        admitted.set()
        return came

    monkeypatch.setattr(ranks_joining, "_admitted", seen)
    with ThreadPoolExecutor(3) as threads:
        leading = threads.submit(lead, first, said(first), Patience(20))
        coming = joining(threads, second)
        until(admitted.is_set)
        with pytest.raises(OptionError, match=r"rank 1 of 3 \(127.0.0.1\) is there already"):
            join(second, lambda port: said(second), Patience(20))
        last = joining(threads, third)
        for circle, channels in (leading.result(20), coming.result(20), last.result(20)):
            for channel in channels if isinstance(channels, list) else [channels]:
                channel.close()
            circle.close()
