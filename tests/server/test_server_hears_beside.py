"""Transcriptions of a server whose first model writes: by name, without one, refused."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from hearing_fake import FakeHearing
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import EngineDead
from headrace.engine.hearing.records import HearOptions
from headrace.server.app import Application, create_app
from headrace.server.attaching import attach_model
from headrace.server.service import Service

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
pytest.importorskip("soxr", reason="needs the extra audio")
URL = "/v1/audio/transcriptions"


@pytest.fixture
async def ears(tmp_path: Path) -> AsyncIterator[FakeHearing]:
    made = FakeHearing(tmp_path)
    yield made
    await made.settled()


@pytest.fixture
def app(ears: FakeHearing) -> Application:
    app = create_app(FakeEngine(), ServerOptions(served_name="chat"))
    first: Service = app.state.service
    beside = first.beside()
    attach_model(beside, ears, ["ears", "whisper-1"])
    first.models.append(beside)
    return app


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def second() -> bytes:
    room = io.BytesIO()
    soundfile.write(room, np.zeros(8_000, np.int16), 8_000, format="FLAC")
    return room.getvalue()


async def test_a_sound_goes_to_the_model_that_hears(
    ears: FakeHearing, client: httpx.AsyncClient
) -> None:
    file = {"file": second()}
    for number, form in enumerate(({"model": "ears"}, {"model": "whisper-1"}, {}), 1):
        reply = await client.post(URL, files=file, data=form)
        assert reply.status_code == 200, reply.text
        assert len(ears.asked) == number
    refused = await client.post(URL, files=file, data={"model": "chat"})
    assert (refused.status_code, "chat does not hear" in refused.text) == (400, True)
    refused = await client.post(URL, files=file, data={"model": "nobody"})
    assert refused.status_code == 404
    assert "'chat', 'ears', 'whisper-1'" in refused.json()["error"]["message"]
    assert len(ears.asked) == 3


async def test_texts_and_lists_are_of_the_others(client: httpx.AsyncClient) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    refused = await client.post("/v1/chat/completions", json={**body, "model": "ears"})
    assert (refused.status_code, "ears transcribes speech" in refused.text) == (400, True)
    listed = (await client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["chat", "ears", "whisper-1"]
    assert [one.get("task") for one in listed] == [None, "transcription", "transcription"]
    tags = (await client.get("/api/tags")).json()["models"]
    assert [one["name"] for one in tags] == ["chat:latest"]
    assert (await client.get("/v2/models/ears/ready")).status_code == 200
    metrics = (await client.get("/metrics")).text
    assert 'headrace_sounds_running{model_name="ears"}' in metrics


class Resting:
    """Residents of which one rests: the next request for it loads it again."""

    def __init__(self, service: Service, one: Service, ears: FakeHearing) -> None:
        self.service, self.ears, self.resting = service, ears, [one]

    def at_rest(self, name: str) -> Service | None:
        return next((one for one in self.resting if name in one.names), None)

    async def wanted(self, name: str) -> None:
        if (one := self.at_rest(name)) is not None:
            self.resting.remove(one)
            self.service.models.append(one)
            self.ears._draining = ""

    def used(self, service: Service) -> None: ...


@pytest.mark.parametrize("form", [{"model": "ears"}, {}])
async def test_a_sound_wakes_the_only_other_model(
    app: Application, ears: FakeHearing, client: httpx.AsyncClient, form: dict[str, str]
) -> None:
    first: Service = app.state.service
    await ears.finish(0.0, "the model is being unloaded")
    residents = Resting(first, first.models.pop(), ears)
    first.residents = residents  # type: ignore[assignment]
    refused = await client.post(URL, files={"file": second()}, data={"model": "chat"})
    assert (refused.status_code, "chat does not hear" in refused.text) == (400, True)
    refused = await client.post(URL, files={"file": second()}, data={"model": "nobody"})
    assert refused.status_code == 404
    assert residents.resting
    reply = await client.post(URL, files={"file": second()}, data=form)
    assert reply.status_code == 200, reply.text
    assert not residents.resting


async def test_an_unloaded_model_hears_on_for_nobody(ears: FakeHearing) -> None:
    ears.answers = False
    hearing = ears.hear(ears.payload(), 0, HearOptions())
    await ears.finish(0.0, "the model is being unloaded")
    assert ears.aborted == [hearing.wanted.request_id]
    with pytest.raises(EngineDead, match="the model is being unloaded"):
        await anext(hearing)
    assert not ears.in_work()
    assert not ears.payloads
