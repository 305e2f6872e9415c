"""Transcriptions of a server whose first model writes: by name, without one, refused."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hearing_fake import FakeHearing
from server_fake import FakeEngine
from starlette.requests import Request
from starlette.types import Message

from headrace.base.config import EngineOptions, ServerOptions
from headrace.base.errors import EngineDead, Overloaded
from headrace.base.request import StepStats
from headrace.base.several import read_models
from headrace.engine.clients.group import EngineGroup
from headrace.engine.hearing.engine import MOST_SECONDS, RATE, HearingEngine
from headrace.engine.hearing.records import HearOptions
from headrace.engine.messages import News
from headrace.obs.tasks import TaskWatch
from headrace.server.app import Application, create_app
from headrace.server.attaching import attach_model
from headrace.server.hearing.handshake import Live
from headrace.server.residents import Residents
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


async def test_texts_and_lists_are_of_the_others(
    ears: FakeHearing, client: httpx.AsyncClient
) -> None:
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
    ears.receive(News([], StepStats(seconds=0.5, predicted_seconds=0.25)))
    metrics = (await client.get("/metrics")).text
    assert 'headrace_sounds_running{model_name="ears"}' in metrics
    assert 'headrace:device_seconds_total{model_name="ears"} 0.5' in metrics
    assert 'headrace:predicted_seconds_total{model_name="ears"} 0.25' in metrics
    assert metrics.count("# TYPE headrace:device_seconds_total") == 1, "one family of all models"


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


async def test_a_model_with_a_silent_session_does_not_rest(
    app: Application, ears: FakeHearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sound that is still being decoded keeps its model, too."""
    first: Service = app.state.service
    rested: list[str] = []
    group = SimpleNamespace(members={1: ears}, chosen={0: None, 1: None})
    residents = Residents(first, group, attach_model)  # type: ignore[arg-type]

    async def unload(name: str, *, rest: bool = False) -> None:
        rested.append(name)
        residents._keep.clear()

    async def look() -> None:
        """Wait for two looks, with a model whose time is up."""
        residents.keep(beside, 0.001)
        residents._used[beside] -= 10.0
        for _ in range(2):
            looked.clear()
            await looked.wait()

    looked, sleep = asyncio.Event(), asyncio.sleep

    async def soon(seconds: float) -> None:
        looked.set()
        await sleep(0.001)

    monkeypatch.setattr(residents, "unload", unload)
    monkeypatch.setattr("headrace.server.residents.asyncio.sleep", soon)
    beside = first.models[1]
    watching = asyncio.ensure_future(residents.watch())
    scope = {"type": "http", "query_string": b"", "headers": [], "headrace.socket": Quiet()}
    session = Live(beside, ears, Request(scope))
    served = asyncio.ensure_future(session(scope, silence, dropped))
    while not ears.sessions:
        await sleep(0)
    await look()
    assert not rested
    served.cancel()
    await asyncio.wait({served})
    payload = ears.payload("", 16_000)
    await look()
    assert not rested
    ears.drop(payload)
    await ears.settled()
    await look()
    assert rested == ["ears"]
    watching.cancel()


class Quiet:
    """The socket of a client that says nothing."""

    lost, subprotocols, subprotocol = False, (), None


async def silence() -> Message:
    return await asyncio.get_running_loop().create_future()


async def dropped(message: Message) -> None: ...


def test_sounds_of_all_models_have_one_bound(tmp_path: Path) -> None:
    """A server has one, and so has a key."""
    supervisor = SimpleNamespace(restarts=0, folder=tmp_path)
    group = EngineGroup(supervisor, TaskWatch())  # type: ignore[arg-type]
    chosen = read_models(["one", "two"], EngineOptions())
    one, two = (group._join(number, (choice, None, None)) for number, choice in enumerate(chosen))  # type: ignore[arg-type]
    assert isinstance(one, HearingEngine)
    assert isinstance(two, HearingEngine)
    half = RATE * MOST_SECONDS // 2
    payloads = [one.payload("key", half)]
    with pytest.raises(Overloaded, match="as many seconds"):
        two.payload("key", 1)
    payloads.append(two.payload("", half))
    with pytest.raises(Overloaded, match="as many seconds"):
        one.payload("", 1)
    for payload in payloads:
        payload.close()


async def test_an_unloaded_model_hears_on_for_nobody(ears: FakeHearing) -> None:
    ears.answers = False
    hearing = ears.hear(ears.payload(), 0, HearOptions())
    await ears.finish(0.0, "the model is being unloaded")
    assert ears.aborted == [hearing.wanted.request_id]
    with pytest.raises(EngineDead, match="the model is being unloaded"):
        await anext(hearing)
    assert not ears.in_work()
    assert not ears.payloads
