"""Work of a client process before its clock starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace import loader, text
from headrace.bench import worker
from headrace.bench.audit import examine
from headrace.bench.crosscheck import cross_check
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord


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
    files = SimpleNamespace(tokenizer=None, arch=SimpleNamespace(vocab_size=3))
    monkeypatch.setattr(loader, "open_model", lambda _name: files)

    def load(_files: Any, _rows: int) -> Slow:
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


def answer(tokens: int, text: str) -> RequestRecord:
    size = len(text.encode())
    return RequestRecord(
        0,
        0,
        0,
        0,
        0,
        0,
        [1, 2],
        2,
        200,
        asked_tokens=64,
        output_tokens=tokens,
        characters=len(text),
        text_bytes=size,
    )


def found(record: RequestRecord, *, ignore_eos: bool = False) -> set[str]:
    findings = examine([record], [], open_loop=False, ignore_eos=ignore_eos, stream=True)
    return {finding.code for finding in findings}


def test_a_character_may_have_several_tokens() -> None:
    # Of a real model: three signs of four bytes each, six tokens and the end.
    assert "claims_impossible" not in found(answer(7, "\U0001f389" * 3))
    assert "claims_impossible" in found(answer(14, "\U0001f389" * 3))
    # Past the end come tokens without text.
    assert "claims_impossible" not in found(answer(14, "a"), ignore_eos=True)


def test_what_is_not_streamed_has_no_first_token_to_compare() -> None:
    told = {name: {"mean": 0.3, "count": 1.0} for name in ("ttft", "itl", "e2e")}
    whole = RequestRecord(0, 0, 0, 0, 0, 0, [10**9], 10**9, 200, output_tokens=16)
    table, findings = cross_check(told, [whole], stream=False)
    assert [finding.code for finding in findings] == ["disagree_e2e"]
    assert table["ttft"]["client"] is table["itl"]["client"] is None


def test_pieces_that_come_in_pairs_are_named() -> None:
    """Such as from a server whose sending waits for its computing."""

    def found(gaps: list[int]) -> set[str]:
        at = [10**8]
        for gap in gaps * 10:
            at.append(at[-1] + gap * 10**5)
        records = [
            RequestRecord(n, n, 0, 0, 0, 0, at, at[-1], 200, output_tokens=len(at))
            for n in range(4)
        ]
        made = examine(records, [], open_loop=False, ignore_eos=False, stream=True)
        return {finding.code for finding in made}

    assert "bursts" in found([1, 200])
    assert "bursts" not in found([120, 130, 110, 900]), "prefills between decode steps"
    assert "bursts" not in found([100])
