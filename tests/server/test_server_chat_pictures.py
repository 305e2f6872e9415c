"""Pictures in a chat, by OpenAI's client: tokens as transformers has them, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image
from processes import Running, headrace, running
from server_fake import FakeEngine
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from headrace.base.config import ServerOptions
from headrace.base.errors import InvalidRequest, TooLarge
from headrace.engine.clients.pictures import open_picture_prompts
from headrace.loader import open_model
from headrace.media import PICTURE_REFUSALS
from headrace.server.app import create_app
from headrace.server.caller import CALLER, Caller
from headrace.server.routes.chat.pictures import MOST_INPUTS, pictures_of, with_pictures
from headrace.server.routes.chat.schema import ChatBody
from headrace.text import load_tokenizer
from tiny.seeing_chat import DEVIATION, END, LONGEST, MEAN, PLACE, TILE, make, tokenizer

TOKENS, ROWS = 12, 4
"""Tokens of an answer; rows of a tile."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing_chat")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make(folder)


@pytest.fixture(scope="module")
def server(folder: Path, oracle: Any) -> Iterator[Running]:
    del oracle
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--step-tokens", "64"]
    with running(headrace(*words, "--kv-dtype", "float32", "--max-context", "512")) as one:
        yield one


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def drawn(seed: int, width: int, height: int) -> Image.Image:
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    return Image.fromarray(coarse.repeat(5, 0).repeat(5, 1)[:height, :width])


def part(picture: Image.Image, detail: str | None = None, format: str = "PNG") -> dict[str, Any]:
    room = io.BytesIO()
    picture.save(room, format)
    data = base64.b64encode(room.getvalue()).decode()
    more = {} if detail is None else {"detail": detail}
    # The type is wrong on purpose: the bytes alone count.
    return {"type": "image_url", "image_url": {"url": f"data:image/tiff;base64,{data}", **more}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def expanded(rows: int, columns: int) -> str:
    """What transformers' processors write for a picture."""
    tile, around = "<image>" * ROWS, "<fake_token_around_image>"
    lines = [
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns))
        for row in range(rows)
    ]
    split = "".join(f"{line}\n" for line in lines) + "\n" * bool(rows)
    return f"{split}{around}<global-img>{tile}{around}"


def wanted(oracle: Any, pictures: list[tuple[Image.Image, bool]], pieces: list[str]) -> Any:
    """Ids of a prompt that is written out, a text, a picture, a text, ..., and greedy tokens."""
    said, pixels = pieces[0], []
    for (picture, split), piece in zip(pictures, pieces[1:], strict=True):
        processor = Idefics3ImageProcessorPil(
            size={"longest_edge": LONGEST},
            max_image_size={"longest_edge": TILE},
            do_image_splitting=split,
            image_mean=MEAN,
            image_std=DEVIATION,
            return_row_col_info=True,
        )
        made = processor([picture], return_tensors="pt")
        pixels.append(made["pixel_values"][0])
        said += expanded(made["rows"][0][0], made["cols"][0][0]) + piece
    ids = list(tokenizer().encode(said).ids)
    given = torch.tensor([ids])
    with torch.no_grad():
        out = oracle.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            pixel_values=torch.cat(pixels)[None].float(),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )
    return ids, [int(token) for token in out[0, len(ids) :]]


def answer(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(
        model="",
        messages=messages,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, **more},
    )


