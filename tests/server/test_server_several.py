"""Several models behind one port: chosen by name, loaded and unloaded while others are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import psutil
import pytest
from processes import Running, headrace, running, serving

from tiny import bytewise
from tiny import encoder as encoders
from tiny.encoder import write_modules
from tiny.kept import Kept

pytestmark = pytest.mark.slow

FLAGS = "--max-sequences 8 --kv-memory 4MiB --step-tokens 64 --offline"
MESSAGES = [{"role": "user", "content": "Where does the water go?"}]
TEXTS = ["a river", "an old mill", "b"]


@pytest.fixture(scope="module")
def folders(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = encoders.make(tmp_path_factory.mktemp("encoder"))
    return {
        "one": kept(bytewise.make),
        "two": kept(bytewise.make, layers=3),
        "vectors": write_modules(folder, "pooling_mode_mean_tokens", normalise=True),
    }


@pytest.fixture(scope="module")
def words(folders: dict[str, Path]) -> list[str]:
    own = {"one": "name=one,name=uno", "two": "name=two", "vectors": "name=vectors"}
    return [f"{folder}:{own[name]}" for name, folder in folders.items()]


@pytest.fixture(scope="module")
def server(words: list[str]) -> Iterator[Running]:
    arguments = [*words, "--port", "0", "--operator-port", "0", "--threads", "1", *FLAGS.split()]
    with running(headrace("serve", *arguments)) as server:
        yield server


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Any]:
    """The answers of servers of their own."""
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        with serving(f"{folder}", f"--served-name {name} {FLAGS}") as server:
            found[name] = ask(server.openai(), name)
    return found


def ask(client: openai.OpenAI, name: str) -> Any:
    """An answer of 24 tokens, or the vectors of the texts."""
    if name == "vectors":
        reply = client.embeddings.create(model=name, input=TEXTS, encoding_format="float")
        return [one.embedding for one in reply.data]
    chat = client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=24, temperature=0
    )
    return chat.choices[0].message.content


def operator(server: Running) -> str:
    return server.await_line(r"operator: (\S+)").group(1)


def engine_of(server: Running) -> psutil.Process:
    """The one engine process of this server."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [one for one in below if "headrace.engine.process" in " ".join(one.cmdline())]
    return engine


