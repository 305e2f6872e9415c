"""The prefill/decode split: the role of a server, and what both sides of it count.

A prefill server computes prompts for others and lends them the blocks; a decode server borrows
them. Each answers whole requests, too: a role says who may ask whom.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from .errors import OptionError

LEAST_KEY = 32
"""Bytes of a key file, at least."""
MOST_SERVERS = 64
"""Prefill servers that one decode server asks, at most."""


@dataclass(frozen=True, slots=True)
class Role:
    """What `--role` says."""

    kind: Literal["both", "prefill", "decode"] = "both"
    addresses: tuple[str, ...] = ()
    """Where a prefill server listens, or the servers that a decode server asks."""
    key: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Role:
        """Read `both`, `prefill@ADDRESS` or `decode@ADDRESS,ADDRESS`, with `?key=FILE` behind the
        last. Raises `OptionError`."""
        if text == "both":
            return cls()
        kind, _, rest = text.partition("@")
        named, _, query = rest.partition("?")
        addresses = tuple(named.split(","))
        if kind not in ("prefill", "decode") or not named:
            raise OptionError(
                "role must be both, prefill@tcp://HOST:PORT or decode@tcp://HOST:PORT,..., not "
                f"{text!r:.200}",
                param="role",
            )
        if query and (not query.startswith("key=") or query == "key="):
            raise OptionError(f"role: {query!r:.200} is not key=FILE", param="role")
        most = 1 if kind == "prefill" else MOST_SERVERS
        if len(addresses) > most or len(set(addresses)) < len(addresses):
            raise OptionError(
                f"role: {kind} takes at most {most} address(es), each once", param="role"
            )
        key = Path(query.removeprefix("key=")) if query else None
        for address in addresses:
            if not _near(address) and key is None:
                raise OptionError(
                    f"role: {address} is not on this machine, so both sides need a key "
                    "(?key=FILE): what is lent tells prompts",
                    param="role",
                )
        return cls("prefill" if kind == "prefill" else "decode", addresses, key)

    def secret(self) -> bytes | None:
        """What the key file holds; None without one. Raises `OptionError`."""
        if self.key is None:
            return None
        try:
            secret = self.key.read_bytes().strip()
        except OSError as refused:
            raise OptionError(
                f"role: {self.key} cannot be read: {refused.strerror}", param="role"
            ) from None
        if len(secret) < LEAST_KEY:
            raise OptionError(
                f"role: {self.key} has {len(secret)} bytes, a key at least {LEAST_KEY}",
                param="role",
            )
        return secret


def _near(address: str) -> bool:
    """Does only this machine reach the address? Raises `OptionError` for what is none."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc" and rest.startswith("/"):
        return True
    if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise OptionError(
            f"role: {address!r:.200} is neither tcp://HOST:PORT nor ipc:///FILE", param="role"
        )
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Handed(NamedTuple):
    """A prompt that another server is to compute, and which blocks of it are wanted."""

    tokens: list[int]
    """One more than the blocks hold, where there is one."""
    salt: str
    adapter: str | None
    """What names the adapter's content."""
    key: bytes
    """Name of the last block that is wanted."""
    first: int
    """The first block that is wanted, in the prompt."""
    blocks: int
    """Where the last one ends."""


class LentBlocks(Protocol):
    """What the books of the pool ask of leases (`kv.leases`)."""

    held: Counter[tuple[int, int]]
    """(group, block) → leases that hold it."""

    def distrust(self) -> object:
        """The pool's content is another from now on."""


class PrefillServers(Protocol):
    """The servers that a decode server may ask. Calls come from one thread and never wait."""

    def ahead(self) -> float | None:
        """Seconds of prompts before a new one at the server with the fewest; None: none answers."""

    def ask(self, ticket: int, handed: Handed, keys: list[bytes], seconds: float) -> None:
        """Have it computed, which takes about so long. The end comes from the store, as that of an
        order of the kind "prefill"; what is good can be read until it is released."""

    def release(self, ticket: int) -> None:
        """Nothing of it is wanted any more, whatever has become of it."""


@dataclass(slots=True)
class SplitStats:
    """Counts since the engine's start."""

    handed: int = 0
    """Prompts whose KV a prefill server was asked for."""
    brought: int = 0
    """Handed prompts that were lent."""
    declined: int = 0
    """The server said no."""
    failed: int = 0
    """The server, or the way to it, was gone or too late."""
    left: int = 0
    """Nobody wanted it any more."""
    here: int = 0
    """Prompts that were computed here, since that took all who wait less time."""
    servers: int = 0
    """Prefill servers that answer now."""
    computed: int = 0
    """Prompts that were computed here for others."""
    refused: int = 0
    """Prompts of others that were not."""
    expired: int = 0
    """Leases that nobody renewed."""
    leases: int = 0
    """Leases now."""
    lent_blocks: int = 0
    """Blocks that they hold now."""
    lent_bytes: int = 0
    """Bytes sent."""
