"""Which marked beginnings of prompts the engine's cache holds, as the API process knows it.

The engine process says after each turn what was gained and lost (`messages.PrefixNews`). A
follower, one for each router that listens, gets all that is held and then the changes; changes that
it has not taken yet are merged, so that a slow one holds no more memory than what there is to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

MOST_FOLLOWERS = 32


class HeldPrefixes:
    """Marks (`Request.marks`) that are held now, and who follows them."""

    def __init__(self) -> None:
        self.marks: set[int] = set()
        self._followers: set[Follower] = set()

    def told(self, held: Iterable[int], gone: Iterable[int]) -> None:
        """What the engine says of one turn."""
        for there, marks in ((True, held), (False, gone)):
            (self.marks.update if there else self.marks.difference_update)(marks)
            for follower in self._followers:
                follower.changed(marks, there)

    def forget(self) -> None:
        """The engine process is gone, and all that it held."""
        self.told((), tuple(self.marks))

    def follow(self) -> Follower | None:
        """A new follower; None: there are `MOST_FOLLOWERS`."""
        if len(self._followers) >= MOST_FOLLOWERS:
            return None
        follower = Follower(self.marks)
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.discard(follower)


class Follower:
    """What one listener has not been told yet."""

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
        """At most so many of the changes: mark → is it held?"""
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
        """Until there is something to take, and at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            pass
