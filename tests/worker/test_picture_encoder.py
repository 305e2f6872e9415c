"""An encoder of pictures in a worker against transformers in fp32, tile by tile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from headrace.base.errors import EngineFault, ModelFileError, UnsupportedModel
from headrace.base.modelfiles import ModelFiles
from headrace.base.slices import slices
from headrace.dist.payloads import SealedInputs, read_payload
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.kernels.cpu.library import LAYOUT
from headrace.loader import open_model
from headrace.loader.panels import PanelShelf
from headrace.loader.pictures import open_pictures
from headrace.models.pictures import describe_pictures
from headrace.text import load_tokenizer
from headrace.worker import Worker
from tiny.seeing_chat import DEVIATION, LONGEST, MEAN, TILE, make
from tiny.seeing_worker import (
    check_answer,
    check_bits,
    drawn,
    encode,
    greedy,
    prompt_of,
    worker_of,
)


class Seeing(NamedTuple):
    oracle: Any
    files: ModelFiles
    prompts: PicturePrompts


def seeing(folder: Path, kind: str, **changes: Any) -> Seeing:
    oracle = make(folder, kind, **changes)
    files = open_model(str(folder))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    prompts = open_picture_prompts(files, tokenizer)
    assert prompts is not None
    return Seeing(oracle, files, prompts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing(tmp_path_factory.mktemp("seeing_chat"), "smolvlm")


@pytest.fixture(scope="module")
def worker(model: Seeing) -> Worker:
    return worker_of(model.files)


def pixels(pictures: list[Image.Image], *, split: bool) -> torch.Tensor:
    """[1, tiles, 3, side, side] by transformers' own processor."""
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": LONGEST},
        max_image_size={"longest_edge": TILE},
        do_image_splitting=split,
        image_mean=MEAN,
        image_std=DEVIATION,
    )
    made = [processor([one], return_tensors="pt")["pixel_values"][0] for one in pictures]
    return torch.cat(made)[None].float()


@pytest.mark.parametrize(("count", "split"), [(1, True), (3, True), (9, True), (9, False)])
def test_rows_and_logits_are_those_of_transformers(
    model: Seeing, worker: Worker, count: int, split: bool
) -> None:
    pictures = drawn(count)
    prompt = prompt_of(model.prompts, pictures, small=not split)
    given = pixels(pictures, split=split)
    rows = np.concatenate(encode(worker, prompt))
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        seen = model.oracle.model.get_image_features(given, return_dict=True).pooler_output
        wanted = torch.cat(list(seen)).numpy()
        assert rows.shape == wanted.shape
        assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
        out = greedy(
            model.oracle, input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=given
        )
    check_answer(worker, prompt, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("idefics3", {}),
        ("idefics3", {"hidden_act": "gelu", "num_hidden_layers": 1}),
        ("smolvlm", {"image_size": 64}),
        ("smolvlm", {"patch_size": 4, "num_attention_heads": 2}),
        ("smolvlm", {"hidden_size": 72, "num_attention_heads": 3}),
        ("smolvlm", {"hidden_size": 144, "num_attention_heads": 2}),
    ],
)
def test_other_configs_give_the_rows_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """Another family's name, activation, a table of another size than a tile, smaller patches,
    heads of a size that is no multiple of 16."""
    model = seeing(tmp_path, kind, **changes)
    one, pictures = worker_of(model.files), drawn(3)
    prompt = prompt_of(model.prompts, pictures)
    assert one.encoder is not None
    rows = np.concatenate(encode(one, prompt))
    with torch.no_grad():
        given = pixels(pictures, split=True)
        seen = model.oracle.model.get_image_features(given, return_dict=True).pooler_output
    wanted = torch.cat(list(seen)).numpy()
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_chunks_slices_and_others_change_no_bit(model: Seeing, worker: Worker) -> None:
    prompt = prompt_of(model.prompts, drawn(3))
    other = prompt_of(model.prompts, drawn(4)[3:])
    check_bits(worker, prompt, other, slices=5)


def test_the_reference_gives_the_same_rows(model: Seeing, worker: Worker) -> None:
    prompt = prompt_of(model.prompts, drawn(1))
    rows = np.concatenate(encode(worker, prompt))
    ref = np.concatenate(encode(worker_of(model.files, "ref"), prompt))
    assert np.abs(rows - ref).max() < 1e-5 * np.abs(ref).max()


