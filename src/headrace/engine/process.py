"""The engine process: `python -m headrace.engine.process ADDRESS FOLDER`.

Its one thread runs the loop. Messages from the channel are accepted between two turns, and the
results of a turn leave in one message. While idle, it waits for a message and regularly sends a
sign of life.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import EngineDead, HeadraceError
from ..base.hardware import torch_build
from ..dist.channel import Channel
from ..obs.flight import FlightRecorder
from ..obs.threads import THREADS
from . import messages
from .aside import come_back
from .entered import enter
from .loop.lane import Planner
from .messages import WireError, WireFiles
from .preload import give_back, preload_torch

if TYPE_CHECKING:
    from ..base.config import EngineOptions
    from ..base.modelfiles import ModelFiles
    from .loop.several import Models, OpenFiles

BEAT_SECONDS = 0.5
"""Seconds between two signs of life when there is nothing to do, or nothing can run now."""


def main() -> None:
    enter(messages.ToEngine, run)


def run(channel: Channel, arguments: Namespace, leave: ExitStack) -> None:
    """Receive the configuration, start, serve until `Stop`; `leave` closes the opened resources."""
    begin = time.monotonic()
    gc.disable()  # A start makes a million lasting objects: little to collect, much to traverse.
    import_torch = arguments.torch and torch_build()[0] != ""  # Else the loader says what needs it.
    if import_torch:
        preload_torch()
    # Local: these imports are slow, and the parent opens the model's files meanwhile.
    from ..loader.gguf_model import gguf_of
    from .loop.several import Models

    for module in arguments.imports:
        import_module(module)
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

    def phase(name: str, seconds: float) -> None:
        channel.send(messages.Phase(name, seconds))

    def open_files(wire: WireFiles, options: EngineOptions) -> ModelFiles:
        """Open the files of a message; later models are opened in threads of their own."""
        if wire.arch is None:
            hearing = import_module("headrace.engine.hearing.opening")  # Text does without it.
            heard: ModelFiles = hearing.open_hearing(Path(wire.path), options)
            return heard
        files = wire.open()
        if files.format == "gguf":
            files = replace(files, opened=gguf_of(files))  # Its header is needed more than once.
        return files

    def opened(wire: WireFiles, options: EngineOptions) -> ModelFiles:
        begin = time.monotonic()
        files = open_files(wire, options)
        if files.format == "gguf":
            phase("read_header", time.monotonic() - begin)
        return files

    models = Models.start(configure, opened, worker=arguments.worker, flight=flight, on_phase=phase)
    leave.callback(models.close)
    gc.freeze()
    gc.enable()
    give_back()
    come_back()
    channel.send(models.ready())
    models.core.announce = lambda seconds: channel.send(messages.Busy(seconds))
    serve(channel, models, open_files)


def serve(channel: Channel, models: Models, opened: OpenFiles) -> None:
    """Repeat accept → turn → emit, until `Stop` comes. `opened`: opens the files of a message."""
    core = models.core
    bell = core.executor.wake
    channel.watch(bell.fileno())
    lender = models.lender
    while True:
        waits = (core.stalled or not core.has_work) and not models.busy
        arrived = channel.receive(BEAT_SECONDS if waits else 0.0)
        if waits:
            bell.clear()
        for message in arrived:
            if isinstance(message, messages.Stop):
                return
            accept(channel, models, message, opened)
        _hear(channel, models)
        for done in models.turn():
            channel.send(done)
        if (changed := THREADS.news()) is not None:
            channel.send(messages.ThreadNews(*changed))
        _tell(channel, models)  # An operator may have emptied the cache.
        asleep = models.controls[0].asleep if lender is not None else False
        if lender is not None and lender.turn(core, asleep=asleep) and not core.has_work:
            channel.send(messages.News([], core.stats))
        if not arrived and not core.has_work:
            models.tidy()
            channel.send(messages.Beat(core.stats.step))
            continue
        reports = models.step()
        if core.stalled:
            if not arrived:
                channel.send(messages.Beat(core.stats.step))
            continue
        for model, lane, deltas in reports:
            if lender is not None:
                deltas = lender.take(deltas)
            _say(channel, model, messages.News(deltas, lane.stats))
        if not reports:
            channel.send(messages.Beat(core.stats.step))
        _hear(channel, models)
        _tell(channel, models)


def _hear(channel: Channel, models: Models) -> None:
    """Let sounds submit their next requests, and report their new text."""
    for model, desk in models.desks.items():
        for news in desk.turn():
            _say(channel, model, news)


def _say(channel: Channel, model: int, message: messages.ModelNews) -> None:
    """Send a message of a model; those of the first are sent bare."""
    channel.send(messages.OfModel(model, message) if model else message)


def _tell(channel: Channel, models: Models) -> None:
    """Report the changes of the prefix caches."""
    for model, built in models.built.items():
        if (news := built.holdings.take()) is not None:
            _say(channel, model, messages.PrefixNews(*news))


def accept(
    channel: Channel,
    models: Models,
    message: object,
    opened: OpenFiles,
) -> None:
    """Take one message of the API process."""
    match message:
        case messages.LoadModel(model):
            if (done := models.load(model, opened)) is not None:
                channel.send(done)
        case messages.UnloadModel(number):
            channel.send(models.unload(number))
        case messages.ToModel(model, inner):
            _accept(channel, models, model, inner)
        case messages.Operate():
            channel.send(models.operate(message))
        case _:
            _accept(channel, models, 0, message)


def _accept(channel: Channel, models: Models, model: int, message: object) -> None:
    """Take a message about a model. A request that cannot be accepted is refused by id."""
    core = models.core
    match message:
        case messages.Submit(request):
            try:
                models.add(request, model)
            except HeadraceError as error:
                _say(channel, model, messages.Refused(request.id, WireError.of(error)))
        case messages.Hear(request_id):
            try:
                models.check_awake(model)
                models.desks[model].add(message)
            except HeadraceError as error:
                _say(channel, model, messages.Refused(request_id, WireError.of(error)))
        case messages.Abort(request_id):
            models.abort(request_id, model)
        case messages.AbortChoice(request_id, choice):
            core.abort_choice(request_id, choice, model)
        case messages.LoadAdapter(name, path):
            lane = core.lanes[model]
            _say(channel, model, _about_adapter(name, lambda: lane.load_adapter(name, path)))
        case messages.UnloadAdapter(name):
            lane = core.lanes[model]
            _say(channel, model, _about_adapter(name, lambda: lane.unload_adapter(name)))
        case messages.Inspect():
            _say(channel, model, inspect(core.lanes[model].scheduler))


def _about_adapter(name: str, work: Callable[[], None]) -> messages.AdapterDone:
    try:
        work()
    except EngineDead:
        raise
    except HeadraceError as error:
        return messages.AdapterDone(name, WireError.of(error))
    return messages.AdapterDone(name)


def inspect(scheduler: Planner) -> messages.Report:
    """Check a model's control plane closely and report its state."""
    stats, wrong = scheduler.stats(), ""
    try:
        scheduler.check_integrity()
    except AssertionError as broken:
        wrong = str(broken) or "check_integrity failed"
    return messages.Report(stats.running, stats.waiting, stats.kv_usage, wrong)


if __name__ == "__main__":
    main()
