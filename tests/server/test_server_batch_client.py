"""Files and batches with OpenAI's client, over a real connection, over kill -9 of the server."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import Running, api_pid, fake_server, kill, running, serving

from tiny import talker
from tiny.kept import Kept

pytestmark = pytest.mark.slow


def lines(count: int, **body: Any) -> bytes:
    given = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | body
    return b"".join(
        json.dumps(
            {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": given}
        ).encode()
        + b"\n"
        for i in range(count)
    )


def client_of(server: Running) -> openai.OpenAI:
    return server.openai()


def begin(client: openai.OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"a": "b"},
    )


def end_of(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = client.batches.retrieve(batch.id)
        if found.status in ("completed", "failed", "expired", "cancelled"):
            return found
        time.sleep(0.1)
    raise AssertionError(f"the batch did not end: {found}")


def test_a_batch_from_file_to_file(tmp_path: Path, kept: Kept) -> None:
    model = kept(talker.make)
    with serving(
        model, "--max-sequences 8 --kv-memory 8MiB", "--files", str(tmp_path / "files")
    ) as server:
        client = client_of(server)
        wrong = b'{"custom_id": "w", "method": "POST", "url": "/v1/embeddings", "body": {}}\n'
        batch = begin(client, lines(20, temperature=0) + wrong)
        assert isinstance(batch, openai.types.Batch)
        end = end_of(client, batch)
        assert end.status == "completed"
        assert end.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
        assert end.metadata == {"a": "b"}
        assert end.usage.output_tokens > 20
        whole = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4, temperature=0
        )
        output = client.files.content(end.output_file_id).text.splitlines()
        assert {json.loads(line)["custom_id"] for line in output} == {f"r{i}" for i in range(20)}
        for line in map(json.loads, output):
            choice = line["response"]["body"]["choices"][0]
            assert choice["message"]["content"] == whole.choices[0].message.content
        (error,) = client.files.content(end.error_file_id).text.splitlines()
        assert json.loads(error)["error"]["code"] == "mismatched_url"
        assert [one.id for one in client.batches.list()] == [batch.id]
        assert len(list(client.files.list(purpose="batch_output", limit=1))) == 2
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_none")
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(batch.id)
        assert client.files.delete(end.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(end.output_file_id)


def test_a_batch_lives_through_kill_9(tmp_path: Path) -> None:
    command = fake_server(delay=0.02, options=f"port=0, files={str(tmp_path / 'files')!r}")
    with running(command) as server:
        client = client_of(server)
        batch = begin(client, lines(1500))
        counts = batch.request_counts
        while counts.completed < 40:
            time.sleep(0.05)
            counts = client.batches.retrieve(batch.id).request_counts
        server.signal(signal.SIGKILL)
        server.wait()
    with running(fake_server(options=f"port=0, files={str(tmp_path / 'files')!r}")) as server:
        client = client_of(server)
        end = end_of(client, batch)
        assert end.status == "completed"
        assert end.request_counts.completed == 1500
        output = client.files.content(end.output_file_id).text.splitlines()
        ids = [json.loads(line)["custom_id"] for line in output]
        assert len(ids) == len(set(ids)) == 1500
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_batch_goes_on_in_the_next_api_process(tmp_path: Path, kept: Kept) -> None:
    model = kept(talker.make)
    with serving(model, "--kernels ref", "--files", str(tmp_path / "files")) as server:
        batch = begin(client_of(server), lines(400, max_tokens=40))
        done = 0
        for _ in range(2):
            while (now := client_of(server).batches.retrieve(batch.id)).request_counts is None or (
                now.request_counts.completed < done + 20
            ):
                time.sleep(0.05)
            done = now.request_counts.completed
            assert done < 400, "too quick to be killed in its middle"
            kill(api_pid(server))
        client = client_of(server)
        end = end_of(client, batch)
        assert end.status == "completed"
        assert end.request_counts.model_dump() == {"total": 400, "completed": 400, "failed": 0}
        output = client.files.content(end.output_file_id).text.splitlines()
        ids = [json.loads(line)["custom_id"] for line in output]
        assert len(ids) == len(set(ids)) == 400
        metrics = httpx.get(server.url + "/metrics").text
        assert "headrace_api_restarts_total 2.0" in metrics


def test_sigterm_does_not_wait_for_a_batch(tmp_path: Path) -> None:
    options = f"port=0, drain_seconds=600, files={str(tmp_path / 'files')!r}"
    command = fake_server(gate=tmp_path / "gate", options=options)
    with running(command) as server:
        client = client_of(server)
        batch = begin(client, lines(1000, max_tokens=60))
        while client.batches.retrieve(batch.id).status != "in_progress":
            time.sleep(0.05)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
