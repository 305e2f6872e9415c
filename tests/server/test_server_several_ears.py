"""A speech model behind one port with a chat: chosen by name, told apart, loaded, resting."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
from processes import Running, headrace, running

from headrace.engine.hearing.opening import open_transcriber
from headrace.media import decode
from tiny import bytewise, moonshine
from tiny.kept import Kept

pytest.importorskip("soundfile", reason="needs the extra audio")
pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "Where does the water go?"}]


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("moonshine")
    moonshine.make(where)
    return where


@pytest.fixture(scope="module")
def server(kept: Kept, ears: Path) -> Iterator[Running]:
    words = [f"{kept(bytewise.make)}:name=chat", f"{ears}:name=ears,name=whisper-1"]
    flags = "--port 0 --operator-port 0 --threads 1 --max-sequences 8 --kv-memory 4MiB --offline"
    with running(headrace("serve", *words, *flags.split())) as server:
        yield server


@pytest.fixture(scope="module")
def talk() -> tuple[str, bytes]:
    t = np.arange(16_000 * 4) / 16_000
    samples = 0.3 * np.sin(2 * np.pi * (300 + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return "talk.wav", held.getvalue()


@pytest.fixture(scope="module")
def text(ears: Path, talk: tuple[str, bytes]) -> str:
    found = open_transcriber(str(ears), 1).transcribe(decode(talk[1]).samples).text
    assert len(found) > 10
    return found


def heard(client: openai.OpenAI, name: str, talk: tuple[str, bytes]) -> str:
    return client.audio.transcriptions.create(model=name, file=talk).text


def operator(server: Running) -> str:
    return server.await_line(r"operator: (\S+)").group(1)


def test_each_is_chosen_by_its_names(server: Running, talk: tuple[str, bytes], text: str) -> None:
    client = server.openai()
    for name in ("ears", "whisper-1", ""):
        assert heard(client, name, talk) == text
    with pytest.raises(openai.BadRequestError, match="chat does not hear"):
        heard(client, "chat", talk)
    with pytest.raises(openai.NotFoundError, match="'chat', 'ears', 'whisper-1'"):
        heard(client, "nobody", talk)
    with pytest.raises(openai.BadRequestError, match="ears transcribes speech"):
        client.chat.completions.create(model="ears", messages=MESSAGES)
    said = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=8)
    assert said.model == "chat"
    described = {one.id: one for one in client.models.list()}
    assert list(described) == ["chat", "ears", "whisper-1"]
    assert described["whisper-1"].task == "transcription"


def test_a_session_beside_a_chat(server: Running) -> None:
    websockets = pytest.importorskip("websockets", reason="needs the extra audio")

    async def opened(query: str) -> Any:
        url = server.url.replace("http", "ws", 1) + f"/v1/realtime?intent=transcription{query}"
        async with websockets.connect(url) as session:
            return json.loads(await session.recv())

    for query in ("", "&model=whisper-1"):
        assert "session" in asyncio.run(opened(query))["type"]
    with pytest.raises(websockets.InvalidStatus, match="400"):
        asyncio.run(opened("&model=chat"))


def test_metrics_and_the_operator_tell_them_apart(
    server: Running, talk: tuple[str, bytes], text: str
) -> None:
    assert heard(server.openai(), "ears", talk) == text
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (seconds,) = [line for line in lines if line.startswith("headrace_audio_seconds_total")]
    assert 'model_name="ears"' in seconds
    assert float(seconds.rpartition(" ")[2]) >= 4
    assert any('model_name="chat"' in line for line in lines)
    models = httpx.get(f"{operator(server)}/operate/models").json()["models"]
    assert [one["names"] for one in models] == [["chat"], ["ears", "whisper-1"]]
    assert all(one["weight_bytes"] > 0 for one in models)
    with ollama.Client(host=server.url) as client:
        assert [one.model for one in client.list().models] == ["chat:latest"], "it has no texts"


def test_it_is_loaded_rests_and_wakes(
    server: Running, ears: Path, talk: tuple[str, bytes], text: str
) -> None:
    url, client = f"{operator(server)}/operate/models", server.openai()
    made = httpx.post(url, json={"model": f"{ears}:name=more,dtype=float32"}, timeout=300)
    assert (made.status_code, "no option 'dtype' of its own" in made.text) == (400, True)
    made = httpx.post(url, json={"model": f"{ears}:name=more"}, timeout=300)
    assert made.json()["names"] == ["more"]
    assert heard(client, "more", talk) == text
    with ollama.Client(host=server.url) as asking:
        assert asking.generate("more", "", keep_alive=0).done_reason == "unload"
    for _ in range(3000):
        models = httpx.get(url).json()["models"]
        if [one["loaded"] for one in models] == [True, True, False]:
            break
    assert [one["loaded"] for one in models] == [True, True, False]
    assert heard(client, "more", talk) == text, "the next sound loads it again"
    assert httpx.delete(f"{url}/more", timeout=300).json() == {"unloaded": "more"}
    with pytest.raises(openai.NotFoundError, match="'whisper-1'"):
        heard(client, "more", talk)
    assert heard(client, "ears", talk) == text