def test_a_slice_is_half_a_layer_and_a_tile_an_input(model: Seeing) -> None:
    picture = open_pictures(model.files)
    assert picture is not None
    graph = describe_pictures(picture)
    assert len(slices(graph)) - 1 == 1 + 2 * picture.arch.layers
    assert picture.arch.max_context == picture.side**2 == len(picture.order())
    assert sorted(picture.order()) == [divmod(at, picture.side) for at in range(picture.side**2)]
    assert picture.rows == picture.side**2 // picture.factor**2


def test_codes_are_read_as_the_numbers_of_their_tables() -> None:
    draw, payloads = np.random.default_rng(2), SealedInputs()
    tables = draw.normal(size=(3, 256)).astype(np.float32)
    codes = draw.integers(0, 256, (5, 12), dtype=np.uint8)
    held = payloads.hold("", codes, tables)
    assert payloads.bytes == 16 + tables.nbytes + codes.nbytes
    found = read_payload(held.source)
    wanted = np.concatenate([tables[at][codes[:, 4 * at : 4 * at + 4]] for at in range(3)], 1)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted)
    assert np.array_equal(read_payload(held.part(1, 3)), wanted[1:4])
    with pytest.raises(EngineFault, match="its request has ended"):
        read_payload(held.part(3, 3))
    held.close()
    assert payloads.bytes == 0


def test_tiles_are_named_by_content_and_model(model: Seeing) -> None:
    tile = np.arange(TILE * TILE * 3, dtype=np.uint8).reshape(TILE, TILE, 3)
    own = model.prompts.prepare(tile).digest
    assert own == model.prompts.prepare(tile.copy()).digest
    assert own != model.prompts.prepare(tile[::-1]).digest
    tokenizer = load_tokenizer(model.files.tokenizer, model.files.arch.vocab_size)
    another = PicturePrompts(model.prompts.picture, tokenizer, "another")
    assert own != another.prepare(tile).digest


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("config.json", {"vision_config": {"hidden_size": 65}}, UnsupportedModel),
        ("config.json", {"vision_config": {"num_channels": 1}}, UnsupportedModel),
        ("config.json", {"vision_config": {"hidden_act": "relu"}}, UnsupportedModel),
        ("config.json", {"vision_config": {"num_hidden_layers": 3}}, ModelFileError),
        ("config.json", {"vision_config": {"image_size": 64}}, ModelFileError),
        ("config.json", {"vision_config": 5}, ModelFileError),
        ("config.json", {"scale_factor": 3}, UnsupportedModel),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 36}}, UnsupportedModel),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 1040}}, UnsupportedModel),
        ("preprocessor_config.json", {"size": {"height": 9}}, ModelFileError),
        ("preprocessor_config.json", {"resample": 3}, UnsupportedModel),
        ("preprocessor_config.json", {"do_normalize": False}, UnsupportedModel),
        ("preprocessor_config.json", {"image_std": [0.5, 0.5]}, ModelFileError),
        ("preprocessor_config.json", {"image_std": [0.5, 0.5, 0]}, UnsupportedModel),
    ],
)
def test_what_is_not_run_is_named(
    model: Seeing, file: str, change: dict[str, Any], error: type[Exception]
) -> None:
    path = model.files.path / file
    before = path.read_text()
    said = json.loads(before)
    for key, value in change.items():
        joined = isinstance(value, dict) and key == "vision_config"
        said[key] = said[key] | value if joined else value
    path.write_text(json.dumps(said))
    try:
        with pytest.raises(error):
            open_pictures(model.files)
    finally:
        path.write_text(before)


def test_eight_bits_are_asked_for_by_name(model: Seeing) -> None:
    """The same tile by the file's numbers and by eight bits of them: near, and not equal."""
    prompt = prompt_of(model.prompts, drawn(1, ((64, 64),)), small=True)
    [exact] = encode(worker_of(model.files), prompt)
    [narrow] = encode(worker_of(model.files, quantise="int8"), prompt)
    [four] = encode(worker_of(model.files, quantise="int4"), prompt)
    assert np.array_equal(four, exact), "fewer bits are of the language model alone"
    assert not np.array_equal(narrow, exact)
    assert np.abs(narrow - exact).max() < 0.05 * np.abs(exact).max()


def test_panels_that_are_kept_at_this_start_are_read(model: Seeing, tmp_path: Path) -> None:
    """They move at the end of loading, and their first place is given back."""
    prompt = prompt_of(model.prompts, drawn(1, ((64, 64),)), small=True)
    [wanted] = encode(worker_of(model.files), prompt)
    for _ in range(2):  # The start that writes them, and the next one.
        shelf = PanelShelf(model.files, tmp_path, LAYOUT, least=0)
        [found] = encode(worker_of(model.files, shelf=shelf), prompt)
        assert shelf.outcome in ("mapped", "copied")
        assert np.array_equal(found, wanted)
