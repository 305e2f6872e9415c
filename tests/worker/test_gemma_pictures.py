"""Gemma 3's encoder of pictures in a worker, and tokens that see each other, against transformers
in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.base.tiling import cut
from headrace.dist.payloads import read_payload
from headrace.engine.clients.kept_pictures import PictureShape
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.loader import open_model
from headrace.loader.pictures import open_pictures
from headrace.text import load_tokenizer
from headrace.worker import Worker
from tiny.gemma_chat import BEGIN, PATCH, PLACE, TOKENS, make, processor, tokenizer
from tiny.seeing_worker import (
    SIZES,
    answer,
    check_answer,
    check_bits,
    drawn,
    encode,
    greedy,
    prompt_of,
    worker_of,
)

PANS: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


class Seeing(NamedTuple):
    oracle: Any
    prompts: PicturePrompts
    worker: Worker
    folder: Path
    pans: dict[str, Any]


def seeing(
    folder: Path, kernels: str = "auto", kv_dtype: str = "float32", **changes: Any
) -> Seeing:
    oracle = make(folder, **changes)
    files = open_model(str(folder))
    prompts = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert prompts is not None
    worker = worker_of(files, kernels, kv_dtype)
    return Seeing(oracle, prompts, worker, folder, changes.get("pans", {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def panning(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp("panning"), pans=PANS)


def check(model: Seeing, count: int, **told: Any) -> None:
    """Pixels are equal; rows, log-probabilities and tokens those of transformers."""
    pictures = drawn(count, SIZES)
    prompt = prompt_of(model.prompts, pictures, **told)
    pans = {} if told.get("small") else model.pans
    seen = processor(**pans)(pictures, return_tensors="pt")["pixel_values"].float()
    assert len(prompt.spans) == len(seen)
    for span, tile in zip(prompt.spans, seen.numpy(), strict=True):
        assert span.source is not None
        cells = tile.reshape(3, 4, 2, PATCH, 4, 2, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
        assert np.array_equal(read_payload(span.source), cells.reshape(-1, 3 * PATCH**2))
    rows = np.concatenate(encode(model.worker, prompt))
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        made = model.oracle.model.get_image_features(seen, return_dict=True).pooler_output
        wanted = made.flatten(0, 1).numpy()
        assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
        out = greedy(
            model.oracle,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            token_type_ids=(ids == PLACE).long(),
            pixel_values=seen,
        )
    check_answer(model.worker, prompt, out)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_rows_logits_and_tokens_are_those_of_transformers(model: Seeing, count: int) -> None:
    check(model, count)


@pytest.mark.parametrize("small", [False, True])
def test_long_pictures_have_their_parts_after_them(panning: Seeing, *, small: bool) -> None:
    check(panning, 9, small=small)


def test_tokens_of_a_picture_see_each_other(model: Seeing) -> None:
    """The other way round of the comparison above: without it the answer differs."""
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    alone = prompt._replace(spans=tuple(one._replace(mutual=False) for one in prompt.spans))
    encode(model.worker, prompt)
    found, other = (answer(model.worker, one, 1_000)[1] for one in (prompt, alone))
    assert max(abs(one.logprob - two.logprob) for one, two in zip(found, other, strict=True)) > 1e-3


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "bfloat16"])
def test_chunks_slices_and_others_change_no_bit(tmp_path: Path, kv_dtype: str) -> None:
    model = seeing(tmp_path, kv_dtype=kv_dtype)
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    other = prompt_of(model.prompts, drawn(4, SIZES)[3:])
    check_bits(model.worker, prompt, other, chunks=(1, 7, 20, 64))


@pytest.mark.parametrize("pans", [{}, PANS])
def test_the_prompt_is_the_processors(tmp_path: Path, pans: dict[str, Any]) -> None:
    """Lines before and after a picture become tokens together with the text around it."""
    model = seeing(tmp_path, pans=pans)  # Of its own the processor of both leaves the parts out.
    names = ("boi_token", "image_token", "eoi_token")
    tokens = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(),
        extra_special_tokens=dict(zip(names, tokens, strict=True)),
        padding_side="left",
    )
    said = (
        "<start_of_turn>user\n<start_of_image>What is this?\n<start_of_image>\n\nand "
        "<start_of_image><start_of_image> \n<end_of_turn>"
    )
    pictures = drawn(4, ((70, 40), (10, 200), (96, 33), (64, 64)))
    whole = Gemma3Processor(processor(**pans), theirs, image_seq_length=TOKENS)
    wanted = whole(images=pictures, text=said, **pans)["input_ids"][0]
    ids = tokenizer().encode(said).ids
    assert ids.count(BEGIN) == len(pictures)
    cuts = [cut(*picture.size, model.prompts.picture.sizing) for picture in pictures]
    shapes = [PictureShape(one.rows, one.columns, TOKENS) for one in cuts]
    made, spans = model.prompts.expand(ids, shapes, [])
    assert made == list(wanted)
    assert not spans


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_act": "gelu"},
        {"patch_size": 8, "intermediate_size": 72},
        {"dtype": torch.bfloat16},
        {"text": {"sliding_window": 40}},
        {"text": {"sliding_window": 3, "num_key_value_heads": 6}},
    ],
)
def test_other_configs_give_the_rows_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model, pictures = seeing(tmp_path, **changes), drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    rows = np.concatenate(encode(model.worker, prompt))
    with torch.no_grad():
        seen = processor()(pictures, return_tensors="pt")["pixel_values"].float()
        made = model.oracle.model.get_image_features(seen, return_dict=True)
    wanted = made.pooler_output.flatten(0, 1).numpy()
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    other = worker_of(open_model(str(tmp_path)), "ref")
    ref = np.concatenate(encode(other, prompt))
    assert np.abs(rows - ref).max() < 1e-4 * np.abs(ref).max()
    found, expected = (answer(one, prompt, 50) for one in (model.worker, other))
    assert found[0] == expected[0]
    pairs = zip(found[1], expected[1], strict=True)
    assert max(abs(one.logprob - two.logprob) for one, two in pairs) < 1e-3


def test_a_folder_without_its_encoder_reads_text(tmp_path: Path) -> None:
    """Some folders of this family have the language model's tensors alone."""
    from safetensors.torch import load_file, save_file

    make(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: one for name, one in load_file(file).items() if name.startswith("language")}
    save_file(kept, file)
    assert open_pictures(open_model(str(tmp_path))) is None


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("vision", {"image_size": [32, 64]}, HeadraceError),
        ("vision", {"image_size": 40}, UnsupportedModel),
        ("vision", {"num_hidden_layers": 3}, ModelFileError),
        ("vision", {"num_attention_heads": 3}, UnsupportedModel),
        ("config", {"mm_tokens_per_image": 15}, UnsupportedModel),
        ("config", {"mm_tokens_per_image": 9}, UnsupportedModel),
        ("preprocessor", {"size": {"height": 64, "width": 64}}, UnsupportedModel),
        ("preprocessor", {"do_pan_and_scan": 1}, ModelFileError),
        (
            "preprocessor",
            {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 17},
            UnsupportedModel,
        ),
        (
            "preprocessor",
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 1},
            UnsupportedModel,
        ),
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
