"""The application of these tests has a folder of files; engine and client are the server's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from batch_kit import close, serving
from server_fake import FakeEngine

from headrace.server.app import Application


@pytest.fixture
async def app(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[Application]:
    app = serving(tmp_path / "files", engine)
    yield app
    await close(app)
