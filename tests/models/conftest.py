"""Each tiny model is made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle import tiny


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny.make(name, folder)
        return made[name]

    return get
