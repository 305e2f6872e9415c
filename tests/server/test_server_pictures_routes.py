"""Pictures by Anthropic's, OpenAI's and Ollama's clients on all routes: the same answer and usage,
and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image
from processes import Running, headrace, running

from tiny.seeing_chat import make

TOKENS = 12
"""Tokens of an answer."""
ASK = "What is it?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("seeing_routes")
    make(folder)
    files = tmp_path_factory.mktemp("files")
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--step-tokens", "64"]
    words += ["--files", str(files), "--served-name", "eye"]
    with running(headrace(*words, "--kv-dtype", "float32", "--max-context", "512")) as one:
        yield one


def drawn(seed: int, width: int = 70, height: int = 40) -> bytes:
    """A PNG of coloured squares."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    room = io.BytesIO()
    Image.fromarray(coarse.repeat(5, 0).repeat(5, 1)[:height, :width]).save(room, "PNG")
    return room.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def chat(server: Running, data: bytes, detail: str = "auto", ask: str = ASK) -> Any:
    """The answer of OpenAI's chat, which other tests hold to transformers."""
    picture = {"type": "image_url", "image_url": {"url": url_of(data), "detail": detail}}
    content: Any = [picture, {"type": "text", "text": ask}]
    return server.openai().chat.completions.create(
        model="eye", messages=[{"role": "user", "content": content}], max_tokens=TOKENS,
        temperature=0,
    )  # fmt: skip


def image(data: bytes) -> Any:
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64_of(data)}
    return {"type": "image", "source": source}


def anthropic_asked(data: bytes, **more: Any) -> dict[str, Any]:
    content = [image(data) | more, {"type": "text", "text": ASK}]
    return {"model": "eye", "messages": [{"role": "user", "content": content}]}


