"""Notifications to systemd, as `sd_notify(3)` sends them; without its socket nothing is sent."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from .environment import notify_socket, watchdog_seconds

log = logging.getLogger("headrace.systemd")


def notify(*lines: str) -> None:
    """Send lines such as `READY=1`; a socket that refuses them is only logged."""
    path = notify_socket()
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.setblocking(False)
            channel.send("\n".join(line.replace("\n", " ") for line in lines).encode())
    except OSError as error:
        log.warning("systemd was not told", extra={"state": lines[0], "reason": str(error)})


async def keep_alive(alive: Callable[[], bool]) -> None:
    """Send the signs of life that systemd expects (`WatchdogSec`) while `alive` is true. A hanging
    event loop sends none."""
    while seconds := watchdog_seconds():
        if alive():
            notify("WATCHDOG=1")
        await asyncio.sleep(seconds / 3)
