"""Loads that leaderboards ask for: presets, caps, ramps, grace, early ends, own prompts, traces."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest
from headrace.bench.audit import few_for, saturated, unsteady
from headrace.bench.lengths import parse_lengths
from headrace.bench.material import Material
from headrace.bench.metrics import parse_slo
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import PRESETS, RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.run import Outcome, make_sessions, run_bench, stale_hits
from headrace.bench.sweep import Point, options_at, read_points, sweep_charts, sweep_page
from headrace.bench.traces import load_trace
from headrace.bench.workload import shareable_tokens
from headrace.cli.bench import command
from headrace.cli.bench_flags import UNSAID, make_options

MS = 1_000_000


def record(session: int, begin: int, end: int, **changes: Any) -> RequestRecord:
    """From `begin` to `end` in ms; the first piece at once."""
    made = RequestRecord(
        session,
        session,
        0,
        0,
        begin * MS,
        begin * MS,
        [begin * MS, end * MS],
        end * MS,
        200,
        asked_tokens=2,
        output_tokens=2,
        prompt_tokens=4,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def run(behaviour: Behaviour, **changes: Any) -> tuple[Outcome, MockServer]:
    values = {"input": "5", "output": "4", "warmup": 0, **changes}
    with MockServer(behaviour) as server:
        return run_bench(RunOptions(url=server.url, **values)), server


def codes(outcome: Outcome) -> set[str]:
    return {finding["code"] for finding in outcome.result["findings"]}


def test_a_capped_open_loop() -> None:
    """All are due at once, two may go at a time; who waits for the cap is not late."""
    outcome, server = run(
        Behaviour(ttft=0.03, itl=0.001), arrivals="constant:10000", requests=12, max_concurrency=2
    )
    assert outcome.result["succeeded"] == 12
    assert server.seen.most_running <= 2
    moved = [r for r in outcome.run.records if r.planned_ns - outcome.run.start_ns >= 30 * MS]
    assert len(moved) == 10, "due when the cap let it go, not when it came"


def test_users_come_by_a_ramp() -> None:
    outcome, _ = run(Behaviour(ttft=0.5, itl=0.0), requests=8, concurrency=4, ramp=0.4)
    begins = {r.planned_ns - outcome.run.start_ns for r in outcome.run.records}
    assert begins >= {int(place / 4 * 0.4 * 1e9) for place in range(4)}


def test_after_the_grace_what_is_in_flight_is_hung_up() -> None:
    outcome, server = run(
        Behaviour(ttft=0.01, itl=3600.0), requests=4, concurrency=2, duration=4.0, grace=0.2
    )
    assert outcome.result["requests"] == 2, "what has not begun is not sent"
    assert all(record.cancelled for record in outcome.run.records)
    assert outcome.result["seconds"] < 3600, "it waited for a token"
    assert server.seen.requests == 2


def test_too_many_errors_end_a_run() -> None:
    outcome, server = run(
        Behaviour(ttft=0.001, itl=0.0, error_rate=1.0), requests=5000, concurrency=2, max_errors=9
    )
    assert 10 <= server.seen.requests < 5000
    assert "max_errors" in codes(outcome)
    assert not outcome.result["valid"]


def test_a_saturated_run_ends_early() -> None:
    """One slot of 50 ms, 200 a second offered for 20 s: it is clear after the first forty."""
    outcome, server = run(
        Behaviour(ttft=0.05, itl=0.0, at_once=1),
        arrivals="constant:200",
        requests=4000,
        stop_saturated=True,
        max_concurrency=None,
        output="1",
    )
    assert server.seen.requests < 4000
    assert "over_saturated" in codes(outcome)
    assert not outcome.result["valid"]


def test_saturation_is_seen_before_the_end() -> None:
    def waits(growth: int) -> list[RequestRecord]:
        return [
            record(n, n * 10, n * 10 + 50 + n * growth, chunk_ns=[(n * 10 + 40 + n * growth) * MS])
            for n in range(40)
        ]

    assert saturated(waits(8), draining=False) is not None
    assert saturated(waits(0), draining=False) is None


@pytest.mark.parametrize(
    ("spans", "users", "found"),
    [
        ([(n // 4 * 100, n // 4 * 100 + 100) for n in range(16)], 4, False),
        ([(0, 100), (0, 100), (0, 100), (0, 100), (0, 1000)], 4, True),
        ([(0, 100)] * 7, 4, True),
        ([(0, 100)] * 7 + [(0, 900)], 4, True),
        ([(0, 100)], 1, False),
    ],
)
def test_a_run_that_is_never_steady(spans: list[tuple[int, int]], users: int, found: bool) -> None:
    records = [record(n, *span) for n, span in enumerate(spans)]
    assert bool(unsteady(records, users)) is found


def test_a_percentile_needs_its_requests() -> None:
    records = [record(n, n, n + 10) for n in range(50)]
    assert [f.code for f in few_for(parse_slo("ttft<1s"), records)] == ["few_for_slo"]
    assert not few_for(parse_slo("ttft:p90<1s,itl<1s"), records)
    assert not few_for(parse_slo("ttft<1s"), records * 2)


def test_presets() -> None:
    for name, (input, output) in PRESETS.items():
        options = make_options({"preset": name, "concurrency": 16})
        assert (options.input, options.output) == (input, output)
        assert (options.sessions, options.warms_up) == (160, 32)
        for text, length in ((input, name[:2]), (output, name[2:])):
            low, high = (int(number) for number in text.split(":")[1:])
            assert high == int(length[0]) * 1024
            assert low == round(0.8 * high)
            parse_lengths(text, "input")
    assert make_options({}).seed == UNSAID
    with pytest.raises(InvalidRequest, match="1k8k"):
        make_options({"preset": "2k2k"})
    at = options_at(make_options({"preset": "1k1k"}), "concurrency", 32, None)
    assert (at.sessions, at.duration) == (320, None)


def test_every_command_has_every_flag_of_a_run() -> None:
    """Except what it sets itself: the points' load, the addresses."""
    own = {
        "run": set(),
        "sweep": {"concurrency", "arrivals", "duration"},
        "search": {"concurrency", "arrivals", "duration"},
        "compare": {"url"},
    }
    # `wait` is not a flag of any; the preset's lengths are.
    every = {spec.name for spec in fields(RunOptions)} - {"wait"}
    import typer.main

    group = typer.main.get_command(command)
    for name, without in own.items():
        there = {parameter.name for parameter in group.commands[name].params}  # type: ignore[attr-defined]
        assert every - without <= there, (name, every - without - there)
        # And the flags of `run` that are no option of the load itself.
        others = {p.name for p in group.commands["run"].params} - every - {"as_json"}  # type: ignore[attr-defined]
        if name == "compare":
            others -= {"accuracy_gate", "at_least", "gate"}  # It has two servers and one verdict.
        assert others <= there, (name, others - there)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"max_concurrency": 2}, "arrivals"),
        ({"grace": 1.0}, "duration"),
        ({"ramp": 1.0, "arrivals": "constant:1"}, "closed"),
        ({"stop_saturated": True}, "arrivals"),
        ({"trace": "prompts:/no/file"}, "no such trace"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        RunOptions(**changes).verify()


def lines(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_own_prompts(tmp_path: Path) -> None:
    call = {"function": {"name": "ls", "arguments": "{}"}}
    path = lines(
        tmp_path / "own.jsonl",
        {"text": "one two", "output_tokens": 7},
        {"turns": [{"text": "a"}, {"text": "b", "delay": 1500, "max_tokens": 3}], "system": "s"},
        {
            "messages": [
                {"role": "system", "content": "an agent"},
                {"role": "user", "content": "fix it"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "a.py"},
                {"role": "tool", "content": "b.py"},
                {"role": "assistant", "content": "done now"},
            ],
            "timestamp": 2000,
        },
    )
    first, second, third = load_trace("prompts", path, Material())
    assert (first.turns[0].text, first.turns[0].output_tokens) == ("one two", 7)
    assert [(t.output_tokens, t.think_seconds) for t in second.turns] == [(128, 0.0), (3, 1.5)]
    assert (second.system, third.system, third.at) == ("s", "an agent", 2.0)
    assert [turn.text for turn in third.turns] == ["fix it", "a.py\nb.py"]
    assert third.turns[0].answer is not None
    assert '"ls"' in third.turns[0].answer
    for bad in ({"turns": []}, {"messages": [{"role": "user"}]}, {"say": 1}):
        with pytest.raises(InvalidRequest, match="line 1"):
            load_trace("prompts", lines(tmp_path / "bad.jsonl", bad), Material())


def test_own_prompts_against_a_server(tmp_path: Path) -> None:
    path = lines(tmp_path / "own.jsonl", *({"text": f"word {n}"} for n in range(6)))
    _, server = run(Behaviour(ttft=0.001, itl=0.0), trace=f"prompts:{path}", concurrency=2)
    asked = [body["messages"][-1]["content"] for body in server.seen.bodies]
    assert sorted(asked) == [f"word {n}" for n in range(6)]


def test_mooncake_has_the_lengths_and_the_sharing_of_the_trace(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 1100, "output_length": 2, "hash_ids": [1, 3, 4]},
        {"timestamp": 2, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]},
    )
    made = [load_trace("mooncake", path, Material(), seed=seed) for seed in (1, 1, 2)]
    texts = [[s.turns[0].text for s in sessions] for sessions in made]
    assert [len(text.split()) for text in texts[0]] == [600, 1100, 600], "one word a token"
    assert texts[0] == texts[1]
    assert texts[0][0].split()[:512] == texts[0][1].split()[:512]
    assert texts[0][0].split()[:16] != texts[2][0].split()[:16], "another seed, other prompts"
    assert shareable_tokens(made[0]) == 512 + 600


