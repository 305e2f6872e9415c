"""Embeddings, rerank and score over HTTP: a real server of a small encoder, the real client."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import Running, headrace, running

from headrace import LLM
from headrace.base.config import ServerOptions
from headrace.server.app import create_app
from tiny import encoder as encoders
from tiny import talker
from tiny.encoder import write_modules
from tiny.kept import Kept

TEXTS = ["the water wheel turns", "a deep cold river", "é 水 seven " * 12]
NARROW = ("--max-sequences", "4", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = encoders.make(tmp_path_factory.mktemp("models") / "wheel")
    return write_modules(folder, "pooling_mode_mean_tokens", normalise=True)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(headrace("serve", str(folder), "--port", "0", *NARROW)) as server:
        yield server


@pytest.fixture(scope="module")
def vectors(folder: Path) -> list[list[float]]:
    with LLM(str(folder), threads=1, max_sequences=4) as llm:
        return [output.vector for output in llm.embed(TEXTS)]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30)


def error(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()["error"]
    return found


def test_the_official_client(client: openai.OpenAI, vectors: list[list[float]]) -> None:
    # The client asks for base64 by itself and decodes it.
    reply = client.embeddings.create(model="wheel", input=TEXTS)
    assert [each.index for each in reply.data] == [0, 1, 2]
    for each, wanted in zip(reply.data, vectors, strict=True):
        assert each.embedding == pytest.approx(wanted, abs=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 3 * 3
    one = client.embeddings.create(model="wheel", input=TEXTS[1], encoding_format="float")
    assert one.data[0].embedding == pytest.approx(vectors[1], abs=1e-6)


def test_pooling_gives_the_same_vectors_in_vllms_shape(
    server: Running, vectors: list[list[float]]
) -> None:
    reply = post(server, "/pooling", model="wheel", input=TEXTS, task="embed").json()
    assert reply["object"] == "list"
    assert reply["id"].startswith("pool-")
    assert [each["object"] for each in reply["data"]] == ["pooling"] * 3
    for each, wanted in zip(reply["data"], vectors, strict=True):
        assert each["data"] == pytest.approx(wanted, abs=1e-6)
    assert "labels" in error(post(server, "/classify", input="a"))["message"]


def test_ids_and_base64(server: Running, vectors: list[list[float]]) -> None:
    ids = post(server, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    ids = [*ids, 3]  # [SEP], which /tokenize does not add.
    for given in (ids, [ids], [ids, ids]):
        reply = post(server, "/v1/embeddings", input=given, encoding_format="base64").json()
        for each in reply["data"]:
            found = struct.unpack("<96f", base64.b64decode(each["embedding"]))
            assert found == pytest.approx(vectors[0], abs=1e-6)


def test_many_inputs_keep_their_order(server: Running, vectors: list[list[float]]) -> None:
    reply = post(server, "/v1/embeddings", input=TEXTS * 100).json()
    for place, each in enumerate(reply["data"]):
        assert each["index"] == place
        assert each["embedding"] == pytest.approx(vectors[place % 3], abs=1e-6)


def test_errors_name_the_input(server: Running) -> None:
    long = "river " * 400
    wrong = error(post(server, "/v1/embeddings", input=["a", long]))
    assert (wrong["code"], wrong["param"]) == ("context_length_exceeded", "input.1")
    cut = post(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["prompt_tokens"] == 160
    # As NIM's clients ask.
    for truncate, status in (("END", 200), ("NONE", 400)):
        asked = post(server, "/v1/embeddings", input=long, truncate=truncate, input_type="query")
        assert asked.status_code == status
    assert error(post(server, "/v1/embeddings", input=["a", ""]))["param"] == "input.1"
    assert error(post(server, "/v1/embeddings", input=[]))["param"] == "input"
    assert error(post(server, "/v1/embeddings", input=[10**6]))["param"] == "input"
    assert error(post(server, "/v1/embeddings", input="a" * 3, dimensions=8))["param"] == (
        "dimensions"
    )
    assert post(server, "/v1/embeddings", input="a", dimensions=96).status_code == 200
    error(post(server, "/v1/embeddings", input="a", model="other"), 404)
    error(post(server, "/v1/embeddings", input=["a"] * 2049))
    error(post(server, "/v1/embeddings", input="a", surprise=1))


def test_a_chat_is_refused_by_name(server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "the"}),
    ):
        wrong = error(post(server, path, **body))
        assert "does not generate" in wrong["message"]
        assert wrong["param"] == "model"


def test_an_embedding_model_reranks_by_the_cosine(
    server: Running, vectors: list[list[float]]
) -> None:
    cosines = [sum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors]
    reply = post(server, "/rerank", query=TEXTS[0], documents=TEXTS[::-1], top_n=2).json()
    best = reply["results"][0]
    assert (best["index"], best["document"]["text"]) == (2, TEXTS[0])
    assert best["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    assert len(reply["results"]) == 2
    scores = post(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx(cosines, abs=1e-5)
    ranked = post(
        server,
        "/v1/ranking",
        query={"text": TEXTS[0]},
        passages=[{"text": text} for text in TEXTS],
        truncate="END",
    ).json()
    order = sorted(range(len(TEXTS)), key=lambda place: -cosines[place])
    assert [each["index"] for each in ranked["rankings"]] == order
    assert ranked["rankings"][0]["logit"] == pytest.approx(1.0, abs=1e-5)
    wrong = error(post(server, "/score", text_1=TEXTS[:2], text_2=TEXTS))
    assert wrong["param"] == "text_1"
    error(post(server, "/score", text_1="", text_2="a"))


def test_a_model_of_pairs(tmp_path: Path) -> None:
    folder = encoders.make(tmp_path / "judge", labels=1)
    with LLM(str(folder), threads=1, max_sequences=4) as llm:
        wanted = [output.score for output in llm.score("what runs", TEXTS)]
    with running(headrace("serve", str(folder), "--port", "0", *NARROW)) as server:
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
            reply = post(server, path, query="what runs", documents=documents).json()
            order = sorted(range(3), key=lambda place: -wanted[place])
            assert [each["index"] for each in reply["results"]] == order
            for each in reply["results"]:
                assert each["relevance_score"] == pytest.approx(wanted[each["index"]], abs=1e-5)
                assert ("document" in each) == (path != "/v2/rerank")
        passages = [{"text": text} for text in TEXTS]
        ranked = post(server, "/v1/ranking", query={"text": "what runs"}, passages=passages).json()
        shares = {each["index"]: 1 / (1 + math.exp(-each["logit"])) for each in ranked["rankings"]}
        assert [shares[place] for place in range(3)] == pytest.approx(wanted, abs=1e-5)
        assert "scores pairs" in error(post(server, "/v1/embeddings", input="a"))["message"]
        long = post(server, "/rerank", query="what", documents=["river " * 400])
        assert error(long)["code"] == "context_length_exceeded"
        cut = post(
            server, "/rerank", query="what", documents=["river " * 400], max_tokens_per_doc=20
        )
        assert cut.json()["usage"]["prompt_tokens"] == 20


def test_a_model_that_generates_embeds_too(kept: Kept) -> None:
    folder = kept(talker.make)
    with running(headrace("serve", str(folder), "--port", "0", *NARROW)) as server:
        reply = post(server, "/v1/embeddings", input=["water", "water", "流れる"]).json()
        first, second, third = (each["embedding"] for each in reply["data"])
        assert first == second != third
        assert sum(value * value for value in first) == pytest.approx(1.0, abs=1e-5)
        chat = post(
            server,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=3,
        )
        assert chat.status_code == 200


def test_the_routes_are_in_the_document() -> None:
    paths = create_app(None, ServerOptions()).openapi()["paths"]
    for path in ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"):
        assert "requestBody" in paths[path]["post"]
