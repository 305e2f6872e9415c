"""Batches when something comes in between: errors, cancellations, restarts, bounds."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from batch_kit import (
    CHAT,
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

from headrace.base.config import ServerOptions
from headrace.base.request import StepStats
from headrace.server.app import Application
from headrace.server.batches import job as job_module
from headrace.server.batches import runner as runner_module
from headrace.server.batches.courtesy import Courtesy
from headrace.server.batches.lines import read_lines, sequences_of
from headrace.server.batches.record import Batch
from headrace.server.batches.results import Results, opened
from headrace.server.batches.runner import BatchRunner
from headrace.server.keys import Key, hash_of, write_keys
from headrace.server.run import ServerProcess, take_port


def failures(app: Application, kind: str) -> float:
    value: float | None = app.state.meter.registry.get_sample_value(
        "headrace_server_failures_total", {"kind": kind}
    )
    return value or 0.0


async def test_an_error_does_not_end_all_batches(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "AGAIN_SECONDS", 0.01)
    purge, broken = app.state.files.purge, True

    async def failing() -> None:
        nonlocal broken
        if broken:
            broken = False
            raise OSError(5, "Input/output error")
        await purge()

    runner = app.state.batches
    monkeypatch.setattr(app.state.files, "purge", failing)
    runner.start()
    while broken:
        await asyncio.sleep(0.01)
    end = await until(client, await begin(client, jsonl(request_line("a"))))
    assert end["status"] == "completed"
    assert failures(app, "bug") == 1
    assert not runner._main.done()


async def test_a_row_that_cannot_be_read_holds_up_no_other(
    app: Application, client: httpx.AsyncClient
) -> None:
    def damage(base: Any) -> None:
        base.execute("insert into batches values ('batch_x', '', 'in_progress', 1, 'no batch')")

    await app.state.files.base.run(damage, "file_write")
    batch = await begin(client, jsonl(request_line("a")))
    assert (await until(client, batch))["status"] == "completed"
    listed = (await client.get("/v1/batches")).json()["data"]
    assert [one["id"] for one in listed] == [batch["id"]]
    for reply in (
        await client.get("/v1/batches/batch_x"),
        await client.post("/v1/batches/batch_x/cancel"),
    ):
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "batch_unreadable"
        assert reply.json()["error"]["param"] == "batch_id"
    assert (await client.get("/v1/batches/batch_y")).status_code == 404
    assert (await look(client, batch))["status"] == "completed"
    assert failures(app, "file_read") == 1, "counted once, not with every look"


async def test_a_content_that_cannot_be_removed_ends_nothing(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    files = app.state.files
    ids = []
    for _ in range(2):
        form = {
            "purpose": "batch",
            "expires_after[anchor]": "created_at",
            "expires_after[seconds]": "3600",
        }
        reply = await client.post("/v1/files", files={"file": ("a", b"{}")}, data=form)
        ids.append(reply.json()["id"])
    monkeypatch.setattr(Path, "unlink", refused)
    assert (await client.delete(f"/v1/files/{ids[0]}")).status_code == 200
    clock = files._clock
    files._clock = lambda: clock() + 4000
    await files.purge()
    monkeypatch.undo()
    assert (await client.get("/v1/files")).json()["data"] == []
    assert failures(app, "file_write") == 2


async def test_a_batch_that_is_taken_up_while_it_is_cancelled(
    app: Application, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay = 0.01
    runner = app.state.batches
    start, runner.start = runner.start, lambda: None
    batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(300))))
    runner.start = start
    save = runner.book.save

    async def late(record: Batch) -> None:
        """The look of the runner comes between the order and its row."""
        if record.id not in runner._tasks:
            await runner._begin()
        await save(record)

    runner.book.save = late
    reply = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert reply["status"] == "cancelling"
    end = await until(client, batch)
    assert end["status"] == "cancelled"
    assert not engine.running


async def test_a_batch_that_is_validated_while_it_is_cancelled(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, wait = threading.Event(), job_module._count
    saved: list[str] = []
    runner = app.state.batches
    save = runner.book.save

    def slow(lines: Any) -> int:
        assert counted.wait(60)
        return wait(lines)

    async def late(record: Batch) -> None:
        saved.append(record.status)
        await save(record)
        if record.status == "cancelling" and not counted.is_set():
            counted.set()  # The validation ends while the order is being written.
            await asyncio.sleep(0.3)

    monkeypatch.setattr(job_module, "_count", slow)
    batch = await begin(client, jsonl(*(request_line(f"{i}", max_tokens=400) for i in range(9))))
    while batch["id"] not in runner._jobs:
        await asyncio.sleep(0.01)
    runner.courtesy.room = lambda: 0  # Not one line is begun.
    runner.book.save = late
    reply = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert reply["status"] == "cancelling"
    assert (await until(client, batch))["status"] == "cancelled"
    last = len(saved) - saved[::-1].index("cancelling")
    assert "in_progress" not in saved[last:], f"a restart would do it after all: {saved}"


async def test_a_batch_that_comes_during_the_look_is_not_forgotten(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LOOK_SECONDS", 600.0)
    runner = app.state.batches
    unfinished, looking, go = runner.book.unfinished, asyncio.Event(), asyncio.Event()

    async def slow() -> list[Batch]:
        found: list[Batch] = await unfinished()
        if not looking.is_set():
            looking.set()
            await go.wait()
        return found

    runner.book.unfinished = slow
    runner.start()
    await looking.wait()
    batch = await begin(client, jsonl(request_line("a")))
    go.set()
    assert (await until(client, batch))["status"] == "completed"


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ({"messages": [{}, {}]}, 1),
        ({"messages": [], "n": 5}, 5),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2, 3]]}, 2),
        ({"input": "a"}, 1),
        ({"input": ["a"] * 7}, 7),
        ({"input": [5] * 7}, 1),
        ({"input": ["a"] * 2000}, 128),
        ({"query": "a", "documents": ["b", {"text": "c"}]}, 3),
        ({"text_1": "a", "text_2": ["b", "c"]}, 3),
        ({}, 1),
        ({"n": 0, "prompt": []}, 1),
        ({"n": "x", "prompt": None, "input": {}}, 1),
        ({"n": True, "prompt": ["a"]}, 1),
    ],
    ids=str,
)
def test_rows_of_a_request(body: dict[str, Any], rows: int) -> None:
    assert sequences_of(body) == rows
    assert sequences_of(body, "/v1/responses") == 1, "a conversation, however many items it has"


@pytest.mark.parametrize(("n", "most"), [(2, 6), (4, 4), (20, 20)])
async def test_the_room_is_counted_in_rows(
    client: httpx.AsyncClient, engine: FakeEngine, gate: Path, n: int, most: int
) -> None:
    engine.rows = 8  # A batch may have six.
    submit, rows, seen = engine.submit, {}, 0

    def watched(prompt: Any, sampling: Any, *, request_id: str = "", **more: Any) -> Any:
        nonlocal seen
        rows[request_id] = sampling.n
        stream = submit(prompt, sampling, request_id=request_id, **more)
        seen = max(seen, sum(rows[name] for name in engine.running))
        return stream

    engine.submit = watched  # type: ignore[method-assign]
    lines = [request_line(f"{i}", n=n) for i in range(12)]
    batch = await begin(client, jsonl(*lines))
    async with asyncio.timeout(120):
        while seen < most:
            await asyncio.sleep(0.01)
    gate.touch()
    end = await until(client, batch)
    assert end["request_counts"]["completed"] == 12
    assert seen == most


async def test_a_large_request_is_not_overtaken_for_ever() -> None:
    engine = SimpleNamespace(
        rows=8,
        stats=StepStats(),
        health=lambda: SimpleNamespace(ready=True),
    )
    service: Any = SimpleNamespace(engine=engine, draining=False, in_work=0)
    courtesy = Courtesy(service)
    assert await courtesy.enter("small", 3)
    assert await courtesy.enter("small", 3)
    large = asyncio.create_task(courtesy.enter("large", 5))
    await asyncio.sleep(0.01)
    courtesy.leave(3)
    await asyncio.sleep(0)
    assert not await courtesy.enter("small", 1), "a small one goes before it"
    assert not await large
    courtesy.leave(3)
    assert await courtesy.enter("large", 5)
    assert await courtesy.enter("small", 1)
    assert not await courtesy.enter("large", 5)
    courtesy.give_up("large")  # It was cancelled.
    courtesy.leave(5)
    assert await courtesy.enter("small", 4)
    assert courtesy.in_work == 5


async def test_no_batch_is_begun_over_the_quota(tmp_path: Path) -> None:
    app = serving(tmp_path / "files", FakeEngine(), file_quota=3000)
    async with client_of(app) as client:
        batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(6))))
        end = await until(client, batch)
        assert end["status"] == "completed"  # One that was begun may go over the quota.
        assert (await client.get("/v1/files")).json()["data"][0]["bytes"] > 1500
        body = {
            "input_file_id": batch["input_file_id"],
            "endpoint": CHAT,
            "completion_window": "1h",
        }
        reply = await client.post("/v1/batches", json=body)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "quota_exceeded"
        assert reply.json()["error"]["param"] == "input_file_id"
        assert len((await client.get("/v1/batches")).json()["data"]) == 1
        await client.delete(f"/v1/files/{end['output_file_id']}")
        assert (await client.post("/v1/batches", json=body)).status_code == 200
    await close(app)


async def test_what_a_batch_writes_counts_before_it_is_a_file(tmp_path: Path) -> None:
    """An upload is refused meanwhile; over twice the quota the batch ends with what is done."""
    quota, engine, gate = 6000, FakeEngine(delay=0.005), tmp_path / "gate"
    engine.gate, engine.held_after = gate, 0
    gate.touch()
    engine.rows = 8  # A batch may have six.
    app = serving(tmp_path / "files", engine, file_quota=quota)
    async with client_of(app) as client:
        batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(40))))
        uploaded = (await client.get(f"/v1/files/{batch['input_file_id']}")).json()["bytes"]
        async with asyncio.timeout(120):
            while app.state.files.growing[""] + uploaded <= quota:
                await asyncio.sleep(0.005)
        gate.unlink()  # It writes no more until the upload has its answer.
        files = {"file": ("in.jsonl", b"{}")}
        over = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert over.status_code == 413
        assert over.json()["error"]["code"] == "quota_exceeded"
        gate.touch()
        assert (await client.get("/v1/files")).json()["data"][0]["purpose"] == "batch"
        end = await until(client, batch)
        assert end["status"] == "failed"
        assert [one["code"] for one in end["errors"]["data"]] == ["quota_exceeded"]
        found = await results(client, end["output_file_id"])
        assert 0 < len(found) == end["request_counts"]["completed"] < 40
        kept = sum(one["bytes"] for one in (await client.get("/v1/files")).json()["data"])
        longest = max(len(json.dumps(line)) for line in found.values())
        assert 2 * quota <= kept < 2 * quota + 8 * longest, "no more than what was in the engine"
        assert not app.state.files.growing
        assert not engine.running
    await close(app)


@pytest.mark.parametrize("how", ["cancelled", "expired", "shutdown"])
async def test_tokens_of_what_is_ended_are_charged(tmp_path: Path, how: str) -> None:
    keys = tmp_path / "keys.toml"
    write_keys(keys, [Key("a", hash_of("secret-a"))])
    engine = FakeEngine(gate=tmp_path / "gate")  # Never there: no answer is done.
    app = serving(tmp_path / "files", engine, keys=str(keys))
    totals = app.state.accounts.named("a").totals
    async with client_of(app, "secret-a") as client:
        lines = [request_line(f"{i}", max_tokens=490) for i in range(3)]
        batch = await begin(client, jsonl(*lines))
        await until(client, batch, "in_progress")
        while len(engine.held) < 3:
            await asyncio.sleep(0.01)
        runner = app.state.batches
        if how == "shutdown":
            # It will be done again, and is charged then (ADR 0049).
            await runner.close()
            assert totals.completion_tokens == totals.requests == 0
        else:
            if how == "cancelled":
                await client.post(f"/v1/batches/{batch['id']}/cancel")
            else:
                clock = runner.clock
                runner.clock = lambda: clock() + 24 * 3600 + 1
            end = await until(client, batch)
            assert end["status"] == how
            assert end["request_counts"]["completed"] == 0
            assert totals.requests == 3
            assert totals.completion_tokens >= 3
            assert totals.prompt_tokens == 3 * len("<user>0")
            usage = end["usage"]
            assert usage["output_tokens"] == totals.completion_tokens
            assert usage["input_tokens"] == totals.prompt_tokens
    await close(app)


async def test_a_batch_of_a_removed_key_ends(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    both = [Key("a", hash_of("secret-a")), Key("b", hash_of("secret-b"))]
    write_keys(keys, both)
    app = serving(tmp_path / "files", FakeEngine(delay=0.01), keys=str(keys))
    accounts, runner = app.state.accounts, app.state.batches
    async with client_of(app, "secret-a") as client:
        batch = await begin(client, jsonl(*(request_line(f"{i}") for i in range(50_000))))
        await until(client, batch, "in_progress", done=1)
    # Nobody asks anything over HTTP: only the batch itself can find out.
    write_keys(keys, both[1:])
    accounts._looked -= 60.0
    for _ in range(6000):
        if batch["id"] not in runner._tasks:
            break
        await asyncio.sleep(0.02)
    found = await runner.book.get(batch["id"], "a")
    assert found.status == "failed"
    assert found.errors[0]["code"] == "key_removed"
    await close(app)


async def test_files_of_results_are_read_beside_the_loop(
    app: Application,
    client: httpx.AsyncClient,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recover, seen = Results._recover, set()

    def watched_recover(self: Results) -> int:
        seen.add(threading.get_ident())
        return recover(self)

    def watched_lines(*arguments: Any) -> Any:
        for line in read_lines(*arguments):
            seen.add(threading.get_ident())
            yield line

    monkeypatch.setattr(Results, "_recover", watched_recover)
    monkeypatch.setattr(job_module, "read_lines", watched_lines)
    monkeypatch.setattr(job_module, "EXPIRED_AT_A_TIME", 3)
    engine.delay = 0.05
    lines = [request_line(f"{i}", max_tokens=400) for i in range(10)]
    batch = await begin(client, jsonl(*lines, b"["))
    await until(client, batch, "in_progress")
    runner = app.state.batches
    clock = runner.clock
    runner.clock = lambda: clock() + 24 * 3600 + 1
    end = await until(client, batch)
    assert end["status"] == "expired"
    assert end["request_counts"] == {"total": 11, "completed": 0, "failed": 11}
    assert len(await results(client, end["error_file_id"])) == 11
    assert seen
    assert threading.get_ident() not in seen


async def test_files_of_results_are_all_open_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover, made = Results._recover, []

    def failing(self: Results) -> int:
        made.append(self)
        if self.path.name == "bad":
            raise OSError(5, "Input/output error")
        return recover(self)

    monkeypatch.setattr(Results, "_recover", failing)
    with pytest.raises(OSError, match="Input"):
        await opened(tmp_path / "good", tmp_path / "bad")
    assert [one._file.closed for one in made] == [True, True]
    made.clear()
    task = asyncio.create_task(opened(tmp_path / "good", tmp_path / "other"))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert all(one._file.closed for one in made)


async def test_after_the_end_nothing_begins(
    app: Application, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await app.state.batches.close()
    batch = await begin(client, jsonl(request_line("a")))  # While the server drains.
    await asyncio.sleep(0.1)
    assert (await look(client, batch))["status"] == "validating"
    assert not engine.seen


async def test_batches_are_closed_before_the_ledger_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    end = BatchRunner.close

    async def closing(self: BatchRunner) -> None:
        order.append("batches")
        await end(self)

    async def saving(self: ServerProcess, app: Application) -> None:
        order.append("ledger")

    async def broken(self: ServerProcess, http: Any) -> None:
        raise RuntimeError("the server broke")

    monkeypatch.setattr(BatchRunner, "close", closing)
    monkeypatch.setattr(ServerProcess, "_save_ledger", saving)
    monkeypatch.setattr(ServerProcess, "_until_stopped", broken)

    async def start() -> Any:
        return FakeEngine()

    options = ServerOptions(port=0, files=str(tmp_path / "files"))
    process = ServerProcess(start, options, lambda line: None)
    with take_port("127.0.0.1", 0) as listener, pytest.raises(RuntimeError, match="broke"):
        await process._serve([listener])
    assert order[-2:] == ["batches", "ledger"]
