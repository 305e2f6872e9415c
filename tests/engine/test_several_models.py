"""Several models in one engine process: each answers as it does alone, whatever the others do."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from engine_fakes import FAKE, HOLD_START, OPTIONS, RAISE, continuation
from engine_waits import until

from headrace import LLM
from headrace.base.config import EngineOptions
from headrace.base.errors import DoesNotFit, EngineDead, EngineFault, InvalidRequest, Overloaded
from headrace.base.modelfiles import ModelFiles
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.several import ModelChoice
from headrace.base.spec import RequestSpec
from headrace.engine import messages
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.group import EngineGroup
from headrace.engine.clients.operations import Asleep
from headrace.engine.clients.supervision import Supervision
from headrace.engine.loop.several import Models
from headrace.engine.messages import Configure, WireFiles, WireModel
from headrace.loader import open_model
from headrace.obs.flight import FlightRecorder
from headrace.server.app import create_app
from headrace.server.attaching import attach
from headrace.server.residents import Residents
from headrace.server.service import Service
from tiny import bytewise
from tiny import encoder as encoders
from tiny.encoder import write_modules
from tiny.kept import Kept

PROMPTS = ["the water wheel turns", "a", "river " * 30, "what is a mill race?"]


@pytest.fixture(scope="module")
def folders(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of text and one of vectors."""
    folder = encoders.make(tmp_path_factory.mktemp("encoder"))
    vectors = write_modules(folder, "pooling_mode_mean_tokens", normalise=True)
    return [kept(bytewise.make), kept(bytewise.make, layers=3), vectors]


def choices(folders: list[Path], **more: Any) -> list[ModelChoice]:
    names = [("one", "uno"), ("two",), ("vectors",)]
    return [
        ModelChoice(EngineOptions(**{**OPTIONS, "model": str(folder), **more}), name)
        for folder, name in zip(folders, names, strict=False)
    ]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[Any]:
    """The answers of engines of their own: tokens of the models of text, and vectors."""
    found: list[Any] = []
    for folder in folders[:2]:
        with LLM(**{**OPTIONS, "model": str(folder)}) as llm:
            answers = llm.generate(PROMPTS, greedy(30))
            found.append([answer.outputs[0].token_ids for answer in answers])
    with LLM(**{**OPTIONS, "model": str(folders[2])}) as llm:
        found.append([output.vector for output in llm.embed(PROMPTS)])
    return found


@pytest.fixture
async def group(folders: list[Path], supervision: Supervision) -> AsyncIterator[EngineGroup]:
    group = await EngineGroup.start(choices(folders), supervision=supervision)
    yield group
    await group.close()


@pytest.fixture
async def fakes(
    folders: list[Path], supervision: Supervision, notes: Path
) -> AsyncIterator[EngineGroup]:
    chosen = choices(folders[:2])
    group = await EngineGroup.start(chosen, supervision=supervision, worker=FAKE)
    yield group
    await group.close()


async def tokens(engine: AsyncEngine, prompt: str) -> list[int]:
    return (await engine.generate(prompt, greedy(30))).outputs[0].token_ids


async def everything(group: EngineGroup) -> list[Any]:
    """The answers of all models, at once."""
    text = [group.members[0], group.members[1]]
    made = await asyncio.gather(
        *(tokens(engine, prompt) for engine in text for prompt in PROMPTS),
        *(group.members[2].embed(prompt) for prompt in PROMPTS),
    )
    count = len(PROMPTS)
    vectors = [one.vector for one in made[2 * count :]]
    return [made[:count], made[count : 2 * count], vectors]


@pytest.mark.parametrize("depth", [1, 2])
async def test_answers_are_those_of_engines_of_their_own(
    folders: list[Path], alone: list[Any], supervision: Supervision, depth: int
) -> None:
    group = await EngineGroup.start(choices(folders, depth=depth), supervision=supervision)
    try:
        for _ in range(3):
            assert await everything(group) == alone
        for member in group.members.values():
            report = await member.inspect()
            assert (report.running, report.waiting, report.integrity) == (0, 0, "")
    finally:
        await group.close()


async def test_the_memory_is_planned_once(group: EngineGroup) -> None:
    decided = [
        {one.name: one.value for one in member.decisions} for member in group.members.values()
    ]
    assert [one["kv_memory"] for one in decided[:2]] == ["2.0 MiB", "2.0 MiB"]
    assert len({member.engine_pid for member in group.members.values()}) == 1


