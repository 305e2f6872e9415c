from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.server.app import Application, create_app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def gate(engine: FakeEngine, tmp_path: Path) -> Path:
    """The file without which no answer of this engine gives a token."""
    engine.gate, engine.held_after = tmp_path / "gate", 0
    return tmp_path / "gate"


@pytest.fixture
async def app(engine: FakeEngine) -> Application:
    return create_app(engine, ServerOptions(max_body=100_000, max_concurrent=4))  # type: ignore[arg-type]


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
