"""The loop that `headrace route` runs on: its transports are of other classes than asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.server.run import loop_factory


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        make: Callable[[], asyncio.AbstractEventLoop] | None = loop_factory()
        return make() if make is not None else super().new_event_loop()


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return _Policy()
