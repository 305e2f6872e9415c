"""Embeddings as a workload, the server's word on its queue, hits that a template explains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.base.errors import InvalidRequest
from headrace.bench.crosscheck import cross_check
from headrace.bench.material import Material
from headrace.bench.metrics import Run, queue_time
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.report import figure_rows, html_report
from headrace.bench.run import run_bench
from headrace.bench.sweep import Point, sweep_page
from headrace.bench.workload import Session, Turn


def options(url: str, **changes: object) -> RunOptions:
    base = RunOptions(
        url=url, workload="embeddings", requests=12, concurrency=3, input="20", warmup=1
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_embeddings_are_counted_by_their_inputs() -> None:
    with MockServer(Behaviour(ttft=0.05)) as server:
        result = run_bench(options(server.url, slo="e2e:p99<600s")).result
        body = server.seen.bodies[-1]
    assert sorted(body) == ["input", "model"]
    assert len(body["input"].split()) == 20
    assert result["succeeded"] == 12
    samples, figures = result["samples"], result["figures"]
    # A server that sleeps is never early, but for what two clocks differ.
    assert 0.049 <= samples["e2e"]["percentiles"]["p50"] <= result["seconds"]
    assert samples["input_tokens"]["mean"] == 20
    assert figures["total_throughput"]["value"] == pytest.approx(12 * 20 / result["seconds"])
    # Nothing was generated, so nothing is said of it.
    assert not {"ttft", "itl", "tpot", "user_throughput", "output_tokens"} & set(samples)
    assert "output throughput" not in dict(figure_rows(result))
    assert result["slo"]["met"]
    page = html_report(result)
    assert "20 in ·" in page
    for empty in ("Output rate", "Time to first token by planned time"):
        assert f">{empty}<" not in page
    page = sweep_page([Point("rate", 1.0, result)])
    assert "nan" not in page.lower().replace("nano", "")


def test_a_vector_of_noughts_is_a_failure() -> None:
    with MockServer(Behaviour(ttft=0.001, zero_vectors=True)) as server:
        outcome = run_bench(options(server.url, requests=3))
    assert outcome.result["figures"]["failure_rate"]["value"] == 1
    assert "squared length" in (outcome.run.records[0].error or "")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "completions"}, "endpoint"),
        ({"workload": "fixed", "endpoint": "embeddings"}, "endpoint"),
        ({"slo": "ttft<1s"}, "slo"),
    ],
)
def test_what_embeddings_do_not_have(change: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        options("http://127.0.0.1:9", **change).verify()
    assert error.value.param == param


def test_the_queue_is_the_servers_word() -> None:
    record = RequestRecord(0, 0, 0, 0, 0, 0, [], 10**9, asked_tokens=0, output_tokens=0)
    assert queue_time.value(Run([record], 0, 10**9)) is None
    assert queue_time.value(Run([record], 0, 10**9, queue_seconds=0.25)) == 0.25
    # An embedding has no pieces, its end can be compared all the same.
    table, findings = cross_check({"e2e": {"mean": 1.0, "count": 1}}, [record])
    assert table["e2e"] == {"server": 1.0, "client": 1.0}
    assert not findings


def test_what_a_template_shares_is_no_stale_hit() -> None:
    sent = RunOptions(
        workload="structured", requests=8, concurrency=1, input="40", output="4", warmup=0
    )
    behaviour = Behaviour(ttft=0.002, itl=0.001, prefix_cache=True, template=32)
    with MockServer(behaviour) as server:
        fresh = run_bench(replace(sent, url=server.url, seed=1)).result
        known = run_bench(replace(sent, url=server.url, seed=1)).result
    assert fresh["figures"]["prefix_hit_rate"]["value"] > 0.3
    assert "stale_hits" not in {finding["code"] for finding in fresh["findings"]}
    assert "stale_hits" in {finding["code"] for finding in known["findings"]}


def test_material_for_embeddings_is_exact() -> None:
    from headrace.bench.run import make_sessions

    sessions, _ = make_sessions(options("http://x"), Material())
    assert all(isinstance(s, Session) and isinstance(s.turns[0], Turn) for s in sessions)
    assert {s.turns[0].output_tokens for s in sessions} == {0}
    assert {s.turns[0].prompt_tokens for s in sessions} == {20}
