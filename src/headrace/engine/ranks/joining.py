"""The rendezvous of ranks that a launcher started. Rank 0 awaits the others, and all are connected
to all before any weight is loaded.

    rank r → 0     Joins: its identity and the model that it would serve
    0 → rank r     Peers: the addresses of the others; or Failed, if it differs from rank 0
    r → each q < r one connection for all-gathers, and one for signs of life
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ...base.config import EngineOptions
from ...base.errors import EngineDead, OptionError
from ...base.foreign import Undecodable
from ...base.layout import Layout
from ...base.modelfiles import ModelFiles
from ...base.version import VERSION
from ...dist.channel import Channel
from ...dist.commons import Commons, make_commons
from ...dist.hosts import PROOF_SECONDS, Arrival, Door, HostPort, Use, dial
from ...dist.pulse import SILENT, Pulse
from ...kernels.cpu.library import sources
from ...kernels.cpu.wire import Wire
from ...loader.content import content_digest
from .. import messages
from ..messages import WireError
from .joins import FromRank, Joins, Peers, ToRank
from .launch import RankPlace


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of waiting, in seconds."""

    join: float = 300.0
    """Limit until all ranks have come."""
    silent: float = SILENT
    """Limit without a sign of life."""


PATIENCE = Patience()


@dataclass(slots=True)
class Circle:
    """All ranks, connected: this rank's shared memory, its links to them, and the lost ones."""

    place: RankPlace
    names: Sequence[str]
    """By rank, with its address."""
    descriptor: int
    """Descriptor of this rank's own shared-memory arena."""
    commons: Commons
    wire: Wire
    lost: dict[int, str] = field(default_factory=dict)
    """Reasons by lost rank, the first loss first."""
    calls: list[Callable[[int, str], None]] = field(default_factory=list)
    _pulse: Pulse | None = None
    _connections: Sequence[Arrival] = ()

    @classmethod
    def of(
        cls, place: RankPlace, names: Sequence[str], came: Sequence[Arrival], patience: Patience
    ) -> Circle:
        descriptor = make_commons()
        commons = Commons(descriptor, place.ranks, place.rank, place.stages)
        sockets = [-1] * place.ranks
        for one in came:
            if one.use is Use.EXCHANGE:
                sockets[one.rank] = one.connection.fileno()
        wire = Wire(commons, sockets)
        made = cls(place, names, descriptor, commons, wire)
        made._connections = [one for one in came if one.use is Use.EXCHANGE]
        pulses = {str(one.rank): one.connection for one in came if one.use is Use.PULSE}
        made._pulse = Pulse(
            pulses, lambda rank, why: made._lose(int(rank), why), silent=patience.silent
        )
        return made

    def _lose(self, rank: int, why: str) -> None:
        self.lost[rank] = why
        self.commons.tear()
        for call in self.calls:
            call(rank, why)

    def check(self) -> None:
        """Raise `EngineDead` naming the first lost rank, if there is one."""
        for rank, why in self.lost.items():
            raise EngineDead(f"{self.names[rank]} {why}")

    def close(self) -> None:
        """Close all connections; no thread may be in a step."""
        if self._pulse is not None:
            self._pulse.close()
        self.commons.tear()
        self.wire.close()
        for one in self._connections:
            one.connection.close()
        os.close(self.descriptor)


def joins(place: RankPlace, options: EngineOptions, files: ModelFiles, port: int = 0) -> Joins:
    """Return a rank's own description."""
    digest = content_digest(files)
    layout = str(Layout.parse(options.layout))
    return Joins(place.rank, place.ranks, VERSION, sources(), layout, digest, port)


def lead(
    place: RankPlace,
    mine: Joins,
    patience: Patience = PATIENCE,
    call: Callable[[int], None] = lambda port: None,
) -> tuple[Circle, list[Channel]]:
    """Await the other ranks, as rank 0; return the circle, and a channel to each from rank 1 on.

    `call`, given the port, lets them come. Raises `EngineDead` naming ranks that do not come,
    `OptionError` naming a rank that differs from this one, and any error that a peer sends instead.
    """
    # Without a key only processes of this host can connect.
    host = "" if place.key else place.leader.host
    door = Door.open(host, place.leader.port, place.key)
    place = replace(place, leader=HostPort(place.leader.host, door.port))
    channels: dict[int, Channel] = {}
    try:
        call(door.port)
        where: dict[int, HostPort] = {}
        end = time.monotonic() + patience.join
        while len(channels) < place.ranks - 1:
            arrival = door.next(end - time.monotonic())
            if arrival is None:
                missing = [r for r in range(1, place.ranks) if r not in channels]
                who = ", ".join(f"rank {rank}" for rank in missing)
                raise EngineDead(
                    f"{who} of {place.ranks} did not come to {place.leader} within "
                    f"{patience.join:g} s"
                )
            if (came := _admitted(arrival, place, mine, channels)) is not None:
                channels[arrival.rank], port = came
                where[arrival.rank] = HostPort(arrival.host, port)
        everywhere = [("", 0), *((one.host, one.port) for _, one in sorted(where.items()))]
        for channel in channels.values():
            channel.send(Peers(everywhere))
        names = _names(place, {0: place.leader.host} | {r: one.host for r, one in where.items()})
        came_all = _awaited(door, place, names, range(1, place.ranks))
        circle = Circle.of(place, names, came_all, patience)
    except BaseException as error:
        for channel in channels.values():
            fault = (
                error if isinstance(error, EngineDead | OptionError) else EngineDead("rank 0 ends")
            )
            _tell(channel, fault)
        raise
    finally:
        door.close()
    return circle, [channel for _, channel in sorted(channels.items())]


