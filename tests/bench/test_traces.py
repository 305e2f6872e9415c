"""Traces recorded elsewhere: read as published, and refused with line and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest
from headrace.bench.material import Material
from headrace.bench.traces import load_trace

MATERIAL = Material()


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talk = [
        {"from": "human", "value": "how do I sort"},
        {"from": "gpt", "value": "use the sort method"},
        {"from": "human", "value": "thanks"},
        {"from": "gpt", "value": "you are welcome"},
    ]
    short = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps([{"conversations": talk}, {"messages": short}]))
    first, second = load_trace("sharegpt", path, MATERIAL)
    assert [turn.text for turn in first.turns] == ["how do I sort", "thanks"]
    assert [turn.output_tokens for turn in first.turns] == [4, 3]
    assert first.turns[0].answer == "use the sort method"
    assert second.turns[0].text == "hi"


def test_mooncake_shares_hashed_blocks(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [1, 2]},
        {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    sessions = load_trace("mooncake", path, MATERIAL)
    assert [session.at for session in sessions] == [0, 0.5, 3]
    texts = [session.turns[0].text.split() for session in sessions]
    assert texts[0][:1024] == texts[2][:1024], "the same hash ids are the same tokens"
    assert texts[0][:512] != texts[1][:512]


def test_azure_and_burstgpt(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = load_trace("azure", azure, MATERIAL)
    assert second.at is not None
    assert first.at is not None
    assert second.at - first.at == pytest.approx(4.314579, abs=1e-5)
    assert (first.turns[0].prompt_tokens, first.turns[0].output_tokens) == (374, 44)
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    sessions = load_trace("burstgpt", burst, MATERIAL)
    assert [session.at for session in sessions] == [5, 118], "a failed request is left out"
    assert len(load_trace("burstgpt", burst, MATERIAL, limit=1)) == 1


@pytest.mark.parametrize(
    ("kind", "content", "match"),
    [
        ("azure", "TIMESTAMP,Context,GeneratedTokens\n", "lacks the column 'ContextTokens'"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3\n", "line 2"),
        ("burstgpt", "", "lacks the column"),
        ("mooncake", '{"timestamp": 1}\n', "line 1"),
        ("mooncake", '{"timestamp": 1, "input_', "line 1"),
        ("prompts", "Why is rain wet?\n", r'line 1: it is no JSON.*\{"text"'),
        ("sharegpt", "{}", "expected a list"),
        ("sharegpt", '[{"id": 1}]', "entry 0"),
        ("sharegpt", "[half", "not JSON"),
        ("sharegpt", "[]", "no request"),
        ("parquet", "", "one of sharegpt"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, kind: str, content: str, match: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=match):
        load_trace(kind, path, MATERIAL)


def test_an_absent_trace(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such"):
        load_trace("azure", tmp_path / "none.csv", MATERIAL)
