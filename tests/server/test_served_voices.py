"""Programs that speak, over HTTP: their sound, its draws, fields that are wrong, and clients that
leave, read slowly or come beside others. The programs are small; real ones are below."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from server_fake import FakeEngine
from small_programs import voices

from headrace.base.config import ServerOptions
from headrace.base.errors import DeadlineMissed, EngineFault, ModelFileError
from headrace.engine.clients.speaking import SpeechClient
from headrace.engine.programs.engine import ProgramEngine
from headrace.engine.programs.speaking import ProgramSpeaker, ProgramSpeaking
from headrace.programs import ForeignProgram, inspected
from headrace.server.app import create_app
from headrace.server.attaching import attach

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "あい。うえお、かき。くけこ。"
LICENCES = {"ann": "MIT", "kana": "Apache-2.0"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return voices(tmp_path_factory.mktemp("voices"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(files: dict[str, Path]) -> AsyncIterator[ProgramEngine]:
    made = await ProgramEngine.start(files, lanes=1, licences=LICENCES)
    yield made
    await made.close()


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: ProgramEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(engine, ServerOptions())) as made:  # type: ignore[arg-type]
        yield made


def body(**more: Any) -> dict[str, Any]:
    given = {"model": "kana", "voice": "jf_one", "input": TEXT, "response_format": "pcm"}
    return {**given, **more}


async def spoken(http: httpx.AsyncClient, **more: Any) -> np.ndarray[Any, Any]:
    reply = await http.post("/v1/audio/speech", json=body(**more), timeout=60)
    assert reply.status_code == 200, reply.text
    return np.frombuffer(reply.content, "<i2") / 32767


def phonemes(**more: Any) -> dict[str, Any]:
    return {"model": "ann", "voice": "ann", "input": "abc. de.", "phonemes": True, **more}


async def no_espeak(work: Any, text: str) -> str:
    return str(work(text))


def speaking(engine: ProgramEngine, count: int, **given: Any) -> ProgramSpeaking:
    speaker = ProgramSpeaker(engine, engine.find("kana"), no_espeak)
    return speaker.speak("あい。" * count, "jf_one", given, SpeechClient())


async def test_the_sound_is_that_of_each_sentence(
    http: httpx.AsyncClient, engine: ProgramEngine, files: dict[str, Path]
) -> None:
    program, voice = ForeignProgram(inspected(files["kana"])), engine.find("kana").voice
    assert voice is not None
    runs = [
        program.run(voice.feed(one, "jf_one", 1.0))["audio"]
        for one in ("ai.", "ɯeo,kakʲi.", "kɯkeko.")
    ]
    wanted = np.concatenate(runs)
    assert np.array_equal(np.rint(wanted * 32767), np.rint(await spoken(http) * 32767))
    assert len(await spoken(http, speed=2)) == len(wanted) // 2
    assert not np.array_equal(await spoken(http, voice="jm_two"), await spoken(http))


async def test_the_same_seed_is_the_same_sound_and_each_run_draws_anew(
    http: httpx.AsyncClient,
) -> None:
    first = await spoken(http, **phonemes(seed=5))
    assert np.array_equal(first, await spoken(http, **phonemes(seed=5)))
    assert not np.array_equal(first, await spoken(http, **phonemes(seed=6)))
    assert not np.array_equal(await spoken(http, **phonemes()), await spoken(http, **phonemes()))
    long = "abcde" * 95 + " "
    twice = await spoken(http, **phonemes(input=2 * long, seed=1))
    (silence,) = np.flatnonzero(np.convolve(twice == 0, np.ones(3200), "valid") == 3200)[:1]
    assert len(twice) == 2 * silence + 3200
    assert not np.array_equal(twice[:silence], twice[silence + 3200 :])


async def test_streamed_is_the_same(http: httpx.AsyncClient, engine: ProgramEngine) -> None:
    asked = body(**phonemes(seed=5), stream_format="sse")
    async with http.stream("POST", "/v1/audio/speech", json=asked) as reply:
        events = [json.loads(row[6:]) async for row in reply.aiter_lines() if row[:6] == "data: "]
    sound = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    whole = await spoken(http, **phonemes(seed=5))
    assert np.array_equal(np.frombuffer(sound, "<i2") / 32767, whole)
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["finish_reason"] == "stop"
    usage = events[-1]["usage"]
    assert usage["input_tokens"] == len("abc. de.")
    assert usage["output_tokens"] == int(np.ceil(50 * len(whole) / 16_000))
    parts = speaking(engine, 3)
    async with aclosing(parts.pieces()) as pieces:
        sounds = [samples async for samples in pieces]
    assert len(sounds) == 3
    made = await spoken(http, input="あい。" * 3)
    assert np.array_equal(np.rint(np.concatenate(sounds) * 32767), np.rint(made * 32767))


@pytest.mark.parametrize("form", ["wav", "flac", "opus", "mp3"])
async def test_every_form(http: httpx.AsyncClient, form: str) -> None:
    if form != "wav":
        pytest.importorskip("soundfile", reason="needs the extra audio")
    reply = await http.post("/v1/audio/speech", json=body(response_format=form))
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("audio/")
    assert len(reply.content) > 100


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n"}, "input"),
        ({"input": "あ" * 4097}, "input"),
        ({"input": "a " * 500_000}, "input"),
        ({"input": "\x01\x02\x7f"}, "input"),
        ({"input": "😀🎉"}, "input"),
        ({"input": "。！"}, "input"),
        ({"input": "あい。" * 20 + "漢字"}, "input"),
        ({"speed": 0}, "speed"),
        ({"speed": 100}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"voice": "bob"}, "voice"),
        ({"voice": "af_three"}, "voice"),
        ({"seed": 2**64}, "seed"),
        ({"timeout": 0}, "timeout"),
        ({"class": "realtime"}, "class"),
        ({"temperature": 0.5}, "temperature"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"priority": 1}, "priority"),
        ({"instructions": "Whisper."}, "instructions"),
        ({"input": "xyz", "phonemes": True}, "input"),
        ({"model": None}, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    reply = await http.post("/v1/audio/speech", json=body(**change))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
async def test_numbers_without_an_end(http: httpx.AsyncClient, number: str) -> None:
    text = json.dumps(body(speed=1)).replace('"speed": 1', f'"speed": {number}')
    head = {"content-type": "application/json"}
    reply = await http.post("/v1/audio/speech", content=text, headers=head)
    assert reply.status_code == 400
    assert (await http.post("/v1/audio/speech", json=body(model="kani"))).status_code == 404


async def test_models_tell_voices_and_licences(http: httpx.AsyncClient) -> None:
    listed = {one["id"]: one for one in (await http.get("/v1/models")).json()["data"]}
    assert {name: one["licence"] for name, one in listed.items()} == LICENCES
    assert {one["task"] for one in listed.values()} == {"speech"}
    assert listed["kana"]["voices"] == ["jf_one", "jm_two", "af_three"]
    assert (await http.get("/v1/models/ann")).json() == listed["ann"]


async def test_beside_a_text_model(engine: ProgramEngine) -> None:
    app = create_app(None, ServerOptions())
    attach(app.state.service, FakeEngine(), engine)  # type: ignore[arg-type]
    async with client_of(app) as http:
        assert len(await spoken(http)) > 0
        listed = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        assert listed[1:] == ["ann", "kana"]
        reply = await http.post("/v1/audio/speech", json=body(model=listed[0]))
        assert reply.status_code == 404
        assert "ann, kana" in reply.json()["error"]["message"]
        metrics = (await http.get("/metrics")).text
        assert metrics.count("# TYPE headrace_spoken_seconds_total") == 1
        assert 'headrace_first_sound_seconds_count{model_name="kana"}' in metrics


async def test_who_leaves_ends_the_work(engine: ProgramEngine) -> None:
    parts = speaking(engine, 200)
    pieces = parts.pieces()
    await anext(pieces)
    await pieces.aclose()
    while engine.executor.running:
        await asyncio.sleep(0.001)
    assert not len(engine.executor.queue)
    assert engine.executor._places.held == 0
    assert 0 < parts._runs < 10


async def test_who_reads_slowly_holds_up_nobody(engine: ProgramEngine) -> None:
    """More slow readers than there are turns; others speak, and what the slow ones get is whole."""
    slow = [speaking(engine, 6) for _ in range(8)]
    begun = [one.pieces() for one in slow]
    first = [await anext(one) for one in begun]
    while any(one._runs < 2 for one in slow):
        await asyncio.sleep(0.001)
    quick = [samples async for samples in speaking(engine, 6).pieces()]
    assert max(one._runs for one in slow) < 6
    for head, rest in zip(first, begun, strict=True):
        whole = np.concatenate([head, *[samples async for samples in rest]])
        assert whole.tobytes() == np.concatenate(quick).tobytes()


async def test_a_deadline_ends_the_sound(engine: ProgramEngine, http: httpx.AsyncClient) -> None:
    parts = speaking(engine, 100, timeout=0.5)
    pieces = parts.pieces()
    await anext(pieces)
    await asyncio.sleep(0.6)  # A client that does not read.
    with pytest.raises(DeadlineMissed):
        async for _ in pieces:
            pass
    reply = await http.post("/v1/audio/speech", json=body(timeout=0.001, input="あい。" * 500))
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_missed"


async def test_without_espeak_the_reply_says_how_to_get_it(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    given = body(model="ann", voice="ann", input="Hello.")
    reply = await http.post("/v1/audio/speech", json=given)
    assert reply.status_code == 500
    assert "apt install espeak-ng" in reply.json()["error"]["message"]
    assert len(await spoken(http, **phonemes())) > 0


async def test_wrong_files_end_the_start(tmp_path: Path) -> None:
    path = voices(tmp_path)["ann"]
    path.with_name("ann.onnx.json").write_text('{"espeak": {"voice": "en-us"}}')
    with pytest.raises(ModelFileError, match=r"ann\.onnx\.json: audio"):
        await ProgramEngine.start({"ann": path})
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelFileError):
        await ProgramEngine.start({"ann": path})


async def test_an_id_that_the_program_lacks_is_its_fault(tmp_path: Path) -> None:
    """The client sent a text; a config that does not fit the program is no error of its."""
    files = voices(tmp_path)
    engine = await ProgramEngine.start({"kana": files["kana"]}, lanes=1)
    try:
        voice = engine.find("kana").voice
        for name, style in getattr(voice, "styles", {}).items():
            voice.styles[name] = style[:, :3]  # type: ignore[union-attr]
        with pytest.raises(EngineFault, match="does not run on a text"):
            async for _ in speaking(engine, 1).pieces():
                pass
    finally:
        await engine.close()