def _tell(channel: Channel, error: EngineDead | OptionError) -> None:
    try:
        channel.send(messages.Failed(WireError.of(error)))
    except ConnectionError:
        pass
    finally:
        channel.close()


def _admitted(
    arrival: Arrival, place: RankPlace, mine: Joins, channels: dict[int, Channel]
) -> tuple[Channel, int] | None:
    """Return the rank's channel and port, or None if the peer is not a rank. Raises
    `OptionError`."""
    name = f"rank {arrival.rank} of {place.ranks} ({arrival.host})"
    channel = Channel(arrival.connection, FromRank)
    said = None
    with suppress(Undecodable):
        said = channel.receive_one(PROOF_SECONDS) if arrival.use is Use.CONTROL else None
    if isinstance(said, messages.Failed):
        channel.close()
        raise said.error.error()
    if not isinstance(said, Joins) or not 0 < arrival.rank == said.rank:
        channel.close()
        return None
    for what, theirs, ours in (
        ("is of a layout of this many ranks:", said.ranks, mine.ranks),
        ("has the layout", said.layout, mine.layout),
        ("is Headrace", said.version, mine.version),
        ("has kernels built from", said.kernels, mine.kernels),
        ("has weights of digest", said.weights, mine.weights),
    ):
        if theirs != ours:
            error = OptionError(f"{name} {what} {theirs}, rank 0 {ours}", param="layout")
            _tell(channel, error)
            raise error
    if (before := channels.get(arrival.rank)) is not None:
        before.receive(0.0)
        if not before.lost:
            _tell(channel, OptionError(f"{name} is there already", param="layout"))
            return None
        before.close()  # It died and was restarted.
    return channel, said.port


def _names(place: RankPlace, hosts: dict[int, str]) -> list[str]:
    return [f"rank {rank} of {place.ranks} ({hosts[rank]})" for rank in range(place.ranks)]


def _awaited(
    door: Door, place: RankPlace, names: Sequence[str], ranks: Sequence[int]
) -> list[Arrival]:
    """Return both connections of each of `ranks`. Raises `EngineDead`."""
    found: dict[tuple[int, Use], Arrival] = {}
    wanted = {(rank, use) for rank in ranks for use in (Use.PULSE, Use.EXCHANGE)}
    end = time.monotonic() + 2 * PROOF_SECONDS
    while found.keys() != wanted:
        arrival = door.next(end - time.monotonic())
        if arrival is None:
            rank = min(wanted - found.keys())[0]
            for one in found.values():
                one.connection.close()
            raise EngineDead(f"{names[rank]} came, and did not connect to rank {place.rank}")
        key = arrival.rank, arrival.use
        if key in wanted and key not in found:
            found[key] = arrival
        else:
            arrival.connection.close()
    return list(found.values())


def join(
    place: RankPlace, describe: Callable[[int], Joins], patience: Patience = PATIENCE
) -> tuple[Circle, Channel]:
    """Join rank 0, as another rank; return the circle, and the channel for its commands.

    `describe` makes this rank's own description, given its port. Raises `EngineDead`, and the error
    with which rank 0 refuses this one.
    """
    try:
        control = dial(place.leader, place.key, Use.CONTROL, place.rank, seconds=patience.join)
    except EngineDead as error:
        raise EngineDead(f"rank 0 of {place.ranks}: {error.message}") from None
    channel = Channel(control, ToRank)
    door = Door.open(control.getsockname()[0], 0, place.key)
    came: list[Arrival] = []
    try:
        channel.send(describe(door.port))
        answer = channel.receive_one(patience.join)
        if isinstance(answer, messages.Failed):
            raise answer.error.error()
        if not isinstance(answer, Peers):
            how = "ended" if channel.lost else f"did not answer within {patience.join:g} s"
            raise EngineDead(f"rank 0 of {place.ranks} ({place.leader.host}) {how}")
        addresses = [place.leader, *(HostPort(*one) for one in answer.addresses[1:])]
        names = _names(place, {rank: one.host for rank, one in enumerate(addresses)})
        for rank in range(place.rank):
            for use in (Use.PULSE, Use.EXCHANGE):
                try:
                    made = dial(addresses[rank], place.key, use, place.rank, seconds=PROOF_SECONDS)
                except EngineDead as error:
                    raise EngineDead(f"{names[rank]}: {error.message}") from None
                came.append(Arrival(use, rank, made))
        came += _awaited(door, place, names, range(place.rank + 1, place.ranks))
        return Circle.of(place, names, came, patience), channel
    except BaseException:
        for one in came:
            one.connection.close()
        channel.close()
        raise
    finally:
        door.close()
