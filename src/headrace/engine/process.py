"""The engine process: `python -m headrace.engine.process ADDRESS FOLDER`.

Its one thread runs the loop. Messages from the channel are accepted between two turns, and the
results of a turn leave in one message. While idle, it waits for a message and now and then sends a
sign of life.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import EngineDead, HeadraceError, Overloaded
from ..base.hardware import torch_build
from ..dist.channel import Channel
from ..obs.flight import FlightRecorder
from ..obs.threads import THREADS
from . import messages
from .aside import come_back
from .entered import enter
from .loop.core import EngineCore
from .messages import WireError
from .preload import give_back, preload_torch

if TYPE_CHECKING:
    from ..kv.holdings import Holdings
    from .loop.controls import Controls
    from .loop.lending import Lender

BEAT_SECONDS = 0.5
"""Time between two signs of life when there is nothing to do, or nothing that can run now."""


def main() -> None:
    enter(messages.ToEngine, run)


def run(channel: Channel, arguments: Namespace, leave: ExitStack) -> None:
    """Be configured, start, serve until `Stop` comes; `leave` closes the opened resources."""
    begin = time.monotonic()
    gc.disable()  # A start makes a million objects that stay: nothing to collect, much to walk.
    import_torch = arguments.torch and torch_build()[0] != ""  # Else the loader says what needs it.
    if import_torch:
        preload_torch()
    # Local: the imports below take longer than saying hello, and the parent opens the files of the
    # model meanwhile.
    from ..loader.gguf_model import gguf_of
    from .loop.build import build
    from .loop.controls import Controls

    channel.send(messages.Phase("import_engine", time.monotonic() - begin))
    if import_torch:
        begin = time.monotonic()
        import torch  # noqa: F401 - loads while the parent opens the model's files

        channel.send(messages.Phase("import_torch", time.monotonic() - begin))
    configure = channel.receive_one(None)
    if not isinstance(configure, messages.Configure):
        return
    flight = FlightRecorder(Path(configure.flight))
    leave.callback(flight.close)
    files = configure.files.open()
    if files.format == "gguf":
        begin = time.monotonic()
        files = replace(files, opened=gguf_of(files))  # Its header is wanted more than once.
        channel.send(messages.Phase("read_header", time.monotonic() - begin))
    built = build(
        configure.options,
        files,
        worker=arguments.worker,
        flight=flight,
        on_phase=lambda name, seconds: channel.send(messages.Phase(name, seconds)),
    )
    leave.callback(built.close)
    gc.freeze()
    gc.enable()
    give_back()
    come_back()
    facts = {
        "weight_bytes": float(built.facts.weight_bytes),
        "kv_bytes": float(built.memory.kv_bytes),
        "kv_tokens": float(built.memory.kv_tokens),
    }
    channel.send(
        messages.Ready(
            built.core.max_context,
            built.memory.rows,
            built.decisions,
            facts,
            list(built.facts.features),
            built.identity,
        )
    )
    built.core.announce = lambda seconds: channel.send(messages.Busy(seconds))
    serve(channel, built.core, Controls(built, files), built.holdings, built.lender)


def serve(
    channel: Channel,
    core: EngineCore,
    operator: Controls,
    holdings: Holdings | None = None,
    lender: Lender | None = None,
) -> None:
    """Repeat accept → turn → emit, until `Stop` comes."""
    bell = core.executor.wake
    channel.watch(bell.fileno())
    while True:
        waits = core.stalled or not core.has_work
        arrived = channel.receive(BEAT_SECONDS if waits else 0.0)
        if waits:
            bell.clear()
        for message in arrived:
            if isinstance(message, messages.Stop):
                return
            if isinstance(message, messages.Operate):
                channel.send(operator.perform(message))
            elif isinstance(message, messages.Submit) and operator.asleep:
                # The scheduler still has the blocks of the pool that was given back.
                refusal = Overloaded("the engine sleeps", retry_after=messages.ASLEEP_RETRY)
                channel.send(messages.Refused(message.request.id, WireError.of(refusal)))
            else:
                accept(channel, core, message)
        if (changed := THREADS.news()) is not None:
            channel.send(messages.ThreadNews(*changed))
        _tell(channel, holdings)  # An operator may have emptied the cache.
        if lender is not None and lender.turn(core, asleep=operator.asleep) and not core.has_work:
            channel.send(messages.News([], core.stats))
        if not arrived and not core.has_work:
            operator.tidy()
            channel.send(messages.Beat(core.stats.step))
            continue
        deltas = core.turn()
        if lender is not None:
            deltas = lender.take(deltas)
        if not core.stalled:
            channel.send(messages.News(deltas, core.stats))
            _tell(channel, holdings)
        elif not arrived:
            channel.send(messages.Beat(core.stats.step))


def _tell(channel: Channel, holdings: Holdings | None) -> None:
    """Report the changes of the prefix cache."""
    if holdings is not None and (news := holdings.take()) is not None:
        channel.send(messages.PrefixNews(*news))


def accept(channel: Channel, core: EngineCore, message: object) -> None:
    """Take one message of the API process. A request that cannot be accepted is refused by id."""
    match message:
        case messages.Submit(request):
            try:
                core.add(request)
            except HeadraceError as error:
                channel.send(messages.Refused(request.id, WireError.of(error)))
        case messages.Abort(request_id):
            core.abort(request_id)
        case messages.AbortChoice(request_id, choice):
            core.abort_choice(request_id, choice)
        case messages.LoadAdapter(name, path):
            channel.send(_about_adapter(name, lambda: core.load_adapter(name, path)))
        case messages.UnloadAdapter(name):
            channel.send(_about_adapter(name, lambda: core.unload_adapter(name)))
        case messages.Inspect():
            channel.send(inspect(core))


def _about_adapter(name: str, work: Callable[[], None]) -> messages.AdapterDone:
    try:
        work()
    except EngineDead:
        raise
    except HeadraceError as error:
        return messages.AdapterDone(name, WireError.of(error))
    return messages.AdapterDone(name)


def inspect(core: EngineCore) -> messages.Report:
    """Report the state of the control plane after a close check."""
    stats, wrong = core.scheduler.stats(), ""
    try:
        core.scheduler.check_integrity()
    except AssertionError as broken:
        wrong = str(broken) or "check_integrity failed"
    return messages.Report(stats.running, stats.waiting, stats.kv_usage, wrong)


if __name__ == "__main__":
    main()