def test_each_answers_as_a_server_of_its_own(server: Running, alone: dict[str, Any]) -> None:
    """All at once, from several threads of the real client."""
    found: list[tuple[str, Any]] = []

    def work(name: str) -> None:
        client = server.openai()
        for _ in range(4):
            found.append((name, ask(client, name)))

    threads = [threading.Thread(target=work, args=(name,)) for name in alone for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * len(threads)
    assert all(answer == alone[name] for name, answer in found)
    assert engine_of(server).is_running()


def test_names_and_aliases(server: Running, alone: dict[str, Any]) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["one", "uno", "two", "vectors"]
    chat = client.chat.completions.create(
        model="uno", messages=MESSAGES, max_tokens=24, temperature=0
    )
    assert (chat.choices[0].message.content, chat.model) == (alone["one"], "one")
    assert client.models.retrieve("two").root != client.models.retrieve("uno").root
    with pytest.raises(openai.NotFoundError, match="'one', 'uno', 'two', 'vectors'"):
        ask(client, "three")
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.chat.completions.create(model="vectors", messages=MESSAGES)


def test_every_interface_chooses(server: Running, alone: dict[str, Any]) -> None:
    url = server.url
    said = server.anthropic().messages.create(
        model="two", messages=MESSAGES, max_tokens=24, extra_body={"temperature": 0}
    )
    assert said.content[0].text == alone["two"]
    response = server.openai().responses.create(
        model="two", input=MESSAGES[0]["content"], max_output_tokens=24, temperature=0
    )
    assert (response.output_text, response.model) == (alone["two"], "two")
    chat = server.ollama().chat(
        "two:latest", MESSAGES, options={"num_predict": 24, "temperature": 0}
    )
    assert chat.message.content == alone["two"]
    vectors = server.ollama().embed("vectors", TEXTS)
    for vector, wanted in zip(vectors.embeddings, alone["vectors"], strict=True):
        assert list(vector) == pytest.approx(wanted)
    body = {"model": "two", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    invoked = httpx.post(f"{url}/invocations", json=body).json()
    assert invoked["choices"][0]["message"]["content"] == alone["two"]
    ids = [
        httpx.post(f"{url}/tokenize", json={"model": name, "prompt": "a river"}).json()["count"]
        for name in ("one", "vectors")
    ]
    assert ids[0] != ids[1]
    assert httpx.get(f"{url}/v2/models/two/ready").json()["ready"]


def test_metrics_tell_models_apart(server: Running) -> None:
    ask(server.openai(), "two")
    text = httpx.get(f"{server.url}/metrics").text
    counted = {
        name: float(line.rpartition(" ")[2])
        for name in ("one", "two", "vectors")
        for line in text.splitlines()
        if line.startswith("vllm:prompt_tokens_total") and f'model_name="{name}"' in line
    }
    assert set(counted) == {"one", "two", "vectors"}
    assert counted["two"] > 0
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "a family comes once"


def test_ollama_lists_all(server: Running) -> None:
    with ollama.Client(host=server.url) as client:
        listed = [model.model for model in client.list().models]
        assert listed == ["one:latest", "uno:latest", "two:latest", "vectors:latest"]
        assert [model.model for model in client.ps().models] == listed
        assert client.show("vectors").capabilities == ["embedding"]
        assert client.show("two").capabilities == ["completion"]


def test_a_killed_engine_comes_back_with_all(server: Running, alone: dict[str, Any]) -> None:
    """A begun stream ends with an error; requests of which nothing was sent are answered."""
    client = server.openai()
    stream = client.chat.completions.create(
        model="two", messages=MESSAGES, max_tokens=400, temperature=0, stream=True
    )
    next(iter(stream))
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(
            target=lambda name=name: found.update({name: ask(server.openai(max_retries=30), name)})
        )
        for name in alone
    ]
    engine = engine_of(server)
    for thread in threads:
        thread.start()
    engine.kill()
    with pytest.raises(openai.APIError):
        list(stream)
    for thread in threads:
        thread.join()
    assert found == alone
    assert {name: ask(client, name) for name in alone} == alone


def test_models_come_and_go_under_load(
    server: Running, folders: dict[str, Path], alone: dict[str, Any]
) -> None:
    """Nothing is lost meanwhile, and what has gone is refused with what is there."""
    url = f"{operator(server)}/operate/models"
    done, answers = threading.Event(), list[tuple[str, Any]]()

    def work(name: str) -> None:
        client = server.openai()
        while not done.is_set():
            answers.append((name, ask(client, name)))

    threads = [threading.Thread(target=work, args=(name,)) for name in alone]
    for thread in threads:
        thread.start()
    client = server.openai()
    with httpx.Client(timeout=300) as http:
        for _ in range(3):
            made = http.post(url, json={"model": f"{folders['two']}:name=three,kv=2MiB"})
            assert made.status_code == 200, made.text
            assert made.json()["names"] == ["three"]
            assert made.json()["kv_bytes"] <= 2 << 20
            assert ask_as(client, "three", "two") == alone["two"]
            again = http.post(url, json={"model": f"{folders['two']}:name=three"})
            assert (again.status_code, again.json()["error"]["param"]) == (400, "model")
            gone = http.delete(f"{url}/three")
            assert gone.json() == {"unloaded": "three"}
            with pytest.raises(openai.NotFoundError, match="'vectors'"):
                ask(client, "three")
    done.set()
    for thread in threads:
        thread.join()
    assert {name for name, _ in answers} == set(alone)
    assert all(answer == alone[name] for name, answer in answers)


def ask_as(client: openai.OpenAI, name: str, kind: str) -> Any:
    assert kind != "vectors"
    return ask(client, name)


def test_what_does_not_fit_is_refused_with_the_bytes_that_lack(
    server: Running, folders: dict[str, Path]
) -> None:
    url = f"{operator(server)}/operate/models"
    refused = httpx.post(url, json={"model": f"{folders['two']}:name=big,kv=100TiB"}, timeout=300)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "does_not_fit"
    assert "beside the server's other models" in error["message"]
    first = httpx.delete(f"{url}/one", timeout=300)
    assert (first.status_code, "stays" in first.text) == (400, True)
    assert httpx.delete(f"{url}/nobody").status_code == 404
    assert httpx.get(f"{server.url}/operate/models").status_code == 404, "the operator's port only"


def test_ollama_lets_a_model_rest(server: Running, alone: dict[str, Any]) -> None:
    """`keep_alive` of 0 unloads; a request for it loads it again."""
    with ollama.Client(host=server.url) as client:
        assert client.generate("two", "", keep_alive=0).done_reason == "unload"
        for _ in range(3000):
            there = [model.model for model in client.ps().models]
            if "two:latest" not in there:
                break
            threading.Event().wait(0.02)
        assert there == ["one:latest", "uno:latest", "vectors:latest"]
        assert "two:latest" in [model.model for model in client.list().models]
        assert ask(server.openai(), "two") == alone["two"]
        assert "two:latest" in [model.model for model in client.ps().models]
        client.generate("two", "a", keep_alive="1h", options={"num_predict": 1})
        (two,) = [model for model in client.ps().models if model.model == "two:latest"]
        assert two.expires_at is not None
        client.generate("one", "a", keep_alive=0, options={"num_predict": 1})
        with pytest.raises(ollama.ResponseError, match="keep_alive"):
            client.generate("two", "a", keep_alive="soon")
    assert ask(server.openai(), "one") == alone["one"], "the first one stays"


def test_the_operator_sees_and_puts_all_to_sleep(server: Running, alone: dict[str, Any]) -> None:
    url = operator(server)
    models = httpx.get(f"{url}/operate/models").json()["models"]
    assert {name for model in models for name in model["names"]} == {"one", "uno", "two", "vectors"}
    assert all(model["weight_bytes"] > 0 for model in models if model["loaded"])
    assert httpx.post(f"{url}/sleep", timeout=300).json()["is_sleeping"]
    with pytest.raises(openai.InternalServerError, match="sleeps"):
        ask(server.openai(), "two")
    assert httpx.post(f"{url}/wake_up", timeout=300).status_code == 200
    assert {name: ask(server.openai(), name) for name in alone} == alone
    profile = httpx.post(f"{url}/start_profile")
    assert (profile.status_code, "of one model" in profile.text) == (400, True)


def test_a_model_that_does_not_fit_ends_the_start(folders: dict[str, Path]) -> None:
    words = [str(folders["one"]), f"{folders['two']}:name=two,kv=100TiB"]
    command = headrace("serve", *words, "--port", "0", "--threads", "1", *FLAGS.split())
    with running(command, ready=False) as server:
        assert server.wait() == 5
    assert any("beside the server's other models" in line for line in server.lines)


def test_options_of_one_model_are_refused_for_several(folders: dict[str, Path]) -> None:
    words = [f"{folders['one']}:name=a", str(folders["two"])]
    for more, told in (
        (["--served-name", "x"], "give each its names"),
        (["--layout", "TP2"], "no layout"),
        (["--executor", "multiproc"], "no executor"),
    ):
        command = headrace("serve", *words, "--port", "0", *more)
        with running(command, ready=False) as server:
            assert server.wait() == 2
        assert any(told in line for line in server.lines), server.lines


def test_the_start_prints_what_each_has(server: Running) -> None:
    server.await_line("model one: 1.0 MiB of KV")
    server.await_line("model two: 1.5 MiB of KV")
