"""Encoders of pictures of the Qwen-VL families in a worker against transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image

from headrace.base.modelfiles import ModelFiles
from headrace.dist.payloads import read_payload
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.loader import open_model
from headrace.text import load_tokenizer
from headrace.worker import Worker
from tiny.qwen_chat import KINDS, PLACE, make, processor
from tiny.seeing_worker import TOKENS, Prompt, answer, drawn, encode, prompt_of, worker_of

SIZES = ((70, 40), (1, 1), (33, 96), (64, 64), (4, 200), (31, 32), (90, 89), (1, 200), (96, 12))
LAYERS = {"qwen2_vl": 2, "qwen2_5_vl": 3, "qwen3_vl": 4}


class Seeing(NamedTuple):
    oracle: Any
    files: ModelFiles
    prompts: PicturePrompts
    worker: Worker
    slices: int


def seeing(folder: Path, kind: str, kv_dtype: str = "float32", **changes: Any) -> Seeing:
    oracle = make(folder, kind, **changes)
    files = open_model(str(folder))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    prompts = open_picture_prompts(files, tokenizer)
    assert prompts is not None
    slices = 1 + changes.get("depth", LAYERS[kind])
    return Seeing(oracle, files, prompts, worker_of(files, kv_dtype=kv_dtype), slices)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp(request.param), request.param)


def given(prompt: Prompt, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
    """The prompt as transformers takes it."""
    ids, made = torch.tensor([prompt.ids]), processor()(pictures, return_tensors="pt")
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == PLACE).int(),
        "pixel_values": made["pixel_values"].float(),
        "image_grid_thw": made["image_grid_thw"],
    }


def features(oracle: Any, inputs: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    """The encoder's rows by transformers; DeepStack's lie beside the first."""
    with torch.no_grad():
        made = oracle.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        )
    deep = getattr(made, "deepstack_features", None) or []
    parts = [made.pooler_output, *deep]
    return torch.cat([torch.cat(list(one), 0) for one in parts], 1).numpy()


@pytest.mark.parametrize("count", [1, 3, 9])
def test_pixels_are_those_of_the_processor(model: Seeing, count: int) -> None:
    pictures = drawn(count, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    made = processor()(pictures, return_tensors="np")
    picture, after = model.prompts.picture, 0
    for span, (_, rows, columns) in zip(prompt.spans, made["image_grid_thw"], strict=True):
        wanted = made["pixel_values"][after : after + rows * columns]
        after += rows * columns
        frames = wanted.reshape(rows * columns, 3, 2, -1)
        assert np.array_equal(frames[:, :, 0], frames[:, :, 1])
        assert span.source is not None
        order = picture.laid(int(rows), int(columns)).order
        places = {place: at for at, place in enumerate(_squares(int(rows), int(columns)))}
        ours = np.empty_like(frames[:, :, 0])
        ours[[places[place] for place in order]] = read_payload(span.source).reshape(
            rows * columns, 3, -1
        )
        assert np.array_equal(ours, frames[:, :, 0])


def _squares(rows: int, columns: int) -> list[tuple[int, int]]:
    """The processor's order of patches."""
    grid = np.indices((rows, columns)).reshape(2, rows // 2, 2, columns // 2, 2)
    return [(int(a), int(b)) for a, b in grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_rows_logits_and_tokens_are_those_of_transformers(model: Seeing, count: int) -> None:
    pictures = drawn(count, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    inputs = given(prompt, pictures)
    rows = np.concatenate(encode(model.worker, prompt, (model.slices,)))
    wanted = features(model.oracle, inputs)
    assert rows.shape == wanted.shape
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    with torch.no_grad():
        out = model.oracle.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens, told = answer(model.worker, prompt, len(prompt.ids))
    assert tokens == out.sequences[0, len(prompt.ids) :].tolist()
    for one, logits in zip(told, out.logits, strict=True):
        scores = torch.log_softmax(logits[0], -1)
        expected = scores[torch.tensor(one.top_ids)].numpy()
        assert np.abs(np.array(one.top_logprobs) - expected).max() < 1e-4


def test_chunks_slices_and_others_change_no_bit(model: Seeing) -> None:
    pictures = drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    rows = encode(model.worker, prompt, (model.slices,))
    whole = answer(model.worker, prompt, len(prompt.ids))
    for chunk in (1, 7, 64):
        assert answer(model.worker, prompt, chunk) == whole
    other = prompt_of(model.prompts, drawn(4, SIZES)[3:])
    assert model.worker.encoder is not None
    model.worker.encoder.begin_anew()
    encode(model.worker, other, (model.slices,))
    again = encode(model.worker, prompt, (1,) * model.slices)
    assert all(np.array_equal(one, two) for one, two in zip(rows, again, strict=True))


def test_the_reference_gives_the_same_rows(model: Seeing) -> None:
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    rows = np.concatenate(encode(model.worker, prompt, (model.slices,)))
    other = worker_of(model.files, "ref")
    ref = np.concatenate(encode(other, prompt, (model.slices,)))
    assert np.abs(rows - ref).max() < 1e-5 * np.abs(ref).max()
    tokens, told = answer(model.worker, prompt, 64)
    same, also = answer(other, prompt, 64)
    assert tokens == same
    for one, two in zip(told, also, strict=True):
        assert np.abs(np.array(one.top_logprobs) - np.array(two.top_logprobs)).max() < 1e-4
