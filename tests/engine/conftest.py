from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_fakes import OPTIONS

from headrace.engine.supervisor import Supervision


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def options(tiny: Path) -> dict[str, Any]:
    return {**OPTIONS, "model": str(tiny)}


@pytest.fixture
def supervision(tmp_path: Path) -> Supervision:
    """Little patience, so that tests are quick."""
    return Supervision(hang=2.0, start=60.0, back_off=0.1, dumps=tmp_path / "flight")
