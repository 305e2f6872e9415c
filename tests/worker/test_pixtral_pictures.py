"""Encoders of pictures of Pixtral and Mistral Small in a worker against transformers in fp32."""

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
from tiny.pixtral_chat import BREAK, END, FACTORS, PATCH, PLACE, make, processor
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

KINDS = list(FACTORS)


class Seeing(NamedTuple):
    kind: str
    oracle: Any
    prompts: PicturePrompts
    worker: Worker

    @property
    def factor(self) -> int:
        return FACTORS[self.kind]

    def pixels(self, pictures: list[Image.Image]) -> tuple[torch.Tensor, Any]:
        made = processor(self.factor)(pictures, return_tensors="pt")
        return made["pixel_values"].float(), made["image_sizes"]

    def rows(self, seen: torch.Tensor, sizes: Any) -> np.ndarray[Any, Any]:
        """Merged rows of all pictures as transformers has them."""
        with torch.no_grad():
            made = self.oracle.model.get_image_features(
                seen, image_sizes=sizes, return_dict=True
            ).pooler_output
        return torch.cat(list(made)).numpy()


def seeing(folder: Path, kind: str, kv_dtype: str = "float32", **changes: Any) -> Seeing:
    oracle = make(folder, kind, **changes)
    files = open_model(str(folder))
    prompts = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert prompts is not None
    return Seeing(kind, oracle, prompts, worker_of(files, kv_dtype=kv_dtype))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_rows_logits_and_tokens_are_those_of_transformers(model: Seeing, count: int) -> None:
    pictures, factor = drawn(count, SIZES), model.factor
    prompt = prompt_of(model.prompts, pictures)
    seen, sizes = model.pixels(pictures)
    at = 2
    for span, tile, (height, width) in zip(prompt.spans, seen.numpy(), sizes.tolist(), strict=True):
        high, wide = height // PATCH // factor, width // PATCH // factor
        cells = tile[:, :height, :width].reshape(3, high, factor, PATCH, wide, factor, PATCH)
        cells = cells.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * PATCH**2)
        assert span.source is not None
        assert np.array_equal(read_payload(span.source), cells)
        tokens = ([PLACE] * wide + [BREAK]) * high
        assert prompt.ids[at : at + len(tokens)] == [*tokens[:-1], END]
        assert (span.first, span.length, span.rows) == (at, len(tokens) - 1, high * wide)
        at += len(tokens) + 1
    rows, wanted = np.concatenate(encode(model.worker, prompt)), model.rows(seen, sizes)
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        out = greedy(
            model.oracle,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=seen,
            image_sizes=sizes,
        )
    check_answer(model.worker, prompt, out)


def test_chunks_slices_and_others_change_no_bit(model: Seeing) -> None:
    """A chunk may end at, before and after a token between the rows, or be that token alone."""
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    other = prompt_of(model.prompts, drawn(4, SIZES)[3:])
    check_bits(model.worker, prompt, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llava", {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_act": "silu"}),
        ("llava", {"whole": {"multimodal_projector_bias": False}}),
        ("llava", {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}),
        ("mistral3", {"whole": {"multimodal_projector_bias": True}}),
        ("mistral3", {"text": {"model_type": "ministral3", "rms_norm_eps": 1e-2}}),
        ("mistral3", {"dtype": torch.bfloat16}),
    ],
)
def test_other_configs_give_the_rows_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    model, pictures = seeing(tmp_path, kind, **changes), drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    rows, wanted = np.concatenate(encode(model.worker, prompt)), None
    wanted = model.rows(*model.pixels(pictures))
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    other = worker_of(open_model(str(tmp_path)), "ref")
    ref = np.concatenate(encode(other, prompt))
    assert np.abs(rows - ref).max() < 1e-4 * np.abs(ref).max()


@pytest.mark.parametrize(
    ("kind", "file", "change", "error"),
    [
        ("llava", "vision", {"model_type": "clip_vision_model"}, UnsupportedModel),
        ("llava", "vision", {"num_hidden_layers": 3}, ModelFileError),
        ("llava", "vision", {"head_dim": 32}, UnsupportedModel),
        ("llava", "vision", {"patch_size": [8, 4]}, HeadraceError),
        ("llava", "config", {"vision_feature_layer": -2}, UnsupportedModel),
        ("llava", "config", {"vision_feature_select_strategy": "default"}, UnsupportedModel),
        ("mistral3", "config", {"spatial_merge_size": 3}, ModelFileError),
        ("mistral3", "config", {"projector_hidden_act": "relu"}, UnsupportedModel),
        ("mistral3", "preprocessor", {"size": {"longest_edge": 4_000}}, UnsupportedModel),
        ("mistral3", "preprocessor", {"size": {"height": 60, "width": 60}}, ModelFileError),
    ],
)
def test_what_is_not_run_is_named(
    tmp_path: Path, kind: str, file: str, change: dict[str, Any], error: type[Exception]
) -> None:
    make(tmp_path, kind)
    name = "preprocessor_config.json" if file == "preprocessor" else "config.json"
    said = json.loads((tmp_path / name).read_text())
    at = said["vision_config"] if file == "vision" else said
    at |= change
    (tmp_path / name).write_text(json.dumps(said))
    with pytest.raises(error):
        open_pictures(open_model(str(tmp_path)))
