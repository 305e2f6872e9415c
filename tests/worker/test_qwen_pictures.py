"""Encoders of pictures of the Qwen-VL families in a worker against transformers in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.base.modelfiles import ModelFiles
from headrace.base.spec import InputSpan
from headrace.dist.payloads import read_payload
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.kernels.cpu.pieces import LoweredPieces
from headrace.loader import open_model
from headrace.loader.pictures import open_pictures
from headrace.text import load_tokenizer
from headrace.worker import Worker
from headrace.worker.turns import turns_of
from tiny.qwen_chat import KINDS, PLACE, make, processor
from tiny.seeing_worker import (
    Prompt,
    answer,
    check_answer,
    check_bits,
    drawn,
    encode,
    greedy,
    prompt_of,
    worker_of,
)

SIZES = ((70, 40), (1, 1), (33, 96), (64, 64), (4, 200), (31, 32), (90, 89), (1, 200), (96, 12))
LAYERS = {"qwen2_vl": 2, "qwen2_5_vl": 3, "qwen3_vl": 4, "qwen3_vl_moe": 4}


class Seeing(NamedTuple):
    oracle: Any
    files: ModelFiles
    prompts: PicturePrompts
    worker: Worker


def seeing(folder: Path, kind: str, kv_dtype: str = "float32", **changes: Any) -> Seeing:
    oracle = make(folder, kind, **changes)
    files = open_model(str(folder))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    prompts = open_picture_prompts(files, tokenizer)
    assert prompts is not None
    return Seeing(oracle, files, prompts, worker_of(files, kv_dtype=kv_dtype))


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
    rows = np.concatenate(encode(model.worker, prompt))
    wanted = features(model.oracle, inputs)
    assert rows.shape == wanted.shape
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    with torch.no_grad():
        out = greedy(model.oracle, **inputs)
    check_answer(model.worker, prompt, out)


def test_chunks_slices_and_others_change_no_bit(model: Seeing) -> None:
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    other = prompt_of(model.prompts, drawn(4, SIZES)[3:])
    check_bits(model.worker, prompt, other, slices=5)


def test_the_reference_gives_the_same_rows(model: Seeing) -> None:
    prompt = prompt_of(model.prompts, drawn(3, SIZES))
    rows = np.concatenate(encode(model.worker, prompt))
    other = worker_of(model.files, "ref")
    ref = np.concatenate(encode(other, prompt))
    assert np.abs(rows - ref).max() < 1e-5 * np.abs(ref).max()
    tokens, told = answer(model.worker, prompt, 64)
    same, also = answer(other, prompt, 64)
    assert tokens == same
    for one, two in zip(told, also, strict=True):
        assert np.abs(np.array(one.top_logprobs) - np.array(two.top_logprobs)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2_5_vl", {"window_size": 24, "fullatt_block_indexes": []}),
        ("qwen2_5_vl", {"depth": 1, "fullatt_block_indexes": [0]}),
        ("qwen2_5_vl", {"hidden_size": 96, "num_heads": 2, "hidden_act": "gelu"}),
        ("qwen2_vl", {"embed_dim": 72, "num_heads": 6, "depth": 1}),
        ("qwen3_vl", {"deepstack_visual_indexes": [3], "num_position_embeddings": 1}),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2], "hidden_size": 144}),
        ("qwen3_vl", {"deepstack_visual_indexes": []}),
        ("qwen3_vl", {"dtype": torch.bfloat16}),
        ("qwen2_5_vl", {"dtype": torch.bfloat16}),
    ],
)
def test_other_configs_give_the_answers_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """Windows that do not divide a picture, one layer, no whole layers, heads of 12 and 36 numbers,
    a table of one position, further rows at every place or nowhere, weights in bf16."""
    model, pictures = seeing(tmp_path, kind, **changes), drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    inputs = given(prompt, pictures)
    rows = np.concatenate(encode(model.worker, prompt))
    wanted = features(model.oracle, inputs)
    # Frames are added before the product: of bf16 weights that is a sum in fp32.
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    if "dtype" in changes:
        return  # The language model multiplies bf16 in a way of its own.
    with torch.no_grad():
        logits = model.oracle(**inputs).logits[0, -1]
    _, told = answer(model.worker, prompt, len(prompt.ids))
    expected = torch.log_softmax(logits, -1)[torch.tensor(told[0].top_ids)].numpy()
    assert np.abs(np.array(told[0].top_logprobs) - expected).max() < 1e-4


@pytest.mark.parametrize("count", [1, 3, 9])
def test_positions_are_those_of_transformers(model: Seeing, count: int) -> None:
    pictures = drawn(count, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    inputs = given(prompt, pictures)
    wanted, _ = model.oracle.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
    )
    length = len(prompt.ids)
    assert np.array_equal(turns_of(prompt.spans, 0, length), wanted[:, 0].numpy())
    for chunk in (1, 3, 17):
        parts = [
            turns_of(prompt.spans, start, min(chunk, length - start))
            for start in range(0, length, chunk)
        ]
        assert np.array_equal(np.concatenate(parts, 1), wanted[:, 0].numpy())
    after = turns_of(prompt.spans, length, 4)
    assert after.tolist() == [[int(wanted.max()) + 1 + at for at in range(4)]] * 3


def test_spans_without_a_grid_count_as_text() -> None:
    spans = (InputSpan(2, 5, "sound", b""),)
    assert turns_of(spans, 1, 9).tolist() == [list(range(1, 10))] * 3


def test_keys_in_codes_do_without_turned_biases(tmp_path: Path) -> None:
    model, pictures = seeing(tmp_path, "qwen2_5_vl", kv_dtype="int8"), drawn(3, SIZES)
    prompt = prompt_of(model.prompts, pictures)
    encode(model.worker, prompt)
    with torch.no_grad():
        logits = model.oracle(**given(prompt, pictures)).logits[0, -1]
    tokens, told = answer(model.worker, prompt, 13)
    assert (tokens, told) == answer(model.worker, prompt, len(prompt.ids))
    expected = torch.log_softmax(logits, -1)[torch.tensor(told[0].top_ids)].numpy()
    assert np.abs(np.array(told[0].top_logprobs) - expected).max() < 0.1


def test_the_shape_of_a_grid_is_a_part_of_its_name(model: Seeing) -> None:
    tall = np.random.default_rng(1).integers(0, 256, (32, 8, 3), np.uint8)
    cells = tall.reshape(4, 8, 1, 8, 3)
    wide = np.ascontiguousarray(cells.transpose(2, 1, 0, 3, 4).reshape(8, 32, 3))
    one, two = (model.prompts.prepare(each) for each in (tall, wide))
    assert (one.rows, one.columns, two.columns) == (4, 1, 4)
    if model.prompts.picture.kind != "qwen2_5_vl":
        assert np.array_equal(one.patches, two.patches)
    assert one.digest != two.digest


@pytest.mark.parametrize(
    ("kind", "file", "change", "error"),
    [
        ("qwen2_5_vl", "vision", {"window_size": 7}, UnsupportedModel),
        ("qwen2_5_vl", "vision", {"fullatt_block_indexes": [2, 1]}, ModelFileError),
        ("qwen2_5_vl", "vision", {"fullatt_block_indexes": 7}, ModelFileError),
        ("qwen2_5_vl", "vision", {"out_hidden_size": 97}, ModelFileError),
        ("qwen2_5_vl", "vision", {"num_heads": 32}, UnsupportedModel),
        ("qwen2_5_vl", "vision", {"num_heads": 5}, UnsupportedModel),
        ("qwen2_5_vl", "vision", {"temporal_patch_size": 1}, UnsupportedModel),
        ("qwen2_5_vl", "vision", {"spatial_merge_size": 3}, HeadraceError),
        ("qwen2_5_vl", "vision", {"depth": 4}, ModelFileError),
        ("qwen2_5_vl", "vision", {"hidden_act": "quick_gelu"}, UnsupportedModel),
        ("qwen2_vl", "vision", {"hidden_act": "gelu"}, UnsupportedModel),
        ("qwen2_vl", "vision", {"mlp_ratio": 3}, ModelFileError),
        ("qwen3_vl", "vision", {"num_position_embeddings": 24}, UnsupportedModel),
        ("qwen3_vl", "vision", {"num_position_embeddings": 36}, ModelFileError),
        ("qwen3_vl", "vision", {"deepstack_visual_indexes": ["1"]}, ModelFileError),
        ("qwen3_vl", "vision", {"deepstack_visual_indexes": [0, 1, 2, 3]}, ModelFileError),
        ("qwen2_5_vl", "preprocessor", {"patch_size": 8}, UnsupportedModel),
        ("qwen2_5_vl", "preprocessor", {"resample": 2}, UnsupportedModel),
        ("qwen2_5_vl", "preprocessor", {"size": {"shortest_edge": 1 << 29}}, UnsupportedModel),
        ("qwen2_5_vl", "preprocessor", {"min_pixels": 0}, HeadraceError),
        ("qwen2_5_vl", "text", {"mrope_section": [2, 3, 4]}, UnsupportedModel),
        ("qwen2_5_vl", "text", {"mrope_section": [8]}, UnsupportedModel),
        ("qwen3_vl", "text", {"mrope_section": "abc"}, UnsupportedModel),
    ],
)
def test_what_is_not_run_is_named(
    tmp_path: Path, kind: str, file: str, change: dict[str, Any], error: type[Exception]
) -> None:
    make(tmp_path, kind)
    name = "preprocessor_config.json" if file == "preprocessor" else "config.json"
    said = json.loads((tmp_path / name).read_text())
    if file == "vision":
        said["vision_config"] |= change
    elif file == "text":
        said["text_config"]["rope_parameters"] |= change
    else:
        said |= change
    (tmp_path / name).write_text(json.dumps(said))
    with pytest.raises(error):
        open_pictures(open_model(str(tmp_path)))


def test_files_of_the_hub_are_read(tmp_path: Path) -> None:
    """Their config is flat, their rope is of the type "mrope"."""
    make(tmp_path, "qwen2_5_vl")
    said = json.loads((tmp_path / "config.json").read_text())
    text = said.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **said, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    newer = open_model(str(tmp_path)).arch
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert open_model(str(tmp_path)).arch == newer
    assert newer.rope.axes == (0, 0, 1, 1, 1, 2, 2, 2)


def test_experts_are_read_in_both_layouts(tmp_path: Path) -> None:
    """The hub has stacks [experts, in, out]; transformers writes [experts, out, in]."""
    model = seeing(tmp_path, "qwen3_vl_moe")
    prompt = prompt_of(model.prompts, drawn(1, SIZES))
    encode(model.worker, prompt)
    wanted = answer(model.worker, prompt, 64)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    turned = {
        name: one.transpose(1, 2).contiguous() if ".experts." in name else one
        for name, one in tensors.items()
    }
    assert any(one.shape != turned[name].shape for name, one in tensors.items())
    safetensors.torch.save_file(turned, path, {"format": "pt"})
    other = worker_of(open_model(str(tmp_path)))
    encode(other, prompt)
    assert answer(other, prompt, 64) == wanted


def test_the_encoder_runs_as_records(model: Seeing) -> None:
    assert model.worker.encoder is not None
    assert isinstance(model.worker.encoder._run, LoweredPieces)
