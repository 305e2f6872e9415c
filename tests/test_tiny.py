"""The keeper of tiny models: made once, and a test that writes to one is found out."""

from __future__ import annotations

from pathlib import Path

from tiny import bytewise
from tiny.kept import Kept


def test_a_model_is_made_once_and_one_that_was_written_to_is_named(tmp_path: Path) -> None:
    calls = []

    def make(folder: Path, layers: int = 1) -> None:
        calls.append(layers)
        bytewise.make(folder, layers=layers)

    first, other = Kept(tmp_path), Kept(tmp_path)  # As two workers have them.
    model = first(make)
    assert first(make) == other(make) == model
    assert first(make, layers=2) != model
    assert calls == [1, 2]
    assert not first.changed()
    (model / "config.json").write_text("{}")
    assert first.changed() == other.changed() == [model]
