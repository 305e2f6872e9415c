"""A codec's lane in the loop: every sound has the bits of its codes, and ends once, whatever comes,
goes or dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_waits import age, stopped
from prometheus_client import CollectorRegistry

from headrace.base.config import EngineOptions
from headrace.base.errors import EngineDead, EngineFault, ModelFileError, Overloaded
from headrace.base.hardware import hardware
from headrace.base.outputs import Samples
from headrace.base.request import OutputDelta, Request, SequenceDelta
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine import messages
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.codec_speaking import CodecSpeaker
from headrace.engine.clients.speaking import SpeechClient
from headrace.engine.clients.stream import Stream
from headrace.engine.clients.supervision import Supervision
from headrace.engine.loop import spoken as module
from headrace.engine.loop.core import EngineCore
from headrace.engine.loop.real import REAL_WORKER
from headrace.engine.loop.several import Models
from headrace.engine.loop.spoken import CodecPart, load_codec
from headrace.engine.loop.spoken_plan import plan_codec
from headrace.engine.loop.start import explain
from headrace.kernels.cpu.library import Team
from headrace.loader import open_model
from headrace.obs.flight import FlightRecorder
from headrace.speech.codec import Codec, SoundStream
from headrace.speech.voices import FrameReader, VoiceFiles, open_voices
from tiny.speaking import CODES, FIRST, PLACES, VOCAB, make

TEXT = "The water turns the wheel."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("speaking"), context=1024)


@pytest.fixture(scope="module")
def voices(folder: Path) -> VoiceFiles:
    return open_voices(folder, VOCAB)


@pytest.fixture
def part(folder: Path) -> Iterator[CodecPart]:
    plan = plan_codec(open_model(str(folder)), 8)
    assert plan is not None
    made = load_codec(plan, None, 1)
    yield made
    made.lane.executor.close()


def whole(voices: VoiceFiles, tokens: list[int], seed: int) -> bytes:
    frames = FrameReader(voices).take(tokens)
    return Codec(voices.codec, Team(1)).stream(seed).push(frames, last=True).tobytes()


def written(random: random.Random, frames: int) -> list[int]:
    """Tokens of so many frames, now and then one that is no code."""
    tokens = []
    for place in range(frames * PLACES):
        if random.random() < 0.05:
            tokens.append(1)
        tokens.append(FIRST + place % PLACES * CODES + random.randrange(CODES))
    return tokens


@pytest.mark.parametrize(("seed", "slice_seconds"), [(0, 0.0), (1, 1.0), (2, 0.01)])
def test_sounds_in_turns_are_whole_and_end_once(
    part: CodecPart,
    voices: VoiceFiles,
    seed: int,
    slice_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", slice_seconds)
    draw, spoken = random.Random(seed), part.spoken
    core = EngineCore(part.lane.scheduler, part.lane.executor, check=True)
    texts = {f"{i}": written(draw, draw.randrange(9)) for i in range(6)}
    left = {name: list(tokens) for name, tokens in texts.items()}
    told: dict[str, list[SequenceDelta]] = {name: [] for name in texts}
    aborted = set(draw.sample(list(texts), 2))

    def hear(deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            told[delta.request_id].append(delta)

    for name in texts:
        spec = RequestSpec(SamplingParams(), seed=int(name), task="sound")
        spoken.begin(Request(name, [1], spec))
    open_texts = set(texts)
    while open_texts or core.has_work:
        if open_texts and draw.random() < 0.6:
            name = draw.choice(sorted(open_texts))
            count = draw.randrange(12)
            new, left[name] = left[name][:count], left[name][count:]
            finish: Any = None if left[name] else "length"
            if name in aborted and draw.random() < 0.1:
                finish = "abort"  # By the text's lane.
            hear(spoken.take([SequenceDelta(name, 0, new, finish=finish)]))
            if finish:
                open_texts.discard(name)
        elif draw.random() < 0.05 and aborted - open_texts:
            core.abort(draw.choice(sorted(aborted - open_texts)))  # By the codec's.
        hear(core.turn())
    assert not spoken._sounds
    for name, tokens in texts.items():
        finishes = [delta.finish for delta in told[name] if delta.finish is not None]
        assert len(finishes) == 1, name
        assert told[name][-1].finish is finishes[0], "nothing comes after the end"
        outputs = [one.output for one in told[name] if isinstance(one.output, Samples)]
        made = b"".join(piece for one in outputs for piece in one.pieces)
        wanted = whole(voices, tokens, int(name))
        if finishes[0] == "length":
            assert made == wanted
            assert sum(one.dropped for one in outputs) == tokens.count(1)
            assert [token for one in told[name] for token in one.tokens] == tokens
        else:
            assert name in aborted
            assert wanted.startswith(made)


def test_a_fault_of_the_codec_is_of_its_sound(
    part: CodecPart, voices: VoiceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, spoken = EngineCore(part.lane.scheduler, part.lane.executor), part.spoken
    tokens, begun = written(random.Random(1), 4), spoken._codec.stream

    def failing(*args: Any, **more: Any) -> Any:
        raise ValueError("no such frame")
        yield

    def stream(seed: int) -> SoundStream:
        made = begun(seed)
        if seed == 4:
            made.slices = failing  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(spoken._codec, "stream", stream)
    for seed, name in ((4, "bad"), (3, "good")):
        spec = RequestSpec(SamplingParams(), seed=seed, task="sound")
        spoken.begin(Request(name, [1], spec))
        spoken.take([SequenceDelta(name, 0, tokens, finish="length")])
    told = []
    while core.has_work:
        told += core.turn()
    (error,) = [one for one in told if one.request_id == "bad"]
    assert (error.finish, "no such frame" in (error.error or "")) == ("error", True)
    made = [one.output.pieces for one in told if isinstance(one.output, Samples)]
    assert b"".join(piece for pieces in made for piece in pieces) == whole(voices, tokens, 3)


def test_no_more_sounds_are_decoded_than_have_memory(folder: Path, voices: VoiceFiles) -> None:
    """Texts may be ahead of the codec by any number of sounds: these wait as frames."""
    plan = plan_codec(open_model(str(folder)), 2)
    assert plan is not None
    part = load_codec(plan, None, 1)
    core, spoken = EngineCore(part.lane.scheduler, part.lane.executor, check=True), part.spoken
    texts = {str(seed): written(random.Random(seed), 4) for seed in range(6)}
    told: list[SequenceDelta] = []

    def turns() -> None:
        while core.has_work:
            told.extend(core.turn())
            assert sum(one.stream is not None for one in spoken._sounds.values()) <= 2

    for name, tokens in texts.items():
        spoken.begin(Request(name, [1], RequestSpec(SamplingParams(), seed=int(name))))
        spoken.take([SequenceDelta(name, 0, tokens, finish=None if name < "2" else "length")])
    turns()
    assert {one.request_id for one in told} == {"0", "1"}, "they wait for their texts"
    spoken.take([SequenceDelta("0", 0, [], finish="abort")])
    core.abort("5")
    turns()
    spoken.take([SequenceDelta("1", 0, [], finish="length")])
    turns()
    assert not spoken._sounds
    for name in ("1", "2", "3", "4"):
        made = [one.output for one in told if one.request_id == name]
        pieces = [piece for one in made if isinstance(one, Samples) for piece in one.pieces]
        assert b"".join(pieces) == whole(voices, texts[name], int(name))
    part.lane.executor.close()


def test_a_name_that_comes_again_has_nothing_of_the_sound_before(
    part: CodecPart, voices: VoiceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.0)
    core, spoken = EngineCore(part.lane.scheduler, part.lane.executor), part.spoken
    first, second = (written(random.Random(seed), 4) for seed in (1, 2))
    for seed, tokens, finish in ((1, first, "abort"), (2, second, "length")):
        spec = RequestSpec(SamplingParams(), seed=seed, task="sound")
        spoken.begin(Request("one", [1], spec))
        spoken.take([SequenceDelta("one", 0, tokens)])
        assert not core.turn(), "a slice of its first piece"
        last: Any = finish
        spoken.take([SequenceDelta("one", 0, [], finish=last)])
    told = []
    while core.has_work:
        told += core.turn()
    made = [one.output.pieces for one in told if isinstance(one.output, Samples)]
    assert b"".join(piece for pieces in made for piece in pieces) == whole(voices, second, 2)


def test_the_codec_is_in_the_memory_plan(folder: Path) -> None:
    options = EngineOptions(model=str(folder), device="cpu", max_sequences=8, offline=True)
    files = open_model(str(folder))
    decisions, memory = explain(options, files, hardware())
    memory.verify()
    (reason,) = [one for one in decisions if one.name == "parts"]
    assert reason.value == "text, codec"
    codec = open_voices(folder, VOCAB).codec
    assert dict(memory.parts())["codec"] == codec.weight_bytes + 8 * codec.stream_bytes


def test_a_sound_keeps_no_more_than_is_planned(voices: VoiceFiles) -> None:
    """Arrays that outlive a piece; what they are views of counts, too."""
    stream = Codec(voices.codec, Team(1)).stream(1)
    for _ in range(6):
        stream.push(np.zeros((2, PLACES), np.int64))
    kept: dict[int, int] = {}

    def count(found: Any, deep: int = 0) -> None:
        if isinstance(found, np.ndarray):
            base = found
            while isinstance(base.base, np.ndarray):
                base = base.base
            kept[id(base)] = base.nbytes
        elif hasattr(found, "_rows"):
            count(found._rows)
        for cell in getattr(found, "__closure__", None) or ():
            inside = cell.cell_contents
            if isinstance(inside, np.ndarray) or hasattr(inside, "_rows"):
                count(inside)

    for layer in stream._layers:
        count(layer)
    assert 0 < sum(kept.values()) <= voices.codec.stream_bytes


def test_a_codec_has_the_weight_of_its_model(folder: Path) -> None:
    options = EngineOptions(model=str(folder), device="cpu", threads=1, max_sequences=2)
    wire = messages.WireFiles.of(open_model(str(folder)))
    beside = messages.WireModel(1, options, wire, 2.0)
    models = Models.start(
        messages.Configure(options, wire, "", 0.25, [beside]),
        lambda files, _: files.open(),
        worker=REAL_WORKER,
        flight=FlightRecorder(records=32),
        on_phase=lambda name, seconds: None,
    )
    assert models.core._arbiter._weight == {0: 0.25, ~0: 0.25, 1: 2.0, ~1: 2.0}
    models.close()


async def test_a_sound_of_which_only_tokens_came_can_come_again(folder: Path) -> None:
    """No reader hears tokens: until the first samples, another engine can begin the sound anew."""
    streams: list[Stream] = []

    def submit(prompt: list[int], *_: Any, whole: bool = False, **options: Any) -> Stream:
        streams.append(Stream("one", prompt, 1, lambda _: None, whole=whole))
        return streams[-1]

    files = open_model(str(folder))
    engine = SimpleNamespace(
        registry=CollectorRegistry(), model_name="one", files=files, submit=submit,
        tokenizer=SimpleNamespace(encode=lambda text, special: [1]),
    )  # fmt: skip
    speaking = CodecSpeaker.of(engine).speak(TEXT, "leo", {}, SpeechClient())  # type: ignore[arg-type]
    (stream,) = streams
    heard: list[bytes] = []

    async def listen() -> None:
        heard.extend([samples.tobytes() async for samples in speaking.pieces()])

    listening = asyncio.ensure_future(listen())
    stream.push(OutputDelta("one", 0, token_ids=[1, 2, 3]))
    await asyncio.sleep(0.01)
    assert stream.begun
    assert stream.repeatable
    assert speaking.tokens == 3
    stream.again()
    first, second = (np.full(4, one, np.float32).tobytes() for one in (0.25, 0.5))
    stream.push(OutputDelta("one", 0, token_ids=[1, 2], output=Samples([first])))
    await asyncio.sleep(0.01)
    assert speaking.tokens == 2
    assert not stream.repeatable
    stream.push(OutputDelta("one", 0, output=Samples([second]), finish_reason="stop"))
    await listening
    assert heard == [first, second]


# Through processes


@pytest.fixture
async def engine(folder: Path, supervision: Supervision) -> AsyncIterator[AsyncEngine]:
    options = EngineOptions(
        model=str(folder), device="cpu", threads=1, max_sequences=8, kv_memory="8MiB", offline=True
    )
    engine = await AsyncEngine.start(options, supervision=supervision)
    yield engine
    await engine.close()


async def spoken_by(speaker: CodecSpeaker, seed: int, tokens: int, name: str) -> bytes:
    given = {"seed": seed, "max_tokens": tokens}
    speaking = speaker.speak(TEXT, "tara", given, SpeechClient(request_id=name))
    return b"".join([samples.tobytes() async for samples in speaking.pieces()])


async def begun(speaker: CodecSpeaker, name: str) -> tuple[Any, Any]:
    """A long sound whose first samples are there."""
    given = {"seed": 2, "max_tokens": 900}
    speaking = speaker.speak(TEXT, "leo", given, SpeechClient(request_id=name))
    pieces = speaking.pieces()
    assert len(await anext(pieces))
    return speaking, pieces


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "hang"])
async def test_an_engine_that_ends_while_it_speaks(engine: AsyncEngine, end: str) -> None:
    """A sound of which nothing was heard comes from the next engine, with its bits; one that was
    heard in part ends in one typed error."""
    speaker = CodecSpeaker.of(engine)
    wanted = await spoken_by(speaker, 5, 70, "first")
    assert len(wanted) == 4 * 10 * 2048
    _, pieces = await begun(speaker, "heard")
    unheard = asyncio.ensure_future(spoken_by(speaker, 5, 70, "unheard"))
    await asyncio.sleep(0)
    pid = engine.engine_pid
    assert pid is not None
    if end == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        await stopped(engine)
        age(engine)
    with pytest.raises(EngineDead):
        async for _ in pieces:
            pass
    assert await unheard == wanted
    assert engine.engine_pid != pid
    assert await spoken_by(speaker, 5, 70, "after") == wanted


async def test_who_leaves_frees_the_sound(engine: AsyncEngine) -> None:
    speaker = CodecSpeaker.of(engine)
    _, pieces = await begun(speaker, "left")
    await pieces.aclose()
    assert not len(engine.work)

    while (report := await engine.inspect()).running or report.waiting:
        await asyncio.sleep(0.01)
    assert not report.integrity
    assert await spoken_by(speaker, 5, 70, "after")


async def test_a_drained_engine_ends_a_sound(engine: AsyncEngine) -> None:
    speaker = CodecSpeaker.of(engine)
    _, pieces = await begun(speaker, "ended")
    ending = asyncio.ensure_future(engine.finish(0.0))
    with pytest.raises((Overloaded, EngineFault, EngineDead)):
        async for _ in pieces:
            pass
    await ending


async def test_a_damaged_codec_ends_the_start(tmp_path: Path, supervision: Supervision) -> None:
    folder = make(tmp_path)
    path = folder / "snac" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"quantizers.0", b"quantizers.9"))
    options = EngineOptions(model=str(folder), device="cpu", threads=1, offline=True)
    with pytest.raises(ModelFileError, match=r"quantizers\.0"):
        await AsyncEngine.start(options, supervision=supervision)
