"""Batches over HTTP: every kind of line, cancel, expiry, owners, restarts, courtesy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_kit import (
    CHAT,
    DONE,
    begin,
    client_of,
    close,
    jsonl,
    look,
    request_line,
    results,
    serving,
    until,
)
from server_fake import FakeEngine

from headrace.base.errors import EngineDead, Overloaded
from headrace.base.request import StepStats
from headrace.server.app import Application
from headrace.server.batches import job as job_module
from headrace.server.batches import runner as runner_module
from headrace.server.batches.lines import PRIORITY, read_lines
from headrace.server.batches.results import Results
from headrace.server.keys import Key, hash_of, write_keys


async def test_all_lines_are_done(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    lines = [request_line(f"line {i}") for i in range(30)]
    batch = await begin(client, jsonl(*lines), metadata={"who": "me"})
    end = await until(client, batch)
    assert end["status"] == "completed"
    assert end["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert end["error_file_id"] is None
    assert end["errors"] is None
    assert end["metadata"] == {"who": "me"}
    assert end["in_progress_at"] <= end["finalizing_at"] <= end["completed_at"]
    assert end["usage"]["output_tokens"] == 90
    found = await results(client, end["output_file_id"])
    assert set(found) == {f"line {i}" for i in range(30)}
    one = found["line 7"]
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    whole = (await client.post(CHAT, json=lines[7]["body"])).json()
    assert one["response"]["body"]["choices"] == whole["choices"]
    file = (await client.get(f"/v1/files/{end['output_file_id']}")).json()
    assert file["purpose"] == "batch_output"
    assert [one["id"] for one in (await client.get("/v1/batches")).json()["data"]] == [batch["id"]]
    text = (await client.get("/metrics")).text
    assert 'headrace_batches_total{status="completed"} 1.0' in text
    assert 'headrace_batch_requests_total{outcome="completed"} 30.0' in text
    assert not engine.running


WRONG: list[tuple[Any, str]] = [
    (b"{not json", "invalid_json_line"),
    (b'{"a": "\xff"}', "invalid_json_line"),
    (b"[" * 5000, "line_too_long"),
    (b"[" * 3000, "invalid_json_line"),
    (b"[1]", "invalid_json_line"),
    ({"custom_id": "a"}, "invalid_method"),
    ({"method": "POST"}, "invalid_custom_id"),
    (request_line("b") | {"custom_id": 5}, "invalid_custom_id"),
    (request_line("b") | {"custom_id": ""}, "invalid_custom_id"),
    (request_line("b") | {"custom_id": "x" * 513}, "invalid_custom_id"),
    (request_line("b") | {"method": "GET"}, "invalid_method"),
    (request_line("c", url="/v1/completions"), "mismatched_url"),
    (request_line("d", url="/operate/drain"), "mismatched_url"),
    (request_line("e") | {"body": []}, "invalid_body"),
    (request_line("f", stream=True), "invalid_body"),
    (request_line("g") | {"more": 1}, "unknown_parameter"),
    (request_line("good"), "duplicate_custom_id"),
]


async def test_a_wrong_line_is_an_error_of_its_own(client: httpx.AsyncClient) -> None:
    lines = [request_line("good"), b"", *(line for line, _ in WRONG), b"  "]
    bad = [request_line("hot", top_p=5.0), request_line("other", model="nobody")]
    batch = await begin(client, jsonl(*lines, *bad))
    end = await until(client, batch)
    assert end["status"] == "completed"
    count = len(WRONG) + len(bad)
    assert end["request_counts"] == {"total": count + 1, "completed": 1, "failed": count}
    text = (await client.get(f"/v1/files/{end['error_file_id']}/content")).text
    errors = {}
    for line in map(json.loads, text.splitlines()):
        number = int(line["id"].rpartition("_")[2])
        errors[number] = line
    for number, (_, code) in enumerate(WRONG, start=3):
        assert errors[number]["error"]["code"] == code, number
        assert errors[number]["error"]["line"] == number
        assert errors[number]["response"] is None
    hot = errors[4 + len(WRONG)]
    assert hot["custom_id"] == "hot"
    assert hot["response"]["status_code"] == 400
    assert hot["response"]["body"]["error"]["param"] == "top_p"
    assert errors[5 + len(WRONG)]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"{}\n" * 50_001, "too_many_requests")],
)
async def test_files_that_are_no_batch(
    client: httpx.AsyncClient, content: bytes, code: str
) -> None:
    end = await until(client, await begin(client, content))
    assert end["status"] == "failed"
    assert end["errors"]["data"][0]["code"] == code
    assert end["output_file_id"] is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-nobody"}, "input_file_id"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
        ({"other": 1}, "other"),
    ],
)
async def test_mistakes(client: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    files = {"file": ("in.jsonl", b"{}")}
    file = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"} | change
    reply = await client.post("/v1/batches", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_cancelled_half_way(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay = 0.02
    batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(400))))
    await until(client, batch, "in_progress", done=3)
    reply = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert reply["status"] == "cancelling"
    end = await until(client, batch)
    assert end["status"] == "cancelled"
    assert end["cancelling_at"] <= end["cancelled_at"]
    assert 3 <= end["request_counts"]["completed"] < 400
    found = await results(client, end["output_file_id"])
    assert len(found) == end["request_counts"]["completed"]
    assert not engine.running, "the work of a cancelled batch goes on"
    again = await client.post(f"/v1/batches/{batch['id']}/cancel")
    assert again.json()["status"] == "cancelled"
    other = await until(client, await begin(client, jsonl(request_line("x"))))
    late = await client.post(f"/v1/batches/{other['id']}/cancel")
    assert late.status_code == 400


async def test_what_is_not_done_in_time_expires(
    app: Application, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay = 0.05
    batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(200)), b"["))
    await until(client, batch, "in_progress", done=2)
    runner = app.state.batches
    clock = runner.clock
    runner.clock = lambda: clock() + 24 * 3600 + 1
    end = await until(client, batch)
    assert end["status"] == "expired"
    counts = end["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == 201
    errors = await results(client, end["error_file_id"])
    codes = {line["error"]["code"] for line in errors.values()}
    assert codes == {"batch_expired", "invalid_json_line"}
    assert not engine.running


async def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    engine = FakeEngine(delay=0.02)
    app = serving(tmp_path / "files", engine)
    async with client_of(app) as client:
        batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(120)), b"["))
        before = await until(client, batch, "in_progress", done=20)
    await close(app)
    assert not engine.running
    (output,) = [
        path for path in (tmp_path / "files").glob("file-*") if b'"response":{' in path.read_bytes()
    ]
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_x_99","custom')  # A crash cut this line.
    again = FakeEngine()
    app = serving(tmp_path / "files", again)
    app.state.batches.start()
    async with client_of(app) as client:
        end = await until(client, batch)
        assert end["status"] == "completed"
        assert end["request_counts"] == {"total": 121, "completed": 120, "failed": 1}
        assert end["usage"]["output_tokens"] == 360
        found = await results(client, end["output_file_id"])
        assert len(found) == 120
        assert len(again.seen) <= 120 - before["request_counts"]["completed"]
    await close(app)


async def test_a_cancelled_batch_stays_cancelled_over_a_restart(tmp_path: Path) -> None:
    app = serving(tmp_path / "files", FakeEngine(delay=0.05))
    async with client_of(app) as client:
        batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(100))))
        await until(client, batch, "in_progress", done=1)
        app.state.batches._jobs[batch["id"]].stop = lambda: None  # The server ends before.
        await client.post(f"/v1/batches/{batch['id']}/cancel")
    await close(app)
    app = serving(tmp_path / "files", FakeEngine())
    app.state.batches.start()
    async with client_of(app) as client:
        assert (await until(client, batch))["status"] == "cancelled"
    await close(app)


async def test_the_key_that_made_it_pays(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    limited = Key("a", hash_of("secret-a"), requests_per_minute=1, tokens_per_minute=1)
    write_keys(keys, [limited, Key("b", hash_of("secret-b"))])
    app = serving(tmp_path / "files", FakeEngine(), keys=str(keys))
    async with client_of(app, "secret-a") as a, client_of(app, "secret-b") as b:
        batch = await begin(a, jsonl(*(request_line(f"{i}") for i in range(10))))
        end = await until(a, batch)
        assert end["request_counts"]["completed"] == 10, "limits per minute are not a batch's"
        totals = app.state.accounts.named("a").totals
        assert totals.requests == 10
        assert totals.completion_tokens == 30
        assert app.state.accounts.named("b").totals.requests == 0
        for asked in (
            b.get(f"/v1/batches/{batch['id']}"),
            b.post(f"/v1/batches/{batch['id']}/cancel"),
        ):
            assert (await asked).status_code == 404
        assert (await b.get("/v1/batches")).json()["data"] == []
        theirs = {
            "input_file_id": batch["input_file_id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        assert (await b.post("/v1/batches", json=theirs)).status_code == 400
    await close(app)


async def test_a_batch_leaves_room_and_goes_last(
    app: Application, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.rows = 8
    courtesy, service = app.state.batches.courtesy, app.state.service
    assert courtesy.room() == 6
    service.in_work = 3
    assert courtesy.room() == 3
    service.in_work = 100
    assert courtesy.room() == 1
    service.in_work = 0
    engine.stats = StepStats(waiting=1)
    assert courtesy.room() == 1
    service.draining = True
    assert courtesy.room() == 0
    service.draining = False
    engine.stats = StepStats()
    engine.delay = 0.02
    seen: list[int] = []
    submit = engine.submit

    def watched(prompt: Any, sampling: Any, **more: Any) -> Any:
        seen.append(more["priority"])
        return submit(prompt, sampling, **more)

    engine.submit = watched  # type: ignore[method-assign]
    batch = await begin(client, jsonl(*(request_line(f"{i}", priority=i) for i in range(60))))
    most = 0
    while (await look(client, batch))["status"] not in DONE:
        most = max(most, len(engine.running))
        # The server's limit of two requests at a time is people's alone.
        assert (await client.post(CHAT, json=request_line("x")["body"])).status_code == 200
    assert most <= 7
    assert sorted(set(seen)) == [0, PRIORITY]


async def test_a_full_engine_is_waited_for(
    app: Application, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refusal = Overloaded("full", retry_after=0.1)
    batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(3))))
    await until(client, batch, "in_progress")
    await asyncio.sleep(0.3)
    engine.refusal = None
    end = await until(client, batch)
    assert end["request_counts"]["completed"] == 3


async def test_a_request_that_kills_the_engine_is_given_up(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fault = EngineDead("the engine died", retry_after=0.1)
    end = await until(client, await begin(client, jsonl(request_line("poison"))))
    assert end["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    errors = await results(client, end["error_file_id"])
    assert errors["poison"]["response"]["body"]["error"]["code"] == "engine_dead"
    assert len(engine.seen) == job_module.MOST_DEATHS


async def test_a_request_that_kills_the_engine_takes_no_other_with_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay = 0.01
    submit, deaths = engine.submit, 0

    def watched(prompt: Any, sampling: Any, **more: Any) -> Any:
        nonlocal deaths
        stream = submit(prompt, sampling, **more)
        if b"poison" in bytes(prompt):
            deaths += 1
            for name in list(engine.running):
                engine._cancel(name)
                engine.streams[name].fail(EngineDead("the engine died", retry_after=0.1))
        return stream

    engine.submit = watched  # type: ignore[method-assign]
    lines = [request_line("poison" if i == 20 else f"{i}") for i in range(60)]
    end = await until(client, await begin(client, jsonl(*lines)))
    assert end["request_counts"] == {"total": 60, "completed": 59, "failed": 1}
    assert deaths == job_module.MOST_DEATHS
    assert set(await results(client, end["error_file_id"])) == {"poison"}


async def test_a_full_disk_makes_a_batch_wait(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "AGAIN_SECONDS", 0.05)
    append, refused = Results.append, 0

    def full(self: Results, number: int, line: dict[str, Any]) -> None:
        nonlocal refused
        if number == 5 and refused < 3:
            refused += 1
            raise OSError(28, "No space left on device")
        append(self, number, line)

    monkeypatch.setattr(Results, "append", full)
    batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(40))))
    end = await until(client, batch)
    assert end["status"] == "completed"
    assert end["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert len(await results(client, end["output_file_id"])) == 40
    text = (await client.get("/metrics")).text
    assert 'headrace_server_failures_total{kind="batch_write"} 3.0' in text


def test_a_cut_write_leaves_whole_lines(tmp_path: Path) -> None:
    """The system writes half of a line and then says that the disk is full."""
    import resource

    found = Results(tmp_path / "r")
    found.append(1, {"id": "batch_req_a_1", "response": None})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (found.size + 20, hard))
        with pytest.raises(OSError, match="large"):
            found.append(2, {"id": "batch_req_a_2", "response": None, "more": "x" * 100})
        with pytest.raises(OSError, match="large"):
            found.check_room()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    found.check_room()
    found.append(3, {"id": "batch_req_a_3", "response": None})
    found.close()
    again = Results(tmp_path / "r")
    assert again.done == {1, 3}
    again.close()


async def test_a_deleted_input_ends_the_batch(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    batch = await begin(client, jsonl(request_line("a")))
    await until(client, batch)
    file = batch["input_file_id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "1h"}
    second = (await client.post("/v1/batches", json=body)).json()
    await client.delete(f"/v1/files/{file}")
    end = await until(client, second)
    assert end["status"] in ("failed", "completed")
    if end["status"] == "failed":
        assert end["errors"]["data"][0]["code"] == "input_file_gone"


def test_long_lines_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 10_000_000 + b"\n" + jsonl(request_line("a")))
    first, second = read_lines(path, CHAT, 4096)
    assert first.problem is not None
    assert first.problem[0] == "line_too_long"
    assert second.custom_id == "a"
    assert second.number == 2
