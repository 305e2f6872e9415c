"""Recorded answers are proved again bit for bit, and what differs is named."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_fakes import CRAWL, FAKE, OPTIONS
from engine_waits import until

from headrace import LLM, SamplingParams
from headrace.base.config import EngineOptions
from headrace.base.errors import InvalidRequest
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.records import Record, read_records, records_of_dump
from headrace.engine.clients.replay import Verdict, replay
from headrace.engine.clients.supervision import Supervision
from headrace.engine.loop.build import Built, build
from headrace.loader import open_model
from headrace.text import Tokenizer, load_tokenizer

WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=24, n=3, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=24, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, max_tokens=60, stop=["e", "a"], min_tokens=3),
    SamplingParams(temperature=0.7, seed=5, max_tokens=24, logit_bias={70: 3.0}, min_p=0.05),
]


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Answers of one engine, recorded as a user records them."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HEADRACE_RECORD", str(folder))
        with LLM(str(tiny), **OPTIONS) as llm:
            llm.generate([f"Prompt number {place}" for place in range(len(WISHES))], WISHES)
            llm.generate("To be or not to be", WISHES[1])
    (file,) = folder.glob("records-*.jsonl")
    return sorted(read_records(file), key=lambda record: record.prompt)


@pytest.fixture(scope="module")
def other(tiny: Path) -> Iterator[tuple[Built, Tokenizer, int]]:
    """Another engine, that does the same work in other steps."""
    files = open_model(str(tiny), offline=True)
    options = EngineOptions(
        **{**OPTIONS, "max_sequences": 3, "step_tokens": 16, "prefix_cache": False},
        model=str(tiny),
    )
    built = build(options, files)
    yield built, load_tokenizer(files.tokenizer), files.arch.vocab_size
    built.close()


def again(other: tuple[Built, Tokenizer, int], records: list[Record]) -> list[Verdict]:
    built, tokenizer, vocab_size = other
    verdicts = replay(built.core, tokenizer, records, vocab_size=vocab_size)
    built.core.scheduler.check_integrity()
    return verdicts


def test_every_answer_is_equal_in_other_steps(
    recorded: list[Record], other: tuple[Built, Tokenizer, int]
) -> None:
    assert len(recorded) == len(WISHES) + 1
    verdicts = again(other, recorded)
    assert [verdict.difference or verdict.refused for verdict in verdicts] == [None] * 6
    assert sum(verdict.tokens for verdict in verdicts) > 150
    for record in recorded:
        assert record.identity.differences(other[0].identity) == []


def test_seeds_that_nobody_gave_are_in_the_record(recorded: list[Record]) -> None:
    drawn = [record for record in recorded if record.spec.sampling.seed is None]
    assert len({record.spec.seed for record in drawn}) == len(drawn) == 5


@pytest.mark.parametrize("place", [0, 7])
def test_a_token_that_differs_is_named(
    recorded: list[Record], other: tuple[Built, Tokenizer, int], place: int
) -> None:
    record = copy(recorded[0])
    token = record.choices[0].tokens[place]
    record.choices[0].tokens[place] = (token + 1) % 250
    (verdict,) = again(other, [record])
    assert verdict.difference is not None
    found = verdict.difference
    assert (found.choice, found.place, found.replayed) == (0, place, token)


def test_the_last_bit_of_a_log_probability_counts(
    recorded: list[Record], other: tuple[Built, Tokenizer, int]
) -> None:
    record = next(copy(one) for one in recorded if one.spec.sampling.logprobs)
    scores = record.choices[2].logprobs
    assert scores is not None
    scores[5] = scores[5]._replace(logprob=math.nextafter(scores[5].logprob, -math.inf))
    (verdict,) = again(other, [record])
    assert verdict.difference is not None
    assert (verdict.difference.choice, verdict.difference.place) == (2, 5)


def test_an_end_that_differs_is_a_difference(
    recorded: list[Record], other: tuple[Built, Tokenizer, int]
) -> None:
    shorter, longer = copy(recorded[0]), copy(recorded[0])
    shorter.choices[0].tokens.pop()
    longer.choices[0].tokens.append(1)
    ended = copy(recorded[0])
    ended.choices[0].finish = "stop"
    assert not any(verdict.equal for verdict in again(other, [shorter, longer, ended]))


def test_what_a_death_cut_off_is_compared_as_far_as_it_came(
    recorded: list[Record], other: tuple[Built, Tokenizer, int]
) -> None:
    record = copy(recorded[0])
    record.cut, record.choices[0].finish = "death", None
    del record.choices[0].tokens[9:]
    (verdict,) = again(other, [record])
    assert verdict.equal
    assert verdict.tokens == 9


def test_what_no_engine_can_take_is_refused_by_name(
    recorded: list[Record], other: tuple[Built, Tokenizer, int]
) -> None:
    foreign, long, short = copy(recorded[0]), copy(recorded[0]), copy(recorded[1])
    foreign.prompt[0] = 1 << 40
    long.prompt *= 1000
    short.choices.pop()
    said = [verdict.refused for verdict in again(other, [foreign, recorded[0], long, short])]
    assert said[1] is None
    assert "vocabulary" in (said[0] or "")
    assert "context" in (said[2] or "")
    assert "n = 3" in (said[3] or "")


@pytest.mark.parametrize("line", [b"{}", b"not json", b'{"model": 3}', b"[" * 100_000])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(InvalidRequest, match="line 1 of"):
        list(read_records(file))


async def test_a_death_leaves_what_was_in_work_and_the_dump_says_where(
    options: dict[str, Any],
    supervision: Supervision,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_RECORD", str(tmp_path / "records"))
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        await engine.generate([70], SamplingParams(temperature=0.0, max_tokens=3))
        stream = engine.submit([65, CRAWL], SamplingParams(temperature=0.0, max_tokens=300))
        first = await anext(stream)
        left = engine.submit([66, CRAWL], SamplingParams(temperature=0.0, max_tokens=300))
        await anext(left)
        left.cancel()
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        with pytest.raises(Exception, match="engine"):
            async for _ in stream:
                pass
        assert supervision.dumps is not None
        folder = supervision.dumps
        await until(lambda: list(folder.glob("flight-*.json")), "the dump is there")
        dumps = list(folder.glob("flight-*.json"))
    named = records_of_dump(dumps[0])
    assert named is not None
    whole, cut = read_records(named)
    assert (whole.prompt, whole.cut, whole.choices[0].finish) == ([70], None, "length")
    assert (cut.prompt, cut.cut, cut.choices[0].finish) == ([65, CRAWL], "death", None)
    assert cut.choices[0].tokens[: len(first.token_ids)] == first.token_ids


def test_a_dump_without_records_says_what_to_do(tmp_path: Path) -> None:
    dump = tmp_path / "flight.json"
    dump.write_text(json.dumps({"kind": "death", "steps": []}))
    with pytest.raises(InvalidRequest, match="HEADRACE_RECORD"):
        records_of_dump(dump)


def copy(record: Record) -> Record:
    """A deep copy, by way of the file format."""
    return msgspec.json.decode(msgspec.json.encode(record), type=Record)
