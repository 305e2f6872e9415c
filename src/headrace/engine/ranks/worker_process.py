"""A worker in a process of its own: `python -m headrace.engine.ranks.worker_process ADDRESS
FOLDER`."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...base.errors import EngineFault, HeadraceError
from ...base.facts import WorkerFacts
from ...dist.channel import Channel, PeerGone
from ...dist.wake import Wake
from .. import messages
from ..aside import come_back
from ..loop.executor import LoadedWorker, StageWorker, execute
from ..loop.real import worker_loader
from ..messages import WireError
from ..preload import give_back
from ..spawn import become_child, take_arguments

_HOT = 1e-3
"""Seconds for which a rank polls for the next plan before it sleeps."""


def main(given: list[str] | None = None) -> None:
    """`given`: arguments, instead of those of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--worker", required=True)
    take_arguments(parser)
    arguments = parser.parse_args(given)
    stacks = become_child(arguments)
    channel = Channel(arguments.address, messages.ToWorker, bind=False)
    try:
        load = worker_loader(arguments.worker)
        serve(channel, lambda asked: load(asked.files.open(), asked.settings), arguments.spawned)
    finally:
        channel.close()
        stacks.close()


def serve(
    channel: Channel,
    load: Callable[[messages.Load], tuple[LoadedWorker, WorkerFacts]],
    spawned: float,
    check: Callable[[], None] = lambda: None,
) -> HeadraceError | None:
    """Execute the engine's commands until it says stop; return an error that ended it instead,
    which the engine gets, too.

    `spawned`: the monotonic clock when this process began. `check` is called when it wakes without
    a message, and raises if it must end. Raises `PeerGone` if the engine is gone.
    """
    wake = Wake()
    channel.watch(wake.fileno())
    channel.send(messages.Hello(0))
    worker: LoadedWorker | None = None
    hot = False
    began = time.monotonic()
    while True:
        message = channel.receive_one(None) if not hot else _soon(channel)
        if wake.clear():
            channel.send(messages.Compiled())
        begin = time.monotonic()
        try:
            match message:
                case messages.Execute(plan):
                    assert worker is not None
                    channel.send(messages.Executed(execute(worker, plan)))
                case messages.Learn(rows, places, tokens):
                    assert isinstance(worker, StageWorker)
                    worker.learn(rows, places, tokens)
                case messages.LoadAdapter(name, path):
                    assert worker is not None
                    channel.send(_load_adapter(worker, name, path))
                case messages.UnloadAdapter(name):
                    assert worker is not None
                    worker.unload_adapter(name)
                    channel.send(messages.AdapterDone(name))
                case messages.Prepare(grammar, owner):
                    assert worker is not None
                    done = worker.prepare_grammar(grammar, owner, wake.ring)
                    channel.send(messages.Prepared(done))
                case messages.Load(_, settings):
                    hot = settings.ranks > 1
                    worker, facts = load(message)
                    phases = {"worker_process": began - spawned, **facts.phases}
                    channel.send(messages.Loaded(replace(facts, phases=phases)))
                case messages.Allocate(pool):
                    assert worker is not None
                    worker.allocate(pool)
                    channel.send(messages.Done(time.monotonic() - begin))
                case messages.WarmUp():
                    assert worker is not None
                    worker.warm_up()
                    give_back()
                    come_back()
                    channel.send(messages.Done(time.monotonic() - begin))
                case messages.Stop():
                    break
                case messages.Failed(error):
                    raise error.error()
                case None:
                    check()
        except HeadraceError as error:
            with contextlib.suppress(PeerGone):
                channel.send(messages.Failed(WireError.of(error)))
            return error
        except PeerGone:
            raise
        except Exception as fault:
            wrapped = EngineFault(f"{type(fault).__name__}: {fault}")
            channel.send(messages.Failed(WireError.of(wrapped)))
            raise
    if worker is not None:
        worker.close()
    return None


def _soon(channel: Channel) -> Any:
    """Return the next message. Polls for a while: other ranks wait for its result, and a message
    that follows soon finds it awake."""
    end = time.monotonic() + _HOT
    while time.monotonic() < end:
        message = channel.receive_one(0.0)
        if message is not None:
            return message
    return channel.receive_one(None)


def _load_adapter(worker: LoadedWorker, name: str, path: str) -> messages.AdapterDone:
    """Load an adapter; an adapter's error does not end the process."""
    try:
        worker.load_adapter(name, path)
    except HeadraceError as error:
        return messages.AdapterDone(name, WireError.of(error))
    return messages.AdapterDone(name)


if __name__ == "__main__":
    main()
