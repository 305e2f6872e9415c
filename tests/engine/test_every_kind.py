"""Every kind of work in one server, and its engine's end: each request has one answer, the one it
has alone, or one typed error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_waits import age, stopped

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import double

from headrace.base.config import EngineOptions
from headrace.base.errors import EngineDead, HeadraceError
from headrace.base.sampling import SamplingParams
from headrace.base.several import ModelChoice
from headrace.base.spec import InputSpan
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.codec_speaking import CodecSpeaker
from headrace.engine.clients.group import EngineGroup
from headrace.engine.clients.kept_pictures import PictureShape
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.engine.clients.speaking import SpeechClient
from headrace.engine.clients.supervision import Supervision
from headrace.engine.hearing.engine import HearingEngine
from headrace.engine.hearing.records import HearOptions
from headrace.engine.programs.engine import ProgramEngine
from tiny import bytewise, encoder, moonshine, seeing_chat, speaking
from tiny.encoder import write_modules
from tiny.kept import Kept

pytestmark = pytest.mark.slow
KINDS = ("text", "vectors", "hears", "speaks", "sees")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHARED: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "kv_memory": "4MiB",
    "max_sequences": 8,
    "offline": True,
}


@pytest.fixture(scope="module")
def folders(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = {name: tmp_path_factory.mktemp(name) for name in KINDS[1:]}
    vectors = encoder.make(where["vectors"])
    write_modules(vectors, "pooling_mode_mean_tokens", normalise=True)
    moonshine.make(where["hears"])
    speaking.make(where["speaks"])
    seeing_chat.make(where["sees"])
    return {"text": kept(bytewise.make), **where, "vectors": vectors}


class Server:
    """All kinds of work, each of which can be asked for again and again."""

    def __init__(self, group: EngineGroup, programs: ProgramEngine) -> None:
        self.group, self.programs = group, programs
        text, vectors, hears, speaks, sees = group.members.values()
        assert isinstance(hears, HearingEngine)
        for one in (text, vectors, speaks, sees):
            assert isinstance(one, AsyncEngine)
        self.text, self.vectors, self.hears, self.sees = text, vectors, hears, sees
        self.speaker = CodecSpeaker.of(speaks)  # type: ignore[arg-type]
        prompts = open_picture_prompts(sees.files, sees.tokenizer)  # type: ignore[union-attr]
        assert prompts is not None
        self.pictures: PicturePrompts = prompts
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"{self.count}"

    async def write(self) -> Any:
        return (await self.text.generate("the water wheel turns", GREEDY)).outputs[0].token_ids

    async def stream(self) -> Any:
        """A text whose reader has seen tokens when the engine ends."""
        tokens: list[int] = []
        async for delta in self.text.stream("a river", GREEDY):
            tokens += delta.token_ids
        return tokens

    async def embed(self) -> Any:
        return (await self.vectors.embed("a river has two banks")).vector

    async def hear(self) -> Any:
        t = np.arange(16_000 * 4) / 16_000
        samples = 0.3 * np.sin(2 * np.pi * (300 + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
        payload = self.hears.payload()
        payload.file.write(samples.astype(np.float32).tobytes())
        hearing = self.hears.hear(payload, len(samples), HearOptions(language="en"))
        return [(one.text, one.tokens) async for news in hearing for one in news.pieces]

    async def speak(self) -> Any:
        given = {"seed": 5, "max_tokens": 140}
        client = SpeechClient(request_id=self.name())
        made = self.speaker.speak("The wheel turns.", "tara", given, client)
        return b"".join([samples.tobytes() async for samples in made.pieces()])

    async def see(self) -> Any:
        draw = np.random.default_rng(1)
        tile = draw.integers(0, 256, (seeing_chat.TILE, seeing_chat.TILE, 3), dtype=np.uint8)
        one, prompts = self.pictures.prepare(tile), self.pictures
        held = prompts.payloads.hold("", one.patches, prompts.levels)
        tokens = prompts.ids(PictureShape(0, 0, one.rows))
        at = 2 + tokens.index(seeing_chat.PLACE)
        source = held.part(0, len(one.patches))
        span = InputSpan(at, one.rows, "picture", one.digest, source, len(one.patches))
        try:
            out = await self.sees.generate([5, 6, *tokens, 7], GREEDY, inputs=[span])
        finally:
            held.close()
        return out.outputs[0].token_ids

    async def run(self) -> Any:
        found = await self.programs.run(self.programs.find("double"), {"x": np.ones(3, "f")})
        return [value.tolist() for value in found.values()]

    async def everything(self) -> list[Any]:
        """Two of each kind, at once; an error in place of its answer."""
        kinds = self.write, self.stream, self.embed, self.hear, self.speak, self.see, self.run
        asked = [kind() for kind in kinds for _ in range(2)]
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture
async def server(
    folders: dict[str, Path], supervision: Supervision, tmp_path: Path
) -> AsyncIterator[Server]:
    (tmp_path / "double.onnx").write_bytes(double("n"))
    chosen = [
        ModelChoice(EngineOptions(**{**SHARED, "model": str(folders[name])}), (name,))
        for name in KINDS
    ]
    group = await EngineGroup.start(chosen, supervision=supervision)
    programs = await ProgramEngine.start({"double": tmp_path / "double.onnx"}, lanes=1)
    yield Server(group, programs)
    await programs.close()
    await group.close()


@pytest.mark.parametrize("end", ["kill", "stop", "hang"])
async def test_each_request_has_one_answer(server: Server, end: str) -> None:
    alone = await server.everything()
    assert not [one for one in alone if isinstance(one, BaseException)], alone
    assert alone[0::2] == alone[1::2], "two of a kind are equal"
    group = server.group
    steps = {member: member.stats.step for member in group.members.values()}
    waiting = asyncio.ensure_future(server.everything())
    while any(member.stats.step == step for member, step in steps.items()):
        await asyncio.sleep(0.001)
        if waiting.done():
            break
    pid = group.first.engine_pid
    assert pid is not None
    if end == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        await stopped(group.first)  # type: ignore[arg-type]
        if end == "hang":
            age(group.first)  # type: ignore[arg-type]
        else:
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
    ended = await waiting
    assert len(ended) == len(alone)
    for got, due in zip(ended, alone, strict=True):
        if isinstance(got, BaseException):
            assert isinstance(got, HeadraceError), got
            assert isinstance(got, EngineDead), got
            assert end != "stop"
        else:
            assert got == due
    assert await server.everything() == alone
    assert (group.first.engine_pid == pid) == (end == "stop")
    for member in group.members.values():
        assert not member.wanted
        if isinstance(member, AsyncEngine):
            report = await member.inspect()
            assert (report.running, report.waiting, report.integrity) == (0, 0, "")
