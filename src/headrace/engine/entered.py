"""Start and end of an engine's process: its arguments, its channel, its last message."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..base.errors import EngineFault, HeadraceError
from ..dist.channel import Channel
from ..obs.logs import configure_logs
from . import messages
from .messages import WireError
from .seeds import sow
from .spawn import ORPHANED, become_child, take_arguments

log = logging.getLogger("headrace.engine")


def enter(hears: Any, run: Callable[[Channel, argparse.Namespace, ExitStack], None]) -> None:
    """Say hello to the parent and `run`; an error is the parent's last message. Exits with its
    code.

    `hears`: the type of the parent's messages. `run` leaves resources in the stack that are closed
    after that message: closing an engine takes a tenth of a second, too long for its clients to
    wait.
    """
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--worker", required=True)
    take_arguments(parser)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--torch", action="store_true", help="the worker wants torch")
    parser.add_argument("--import", dest="imports", action="append", default=[], help="a module")
    parser.add_argument("--ranks", type=int, default=1, help="processes of this host, with this")
    arguments = parser.parse_args()
    sow(arguments.ranks - 1)
    configure_logs(arguments.log_level, arguments.log_format)
    try:
        stacks = become_child(arguments)
        channel = Channel(arguments.address, hears, bind=False)
    except (FileNotFoundError, ConnectionError):
        sys.exit(ORPHANED)  # The parent, which owned the folder and the socket, is gone.
    leave = ExitStack()
    try:
        # Ctrl-C is ignored here (`become_child`), so only SIGTERM raises this.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        channel.send(messages.Hello(0))
        channel.send(messages.Phase("engine_process", started - arguments.spawned))
        run(channel, arguments, leave)
    except KeyboardInterrupt:
        pass
    except HeadraceError as error:
        channel.send(messages.Failed(WireError.of(error)))
        sys.exit(error.exit_code)
    except Exception as fault:
        log.exception("the engine process ends")
        wrapped = EngineFault(f"{type(fault).__name__}: {fault}")
        channel.send(messages.Failed(WireError.of(wrapped)))
        sys.exit(1)
    finally:
        leave.close()
        channel.close()
        stacks.close()
