"""Ports for tests and benchmarks of servers that take two of them, which stand side by side."""

from __future__ import annotations

import random
from contextlib import suppress

from headrace.base.errors import OptionError
from headrace.server.run import take_port

BELOW_CLIENTS = range(20_000, 32_000, 2)
"""From 32,768 on the system gives ports to whoever connects to something."""


def two_ports() -> int:
    """A free port whose next is free, too, until somebody takes them."""
    while True:
        with suppress(OptionError):
            port = random.SystemRandom().choice(BELOW_CLIENTS)
            with take_port("127.0.0.1", port), take_port("127.0.0.1", port + 1):
                return port
