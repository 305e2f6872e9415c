"""What a client process does before its clock starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace import loader, text
from headrace.bench import worker
from headrace.bench.options import RunOptions


class Slow:
    """Makes its tables in the first call, as real tokenizers do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def encode(self, words: str, special: bool = True) -> list[int]:
        self.calls.append(words)
        return [0] * len(words.split())


def test_the_tokenizer_is_warm_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first answer's recount stood in the event loop for half a second: late sends.
    slow = Slow()
    monkeypatch.setattr(loader, "open_model", lambda _name: SimpleNamespace(tokenizer=None))

    def load(_files: Any) -> Slow:
        return slow

    monkeypatch.setattr(text, "load_tokenizer", load)
    count = worker.recounter("any")
    assert count is not None
    assert len(slow.calls) == 1
    assert count("three plain words") == 3
    assert worker.recounter(None) is None


def test_nothing_is_recounted_where_it_proves_nothing() -> None:
    assert RunOptions().ignores_eos
    assert not RunOptions(ignore_eos=False).ignores_eos
    assert not RunOptions(workload="structured").ignores_eos
    assert RunOptions(workload="structured", trace="azure:x").ignores_eos
