"""`/v1/images/generations` and `headrace draw` by real processes: the engine's pictures, beside a
text, and typed answers to what cannot be drawn."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from processes import Running, headrace, serving

from headrace.base.denoising import Denoiser, NoiseSolver, PictureWish
from headrace.base.outputs import PictureOutput
from headrace.base.request import OutputDelta
from headrace.engine.clients.drawing import drawn
from headrace.loader.open import open_model
from headrace.media.png import png
from headrace.worker.solvers import Trajectory, normal
from tiny import dit, families
from tiny.kept import Kept

SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served") / "painter"
    return dit.make(made, ("EulerDiscreteScheduler", {}), in_channels=3)


@pytest.fixture(scope="module")
def server(folder: Path, kept: Kept) -> Iterator[Running]:
    chat = str(kept(families.make, "qwen2"))
    with serving(folder, "--quantise none", chat) as server:
        yield server


def ask(server: Running, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    given = {"model": "painter", "prompt": "three", **body}
    reply = httpx.post(f"{server.url}/v1/images/generations", json=given, timeout=60)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


def pixels(text: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(text))) as picture:
        return np.asarray(picture.convert("RGB"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (64, 3, 1), (40, 300, 3)])
def test_a_png_is_read_again_as_it_was(shape: tuple[int, ...]) -> None:
    shades = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    with Image.open(io.BytesIO(png(shades))) as picture:
        picture.load()
        assert picture.mode == ("RGB" if shape[2] == 3 else "L")
        assert np.array_equal(np.asarray(picture).reshape(shape), shades)


def test_partial_pictures_come_at_equal_distances() -> None:
    wish = PictureWish(0, 20, 1.0, 0, 3)
    assert [step for step in range(1, 21) if wish.reports(step)] == [5, 10, 15, 20]
    assert [step for step in range(1, 3) if PictureWish(0, 2, 1.0, 0, 3).reports(step)] == [1, 2]


@pytest.mark.slow
def test_the_official_client(server: Running) -> None:
    client = server.openai(timeout=60)
    given = {"model": "painter", "prompt": " Nought", "n": 3, "size": "8x8"}
    more = {"seed": 5, "steps": 6, "guidance": 2.0}
    first = client.images.generate(**given, response_format="b64_json", extra_body=more)
    again = client.images.generate(**given, extra_body=more)
    pictures = [one.b64_json for one in first.data or []]
    assert len(set(pictures)) == 3
    assert pictures == [one.b64_json for one in again.data or []]
    assert pixels(pictures[0] or "").shape == (8, 8, 3)
    alone = client.images.generate(**{**given, "n": 1, "prompt": "0"}, extra_body=more)
    assert (alone.data or [])[0].b64_json == pictures[0], "its own seed and number are all it has"
    assert first.usage is not None
    assert first.usage.output_tokens == 3 * 6 * 2 * 16
    with pytest.raises(openai.BadRequestError, match="no class 'ten'"):
        client.images.generate(**{**given, "prompt": "ten"})


@pytest.mark.slow
def test_a_stream_of_partial_pictures(server: Running) -> None:
    client = server.openai(timeout=60)
    given: dict[str, Any] = {"model": "painter", "prompt": "4"}
    more = {"seed": 5, "steps": 900}  # Of a quick picture a reader may get the last alone.
    events = list(client.images.generate(**given, stream=True, partial_images=2, extra_body=more))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    whole = ask(server, {**given, **more})
    assert events[-1].b64_json == whole["data"][0]["b64_json"]
    assert events[0].b64_json != events[1].b64_json != events[-1].b64_json
    assert whole["usage"]["denoising_steps"] == 900
    assert whole["usage"]["predicted_seconds"] > 0


@pytest.mark.slow
def test_a_seed_that_is_not_given_is_told(server: Running) -> None:
    first, second = ask(server, {"steps": 3}), ask(server, {"steps": 3})
    assert first["seed"] != second["seed"]
    again = ask(server, {"steps": 3, "seed": first["seed"]})
    assert again["data"] == first["data"] != second["data"]


@pytest.mark.slow
def test_beside_each_other_and_a_text(server: Running) -> None:
    """A text goes on between the steps of a long picture, with its own tokens."""
    names = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
    chat = next(name for name in names if name != "painter")

    def text(_: int) -> tuple[str, float]:
        asked = {"model": chat, "prompt": "the mill", "max_tokens": 8, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"], time.monotonic()

    bodies = [{"steps": steps, "seed": steps, "n": 2} for steps in (5, 900, 12)]
    alone = [ask(server, body)["data"] for body in bodies]
    wanted = text(0)[0]
    with ThreadPoolExecutor(8) as pool:
        pictures = [pool.submit(ask, server, body) for body in bodies]
        texts = [one for some in range(2) for one in pool.map(text, range(2))]
        running = not pictures[1].done()
        assert [one.result()["data"] for one in pictures] == alone
    assert {one for one, _ in texts} == {wanted}
    assert running, "the texts waited for the long picture"


@pytest.mark.slow
def test_a_reader_who_leaves_ends_the_work(server: Running) -> None:
    body = {"model": "painter", "prompt": "1", "steps": 1000, "n": 10}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=0.3)
    until = time.monotonic() + 10
    while "vllm:num_requests_running{" in (text := httpx.get(f"{server.url}/metrics").text):
        counts = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("vllm:num_requests_running{") and "painter" in line
        ]
        if counts and not any(counts):
            return
        assert time.monotonic() < until, "it goes on for nobody"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"steps": 0}, "steps", "allowed: from 1 to 1000"),
        ({"steps": 10_000}, "steps", "allowed: from 1 to 1000"),
        ({"steps": 2**80}, "steps", ""),
        ({"steps": 2.5}, "steps", ""),
        ({"prompt": "fourr"}, "prompt", "did you mean four?"),
        ({"prompt": "10"}, "prompt", "a number from 0 to 9"),
        ({"prompt": "-1"}, "prompt", "a number from 0 to 9"),
        ({"prompt": "٣"}, "prompt", "a number from 0 to 9"),
        ({"prompt": ""}, "prompt", "a number from 0 to 9"),
        ({"prompt": "x" * 2000}, "prompt", ""),
        ({"size": "9x9"}, "size", "pictures of 8x8 alone"),
        ({"size": "1024x1024"}, "size", "pictures of 8x8 alone"),
        ({"size": "8×8"}, "size", "pictures of 8x8 alone"),
        ({"n": 0}, "n", "allowed: from 1 to 10"),
        ({"n": 11}, "n", "allowed: from 1 to 10"),
        ({"guidance": -1.0}, "guidance", "from 0 to 100"),
        ({"guidance": 1e300}, "guidance", "from 0 to 100"),
        ({"response_format": "url"}, "response_format", ""),
        ({"partial_images": 2}, "partial_images", "needs stream"),
        ({"stream": True, "n": 2}, "n", "n must be 1"),
        ({"stream": True, "partial_images": 4}, "partial_images", "from 0 to 3"),
        ({"background": "transparent"}, "background", ""),
        ({"seed": -1}, "seed", ""),
        ({"colour": "red"}, "colour", ""),
    ],
)
def test_what_cannot_be_drawn(
    server: Running, body: dict[str, Any], param: str, words: str
) -> None:
    error = ask(server, body, 400)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.slow
def test_other_models_and_other_routes(server: Running) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {one["id"]: one.get("task") for one in listed}["painter"] == "drawing"
    other = next(one["id"] for one in listed if one["id"] != "painter")
    error = ask(server, {"model": other}, 400)["error"]
    assert (error["code"], error["param"]) == ("unsupported_model", "model")
    for path, asked in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "Hi"}),
        ("embeddings", {"input": "Hi"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
        ("recommend", {"candidates": {"a": [1]}}),
    ):
        reply = httpx.post(f"{server.url}/v1/{path}", json={"model": "painter", **asked})
        assert reply.status_code == 400, (path, reply.text)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "headrace:pictures_total" in metrics


@pytest.mark.slow
def test_the_command_writes_the_pictures_of_the_server(
    server: Running, folder: Path, tmp_path: Path
) -> None:
    wanted = ask(server, {"prompt": "7", "steps": 4, "seed": 3, "n": 2})["data"]
    flags = ["--steps", "4", "--seed", "3", "--n", "2", "--quantise", "none", "--out"]
    command = headrace("draw", str(folder), "seven", *flags, str(tmp_path / "seven.png"))
    subprocess.run(command, check=True, capture_output=True)
    for at, one in enumerate(wanted):
        made = (tmp_path / f"seven-{at + 1}.png").read_bytes()
        assert made == base64.b64decode(one["b64_json"])
    wrong = headrace("draw", str(folder), "ten", "--out", str(tmp_path / "ten.png"))
    ended = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "no class 'ten'" in ended.stderr
    assert "Traceback" not in ended.stderr
    lost = headrace("draw", str(folder), "7", "--out", str(tmp_path / "no" / "ten.png"))
    ended = subprocess.run(lost, capture_output=True, text=True, check=False)
    assert "no is no folder" in ended.stderr
    assert "seed" not in ended.stderr, "it is told before anything is drawn"


def test_the_first_noise_is_the_stated_generator_s(folder: Path) -> None:
    denoiser = open_model(str(folder)).arch.denoiser
    assert denoiser is not None
    bits = np.random.Philox(counter=0, key=(2 << 64) + 5)
    wanted = np.random.Generator(bits).standard_normal(SHAPE, np.float32)
    path = Trajectory(denoiser.solver, 4, lambda number: normal(5, 2, number, SHAPE))
    ratio = path.picture / wanted
    assert np.ptp(ratio) <= 1e-4 * ratio.max(), "scaled by the first noise level alone"
    assert ratio.flat[0] == pytest.approx(157.4, rel=1e-3)


@pytest.mark.slow
def test_refused_pictures_are_not_charged(folder: Path) -> None:
    with serving(folder, "--quantise none --max-sequences 1 --max-waiting 1") as server:
        assert ask(server, {"steps": 900, "n": 10}, 503)["error"]["code"] == "overloaded"
        line = server.await_line(r"exchange .*status=503.*completion_tokens=(\d+)", 5)
        assert line.group(1) == "0"


async def test_others_go_on_while_a_picture_of_noise_is_written() -> None:
    """Guidance and the first steps of Euler leave noise of black and white, which zlib's ninth
    level compresses for seconds."""
    denoiser = Denoiser(3, 512, 64, 10, 3, NoiseSolver("euler"))
    values = 157 * normal(1, 0, 0, (3, 512, 512))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def deltas() -> AsyncIterator[tuple[int, OutputDelta]]:
        output = PictureOutput(values.tobytes(), 1)
        yield 0, OutputDelta("one", 0, finish_reason="stop", output=output)

    ticking = asyncio.create_task(tick())
    begin = time.monotonic()
    [one] = [one async for one in drawn(denoiser, deltas())]
    assert ticks, "the loop was held"
    assert time.monotonic() - begin < 1.5
    ticking.cancel()
    with Image.open(io.BytesIO(one.png)) as picture:
        assert picture.size == (512, 512)


@pytest.mark.slow
def test_a_preempted_picture_sends_no_step_twice(folder: Path) -> None:
    flags = "--quantise none --policy priority --max-sequences 1"
    body = {"model": "painter", "prompt": "1", "steps": 1000, "stream": True, "partial_images": 3}
    with (
        serving(folder, flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/images/generations", json={**body, "priority": 90}) as reply,
    ):
        events = (json.loads(line[5:]) for line in reply.iter_lines() if line.startswith("data:"))
        first = next(events)
        ask(server, {"steps": 3, "priority": -90})
        rest = list(events)
        places = [one.get("partial_image_index") for one in (first, *rest)]
        told = client.get("/metrics").text
    counts = re.findall(r"^vllm:num_preemptions_total{.*} (\S+)$", told, re.MULTILINE)
    assert list(map(float, counts)) == [1.0]
    assert places == [*range(len(places) - 1), None]
    assert len(places) <= 4
