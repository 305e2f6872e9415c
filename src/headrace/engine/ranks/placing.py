"""A process that has ranks placed by Ray: `python -m headrace.engine.ranks.placing FOLDER`.

Ray chooses hosts by their free CPUs, starts an actor for each rank but the first, and reports how
one ended. No token, weight or result passes through it: actors join rank 0 like ranks of any
launcher.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from dataclasses import replace
from typing import Any

from ...base.errors import EngineDead, HeadraceError, OptionError
from ...base.extras import needed
from ...base.foreign import msgpack_reader
from ...dist.channel import Channel
from ...dist.hosts import HostPort, Use, dial
from .. import messages
from ..messages import WireError
from ..spawn import become_child, take_arguments
from .following import RayRank
from .joins import FromRank, RanksAsked
from .placed import ASKED

REACH_SECONDS = 30.0
"""Most seconds until the cluster answers."""
PLACE_SECONDS = 240.0
"""Most seconds until there is room for all, including the growth of the cluster."""


def main() -> None:
    parser = argparse.ArgumentParser()
    take_arguments(parser)
    arguments = parser.parse_args()
    stacks = become_child(arguments)
    asked = msgpack_reader(RanksAsked)((arguments.folder / ASKED).read_bytes())
    try:
        place(asked)
    except HeadraceError as error:
        tell(asked, error)
    stacks.close()


def tell(asked: RanksAsked, error: HeadraceError) -> None:
    """Send rank 0 an error while it awaits the others; later errors it notices by itself."""
    port = asked.first.leader.port
    try:
        end = dial(HostPort("127.0.0.1", port), asked.first.key, Use.CONTROL, 0, seconds=0.5)
    except EngineDead:
        print(error.message, file=sys.stderr, flush=True)
        return
    channel = Channel(end, FromRank)
    channel.send(messages.Failed(WireError.of(error)))
    channel.close()


def place(asked: RanksAsked) -> None:
    """Run all ranks until they end. Raises `OptionError` without a cluster and `EngineDead` without
    room in it. An error that ends a rank is sent by `tell`."""
    ray = needed("ray", "ranks that Ray places", "ray")
    late = threading.Timer(REACH_SECONDS, _unreached, [asked])  # Ray itself retries forever.
    late.daemon = True
    late.start()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptionError(
            f"no Ray cluster can be reached: {reason:.200}", param="launcher"
        ) from None
    finally:
        late.cancel()
    here = ray.util.get_node_ip_address()
    threads, first = asked.options.threads, asked.first
    share = {"CPU": threads}
    # Rank 0 runs here already, so its share is taken.
    shares = [{**share, f"node:{here}": 0.001}] + [share] * (first.ranks - 1)
    group = ray.util.placement_group(shares, strategy="SPREAD")
    if not group.wait(PLACE_SECONDS):
        raise EngineDead(
            f"no room came up in Ray's cluster within {PLACE_SECONDS:g} s for {first.ranks} ranks "
            f"of {threads} CPUs each, one of them on {here}"
        )
    running: dict[Any, int] = {}
    actor = ray.remote(RayRank)
    for rank in range(1, first.ranks):
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, rank)
        made = actor.options(num_cpus=threads, scheduling_strategy=where).remote()
        its = replace(first, rank=rank, leader=replace(first.leader, host=here))
        running[made.follow.remote(asked.options, its)] = rank
    while running:
        (ended,), _ = ray.wait(list(running))
        rank = running.pop(ended)
        try:
            how = ray.get(ended)
        except ray.exceptions.RayError as error:
            how = " ".join(str(error).split())[:300]
        if how:
            tell(asked, EngineDead(f"rank {rank} of {first.ranks}, placed by Ray, ended: {how}"))


def _unreached(asked: RanksAsked) -> None:
    tell(asked, EngineDead(f"no Ray cluster has answered within {REACH_SECONDS:g} s"))
    os._exit(1)


if __name__ == "__main__":
    main()
