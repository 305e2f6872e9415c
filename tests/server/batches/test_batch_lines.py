"""Batch files and result files that hold anything: never an exception, never half a line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.batches.lines import Line, read_lines
from headrace.server.batches.results import Results, line_id

URL, MOST = "/v1/embeddings", 80
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(["a", "b"]) | VALUES,
        "method": st.sampled_from(["POST", "GET"]) | VALUES,
        "url": st.just(URL) | VALUES,
        "body": st.dictionaries(st.text(max_size=8), VALUES) | VALUES,
        "more": VALUES,
    },
)
GOOD = st.fixed_dictionaries(
    {
        "custom_id": st.sampled_from(["a", "b"]),
        "method": st.just("POST"),
        "url": st.just(URL),
        "body": st.just({}),
    }
)
RAW = st.binary(max_size=80) | (FIELDS | GOOD).map(lambda value: json.dumps(value).encode())


@given(raws=st.lists(RAW, max_size=12), end=st.booleans())
@settings(max_examples=100)
def test_any_file_is_lines_or_problems(
    tmp_path_factory: pytest.TempPathFactory, raws: list[bytes], end: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    content = b"\n".join(raws) + b"\n" * end
    path.write_bytes(content)
    found = list(read_lines(path, URL, MOST))
    pieces = content.split(b"\n")
    for line in found:
        assert isinstance(line, Line)
        assert (line.body is None) != (line.problem is None)
        if len(pieces[line.number - 1]) > MOST:
            assert line.problem is not None
            assert line.problem[0] == "line_too_long"
    # Every line that is not empty is there, under its own number, once.
    numbers = [place for place, raw in enumerate(pieces, start=1) if raw.strip()]
    assert [line.number for line in found if pieces[line.number - 1].strip()] == numbers
    ids = [line.custom_id for line in found if line.body is not None]
    assert len(ids) == len(set(ids))


@given(cut=st.integers(0, 400), tail=st.binary(max_size=30))
@settings(max_examples=200)
def test_a_cut_file_of_results_is_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, tail: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "results"
    path.unlink(missing_ok=True)
    results = Results(path)
    for number in range(1, 6):
        body = {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}
        results.append(number, {"id": line_id("batch_x", number), "response": {"body": body}})
    results.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + tail)
    again = Results(path)
    assert again.done == set(range(1, len(again.done) + 1))
    assert len(again.done) >= whole[:cut].count(b"\n")
    assert again.completion == 3 * len(again.done)
    again.append(9, {"id": line_id("batch_x", 9)})
    again.close()
    for line in path.read_bytes().splitlines():
        json.loads(line)