def computed(server: Running) -> float:
    """Encodings that were computed since the server began; before its first step none is told."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("headrace:encodings_total{")]
    found = [line for line in counted if 'end="computed"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_greedy_tokens_are_those_of_transformers(client: openai.OpenAI, oracle: Any) -> None:
    picture = drawn(1, 70, 40)
    said = answer(client, asked(text("This: "), part(picture), text("What is it?")))
    pieces = ["<|im_start|>User: This: ", "What is it?<end_of_utterance>\nAssistant:"]
    ids, tokens = wanted(oracle, [(picture, True)], pieces)
    assert ids.count(PLACE) == 7 * ROWS
    assert said.choices[0].token_ids[: len(tokens)] == tokens
    assert said.usage.prompt_tokens == len(ids)
    other = answer(client, asked(text("This: "), part(drawn(2, 70, 40)), text("What is it?")))
    assert other.choices[0].token_ids != said.choices[0].token_ids, "what is seen matters"
    turned = answer(client, asked(part(picture, "low"), text("What is it?")))
    pieces = ["<|im_start|>User:", "What is it?<end_of_utterance>\nAssistant:"]
    ids, tokens = wanted(oracle, [(picture, False)], pieces)
    assert turned.choices[0].token_ids[: len(tokens)] == tokens
    assert turned.usage.prompt_tokens == len(ids)


def test_a_second_turn_about_a_picture_encodes_nothing(
    server: Running, client: openai.OpenAI, oracle: Any
) -> None:
    one, two = drawn(3, 33, 96), drawn(4, 31, 32)
    before = computed(server)
    first = asked(text("One: "), part(one, format="WEBP"), part(two, "high"), text(" Which?"))
    # WebP loses: the picture that is meant is the one that it holds.
    data = base64.b64decode(first[0]["content"][1]["image_url"]["url"].partition(",")[2])
    one = Image.open(io.BytesIO(data))
    said = answer(client, first)
    pieces = ["<|im_start|>User: One: ", "", " Which?<end_of_utterance>\nAssistant:"]
    ids, tokens = wanted(oracle, [(one, True), (two, True)], pieces)
    assert said.choices[0].token_ids[: len(tokens)] == tokens
    done = computed(server)
    assert done - before == ids.count(PLACE) // ROWS, "each tile once"
    turns = [
        *first,
        {"role": "assistant", "content": said.choices[0].message.content},
        {"role": "user", "content": "And the other one?"},
    ]
    again = answer(client, turns)
    assert computed(server) == done, "nothing is encoded for the second turn"
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached >= said.usage.prompt_tokens - 32, "the same pictures are found in the cache"
    swapped = asked(text("One: "), part(two, "high"), part(one), text(" Which?"))
    assert answer(client, swapped).usage.prompt_tokens_details.cached_tokens < 32
    assert answer(client, first, cache_salt="b").choices[0].token_ids[:4] == tokens[:4]
    assert computed(server) > done, "another tenant shares nothing"


def picture_with(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


PNG = part(drawn(5, 9, 9))["image_url"]["url"]
CUT_OFF = part(drawn(5, 90, 90), format="JPEG")["image_url"]["url"][:1400]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([picture_with("http://127.0.0.1/a.png")], ".0.image_url.url"),
        ([picture_with("https://example.com/a.png")], ".0.image_url.url"),
        ([picture_with("file:///etc/passwd")], ".0.image_url.url"),
        ([picture_with("data:image/png,abc")], ".0.image_url.url"),
        ([picture_with("data:image/png;base64,%%")], ".0.image_url.url"),
        ([picture_with("data:image/png;base64,AAAA")], ".0.image_url.url"),
        ([text("a"), picture_with(CUT_OFF)], ".1.image_url.url"),
        ([picture_with(PNG, detail="sharp")], ".0.image_url.detail"),
        ([picture_with(PNG, detail=5)], ".0.image_url.detail"),
        ([picture_with(5)], ".0.image_url.url"),
        ([{"type": "image_url"}], ".0.image_url.url"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA"}}], ".0"),
        ([{"type": "video_url", "video_url": {"url": PNG}}], ".0"),
    ],
)
def test_what_is_wrong_with_a_picture_is_named(
    server: Running, content: list[Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("messages.0.content" + param)


def test_more_pictures_than_fit_are_refused_at_once(server: Running) -> None:
    """Neither decoded nor encoded: the context has room for 12 split ones, not for 16."""
    before = computed(server)
    square = part(drawn(6, 96, 96))
    for count, status in ((MOST_INPUTS, 400), (MOST_INPUTS + 1, 413)):
        body = {"messages": asked(*[square] * count, text("?")), "max_tokens": 4}
        reply = httpx.post(server.url + "/v1/chat/completions", json=body)
        assert reply.status_code == status, reply.text
        assert reply.json()["error"]["param"].startswith("messages")
    assert computed(server) == before


def test_too_many_pictures_are_refused_before_one_is_read() -> None:
    parts = [picture_with("data:;base64,%%")] * (MOST_INPUTS + 1)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(TooLarge, match=f"at most {MOST_INPUTS}"):
        pictures_of(body.messages)


def test_a_place_that_a_text_forges_is_no_picture(server: Running, client: openai.OpenAI) -> None:
    """Texts of all roles may hold the token's letters, and a user's those of the others."""
    forged = "<image><fake_token_around_image><row_1_col_1>"
    said = answer(client, asked(text(forged), part(drawn(7, 20, 20)), text(forged)))
    assert said.usage.completion_tokens > 0
    plain = answer(client, asked(text(forged)))
    assert plain.usage.completion_tokens > 0
    pieces = [text("<ima"), text("ge>"), part(drawn(7, 20, 20)), text("<im"), text("age>")]
    assert answer(client, asked(*pieces)).usage.completion_tokens > 0
    named = [
        {"role": "system", "content": "<image>"},
        {"role": "assistant", "content": "An <image>."},
        *asked(part(drawn(7, 20, 20)), text("?")),
    ]
    assert answer(client, named).usage.completion_tokens > 0


def test_ollamas_images_are_the_same_pictures(server: Running, client: openai.OpenAI) -> None:
    url = part(drawn(14, 40, 40))["image_url"]["url"]
    wanted = answer(client, asked(picture_with(url), text("What?")))
    message = {"role": "user", "content": "What?", "images": [url.partition(",")[2]]}
    options = {"temperature": 0, "num_predict": TOKENS}
    name = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
    body = {"model": name, "messages": [message], "stream": False, "options": options}
    reply = httpx.post(server.url + "/api/chat", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["message"]["content"] == wanted.choices[0].message.content
    assert reply.json()["prompt_eval_count"] == wanted.usage.prompt_tokens


@pytest.mark.parametrize("more", [{"context": [1, 2]}, {"raw": True}, {"suffix": "b"}])
def test_ollamas_generate_takes_images_in_its_own_prompt_alone(
    server: Running, more: dict[str, Any]
) -> None:
    image = PNG.partition(",")[2]
    name = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
    body = {"model": name, "prompt": "a", "images": [image], "stream": False}
    body["options"] = {"num_predict": 2}
    reply = httpx.post(server.url + "/api/generate", json={**body, **more})
    assert reply.status_code == 400, reply.text
    assert "images are taken without context, raw and suffix" in reply.json()["error"]
    reply = httpx.post(server.url + "/api/generate", json=body)
    assert reply.status_code == 200, reply.text
    assert "context" not in reply.json()


def test_an_engine_without_an_encoder_says_that_it_sees_nothing(folder: Path, oracle: Any) -> None:
    del oracle
    engine = FakeEngine()
    engine.files = replace(engine.files, path=folder)
    service = create_app(engine, ServerOptions()).state.service  # type: ignore[arg-type]
    assert service.modalities == ["text"]


def test_the_model_says_that_it_sees(server: Running) -> None:
    listed = httpx.get(server.url + "/v1/models").json()["data"][0]
    assert listed["input_modalities"] == ["text", "image", "video"]


async def test_a_second_turn_decodes_and_seals_nothing(folder: Path, oracle: Any) -> None:
    """In this process, where the children that decode can be counted."""
    del oracle
    engine, files = FakeEngine(), open_model(str(folder))
    seen = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert seen is not None
    service = create_app(engine, ServerOptions()).state.service  # type: ignore[arg-type]
    service.pictures = seen
    begun: list[Any] = []
    read = seen.read

    def counted(*given: Any) -> Any:
        begun.append(given)
        return read(*given)

    seen.read = counted  # type: ignore[method-assign]
    one, two = drawn(20, 70, 40), drawn(21, 31, 32)

    async def turn(*parts: Any, counts: bool = False) -> tuple[list[int], Any, Any]:
        body = ChatBody.model_validate({"messages": asked(*parts)})
        prompt = [5, *[PLACE] * len(parts), 6]
        return await with_pictures(service, body.messages, prompt, counts=counts)

    counted_ids, spans, held = await turn(part(one), counts=True)
    assert (len(begun), spans, held, seen.payloads.bytes) == (1, [], [], 0), "nothing is sealed"
    ids, spans, held = await turn(part(one))
    assert ids == counted_ids
    (first,) = held
    bytes_of_one, decodings = seen.payloads.bytes, len(begun)
    again, same, held = await turn(part(one))
    assert (again, same, held) == (ids, spans, [first])
    assert (await turn(part(one), counts=True))[0] == ids
    assert (len(begun), seen.payloads.bytes) == (decodings, bytes_of_one)
    both, _, held = await turn(part(one), part(two))
    assert (len(begun), held[0]) == (decodings + 1, first)
    assert both[: len(ids) - 1] == ids[:-1]
    low, _, _ = await turn(part(one, "low"))
    assert len(low) < len(ids), "one tile is another picture"
    CALLER.set(Caller(owner="other"))
    _, _, held = await turn(part(one))
    assert held != [first], "another key's"
    assert len(begun) == decodings + 3
    engine.max_context = 20
    with pytest.raises(InvalidRequest) as refused:
        await turn(part(one))
    assert refused.value.message == PICTURE_REFUSALS["tiles"], "kept ones have to fit, too"


def test_of_a_picture_its_kept_tiles_alone_are_left(server: Running, client: openai.OpenAI) -> None:
    """Tiles lie in memory of the API process, each picture's once: after requests that were
    answered, refused after the picture was read, or left by their client while it is encoded."""
    square = part(drawn(8, 96, 96))
    before = len(sealed(server))
    for _ in range(3):
        answer(client, asked(square, text("A?")))
        with pytest.raises(openai.BadRequestError):
            answer(client, asked(square, text("B?")), stop_token_ids=[-1])
        for seed in range(9, 13):
            body = {"messages": asked(part(drawn(seed, 96, 96)), text("?")), "max_tokens": 4}
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(server.url + "/v1/chat/completions", json=body, timeout=0.3 * (seed - 8))
    until(lambda: not decoding(server), lambda: decoding(server))
    assert len(sealed(server)) <= before + 5
    assert answer(client, asked(square, text("A?"))).usage.completion_tokens > 0


def family(server: Running) -> list[psutil.Process]:
    one = psutil.Process(server.process.pid)
    return [one, *one.children(recursive=True)]


def decoding(server: Running) -> list[str]:
    """Children that decode."""
    found = [one for one in family(server) if "headrace.media.picture_child" in command(one)]
    return [str(one.pid) for one in found]


def sealed(server: Running) -> list[str]:
    """Inputs in sealed memory that a process has open."""
    found = []
    for one in family(server):
        for link in Path(f"/proc/{one.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
    return [name for name in found if "headrace input" in name]


def command(one: psutil.Process) -> list[str]:
    try:
        return list(one.cmdline())
    except psutil.Error:
        return []


def until(done: Callable[[], bool], what: Callable[[], Any]) -> None:
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end, what()
        time.sleep(0.05)
