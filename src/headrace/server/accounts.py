"""Who is asking, how much they may, how much they did: keys at work."""

from __future__ import annotations

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
"""How often the key file is looked at for changes."""


class Bucket:
    """A token bucket: `rate` per minute, at most one minute's worth; may be overdrawn."""

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
        """Seconds until `amount` is there; 0 where it is."""
        self._fill()
        return max(0.0, (amount - self._left) / self._rate)

    def take(self, amount: float) -> None:
        self._fill()
        self._left -= amount


@dataclass(slots=True)
class Totals:
    """What one key used since the start of the ledger."""

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
    """One key with its limits at work."""

    key: Key
    clock: Callable[[], float] = time.monotonic
    totals: Totals = field(default_factory=Totals)
    in_work: int = 0
    _requests: Bucket | None = None
    _tokens: Bucket | None = None

    def __post_init__(self) -> None:
        self.limit(self.key)

    def limit(self, key: Key) -> None:
        """Take the limits of the key file; what was used counts on where a limit is unchanged."""
        before, self.key = self.key, key
        if self._requests is None or before.requests_per_minute != key.requests_per_minute:
            rate = key.requests_per_minute
            self._requests = None if rate is None else Bucket(rate, self.clock)
        if self._tokens is None or before.tokens_per_minute != key.tokens_per_minute:
            rate = key.tokens_per_minute
            self._tokens = None if rate is None else Bucket(rate, self.clock)

    def check(self) -> None:
        """Raise `RateLimited` with the time after which one more request may come."""
        key = self.key
        if key.concurrent is not None and self.in_work >= key.concurrent:
            raise self._refuse(f"{key.concurrent} concurrent requests", 1.0)
        if self._requests is not None and (wait := self._requests.wait(1)):
            raise self._refuse(f"{key.requests_per_minute} requests per minute", wait)
        # Tokens are known when they were used: the bucket is overdrawn and has to fill again.
        if self._tokens is not None and (wait := self._tokens.wait(1)):
            raise self._refuse(f"{key.tokens_per_minute} tokens per minute", wait)

    def enter(self) -> None:
        """One more request. Raises as `check` does."""
        self.check()
        if self._requests is not None:
            self._requests.take(1)
        self.in_work += 1
        self.totals.requests += 1

    def leave(self, usage: Usage | None) -> None:
        self.in_work -= 1
        if usage is None:
            return
        self.totals.add(usage)
        if self._tokens is not None:
            self._tokens.take(usage.prompt - usage.cached + usage.completion)

    def _refuse(self, limit: str, wait: float) -> RateLimited:
        self.totals.refused += 1
        return RateLimited(f"this key is limited to {limit}", retry_after=wait)


class Accounts:
    """All keys of one server, by hash; the file is read again when it changes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `OptionError` where the file cannot be used."""
        self.failed: Callable[[str], None] = lambda kind: None
        """Told of each failure to read the file again."""
        self._path = path
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._seen: tuple[int, int] = (0, 0)
        self._looked = clock()
        self._load()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def restore(self, totals: dict[str, Totals]) -> None:
        """Go on from a stored ledger (by name)."""
        for account in self:
            account.totals = totals.get(account.key.name, account.totals)

    def find(self, secret: str) -> Account | None:
        """The account of a key as the caller sent it.

        What is looked up is its hash: how long that takes says nothing about the key.
        """
        self._reload()
        return self._accounts.get(hash_of(secret))

    def named(self, name: str) -> Account | None:
        """The account of the key with this name, as the ledger knows it; None: it was removed."""
        self._reload()
        return next((account for account in self if account.key.name == name), None)

    def _load(self) -> None:
        state = self._path.stat() if self._path.exists() else None
        accounts: dict[str, Account] = {}
        for key in read_keys(self._path):
            account = self._accounts.get(key.hash)
            if account is None:
                account = Account(key, self._clock)
            else:
                account.limit(key)
            accounts[key.hash] = account
        self._accounts = accounts
        self._seen = (state.st_mtime_ns, state.st_size) if state else (0, 0)

    def _reload(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            state = self._path.stat()
            if (state.st_mtime_ns, state.st_size) != self._seen:
                self._seen = (state.st_mtime_ns, state.st_size)
                self._load()
                log.info("the keys were read again", extra={"keys": len(self._accounts)})
        except (OSError, OptionError) as error:
            # The keys that were good stay good: a half-written file locks nobody out.
            log.error("the key file cannot be read", extra={"reason": str(error)})
            self.failed("keys_read")