async def test_the_rule_by_which_kv_is_divided_is_said(
    folders: list[Path], supervision: Supervision
) -> None:
    chosen = choices(folders[:2], kv_memory="auto")
    group = await EngineGroup.start(chosen, supervision=supervision, worker=FAKE)
    await group.close()
    assert len(group.shares) == 2
    assert all("full context" in line or "1/2 of 12.5%" in line for line in group.shares)


async def test_one_that_does_not_fit_is_refused_with_what_lacks(
    folders: list[Path], supervision: Supervision
) -> None:
    chosen = choices(folders[:2])
    chosen[1].options.kv_memory = "100TiB"
    with pytest.raises(DoesNotFit, match="beside the server's other models"):
        await EngineGroup.start(chosen, supervision=supervision)


async def test_a_killed_engine_comes_back_with_all_models(
    group: EngineGroup, alone: list[Any]
) -> None:
    """Each request has one answer: an error if part of it was seen, else that of the next
    engine."""
    seen = [group.members[model].submit("a", greedy(400)) for model in (0, 1)]
    for stream in seen:
        await anext(stream)
        assert stream.show()
    waiting = asyncio.ensure_future(everything(group))
    for _ in range(10):  # Until all are sent: what is sent to a dead engine is refused.
        await asyncio.sleep(0)
    pid = group.first.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for stream in seen:
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
    assert await waiting == alone
    assert group.first.engine_pid != pid
    assert await everything(group) == alone
    for member in group.members.values():
        assert member.health().restarts == 1


async def test_an_error_of_one_model_is_not_the_others(fakes: EngineGroup) -> None:
    one, two = fakes.members.values()
    good = asyncio.ensure_future(one.generate([65, 66], greedy(50)))
    with pytest.raises(EngineFault, match="the fake raises"):
        await two.generate([RAISE], greedy(5))
    assert (await good).outputs[0].token_ids == continuation([65, 66], 50)


async def test_all_models_sleep_and_wake(group: EngineGroup, alone: list[Any]) -> None:
    assert await everything(group) == alone
    facts = await group.operations.sleep(1)
    assert 4_000_000 < facts["kv_bytes"] < 4 * 2**20
    for member in group.members.values():
        assert not member.health().ready
        with pytest.raises(Overloaded):
            member.submit("a", greedy(2))
    await group.operations.wake()
    assert await everything(group) == alone
    await group.operations.sleep(2)
    await until(lambda: group.first.engine_pid is None, "the process has ended")
    await group.operations.wake()
    assert await everything(group) == alone


async def test_prefixes_are_forgotten_by_all(group: EngineGroup) -> None:
    for model in (0, 1):
        await tokens(group.members[model], PROMPTS[2])
    facts = await group.operations.reset_prefix_cache()
    assert facts["blocks"] >= 2 * (len(PROMPTS[2]) // 16)


async def test_closing_ends_what_is_in_work(fakes: EngineGroup) -> None:
    streams = [member.submit([65], greedy(300)) for member in fakes.members.values()]
    await fakes.close()
    for stream in streams:
        with suppress(EngineDead):
            reasons = [delta.finish_reason async for delta in stream]
            assert reasons[-1] in ("abort", "length")
    assert not any(member.in_work() for member in fakes.members.values())


def three(folders: list[Path]) -> ModelChoice:
    return ModelChoice(EngineOptions(**{**OPTIONS, "model": str(folders[1])}), ("three",))


async def test_no_model_is_loaded_while_the_engine_sleeps(
    fakes: EngineGroup, folders: list[Path], notes: Path
) -> None:
    """Questions that nobody can answer any more end."""
    await fakes.operations.sleep(1)
    with pytest.raises(Asleep):
        await fakes.load(three(folders))
    await fakes.operations.wake()
    (notes / HOLD_START).touch()
    loading = asyncio.ensure_future(fakes.load(three(folders)))
    await until(lambda: fakes._asked, "the engine process was asked")
    await fakes.operations.sleep(2)
    with pytest.raises(EngineDead):
        await loading
    (notes / HOLD_START).unlink()
    await fakes.unload(1)
    assert fakes.operations.asleep == 2, "what goes moves nothing of the others"
    await fakes.operations.wake()
    assert list(fakes.members) == [0]
    (notes / HOLD_START).touch()
    loading = asyncio.ensure_future(fakes.load(three(folders)))
    await until(lambda: fakes._asked, "the engine process was asked")
    await fakes.close()
    with pytest.raises(EngineDead):
        await loading


async def test_a_model_may_go_while_the_engine_comes_back(
    folders: list[Path], supervision: Supervision, notes: Path
) -> None:
    chosen = [*choices(folders[:2]), three(folders)]
    group = await EngineGroup.start(chosen, supervision=supervision, worker=FAKE)
    try:
        (notes / HOLD_START).touch()
        first = group.first.engine_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: group.first.engine_pid not in (first, None), "the next one starts")
        # It is told of all three, and one of them goes before it is ready.
        await until(lambda: group._supervisor._configured, "configured")
        leaving = asyncio.ensure_future(group.unload(1))
        await until(lambda: 1 not in group.members, "it has gone")
        (notes / HOLD_START).unlink()
        await leaving
        assert [member.metrics.up for member in group.members.values()] == [1.0, 1.0]
    finally:
        await group.close()


