"""Llama 4's encoder of pictures in a worker against transformers in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.dist.payloads import read_payload
from headrace.engine.clients.kept_pictures import PictureShape
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.loader import open_model
from headrace.loader.pictures import open_pictures
from headrace.text import load_tokenizer
from headrace.worker import Worker
from tiny.llama4_chat import MOST, PATCH, PLACE, TILE, make, processed, tokenizer
from tiny.seeing_worker import (
    SIZES,
    check_answer,
    check_bits,
    drawn,
    encode,
    greedy,
    prompt_of,
    worker_of,
)

ROWS = (TILE // PATCH // 2) ** 2


class Seeing(NamedTuple):
    oracle: Any
    prompts: PicturePrompts
    worker: Worker


def seeing(folder: Path, **changes: Any) -> Seeing:
    oracle = make(folder, **changes)
    files = open_model(str(folder))
    prompts = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert prompts is not None
    return Seeing(oracle, prompts, worker_of(files))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp("llama4"))


def pixels(pictures: list[Image.Image], most: int = MOST) -> torch.Tensor:
    """Tiles of all pictures [n, 3, TILE, TILE]."""
    return torch.cat([processed(one, most)[0] for one in pictures]).float()


def rows_of(oracle: Any, seen: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        found = oracle.vision_model(seen, return_dict=True).last_hidden_state
        projected: np.ndarray = oracle.multi_modal_projector(found).flatten(0, 1).numpy()
    return projected


@pytest.mark.parametrize(("count", "small"), [(1, False), (3, False), (9, False), (9, True)])
def test_rows_logits_and_tokens_are_those_of_transformers(
    model: Seeing, count: int, *, small: bool
) -> None:
    pictures = drawn(count, SIZES)
    prompt, seen = (
        prompt_of(model.prompts, pictures, small=small),
        pixels(pictures, 1 if small else MOST),
    )
    assert len(prompt.spans) == len(seen)
    for span, tile in zip(prompt.spans, seen.numpy(), strict=True):
        assert span.source is not None
        cells = tile.reshape(3, 2, 2, PATCH, 2, 2, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
        assert np.array_equal(read_payload(span.source)[:-1], cells.reshape(-1, 3 * PATCH**2))
    rows, wanted = np.concatenate(encode(model.worker, prompt)), rows_of(model.oracle, seen)
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        # The whole model of transformers 5.24 fails after its text model, which is asked alone.
        given = model.oracle.get_input_embeddings()(ids)
        given[ids == PLACE] = torch.from_numpy(wanted)
        out = greedy(
            model.oracle.language_model, inputs_embeds=given, attention_mask=torch.ones_like(ids)
        )
    check_answer(model.worker, prompt, out)


def test_the_prompt_is_the_processors(model: Seeing) -> None:
    """Tiles row by row with tokens between them and after each row, then the whole picture."""
    pictures = drawn(3, SIZES)
    prompt, after = prompt_of(model.prompts, pictures), 2
    for picture in pictures:
        high, wide = processed(picture)[1]
        tile, text = "<|patch|>" * ROWS, "<|image_start|>"
        if high * wide > 1:
            for _ in range(high):
                text += "<|tile_x_separator|>".join([tile] * wide) + "<|tile_y_separator|>"
        ids = tokenizer().encode(f"{text}<|image|>{tile}<|image_end|>").ids
        assert prompt.ids[after : after + len(ids)] == ids
        after += len(ids) + 1


def test_the_token_of_a_template_becomes_a_picture(model: Seeing) -> None:
    """No config states its id; a picture has it again, before the whole one."""
    words, shape = tokenizer(), PictureShape(1, 2, ROWS, TILE // PATCH // 2)
    picture = words.encode("<|image|>").ids
    assert [model.prompts.place] == picture == model.prompts.places
    prompt, spans = model.prompts.expand(words.encode("a<|image|>b<|image|>").ids, [shape] * 2, [])
    made = [*model.prompts.ids(shape)]
    assert prompt == [*words.encode("a").ids, *made, *words.encode("b").ids, *made]
    assert not spans
    assert made.count(picture[0]) == 1


def test_chunks_slices_and_others_change_no_bit(model: Seeing) -> None:
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    other = prompt_of(model.prompts, drawn(4, SIZES)[3:])
    check_bits(model.worker, prompt, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 4},
        {"hidden_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"dtype": torch.bfloat16},
    ],
)
def test_other_configs_give_the_rows_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model, pictures = seeing(tmp_path, **changes), drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    rows = np.concatenate(encode(model.worker, prompt))
    wanted = rows_of(model.oracle, pixels(pictures))
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    other = worker_of(open_model(str(tmp_path)), "ref")
    ref = np.concatenate(encode(other, prompt))
    assert np.abs(rows - ref).max() < 1e-4 * np.abs(ref).max()


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("vision", {"image_size": 40}, HeadraceError),
        ("vision", {"image_size": 64}, HeadraceError),
        ("vision", {"hidden_act": "silu"}, UnsupportedModel),
        ("vision", {"num_hidden_layers": 3}, ModelFileError),
        ("vision", {"intermediate_size": 128}, UnsupportedModel),
        ("vision", {"vision_output_dim": 96}, UnsupportedModel),
        ("vision", {"pixel_shuffle_ratio": 0.25}, UnsupportedModel),
        ("vision", {"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModel),
        ("preprocessor", {"size": {"height": 64, "width": 64}}, UnsupportedModel),
        ("preprocessor", {"max_patches": 0}, UnsupportedModel),
        ("preprocessor", {"resize_to_max_canvas": True}, UnsupportedModel),
    ],
)
def test_what_is_not_run_is_named(
    tmp_path: Path, file: str, change: dict[str, Any], error: type[Exception]
) -> None:
    make(tmp_path)
    name = "preprocessor_config.json" if file == "preprocessor" else "config.json"
    said = json.loads((tmp_path / name).read_text())
    at = said["vision_config"] if file == "vision" else said
    at |= change
    (tmp_path / name).write_text(json.dumps(said))
    with pytest.raises(error):
        open_pictures(open_model(str(tmp_path)))