def test_a_traces_own_sharing_is_not_an_earlier_runs(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        *(
            {"timestamp": n, "input_length": 1024, "output_length": 2, "hash_ids": [7, 8]}
            for n in range(10)
        ),
    )
    outcome, _ = run(
        Behaviour(ttft=0.001, itl=0.0, prefix_cache=True), trace=f"mooncake:{path}", concurrency=1
    )
    assert outcome.result["requests"] == 10, "a trace is sent whole"
    assert outcome.result["figures"]["prefix_hit_rate"]["value"] > 0.5
    assert stale_hits(outcome.run) == []


def points(devices: int, price: float | None, fast: float) -> list[Point]:
    from headrace.bench.metrics import Run
    from headrace.bench.result import document

    made = []
    for users in (1, 2, 4):
        records = [
            record(n, 0, 10 + round(10 * users**0.5 / fast), output_tokens=8)
            for n in range(users * 4)
        ]
        bench = Run(records, 0, 100 * MS, devices=devices, price_per_hour=price)
        result = document(
            run=bench,
            options=RunOptions(devices=devices, price_per_hour=price).public(),
            server={"url": "x", "model": "m", "version": None},
            audits=[],
            findings=[],
            interrupted=False,
        )
        made.append(Point("concurrency", users, result))
    return made


