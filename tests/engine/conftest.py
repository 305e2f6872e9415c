from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_fakes import NOTES, OPTIONS

from headrace.engine.clients.supervision import Supervision
from headrace.kv.split import SplitChoice
from tiny import bytewise
from tiny.kept import Kept


@pytest.fixture(scope="session")
def tiny(kept: Kept) -> Path:
    return kept(bytewise.make)


@pytest.fixture
def options(tiny: Path) -> dict[str, Any]:
    return {**OPTIONS, "model": str(tiny)}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a test and the fake in the engine process tell each other things."""
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


@pytest.fixture
def supervision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervision:
    """Quick to start again, and with the patience that a busy machine asks for: who wants a hang
    to be seen makes the silence old by `engine_waits.age`."""
    monkeypatch.setattr("headrace.engine.clients.async_engine.WAIT_FOR_NEXT", 300.0)
    return Supervision(late=300.0, hang=300.0, start=300.0, back_off=0.1, dumps=tmp_path / "flight")


@pytest.fixture
def a_split_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these models takes long enough to compute; and what a busy machine makes late is
    waited for. A test of lateness sets the limit that it is about."""
    monkeypatch.setattr(SplitChoice, "pays", True)
    monkeypatch.setattr("headrace.kv.handover.LEAST_SECONDS", -1.0)
    monkeypatch.setattr("headrace.kv.tiers.LATENCY", -1e9)
    monkeypatch.setattr("headrace.kv.leases.SECONDS", 1e6)
    monkeypatch.setattr("headrace.worker.borrowing.GRACE_SECONDS", 1e6)
    monkeypatch.setattr("headrace.worker.fetching.FETCH_SECONDS", 600.0)
    monkeypatch.setattr("headrace.worker.sending.OPEN_SECONDS", 600.0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/split"
