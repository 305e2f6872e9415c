"""Notifications to systemd: the lines that it is sent, and what a socket that is none costs."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from headrace.base.systemd import keep_alive, notify


def channel(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(address)
    return made


@pytest.mark.parametrize("abstract", [False, True])
def test_lines_come_in_one_message(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"@{tmp_path.name}-headrace" if abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    with channel(path.replace("@", "\0", 1)) as told:
        notify("READY=1", "STATUS=serves a\nREADY=0")
        assert told.recv(4096) == b"READY=1\nSTATUS=serves a READY=0"


def test_without_systemd_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")


def test_a_socket_that_is_none_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (str(tmp_path / "absent"), "/" + "x" * 200):
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        with caplog.at_level(logging.WARNING, "headrace.systemd"):
            notify("READY=1")
        assert caplog.records[-1].message == "systemd was not told"


def test_a_reader_that_does_not_read_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    with channel(path):
        for _ in range(2000):
            notify("READY=1")


async def test_signs_of_life_come_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "150000")
    lives = True
    with channel(path) as told:
        told.setblocking(False)
        task = asyncio.create_task(keep_alive(lambda: lives))
        loop = asyncio.get_running_loop()
        for _ in range(3):
            async with asyncio.timeout(10):
                assert await loop.sock_recv(told, 99) == b"WATCHDOG=1"
        lives = False
        await asyncio.sleep(0.1)
        while True:
            try:
                told.recv(99)
            except BlockingIOError:
                break
        await asyncio.sleep(0.2)
        with pytest.raises(BlockingIOError):
            told.recv(99)
        task.cancel()
        monkeypatch.setenv("WATCHDOG_USEC", "")
        await asyncio.wait_for(keep_alive(lambda: True), 10)
