"""The prefill/decode split: the role of a server, and the counts of both sides.

A prefill server computes prompts for others and lends them the blocks; a decode server borrows
them. Each answers whole requests, too: a role says which server may ask which.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from .errors import OptionError, file_errors

LEAST_KEY = 32
"""Minimum bytes of a key file."""
MOST_SERVERS = 64
"""Maximum prefill servers that one decode server asks."""


@dataclass(frozen=True, slots=True)
class Role:
    """Value of `--role`."""

    kind: Literal["both", "prefill", "decode"] = "both"
    addresses: tuple[str, ...] = ()
    """Listening address of a prefill server, or the servers that a decode server asks."""
    key: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Role:
        """Parse `both`, `prefill@ADDRESS` or `decode@ADDRESS,ADDRESS`, with `?key=FILE` after the
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
        """Read the key file; None without one. Raises `OptionError`."""
        if self.key is None:
            return None
        with file_errors(OptionError, f"role: {self.key} cannot be read", "role"):
            secret = self.key.read_bytes().strip()
        if len(secret) < LEAST_KEY:
            raise OptionError(
                f"role: {self.key} has {len(secret)} bytes, a key at least {LEAST_KEY}",
                param="role",
            )
        return secret


def _near(address: str) -> bool:
    """Return whether only this machine reaches the address. Raises `OptionError` for an invalid
    one."""
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
    """A prompt that another server shall compute, and its wanted blocks."""

    tokens: list[int]
    """Tokens of the prompt: one more than the blocks hold, if there is one."""
    salt: str
    adapter: str | None
    """Name of the adapter's content."""
    key: bytes
    """Name of the last wanted block."""
    first: int
    """Index of the first wanted block in the prompt."""
    blocks: int
    """End index of the wanted blocks."""


class LentBlocks(Protocol):
    """Interface of leases (`kv.leases`) for the pool's bookkeeping."""

    held: Counter[tuple[int, int]]
    """(group, block) → number of leases that hold it."""

    def distrust(self) -> object:
        """End all leases: the pool's content changes from now on."""


class PrefillServers(Protocol):
    """The servers that a decode server may ask. Calls come from one thread and never wait."""

    def ahead(self) -> float | None:
        """Return the least queueing time of a new prompt among the servers, in seconds; None if no
        server answers."""

    def ask(self, ticket: int, handed: Handed, keys: list[bytes], seconds: float) -> None:
        """Ask a server to compute it, which takes about `seconds`.

        The end comes from the store, as that of an order of the kind "prefill". Good blocks can be
        read until they are released.
        """

    def release(self, ticket: int) -> None:
        """Release everything of the ticket, in any state."""


@dataclass(slots=True)
class SplitStats:
    """Counts since the engine's start."""

    handed: int = 0
    """Prompts whose KV was requested from a prefill server."""
    brought: int = 0
    """Handed prompts that were lent."""
    declined: int = 0
    """Handed prompts that the server declined."""
    failed: int = 0
    """Handed prompts whose server, or the way to it, was gone or too late."""
    left: int = 0
    """Handed prompts that were no longer wanted."""
    here: int = 0
    """Prompts computed here, since that cost all waiting requests less time."""
    servers: int = 0
    """Prefill servers that answer now."""
    computed: int = 0
    """Prompts computed here for others."""
    refused: int = 0
    """Prompts of others that were refused."""
    expired: int = 0
    """Leases that were not renewed."""
    leases: int = 0
    """Current leases."""
    lent_blocks: int = 0
    """Blocks held by current leases."""
    lent_bytes: int = 0
    """Bytes sent."""