async def test_a_model_begins_without_the_restarts_before_it(
    fakes: EngineGroup, folders: list[Path]
) -> None:
    first = fakes.first.engine_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: fakes.first.health().restarts and fakes.first.health().ready, "restarted")
    number = await fakes.load(three(folders))
    assert fakes.members[number]._restarts == 1


@pytest.mark.parametrize("place", ["finish", "open"])
def test_a_fault_of_a_new_model_is_not_the_others(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    def faulty(*given: Any) -> Any:
        raise ValueError("it is broken")
        yield

    def opened(files: WireFiles, options: EngineOptions) -> ModelFiles:
        if place == "open" and opening:
            raise ValueError("it is broken")
        return files.open()

    opening: list[int] = []
    one, two = choices(folders[:2])
    wires = [WireFiles.of(open_model(choice.options.model)) for choice in (one, two)]
    models = Models.start(
        Configure(one.options, wires[0], str(tmp_path)),
        opened,
        worker=FAKE,
        flight=FlightRecorder(records=8),
        on_phase=lambda name, seconds: None,
    )
    try:
        opening.append(1)
        if place == "finish":
            monkeypatch.setattr("headrace.engine.loop.several.finish", faulty)
        told = models.load(WireModel(1, two.options, wires[1]), opened)
        done = [] if told is None else [told]
        while not done:
            done = models.turn()
        assert done[0].error is not None
        assert "it is broken" in done[0].error.message
        assert list(models.built) == list(models.core.lanes) == [0]
        assert not models.busy
        assert not models._loading
        opening.clear()
        monkeypatch.undo()
        assert models.load(WireModel(2, two.options, wires[1]), opened) is None
        asked = models.operate(messages.Operate(1, "start_profile", ""))
        assert asked.error is not None, "a model is on its way"
        while not (done := models.turn()):
            pass
        assert done[0].error is None
        assert models.unload(2).error is None
        assert models.operate(messages.Operate(2, "start_profile", "")).error is None
        told = models.load(WireModel(3, two.options, wires[1]), opened)
        assert told is not None
        assert told.error is not None
        assert "profile" in told.error.message
    finally:
        models.close()
        gc.unfreeze()  # What the models froze is this process's.


def test_a_sound_that_needs_no_step_is_not_waited_for(folders: list[Path], tmp_path: Path) -> None:
    """Hours of it are cut, or found silent, piece by piece."""
    (one, _) = choices(folders[:2])
    models = Models.start(
        Configure(one.options, WireFiles.of(open_model(one.options.model)), str(tmp_path)),
        lambda files, options: files.open(),
        worker=FAKE,
        flight=FlightRecorder(records=8),
        on_phase=lambda name, seconds: None,
    )
    try:
        assert not models.busy
        models.desks[0] = desk = cast(Any, SimpleNamespace(busy=True))
        assert models.busy
        models.core.add(Request("a", [65], RequestSpec(greedy(2), 0)))
        assert not models.busy, "the turn after the step is its"
        desk.busy = False
        models.core.abort("a")
        models.core.turn()
        assert not models.busy
    finally:
        models.close()


@pytest.fixture
async def served(
    fakes: EngineGroup, folders: list[Path], notes: Path
) -> AsyncIterator[tuple[Service, Residents, httpx.AsyncClient]]:
    """The server of both models, the second of which rests."""
    app = create_app()
    service = app.state.service
    attach(service, fakes)
    residents = service.residents
    assert isinstance(residents, Residents)
    await residents.unload("two", rest=True)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=300
    ) as client:
        yield service, residents, client


