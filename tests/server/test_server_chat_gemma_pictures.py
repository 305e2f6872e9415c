"""Pictures whose tokens see each other in a chat, by OpenAI's client: tokens as transformers has
them."""

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

from tiny.gemma_chat import END, PLACE, TOKENS, make, processor, tokenizer

pytestmark = pytest.mark.slow
ANSWERED = 12
PANS: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
PICTURE = f"\n\n<start_of_image>{'<image_soft_token>' * TOKENS}<end_of_image>\n\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Any]]:
    folder: Path = tmp_path_factory.mktemp("gemma3")
    oracle = make(folder, pans=PANS)
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--step-tokens", "16"]
    words += ["--max-sequences", "4", "--kv-dtype", "float32", "--max-context", "384"]
    with running(headrace(*words)) as one:
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
        max_tokens=ANSWERED,
        temperature=0,
        extra_body={"return_token_ids": True},
    )


def wanted(oracle: Any, said: str, seen: torch.Tensor) -> tuple[int, list[int]]:
    """Tokens of the prompt, and the greedy answer of transformers about these tiles."""
    turn = f"<start_of_turn>user\n{said}<end_of_turn>\n<start_of_turn>model\n"
    ids = torch.tensor([tokenizer().encode(turn).ids])
    with torch.no_grad():
        out = oracle.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            token_type_ids=(ids == PLACE).long(),
            pixel_values=seen,
            max_new_tokens=ANSWERED,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )
    return ids.shape[1], [int(token) for token in out[0, ids.shape[1] :]]


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_transformers(served: tuple[Running, Any], count: int) -> None:
    server, oracle = served
    pictures = [drawn(at, *size) for at, size in enumerate([(33, 31), (9, 10), (40, 40)][:count])]
    said: list[Any] = [text("Look: ")]
    for at, picture in enumerate(pictures):
        said += [part(picture), text(f"this is {at}")]
    seen = processor(**PANS)(pictures, return_tensors="pt")["pixel_values"].float()
    whole = "Look: " + "".join(f"{PICTURE}this is {at}" for at in range(count))
    length, tokens = wanted(oracle, whole, seen)
    for _ in range(2):
        got = ask(server.openai(), *said)
        assert got.usage.prompt_tokens == length
        assert got.choices[0].token_ids[: len(tokens)] == tokens
    # The second time nothing was encoded, and the prompt was found.
    assert got.usage.prompt_tokens_details.cached_tokens > 0


def test_a_long_picture_has_its_parts_after_it(served: tuple[Running, Any]) -> None:
    server, oracle = served
    picture = drawn(1, 90, 33)
    seen = processor(**PANS)(picture, return_tensors="pt")["pixel_values"].float()
    assert len(seen) == 4, "the whole one and three parts"
    crops = " ".join([PICTURE] * 3)
    whole = (
        f"Here is the original image {PICTURE} and here are some crops to help you see better "
        f"{crops}what is it?"
    )
    length, tokens = wanted(oracle, whole, seen)
    got = ask(server.openai(), part(picture), text("what is it?"))
    assert got.usage.prompt_tokens == length
    assert got.choices[0].token_ids[: len(tokens)] == tokens
    small = ask(server.openai(), part(picture, detail="low"), text("what is it?"))
    length, tokens = wanted(oracle, f"{PICTURE}what is it?", seen[:1])
    assert small.usage.prompt_tokens == length
    assert small.choices[0].token_ids[: len(tokens)] == tokens


def test_what_is_refused(served: tuple[Running, Any]) -> None:
    server, _ = served
    client = server.openai()
    with pytest.raises(openai.APIStatusError, match="400 pictures; at most 16"):
        ask(client, *[part(drawn(1, 30, 30))] * 400)
    with pytest.raises(openai.BadRequestError, match=r"more tiles|384"):
        ask(client, text("a" * 60), *[part(drawn(1, 30, 30))] * 16)
    with pytest.raises(openai.BadRequestError, match="must fit into a context of 384"):
        ask(client, text("a" * 380), part(drawn(1, 70, 40)))
    spelled = ask(client, text("<start_of_image><image_soft_token> and"), part(drawn(1, 30, 30)))
    plain = ask(client, text("<start_of_image><image_soft_token> and"))
    assert spelled.usage.prompt_tokens == plain.usage.prompt_tokens + TOKENS + 4
    strange = ask(client, part(drawn(2, 1, 3_000)), text("still here"))
    assert strange.choices[0].message.content is not None
