"""LoRA adapters over HTTP: loaded, asked for as models, listed, unloaded, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from processes import Running, serving
from safetensors.numpy import save_file

from tiny import talker
from tiny.kept import Kept

MESSAGES: Any = [{"role": "user", "content": "Where does the water go?"}]


def write(folder: Path, seed: int, **config: Any) -> Path:
    """An adapter for the tiny model, in PEFT's layout."""
    folder.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{at}A.weight"] = random.normal(0, 0.5, (4, 64)).astype(np.float32)
        tensors[f"{at}B.weight"] = random.normal(0, 0.5, (64, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("river", "lake")):
        write(folder / name, seed)
    write(folder / "odd", 3, use_dora=True)
    return folder


@pytest.fixture(scope="module")
def server(root: Path, kept: Kept) -> Iterator[Running]:
    model = kept(talker.make)
    with serving(
        model, "--max-sequences 8 --kv-memory 16MiB --max-adapters 1", "--adapter-roots", str(root)
    ) as server:
        yield server


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai(timeout=120)


def post(server: Running, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=body)


def chat(client: openai.OpenAI, model: str) -> Any:
    return client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=16, temperature=0
    )


def test_the_life_of_adapters(server: Running, client: openai.OpenAI, root: Path) -> None:
    plain = chat(client, "tiny").choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        chat(client, "river")
    for name in ("river", "lake"):
        reply = post(server, "load_lora_adapter", lora_name=name, lora_path=str(root / name))
        assert (reply.status_code, reply.json()) == (200, {"loaded": name})
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["tiny", "lake", "river"]
    assert listed["lake"].model_extra["parent"] == "tiny"
    assert client.models.retrieve("river").id == "river"
    river, lake = chat(client, "river"), chat(client, "lake")
    assert (river.model, lake.model) == ("river", "lake")
    texts = {plain, river.choices[0].message.content, lake.choices[0].message.content}
    assert len(texts) == 3
    chunks = client.chat.completions.create(
        model="lake", messages=MESSAGES, max_tokens=16, temperature=0, stream=True
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == lake.choices[0].message.content
    completion = client.completions.create(model="lake", prompt="a", max_tokens=8, temperature=0)
    assert completion.model == "lake"
    assert chat(client, "tiny").choices[0].message.content == plain
    assert post(server, "unload_lora_adapter", lora_name="river").status_code == 200
    with pytest.raises(openai.NotFoundError):
        chat(client, "river")
    assert post(server, "unload_lora_adapter", lora_name="river").status_code == 404
    assert post(server, "unload_lora_adapter", lora_name="lake").status_code == 200


@pytest.mark.parametrize(
    ("name", "folder", "status", "said"),
    [
        ("x", "/etc", 403, "adapter_roots"),
        ("x", "{root}/../", 403, "adapter_roots"),
        ("x", "{root}/nothing", 403, "adapter_roots"),
        ("x", "{root}", 400, "cannot be read"),
        ("x", "{root}/odd", 400, "use_dora"),
        ("tiny", "{root}/lake", 400, "a model's"),
        ("a b", "{root}/lake", 400, "letters"),
        ("", "{root}/lake", 400, "letters"),
    ],
)
def test_refusals(
    server: Running, root: Path, name: str, folder: str, status: int, said: str
) -> None:
    path = folder.format(root=root)
    reply = post(server, "load_lora_adapter", lora_name=name, lora_path=path)
    assert reply.status_code == status
    assert said in reply.json()["error"]["message"]