async def test_a_wait_that_ends_early_leaves_no_model_unreachable(
    served: tuple[Service, Residents, httpx.AsyncClient], fakes: EngineGroup, notes: Path
) -> None:
    service, residents, _ = served
    (notes / HOLD_START).touch()
    waiting = asyncio.ensure_future(residents.wanted("two"))
    await until(lambda: fakes._asked, "the engine process was asked")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (notes / HOLD_START).unlink()
    await until(lambda: not residents.resting, "it is loaded")
    two = service.choose("two").engine
    assert (await two.generate([65, 66], greedy(5))).outputs[0].token_ids == continuation(
        [65, 66], 5
    )


async def test_what_only_reads_loads_no_resting_model(
    served: tuple[Service, Residents, httpx.AsyncClient],
) -> None:
    _, residents, client = served
    for path in ("/v1/models/two", "/v2/models/two", "/v2/models/two/ready"):
        assert (await client.get(path)).status_code == 200, path
    assert (await client.post("/api/show", json={"model": "two"})).status_code == 200
    stop = {"model": "two", "keep_alive": 0}
    for path in ("/api/generate", "/api/chat"):
        reply = await client.post(path, json=stop)
        assert reply.json()["done_reason"] == "unload"
    assert [one.names for one in residents.resting] == [["two"]]
    body = {"model": "two", "prompt": "a", "max_tokens": 3}
    reply = await client.post("/invocations", json=body)
    assert (reply.status_code, reply.json()["model"]) == (200, "two")
    assert not residents.resting


async def test_a_resting_model_that_is_unloaded_is_gone(
    served: tuple[Service, Residents, httpx.AsyncClient],
) -> None:
    _, residents, _ = served
    (two,) = residents.resting
    await residents.unload("two")
    assert not residents.resting
    assert two not in residents._chosen


async def test_a_rest_counts_from_the_last_request(
    served: tuple[Service, Residents, httpx.AsyncClient],
) -> None:
    """Requests of every interface count; an operator who was faster does not end the habit."""
    service, residents, client = served
    await residents.wanted("two")
    two = service.choose("two")
    residents.keep(two, 1000.0)
    residents._used[two] -= 900.0
    assert residents.expires_in(two) < 101
    body = {"model": "two", "prompt": "a", "max_tokens": 3}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert residents.expires_in(two) > 500
    async with residents._turn:
        unloading = asyncio.ensure_future(residents.unload("two"))
        await asyncio.sleep(0)
        residents.keep(two, 0)
        watching = asyncio.ensure_future(residents.watch())
        await until(lambda: len(residents._turn._waiters or ()) == 2, "both wait")
    await unloading
    residents._keep[service] = 1e9  # Looked at in each round.
    residents._used[service] = 0.0
    residents._numbers.pop(service)
    await until(lambda: watching.done() or residents._used[service], "it looks again")
    assert not watching.done()
    watching.cancel()


async def test_adapters_of_a_further_model_are_its_own(
    served: tuple[Service, Residents, httpx.AsyncClient], fakes: EngineGroup
) -> None:
    service, residents, client = served
    await residents.wanted("two")
    body = {"lora_name": "river", "lora_path": "/nowhere", "model": "nobody"}
    reply = await client.post("/v1/load_lora_adapter", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
    two = service.choose("two")
    number = residents.number(two)
    book = fakes.members[number].adapters
    book.add(book.new("river", "/nowhere", "two"))
    assert service.choose("river") is two
    refused = await client.post("/v1/load_lora_adapter", json={**body, "model": "one"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    with pytest.raises(InvalidRequest, match="adapter"):
        await residents.load(f"{two.engine.files.path}:name=river")
    reply = await client.post("/v1/unload_lora_adapter", json={"lora_name": "river"})
    assert reply.status_code == 200, reply.text
    assert service.choose("river") is service
