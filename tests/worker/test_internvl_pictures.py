"""InternVL's encoder of pictures in a worker against transformers in fp32."""

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
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.loader import open_model
from headrace.loader.pictures import open_pictures
from headrace.text import load_tokenizer
from headrace.worker import Worker
from tiny.internvl_chat import MOST, PATCH, TILE, make, processor, tokenizer
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
    folder: Path


def seeing(folder: Path, **changes: Any) -> Seeing:
    oracle = make(folder, **changes)
    files = open_model(str(folder))
    prompts = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert prompts is not None
    return Seeing(oracle, prompts, worker_of(files), folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp("internvl"))


def pixels(pictures: list[Image.Image], most: int = MOST) -> torch.Tensor:
    return processor(most)(pictures, return_tensors="pt")["pixel_values"].float()


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
    rows = np.concatenate(encode(model.worker, prompt))
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        made = model.oracle.model.get_image_features(seen, return_dict=True).pooler_output
        wanted = made.flatten(0, 1).numpy()
        assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
        out = greedy(
            model.oracle, input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=seen
        )
    check_answer(model.worker, prompt, out)


def test_the_prompt_is_the_processors(model: Seeing) -> None:
    """The processor writes one run of placeholders for all tiles, between two tokens."""
    pictures = drawn(3, SIZES)
    prompt, after = prompt_of(model.prompts, pictures), 2
    for picture in pictures:
        tiles = len(pixels([picture]))
        said = f"<img>{'<IMG_CONTEXT>' * ROWS * tiles}</img>"
        ids = tokenizer().encode(said).ids
        assert prompt.ids[after : after + len(ids)] == ids
        after += len(ids) + 1


def test_chunks_slices_and_others_change_no_bit(model: Seeing) -> None:
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    other = prompt_of(model.prompts, drawn(4, SIZES)[3:])
    check_bits(model.worker, prompt, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": True, "norm_type": "rms_norm"},
        {"attention_bias": True, "use_mean_pooling": False},
        {"use_qk_norm": True, "num_attention_heads": 2, "num_hidden_layers": 1},
        {"patch_size": 4, "hidden_act": "gelu_pytorch_tanh"},
        {"dtype": torch.bfloat16},
    ],
)
def test_other_configs_give_the_rows_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model, pictures = seeing(tmp_path, **changes), drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    rows = np.concatenate(encode(model.worker, prompt))
    with torch.no_grad():
        made = model.oracle.model.get_image_features(pixels(pictures), return_dict=True)
    wanted = made.pooler_output.flatten(0, 1).numpy()
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    other = worker_of(open_model(str(tmp_path)), "ref")
    ref = np.concatenate(encode(other, prompt))
    assert np.abs(rows - ref).max() < 1e-4 * np.abs(ref).max()


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("vision", {"image_size": [32, 64]}, HeadraceError),
        ("vision", {"image_size": 40}, UnsupportedModel),
        ("vision", {"image_size": 64}, HeadraceError),
        ("vision", {"norm_type": "batch_norm"}, UnsupportedModel),
        ("vision", {"num_hidden_layers": 3}, ModelFileError),
        ("vision", {"use_absolute_position_embeddings": False}, UnsupportedModel),
        ("config", {"downsample_ratio": 0.25}, UnsupportedModel),
        ("config", {"vision_feature_layer": -2}, UnsupportedModel),
        ("preprocessor", {"size": {"height": 64, "width": 64}}, UnsupportedModel),
        ("preprocessor", {"max_patches": 0}, UnsupportedModel),
        ("preprocessor", {"min_patches": 9}, UnsupportedModel),
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
