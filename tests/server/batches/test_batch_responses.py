"""`/v1/responses` as the endpoint of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batch_kit import begin, client_of, close, jsonl, results, serving, until
from server_fake import FakeEngine

from headrace.server.batches.lines import PRIORITY
from headrace.server.batches.results import Results

PATH = "/v1/responses"


def line(name: str, **body: Any) -> dict[str, Any]:
    given = {"input": name, "max_output_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": PATH, "body": given | body}


async def test_responses_in_a_batch(tmp_path: Path) -> None:
    engine = FakeEngine()
    app = serving(tmp_path / "files", engine)
    submit, priorities = engine.submit, []

    def watched(*given: Any, **more: Any) -> Any:
        priorities.append(more.get("priority"))
        return submit(*given, **more)

    engine.submit = watched  # type: ignore[method-assign]
    async with client_of(app) as client:
        first = (await client.post(PATH, json={"input": "hi", "max_output_tokens": 3})).json()
        lines = [
            line("plain"),
            line("kept", store=True, input=[{"role": "user", "content": "a"}] * 3),
            line("next", previous_response_id=first["id"]),
            line("wrong", max_output_tokens=-1),
            line("stream", stream=True),
            line("background", background=True),
            line("elsewhere") | {"url": "/v1/chat/completions"},
        ]
        end = await until(client, await begin(client, jsonl(*lines), endpoint=PATH))
        assert end["status"] == "completed"
        assert end["request_counts"] == {"total": 7, "completed": 3, "failed": 4}
        found = await results(client, end["output_file_id"])
        assert set(found) == {"plain", "kept", "next"}
        bodies = {name: one["response"]["body"] for name, one in found.items()}
        for name, body in bodies.items():
            assert body["object"] == "response"
            assert body["status"] == "incomplete", "at three tokens"
            assert body["output"][0]["content"][0]["text"] == "Hel"
            # In the file of results; in the store only where that was asked for.
            kept = await client.get(f"{PATH}/{body['id']}")
            assert kept.status_code == (200 if name == "kept" else 404)
        assert bodies["next"]["previous_response_id"] == first["id"]
        assert bodies["next"]["usage"]["input_tokens"] > bodies["plain"]["usage"]["input_tokens"]
        wrong = await results(client, end["error_file_id"])
        assert wrong["wrong"]["response"]["status_code"] == 400
        assert wrong["stream"]["error"]["code"] == "invalid_body"
        assert wrong["background"]["error"]["code"] == "invalid_body"
        assert wrong["elsewhere"]["error"]["code"] == "mismatched_url"
        used = [body["usage"] for body in bodies.values()]
        assert end["usage"]["input_tokens"] == sum(one["input_tokens"] for one in used)
        assert end["usage"]["output_tokens"] == sum(one["output_tokens"] for one in used) == 9
        assert priorities == [0, PRIORITY, PRIORITY, PRIORITY], "behind people's"

        # After a restart the usage is read from the results: in these words too.
        again = tmp_path / "again"
        content = (await client.get(f"/v1/files/{end['output_file_id']}/content")).content
        again.write_bytes(content)
        read = Results(again)
        assert read.prompt_tokens == end["usage"]["input_tokens"]
        assert read.completion == end["usage"]["output_tokens"]
        assert read.cached_tokens == end["usage"]["input_tokens_details"]["cached_tokens"] > 0
        read.close()
    await close(app)
