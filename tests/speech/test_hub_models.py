"""Transcription models by hub id: recognised by their config, fetched, opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import DownloadError, ModelNotFound
from headrace.loader import open_model
from headrace.loader.whisper_files import open_whisper
from headrace.speech.finding import find, hears
from loader.fake_sources import FakeHub, serving

REPO = "org/whisper"


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(FakeHub(REPO, files | {"pytorch_model.bin": b"pickle"})) as served:
        monkeypatch.setattr("headrace.loader.hub.constants.ENDPOINT", served.url)
        yield served


def test_a_hub_model_is_known_by_its_config(tmp_path: Path, hub: FakeHub) -> None:
    assert not hears(REPO, cache_dir=tmp_path)
    assert hub.requests == []
    assert hears(REPO, cache_dir=tmp_path, offline=False)
    assert [name for name, _ in hub.requests] == ["config.json"]
    assert hears(REPO, cache_dir=tmp_path)
    found = find(REPO, cache_dir=tmp_path)
    assert "pytorch_model.bin" not in {name for name, _ in hub.requests}
    assert open_whisper(found).path == found
    hub.requests.clear()
    assert find(REPO, cache_dir=tmp_path, offline=True) == found
    assert hub.requests == []


def test_other_repositories_hear_nothing(tmp_path: Path, hub: FakeHub) -> None:
    assert not hears("org/other", cache_dir=tmp_path, offline=False)
    hub.files = {"m-q4_k_m.gguf": b"GGUF"}
    assert not hears(REPO, cache_dir=tmp_path, offline=False)


@pytest.mark.parametrize("name", ["", "x\0y", "n" * 9999, "~nobody-here/x", "a/b/c", "qwen3-8b"])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    assert not hears(name, cache_dir=tmp_path, offline=False)
    with pytest.raises(ModelNotFound, match="it is a catalog name"):
        find(name, cache_dir=tmp_path)


def test_offline_nothing_is_fetched(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(DownloadError, match="offline"):
        find(REPO, cache_dir=tmp_path, offline=True)
    assert hub.requests == []
    with pytest.raises(DownloadError, match="offline"):
        open_model(REPO, cache_dir=tmp_path, offline=True)
