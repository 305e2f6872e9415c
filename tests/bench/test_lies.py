"""Servers that fail, lie or speak oddly, and comparisons that would mislead: each is told."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest
from headrace.bench.accuracy import Perplexity
from headrace.bench.audit import examine
from headrace.bench.compare import check_alike, compare_failures
from headrace.bench.gate import hold, not_held
from headrace.bench.material import Material
from headrace.bench.metrics import tpot
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.record import ClientAudit, RequestRecord
from headrace.bench.reference import Answer, Reference, agreement
from headrace.bench.run import Outcome, run_bench
from headrace.bench.sse import Lines, decode
from headrace.bench.tasks import TaskScore
from headrace.bench.traces import load_trace
from headrace.cli.bench import command


def record(number: int, **changes: Any) -> RequestRecord:
    """A sound answer of 8 tokens in 8 pieces, 10 ms apart."""
    start = number * 1_000_000
    made = RequestRecord(
        number,
        number,
        0,
        0,
        start,
        sent_ns=start,
        status=200,
        asked_tokens=8,
        output_tokens=8,
        prompt_tokens=16,
        known_prompt_tokens=16,
        text_bytes=32,
        chunk_ns=[start + 50_000_000 + piece * 10_000_000 for piece in range(8)],
        end_ns=start + 130_000_000,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def found(records: list[RequestRecord], **changes: Any) -> dict[str, str]:
    """Code → severity."""
    asked = {"open_loop": False, "ignore_eos": False, "stream": True, **changes}
    return {f.code: f.severity for f in examine(records, [ClientAudit(0)], **asked)}


def test_a_sound_run_is_valid() -> None:
    assert found([record(n) for n in range(100)]) == {}


@pytest.mark.parametrize(("failed", "severity"), [(5, None), (6, "invalid"), (99, "invalid")])
def test_failures_above_a_share_make_a_run_invalid(failed: int, severity: str | None) -> None:
    records = [record(n) for n in range(100)]
    for one in records[:failed]:
        one.error, one.error_kind = "HTTP 500", "server"
    assert found(records).get("failures") == severity


@pytest.mark.parametrize(
    ("changes", "asked", "code", "severity"),
    [
        ({"output_tokens": 9}, {}, "claims_more", "invalid"),
        ({"output_tokens": 4}, {}, "claims_less", "invalid"),
        ({"text_bytes": 4, "output_tokens": 8}, {}, "claims_impossible", "invalid"),
        ({"text_bytes": 4}, {"ignore_eos": True}, "claims_many", "warning"),
        ({"output_tokens": None}, {}, "no_usage", "warning"),
        ({"output_tokens": None, "chunk_ns": []}, {"stream": False}, "no_usage", "invalid"),
        ({"prompt_tokens": 200}, {}, "prompt_longer", "warning"),
    ],
)
def test_what_a_server_says_of_tokens_is_held_against_what_it_sends(
    changes: dict[str, Any], asked: dict[str, Any], code: str, severity: str
) -> None:
    assert found([record(n, **changes) for n in range(100)], **asked)[code] == severity


def test_the_arguments_of_a_tool_call_are_an_answer() -> None:
    called = [record(n, text_bytes=0, call_bytes=40) for n in range(100)]
    assert "claims_impossible" not in found(called)
    event = decode(
        b'{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":1}"}}]}}]}'
    )
    assert event.called() == len('f{"a":1}')


def test_few_answers_have_no_99th_percentile() -> None:
    assert found([record(n) for n in range(99)]) == {"few_requests": "warning"}


@pytest.mark.parametrize("tokens", [1, 4])
def test_time_per_token_does_not_depend_on_tokens_per_piece(tokens: int) -> None:
    pieces = [50_000_000 + place * tokens * 20_000_000 for place in range(8)]
    one = record(0, chunk_ns=pieces, output_tokens=8 * tokens)
    assert tpot.values(one) == [pytest.approx(0.02)]


EVENTS = [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("last", [b"", b"end"])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_every_valid_form_of_events_is_read(end: bytes, last: bytes, step: int) -> None:
    lines = [b": a comment", b"event: x", b'data: {"a": 1}', b"", b'data:{"b":', b"data: 2}", b""]
    body = end.join([*lines, b"data: [DONE]", *([b""] if last else []), b""])
    reader = Lines()
    events = [
        event for at in range(0, len(body), step) for event in reader.feed(body[at : at + step])
    ]
    assert [*events, *reader.end()] == EVENTS


def quick(server: MockServer, **changes: Any) -> Outcome:
    values: dict[str, Any] = {"input": "8", "output": "4", "warmup": 0, "concurrency": 4}
    return run_bench(RunOptions(url=server.url, **{**values, **changes}))


def test_a_server_that_dies_ends_the_run_at_once_and_makes_it_invalid() -> None:
    with MockServer(Behaviour(ttft=0.01, itl=0.001)) as server:

        def die() -> None:
            while server.seen.requests < 100:
                time.sleep(0.02)
            server.__exit__()

        threading.Thread(target=die).start()
        begin = time.monotonic()
        outcome = quick(server, requests=20_000)
    assert time.monotonic() - begin < 500
    assert not outcome.result["valid"]
    codes = {finding["code"] for finding in outcome.result["findings"]}
    assert "server_gone" in codes
    assert outcome.result["requests"] < 20_000


@pytest.mark.parametrize("arrivals", [None, "constant:100"])
def test_a_duration_lasts(arrivals: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.options.REQUESTS", 8)  # With so many it begins.
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as server:
        outcome = quick(server, duration=2.0, arrivals=arrivals, processes=2)
        sent = [one["prompt"] for one in server.seen.bodies]
    assert outcome.result["seconds"] > 1.8
    assert outcome.result["requests"] > 8
    assert len(set(map(str, sent))) == len(sent) == outcome.result["requests"]


def test_sessions_go_on_as_they_began() -> None:
    from headrace.bench.run import make_sessions

    options = RunOptions(workload="shared-prefix", prefix_tokens=20, groups=3)
    few, many = (
        make_sessions(replace(options, requests=count), Material(None))[0] for count in (10, 40)
    )
    assert many[:10] == few


def result(**changes: Any) -> dict[str, Any]:
    options = {"workload": "fixed", "input": "20", "output": "10", **changes}
    return {"valid": True, "options": options, "findings": []}


def test_unlike_and_invalid_runs_are_not_compared() -> None:
    check_alike([result(), result(url="elsewhere", seed=5)])
    with pytest.raises(InvalidRequest, match="input"):
        check_alike([result(), result(input="40")])
    bad = {**result(), "valid": False, "findings": [{"severity": "invalid", "text": "late"}]}
    with pytest.raises(InvalidRequest, match="late"):
        check_alike([result(), bad])


def test_failures_are_compared() -> None:
    assert compare_failures([((0, 200), (0, 200))]) is None
    worse = compare_failures([((1, 100), (17, 100)), ((0, 100), (16, 100))])
    assert worse is not None
    assert worse.verdict == "worse"
    chance = compare_failures([((1, 100), (2, 100))])
    assert chance is not None
    assert chance.verdict == "unclear"


def test_a_gate_compares_or_fails() -> None:
    kept = Reference(
        "m", [], [], Perplexity(3.0, 100, 32, "text"), {"arithmetic/50": 0.9, "copying/50": 1.0}
    )
    score = TaskScore("extraction", 50, 40, 0)
    held = hold(kept, agreed=None, perplexity=None, scores=[score])
    why = not_held(kept, held, {"tasks"}, perplexity=None, scores=[score])
    assert any("arithmetic/50, copying/50" in line for line in why)
    assert any("extraction/50" in line for line in why)
    (why,) = not_held(kept, [], {"perplexity"}, perplexity=None, scores=[])
    assert why.startswith("perplexity: the reference's is over 32 windows")
    (why,) = not_held(Reference("m", [], []), [], {"tasks"}, perplexity=None, scores=[])
    assert "holds nothing of tasks" in why


def test_answers_of_unlike_length_are_compared_as_far_as_both_go() -> None:
    long, short = Answer(list("abcdefgh"), []), Answer(list("abcd"), [])
    assert agreement([short], [long], limit=4, reference_limit=8).equal == 1
    assert agreement([long], [short], limit=8, reference_limit=4).equal == 1
    assert agreement([short], [long], limit=8, reference_limit=8).equal == 0


def test_conversations_that_do_not_begin_with_a_question_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(
        '[{"conversations": [{"from": "system", "value": "be kind"}, '
        '{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}]}, '
        '{"conversations": [{"from": "gpt", "value": "hello"},'
        ' {"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"},'
        ' {"from": "human", "value": "q2"}, {"from": "gpt", "value": "a2"}]}]'
    )
    sessions = load_trace("sharegpt", file, Material(None))
    asked = [[turn.text for turn in session.turns] for session in sessions]
    assert asked == [["q"], ["q1", "q2"]]


@pytest.mark.parametrize("form", ["html", "csv", "vllm", "png"])
def test_a_report_makes_its_folder(tmp_path: Path, form: str) -> None:
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as server:
        run_bench(
            RunOptions(url=server.url, requests=8, input="8", output="4", warmup=0), tmp_path / "r"
        )
    place = tmp_path / "new" / "deeper"
    done = CliRunner().invoke(
        command, ["report", str(tmp_path / "r"), "--format", form, "-o", str(place)]
    )
    assert done.exit_code == 0, done.output
    assert list(itertools.islice(place.iterdir(), 1))


LIES: list[tuple[str, dict[str, Any], dict[str, Any], set[str], bool]] = [
    # what, server, options, findings that must be there, believed?
    ("sound", {}, {}, set(), True),
    ("twice the tokens claimed", {"claim": 2.0}, {}, {"claims_more"}, False),
    ("half the tokens claimed", {"claim": 0.5}, {}, {"claims_less"}, False),
    ("events twice", {"repeat": 2}, {}, {"claims_less"}, False),
    ("dead from the start", {"error_rate": 1.0}, {}, {"no_success", "failed_server"}, False),
    ("a third fails", {"error_rate": 0.33}, {}, {"failures", "failed_server"}, False),
    ("cut in the middle", {"drop_rate": 1.0}, {}, {"no_success", "failed_connection"}, False),
    (
        "stands still",
        {"stall_after": 2, "stall_seconds": 3.0},
        {"stall": 0.5},
        {"no_success", "failed_stalled"},
        False,
    ),
    ("pieces of four tokens", {"chunk": 4}, {}, set(), True),
    ("CR line ends", {"line_end": "\r"}, {}, set(), True),
    ("CRLF line ends", {"line_end": "\r\n"}, {}, set(), True),
    ("no [DONE]", {"done": False}, {}, set(), True),
    ("tool calls", {"calls": True}, {"endpoint": "chat", "ignore_eos": False}, set(), True),
    ("no usage", {"no_usage": True}, {}, {"no_usage"}, True),
]
ACCUSATIONS = {
    "claims_more",
    "claims_less",
    "claims_impossible",
    "failures",
    "no_success",
    "no_usage",
    "failed_protocol",
    "failed_server",
    "failed_connection",
    "failed_stalled",
    "server_gone",
}
"""Findings that do not depend on how quick this machine is."""


@pytest.mark.parametrize(("what", "server", "options", "told", "believed"), LIES)
def test_the_table_of_lies(
    what: str, server: dict[str, Any], options: dict[str, Any], told: set[str], *, believed: bool
) -> None:
    """Over HTTP, against a server with that fault: what is found, and nothing else is accused."""
    with MockServer(Behaviour(ttft=0.005, itl=0.001, **server)) as mock:
        values: dict[str, Any] = {"requests": 12, "input": "8", "output": "8", **options}
        result = quick(mock, concurrency=4, **values).result
    found = {finding["code"] for finding in result["findings"]}
    assert found & ACCUSATIONS == told, what
    invalid = {f["code"] for f in result["findings"] if f["severity"] == "invalid"}
    assert bool(invalid & ACCUSATIONS) is not believed, what
