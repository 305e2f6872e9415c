"""Pictures that keep their shape in a chat, by OpenAI's client: tokens as transformers has them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image
from processes import Running, headrace, running

from tiny.qwen_chat import END, PLACE, make, processor, tokenizer

pytestmark = pytest.mark.slow
TOKENS = 12


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Any]]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    oracle = make(folder, request.param)
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--step-tokens", "64"]
    with running(headrace(*words, "--kv-dtype", "float32", "--max-context", "512")) as one:
        yield one, oracle


def drawn(seed: int, width: int, height: int) -> Image.Image:
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    return Image.fromarray(coarse.repeat(5, 0).repeat(5, 1)[:height, :width])


def part(picture: Image.Image, **more: str) -> dict[str, Any]:
    room = io.BytesIO()
    picture.save(room, "PNG")
    data = base64.b64encode(room.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **more}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def ask(client: openai.OpenAI, *parts: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(
        model="",
        messages=messages,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
    )


def wanted(oracle: Any, pictures: list[Image.Image], pieces: list[str]) -> tuple[int, list[int]]:
    """Tokens of the prompt "text, a picture, text, ...", and the greedy answer of transformers."""
    made = processor()(pictures, return_tensors="pt")
    said = f"<|im_start|>user\n{pieces[0]}"
    for (_, rows, columns), piece in zip(made["image_grid_thw"].tolist(), pieces[1:], strict=True):
        places = "<|image_pad|>" * (rows * columns // 4)
        said += f"<|vision_start|>{places}<|vision_end|>{piece}"
    ids = tokenizer().encode(f"{said}<|im_end|>\n<|im_start|>assistant\n").ids
    given = torch.tensor([ids])
    with torch.no_grad():
        out = oracle.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            mm_token_type_ids=(given == PLACE).int(),
            pixel_values=made["pixel_values"].float(),
            image_grid_thw=made["image_grid_thw"],
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )
    return len(ids), [int(token) for token in out[0, len(ids) :]]


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_transformers(served: tuple[Running, Any], count: int) -> None:
    server, oracle = served
    pictures = [drawn(at, *size) for at, size in enumerate([(70, 40), (9, 60), (33, 31)][:count])]
    pieces = ["Look: ", *["and"] * (count - 1), "what is it?"]
    said: list[Any] = [text(pieces[0])]
    for picture, piece in zip(pictures, pieces[1:], strict=True):
        said += [part(picture), text(piece)]
    length, tokens = wanted(oracle, pictures, pieces)
    for _ in range(2):
        got = ask(server.openai(), *said)
        assert got.usage.prompt_tokens == length
        assert got.choices[0].token_ids[: len(tokens)] == tokens
    # The second time nothing was encoded, and the prompt was found.
    assert got.usage.prompt_tokens_details.cached_tokens > 0


def test_what_is_refused(served: tuple[Running, Any]) -> None:
    server, _ = served
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="200 times as long"):
        ask(client, part(drawn(1, 201, 1)))
    fits = ask(client, part(drawn(1, 70, 40), detail="low"), text("a"))
    assert fits.usage.prompt_tokens > 12
    with pytest.raises(openai.BadRequestError, match="more tiles, or larger ones"):
        ask(client, *[part(drawn(at, 70, 70)) for at in range(16)])
    with pytest.raises(openai.BadRequestError):
        ask(client, text("a" * 500), part(drawn(1, 70, 40)))
    assert ask(client, text("still here")).choices[0].message.content is not None