def test_sweeps_in_one_chart(tmp_path: Path) -> None:
    one, two = points(8, 3.0, 1.0), points(4, 5.0, 2.0)
    folder = tmp_path / "other"
    folder.mkdir()
    dump = [{"by": p.by, "value": p.value, "result": p.result} for p in two]
    (folder / "points.json").write_text(json.dumps(dump))
    others = read_points([folder])
    drawn = {chart.title: chart for chart in sweep_charts(one, others)}
    chart = drawn["Per device against per user (Pareto)"]
    assert [series.name for series in chart.series][::2] == ["this sweep", "other"]
    for series, given in zip(chart.series[::2], (one, two), strict=True):
        devices = given[0].result["options"]["devices"]
        assert list(series.ys) == [p.figure("output_throughput") / devices for p in given]
    assert "Cost against interactivity" in drawn
    assert "Energy against interactivity" not in drawn, "nothing could be read"
    told = {"reference": "r.json", "at_least": 0.99, "held": [], "why": ["x"], "passed": False}
    one[0].result["accuracy"] = told
    page = sweep_page(one, None, others)
    assert "FAILED" in page
    assert page.count("<table") == 2
    one[1].result["valid"] = False
    shown = sweep_charts(one)[0].series[0]
    assert len(shown.xs) == 1, "neither an invalid point is in a chart nor one below the gate"
    with pytest.raises(InvalidRequest, match="no finished sweep"):
        read_points([tmp_path])


def test_a_search_from_above_its_limit_is_refused() -> None:
    done = CliRunner().invoke(command, ["search", "ttft<1s", "--start", "10", "--limit", "5"])
    assert isinstance(done.exception, InvalidRequest)


def test_sessions_are_made_as_many_as_a_preset_needs() -> None:
    options = RunOptions(preset="1k1k", input="4", output="4", concurrency=9)
    assert len(make_sessions(options, Material())[0]) == 90
