"""The marked prefixes of prompts in the engine's cache, as the API process knows them.

The engine process reports the gains and losses after each turn (`messages.PrefixNews`). Each router
that listens has a follower, which gets all held marks and then the changes. Pending changes are
merged, so a slow follower holds no more memory than the current state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

MOST_FOLLOWERS = 32


class HeldPrefixes:
    """Marks (`Request.marks`) that are held now, and their followers."""

    def __init__(self) -> None:
        self.marks: set[int] = set()
        self._followers: set[Follower] = set()

    def told(self, held: Iterable[int], gone: Iterable[int]) -> None:
        """Take the engine's report of one turn."""
        for there, marks in ((True, held), (False, gone)):
            (self.marks.update if there else self.marks.difference_update)(marks)
            for follower in self._followers:
                follower.changed(marks, there)

    def forget(self) -> None:
        """Forget all marks: the engine process is gone, and its cache with it."""
        self.told((), tuple(self.marks))

    def follow(self) -> Follower | None:
        """Make a new follower; None if there are `MOST_FOLLOWERS`."""
        if len(self._followers) >= MOST_FOLLOWERS:
            return None
        follower = Follower(self.marks)
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.discard(follower)


class Follower:
    """The changes that one listener has not been sent yet."""

    def __init__(self, marks: Iterable[int]) -> None:
        self._news = dict.fromkeys(marks, True)
        self._rung = asyncio.Event()
        if self._news:
            self._rung.set()

    def changed(self, marks: Iterable[int], there: bool) -> None:
        self._news.update(dict.fromkeys(marks, there))
        if self._news:
            self._rung.set()

    def take(self, most: int) -> dict[int, bool]:
        """Take at most `most` of the changes: mark → whether it is held."""
        news = self._news
        if len(news) <= most:
            self._news = {}
            self._rung.clear()
            return news
        taken = {mark: news[mark] for mark, _ in zip(news, range(most), strict=False)}
        for mark in taken:
            del news[mark]
        return taken

    async def wait(self, seconds: float) -> None:
        """Wait until there is something to take, `seconds` at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            pass
