"""API keys in use: the caller, its limits and its usage."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import OptionError, RateLimited
from .keys import Key, hash_of, read_keys

if TYPE_CHECKING:
    from .generation import Usage

log = logging.getLogger("headrace.server.accounts")

LOOK_SECONDS = 2.0
"""Seconds between two checks of the key file for changes."""


class Bucket:
    """Token bucket: `rate` per minute, at most one minute's worth; may be overdrawn."""

    __slots__ = ("_at", "_clock", "_left", "_rate")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._rate = per_minute / 60
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._rate * 60, self._left + (now - self._at) * self._rate)
        self._at = now

    def wait(self, amount: float) -> float:
        """Return the seconds until `amount` is available; 0 if it is."""
        self._fill()
        return max(0.0, (amount - self._left) / self._rate)

    def take(self, amount: float) -> None:
        self._fill()
        self._left -= amount


@dataclass(slots=True)
class Totals:
    """Usage of one key since the start of the ledger."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.completion_tokens += usage.completion


@dataclass(slots=True)
class Account:
    """One key with its limits and usage."""

    key: Key
    clock: Callable[[], float] = time.monotonic
    totals: Totals = field(default_factory=Totals)
    in_work: int = 0
    removed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this secret is no longer in the file: requests that came with it end."""
    _requests: Bucket | None = None
    _tokens: Bucket | None = None

    def __post_init__(self) -> None:
        self.limit(self.key)

    def limit(self, key: Key) -> None:
        """Apply the key file's current limits; usage is kept for limits that did not change."""
        before, self.key = self.key, key
        if before.hash != key.hash:
            self.removed.set()
        if self.removed.is_set():
            self.removed = asyncio.Event()
        if self._requests is None or before.requests_per_minute != key.requests_per_minute:
            rate = key.requests_per_minute
            self._requests = None if rate is None else Bucket(rate, self.clock)
        if self._tokens is None or before.tokens_per_minute != key.tokens_per_minute:
            rate = key.tokens_per_minute
            self._tokens = None if rate is None else Bucket(rate, self.clock)

    def check(self) -> None:
        """Raise `RateLimited`, with the time to wait, if no further request is allowed now."""
        key = self.key
        if key.concurrent is not None and self.in_work >= key.concurrent:
            raise self._refuse(f"{key.concurrent} concurrent requests", 1.0)
        if self._requests is not None and (wait := self._requests.wait(1)):
            raise self._refuse(f"{key.requests_per_minute} requests per minute", wait)
        self.check_tokens()

    def check_tokens(self) -> None:
        """Raise `RateLimited` if the tokens of this minute are used up."""
        # Tokens are counted after use: the bucket may be overdrawn and then has to refill.
        if self._tokens is not None and (wait := self._tokens.wait(1)):
            raise self._refuse(f"{self.key.tokens_per_minute} tokens per minute", wait)

    def enter(self) -> None:
        """Count one more request in work. Raises as `check` does."""
        self.check()
        if self._requests is not None:
            self._requests.take(1)
        self.in_work += 1
        self.totals.requests += 1

    def count(self) -> None:
        """Count one more request of a session that is in work. Raises `RateLimited`."""
        if self._requests is not None and (wait := self._requests.wait(1)):
            raise self._refuse(f"{self.key.requests_per_minute} requests per minute", wait)
        self.check_tokens()
        if self._requests is not None:
            self._requests.take(1)
        self.totals.requests += 1

    def leave(self, usage: Usage | None) -> None:
        self.in_work -= 1
        if usage is not None:
            self.charge(usage)

    def charge(self, usage: Usage) -> None:
        """Charge the usage; `leave` charges usage that was not charged earlier."""
        self.totals.add(usage)
        if self._tokens is not None:
            self._tokens.take(usage.prompt - usage.cached + usage.completion)

    def _refuse(self, limit: str, wait: float) -> RateLimited:
        self.totals.refused += 1
        return RateLimited(f"this key is limited to {limit}", retry_after=wait)


class Accounts:
    """All keys of one server; the file is read again when it changes.

    An account belongs to its key's name. A key that replaces another under the same name takes over
    its usage, limits and requests in work. So does a key that is added again later.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys. Raises `OptionError` if the file cannot be used."""
        self.failed: Callable[[str], None] = lambda kind: None
        """Callback for each failure to read the file again."""
        self._path = path
        self._clock = clock
        self._by_name: dict[str, Account] = {}
        """Accounts of all keys that were in the file since the start."""
        self._by_hash: dict[str, Account] = {}
        """Accounts of the keys that are in the file now."""
        self._stored: dict[str, Totals] = {}
        self._looked = clock()
        self._seen = self._state()
        self._take(read_keys(path))

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_hash.values())

    def totals(self) -> dict[str, Totals]:
        """Return the ledger by name, including keys removed since the start."""
        return {name: account.totals for name, account in self._by_name.items()}

    def restore(self, totals: dict[str, Totals]) -> None:
        """Restore a stored ledger (by name)."""
        self._stored = totals
        for account in self:
            account.totals = totals.get(account.key.name, account.totals)

    def find(self, secret: str) -> Account | None:
        """Return the account of a key as the caller sent it.

        The lookup uses the key's hash, so its duration reveals nothing about the key.
        """
        self.refresh()
        return self._by_hash.get(hash_of(secret))

    def named(self, name: str) -> Account | None:
        """Return the account of the key with this name, or None if the key was removed."""
        self.refresh()
        account = self._by_name.get(name)
        return None if account is None or account.removed.is_set() else account

    async def watch(self, seconds: float = LOOK_SECONDS) -> None:
        """Check the file also while no requests arrive, so that a removed key's work ends."""
        while True:
            await asyncio.sleep(seconds)
            self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed, at most once per `LOOK_SECONDS`."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            keys = read_keys(self._path)
            if not keys and not self._path.read_text(encoding="utf-8").strip():
                # `headrace keys remove` leaves a header even in an empty list.
                raise OptionError(f"{self._path} is empty, as if half written", param="keys")
        except (OSError, OptionError) as error:
            # Good keys stay valid: a half-written file must lock nobody out.
            log.error("the key file cannot be read", extra={"reason": str(error)})
            self.failed("keys_read")
            return
        self._take(keys)
        log.info("the keys were read again", extra={"keys": len(keys)})

    def _state(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)

    def _take(self, keys: list[Key]) -> None:
        by_hash: dict[str, Account] = {}
        for key in keys:
            account = self._by_name.get(key.name)
            if account is None:
                account = self._by_name[key.name] = Account(key, self._clock)
                account.totals = self._stored.get(key.name, account.totals)
            else:
                account.limit(key)
            by_hash[key.hash] = account
        kept = {account.key.name for account in by_hash.values()}
        for account in self._by_hash.values():
            if account.key.name not in kept:
                account.removed.set()
        self._by_hash = by_hash