def test_anthropics_images_are_the_same_pictures(server: Running) -> None:
    """Their media type is wrong: the bytes alone count."""
    data, client = drawn(1), server.anthropic()
    wanted = chat(server, data)
    given: Any = anthropic_asked(data)
    sampled: Any = {"max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    said = client.messages.create(**given, **sampled)
    assert said.content[0].text == wanted.choices[0].message.content
    usage = said.usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert prompt == wanted.usage.prompt_tokens
    assert client.messages.count_tokens(**given).input_tokens == prompt
    with client.messages.stream(**given, **sampled) as stream:
        assert "".join(stream.text_stream) == wanted.choices[0].message.content


def test_a_mark_after_a_picture_retains_it(server: Running) -> None:
    data = drawn(2, 60, 60)
    given: Any = anthropic_asked(data, cache_control={"type": "ephemeral"})
    said = server.anthropic().messages.create(**given, max_tokens=2)
    wanted = chat(server, data).usage.prompt_tokens
    usage = said.usage
    created, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    assert usage.input_tokens + created + read == wanted
    assert 0 < usage.input_tokens < 30, "what follows the picture"
    assert created > wanted - 30


def test_texts_and_pictures_of_a_message_keep_their_order(server: Running) -> None:
    one, two = drawn(3), drawn(4)
    says = [{"type": "text", "text": text} for text in ("First", "and", "then", "ask")]
    content: Any = [says[0], image(one), says[1], says[2], image(two), says[3]]
    counted = server.anthropic().messages.count_tokens(
        model="eye", messages=[{"role": "user", "content": content}]
    )
    parts: Any = [
        {"type": "text", "text": "First"},
        {"type": "image_url", "image_url": {"url": url_of(one)}},
        {"type": "text", "text": "and\n\nthen"},
        {"type": "image_url", "image_url": {"url": url_of(two)}},
        {"type": "text", "text": "ask"},
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    tokens = httpx.post(server.url + "/tokenize", json=body).json()
    assert counted.input_tokens == tokens["count"]


def test_responses_take_pictures_and_remember_them(server: Running) -> None:
    data, client = drawn(5), server.openai()
    for detail in ("auto", "low", "high"):
        wanted = chat(server, data, detail)
        content: Any = [
            {"type": "input_image", "image_url": url_of(data), "detail": detail},
            {"type": "input_text", "text": ASK},
        ]
        asked: Any = [{"role": "user", "content": content}]
        said = client.responses.create(
            model="eye", input=asked, max_output_tokens=TOKENS, temperature=0
        )
        assert said.output_text == wanted.choices[0].message.content
        assert said.usage is not None
        assert said.usage.input_tokens == wanted.usage.prompt_tokens
        counted = client.responses.input_tokens.count(model="eye", input=asked)
        assert counted.input_tokens == wanted.usage.prompt_tokens
    again = client.responses.create(
        model="eye", input="And now?", previous_response_id=said.id, max_output_tokens=2
    )
    assert again.usage is not None
    assert again.usage.input_tokens > said.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0
    items = client.responses.input_items.list(said.id).data
    assert items[0].content[0].image_url == url_of(data)  # type: ignore[union-attr]


def test_a_picture_is_named_by_the_id_of_its_file(server: Running) -> None:
    data, client = drawn(6), server.openai()
    wanted = chat(server, data).choices[0].message.content
    kept = client.files.create(file=("a.png", data), purpose="vision")
    assert kept.purpose == "vision"

    def ask(file_id: str) -> Any:
        part = {"type": "input_image", "file_id": file_id, "detail": "auto"}
        content: Any = [part, {"type": "input_text", "text": ASK}]
        return client.responses.create(
            model="eye", input=[{"role": "user", "content": content}],
            max_output_tokens=TOKENS, temperature=0,
        )  # fmt: skip

    assert ask(kept.id).output_text == wanted
    assert ask(kept.id).output_text == wanted, "kept, and the same"
    text = client.files.create(file=("a.txt", b"no picture"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="not a picture") as refused:
        ask(text.id)
    assert refused.value.param == "input.0.content.0.file_id"
    client.files.delete(kept.id)
    for gone in (kept.id, "file-0", "../etc/passwd"):
        with pytest.raises(openai.NotFoundError) as missing:
            ask(gone)
        assert missing.value.param == "input.0.content.0.file_id"


def test_ollamas_client_sends_pictures(server: Running) -> None:
    data = drawn(7)
    wanted = chat(server, data)
    options = {"temperature": 0, "num_predict": TOKENS}
    message = {"role": "user", "content": ASK, "images": [data]}
    said = server.ollama().chat(model="eye", messages=[message], options=options)
    assert said.message.content == wanted.choices[0].message.content
    assert said.prompt_eval_count == wanted.usage.prompt_tokens


def test_ollamas_generate_answers_a_picture_without_a_prompt(server: Running) -> None:
    data = drawn(8)
    wanted = chat(server, data, ask="")
    options = {"temperature": 0, "num_predict": TOKENS}
    said = server.ollama().generate(model="eye", prompt="", images=[data], options=options)
    assert said.response == wanted.choices[0].message.content
    assert said.prompt_eval_count == wanted.usage.prompt_tokens
    loaded = server.ollama().generate(model="eye")
    assert loaded.done_reason == "load", "without pictures an empty prompt loads the model"


WRONG = [
    (
        {"type": "url", "url": "https://example.com/a.png"},
        "source.url: this server fetches nothing",
    ),
    ({"type": "file", "file_id": "file-1"}, "source.type must be base64, not file"),
    ({"type": "base64"}, "source.data must be"),
    ({"type": "base64", "data": 5}, "source.data must be"),
    ({"type": "base64", "data": "%%"}, "source.data: the data is not base64"),
    ({"type": "base64", "data": "AAAA"}, "source.data: the file is not a picture"),
    ({"data": "AAAA"}, "source must be an object"),
    ("AAAA", "source must be an object"),
    (None, "source must be an object"),
]


@pytest.mark.parametrize(("source", "words"), WRONG, ids=str)
def test_what_is_wrong_with_an_image_of_anthropics_is_named(
    server: Running, source: Any, words: str
) -> None:
    content: Any = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        server.anthropic().messages.create(
            model="eye", max_tokens=2, messages=[{"role": "user", "content": content}]
        )
    assert f"messages.0.content.1.{words}" in refused.value.body["error"]["message"]  # type: ignore[index]


def test_who_may_have_pictures(server: Running) -> None:
    """A user alone: not the model, not a tool."""
    user = {"role": "user", "content": "a"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image(drawn(9))]}
    for messages, where in (
        ([user, {"role": "assistant", "content": [image(drawn(9))]}, user], "image block"),
        ([{"role": "user", "content": [result]}], "image block"),
        ([{"role": "system", "content": [image(drawn(9))]}, user], "messages.0.content.0.source"),
    ):
        body = {"model": "eye", "max_tokens": 2, "messages": messages}
        reply = httpx.post(server.url + "/v1/messages", json=body)
        assert reply.status_code == 400, reply.text
        assert where in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"image_url": "https://example.com/a.png"}, ".image_url"),
        ({"image_url": {"url": "data:;base64,AAAA"}}, ".image_url"),
        ({"image_url": "data:;base64,%%"}, ".image_url"),
        ({"image_url": "data:;base64,AAAA", "detail": "original"}, ".detail"),
        ({"image_url": "data:;base64,AAAA", "file_id": "file-1"}, ""),
        ({"file_id": 5}, ".file_id"),
        ({}, ""),
    ],
)
def test_what_is_wrong_with_a_picture_of_a_response_is_named(
    server: Running, part: dict[str, Any], param: str
) -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", **part}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        reply = httpx.post(server.url + path, json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == "input.0.content.1" + param


PLACE = "<image>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PLACE * 3}),
        ("/completion", {"prompt": PLACE, "n_predict": 2}),
        ("/infill", {"input_prefix": PLACE, "input_suffix": PLACE, "n_predict": 2}),
        ("/v1/responses", {"input": PLACE, "instructions": PLACE}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PLACE}], "system": PLACE}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": PLACE}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": PLACE}]}),
        ("/api/generate", {"prompt": PLACE}),
        ("/api/generate", {"prompt": PLACE, "raw": True}),
        ("/api/generate", {"prompt": PLACE, "system": PLACE, "images": ["picture"]}),
        ("/tokenize", {"prompt": PLACE}),
        ("/tokenize", {"messages": [{"role": "user", "content": PLACE}]}),
    ],
    ids=str,
)
def test_a_place_typed_as_text_has_one_answer_on_every_route(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    """An answer, or one typed refusal where the model lacks the route; and the server lives."""
    body = {"model": "eye", **body}
    if path in ("/v1/completions", "/v1/messages"):
        body["max_tokens"] = 2
    if path == "/v1/responses":
        body["max_output_tokens"] = 2
    if path.startswith("/api"):
        body |= {"stream": False, "options": {"num_predict": 2}}
    if "images" in body:
        body["images"] = [base64_of(drawn(10))]
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200 or path == "/infill", reply.text
    assert reply.status_code in (200, 400), reply.text
    assert httpx.get(server.url + "/health").status_code == 200
