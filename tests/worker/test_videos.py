"""Videos and pictures in one prompt: rows, positions, log-probabilities and tokens in a worker
against transformers in fp32."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image

from headrace.base.filming import Film, Sampling, filmed
from headrace.base.tiling import cut
from headrace.engine.clients.kept_pictures import PreparedPicture
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.kv.prefix import PrefixChain
from headrace.loader import open_model
from headrace.media import picture_child
from headrace.media.videos import sized
from headrace.text import load_tokenizer
from headrace.worker import Worker
from headrace.worker.turns import turns_of
from tiny import filmed as films
from tiny import qwen_chat, seeing_chat
from tiny.seeing_worker import Prompt, answer, check_answer, encode, greedy, worker_of

KINDS = "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"
SLOW, LONG = Film(9, 2.0, (0, 2, 4, 6, 8)), Film(40, 10.0, (0, 5, 10, 15, 20, 25, 30, 35))
SIZES = {"qwen2_vl": 3, "qwen2_5_vl": 4, "qwen3_vl": 5, "smolvlm": 3}


class Seeing(NamedTuple):
    kind: str
    oracle: Any
    prompts: PicturePrompts
    worker: Worker
    slices: int


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    oracle = seeing_chat.make(folder) if kind == "smolvlm" else qwen_chat.make(folder, kind)
    files = open_model(str(folder))
    prompts = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert prompts is not None
    return Seeing(kind, oracle, prompts, worker_of(files), SIZES[kind])


def frames_of(model: Seeing, film: Film, seed: int, width: int, height: int) -> films.Frames:
    """Frames of a video in the size that the model takes."""
    assert model.prompts.picture.videos is not None
    found = sized(width, height, film, model.prompts.picture.videos.sizing)
    return films.drawn(len(film.frames), *found.tile, seed=seed)


class Parts(NamedTuple):
    prompt: Prompt
    pictures: list[Image.Image]
    videos: list[films.Frames]
    made: list[Film]


def parts_of(model: Seeing, *kinds: Film | tuple[int, int]) -> Parts:
    """Text, a picture or a video, text, ..., text."""
    prompts, tokens, shapes, held = model.prompts, [5, 6], [], []
    pictures: list[Image.Image] = []
    videos: list[films.Frames] = []
    for number, kind in enumerate(kinds):
        film = kind if isinstance(kind, Film) else None
        if film is None:
            picture = Image.fromarray(films.drawn(1, *kind, seed=number)[0])
            rule = prompts.picture.sizing.small()
            found = cut(*picture.size, rule)
            tiles = [
                prompts.prepare(np.array(tile))
                for tile in picture_child.tiles_of(picture, found, Image)
            ]
            made = PreparedPicture(tiles, found.rows, found.columns)
            pictures.append(picture)
        else:
            videos.append(frames_of(model, film, number, 40, 30))
            made = prompts.prepare_video(videos[-1], film)
        held.append(prompts.kept.hold(("", bytes([number]), number), *made))
        shapes.append(made.shape)
        tokens += [prompts.place_of(film is not None), 7 + number]
    ids, spans = prompts.expand(tokens, shapes, held)
    sealed = [one.sealed for one in held]
    return Parts(
        Prompt(ids, tuple(spans), sealed),
        pictures,
        videos,
        [one for one in kinds if isinstance(one, Film)],
    )


def given(model: Seeing, parts: Parts) -> dict[str, torch.Tensor]:
    """A prompt as transformers takes it."""
    ids = torch.tensor([parts.prompt.ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.kind == "smolvlm":
        mean, deviation = seeing_chat.MEAN, seeing_chat.DEVIATION
        rule = model.prompts.picture.sizing.small()
        tiles = [
            np.stack(
                [
                    np.array(one)
                    for one in picture_child.tiles_of(each, cut(*each.size, rule), Image)
                ]
            )
            for each in parts.pictures
        ]
        # The picture of these prompts comes after the first video.
        order = [parts.videos[0], *tiles, *parts.videos[1:]]
        pixels = torch.cat([films.normal(one, mean, deviation) for one in order])[None]
        return {**inputs, "pixel_values": pixels}
    kinds = (ids == qwen_chat.PLACE).int() + 2 * (ids == qwen_chat.FILM).int()
    inputs |= {"mm_token_type_ids": kinds}
    if parts.pictures:
        made = qwen_chat.processor()(parts.pictures, return_tensors="pt")
        # With little detail these pictures are no smaller.
        inputs |= {"pixel_values": made["pixel_values"].float()}
        inputs |= {"image_grid_thw": made["image_grid_thw"]}
    mean, deviation = qwen_chat.MEAN, qwen_chat.DEVIATION
    patches = [
        films.patched(films.normal(one, mean, deviation), qwen_chat.PATCH) for one in parts.videos
    ]
    inputs |= {
        "pixel_values_videos": torch.cat([one for one, _ in patches]),
        "video_grid_thw": torch.cat([grid for _, grid in patches]),
    }
    if model.kind == "qwen2_5_vl":
        rates = [len(film.frames) / film.total * film.rate for film in parts.made]
        inputs["second_per_grid_ts"] = torch.tensor([2 / rate for rate in rates])
    return inputs


def test_rows_log_probabilities_and_tokens_are_those_of_transformers(model: Seeing) -> None:
    parts = parts_of(model, LONG, (40, 24), SLOW)
    prompt, inputs = parts.prompt, given(model, parts)
    rows = encode(model.worker, prompt, (model.slices,))
    if model.kind != "smolvlm":
        with torch.no_grad():
            made = model.oracle.model.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
            )
        deep = getattr(made, "deepstack_features", None) or []
        wanted = torch.cat(
            [torch.cat(list(one), 0) for one in (made.pooler_output, *deep)], 1
        ).numpy()
        ours = np.concatenate(
            [one for one, span in zip(rows, prompt.spans, strict=True) if span.kind == "video"]
        )
        assert ours.shape == wanted.shape
        assert np.abs(ours - wanted).max() < 1e-4 * np.abs(wanted).max()
    with torch.no_grad():
        out = greedy(model.oracle, **inputs)
    check_answer(model.worker, prompt, out)


def test_chunks_and_slices_change_no_bit(model: Seeing) -> None:
    prompt = parts_of(model, SLOW, (40, 24), LONG).prompt
    encode(model.worker, prompt, (model.slices,))
    whole = answer(model.worker, prompt, len(prompt.ids))
    for chunk in (1, 7, 64):
        assert answer(model.worker, prompt, chunk) == whole
    assert model.worker.encoder is not None
    model.worker.encoder.forget()
    encode(model.worker, prompt, (1,) * model.slices)
    assert answer(model.worker, prompt, 33) == whole


def test_positions_are_those_of_transformers(model: Seeing) -> None:
    if model.kind == "smolvlm":
        pytest.skip("its positions are those of text")
    for kinds in ((LONG,), (LONG, (40, 24), SLOW), ((40, 24), SLOW)):
        parts = parts_of(model, *kinds)
        inputs, spans, length = given(model, parts), parts.prompt.spans, len(parts.prompt.ids)
        names = "image_grid_thw", "video_grid_thw", "second_per_grid_ts"
        more = {name: inputs[name] for name in names if name in inputs}
        wanted, _ = model.oracle.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], **more
        )
        assert np.array_equal(turns_of(spans, 0, length), wanted[:, 0].numpy())
        for chunk in (1, 5):
            cuts = range(0, length + 4, chunk)
            found = np.concatenate([turns_of(spans, at, chunk) for at in cuts], 1)
            assert np.array_equal(found[:, :length], wanted[:, 0].numpy())
            first = int(wanted[1:].max()) + 1  # As in `generate`.
            assert found[:, length : length + 4].tolist() == [list(range(first, first + 4))] * 3


def test_equal_frames_at_other_times_share_rows_and_no_keys(model: Seeing) -> None:
    frames = frames_of(model, LONG, 3, 40, 30)
    chains, digests = [], []
    for film in (LONG, LONG._replace(rate=5.0)):
        made = model.prompts.prepare_video(frames, film)
        held = model.prompts.kept.hold(("", film.rate.hex().encode(), -1), *made)
        place = model.prompts.place_of(True)
        ids, spans = model.prompts.expand([5, place, 6, *range(20)], [made.shape], [held])
        digests.append([span.digest for span in spans])
        chains.append(PrefixChain(b"", 16, ids, inputs=spans).extend(len(ids) // 16))
    assert digests[0] == digests[1]
    if model.kind == "qwen2_vl":
        assert chains[0] == chains[1], "its positions do not say the rate"
    else:
        assert chains[0][-1] != chains[1][-1]


@pytest.mark.parametrize(
    ("rule", "total", "rate", "frames"),
    [
        (Sampling("even", 2.0, 4, 768, 2), 40, 10.0, (0, 5, 10, 15, 20, 25, 30, 35)),
        (Sampling("even", 2.0, 4, 768, 2), 7, 30.0, (0, 1, 3, 5)),
        (Sampling("even", 2.0, 4, 768, 2), 1, 30.0, (0,)),
        (Sampling("even", 2.0, 4, 8, 2), 3_000, 30.0, tuple(range(0, 3_000, 375))),
        (Sampling("even", 2.0, 4, 768, 2), 143, 10.0, None),
        (Sampling("spread", 2.0, 4, 768, 2), 20, 10.0, (0, 6, 13, 19)),
        (Sampling("spread", 2.0, 4, 768, 2), 3, 10.0, (0, 1, 2)),
        (Sampling("spread", 2.0, 4, 768, 2), 100, 25.0, (0, 14, 28, 42, 57, 71, 85, 99)),
        (Sampling("centred", 1.0, 1, 64), 100, 25.0, (0, 33, 66, 99)),
        (Sampling("centred", 1.0, 1, 64), 2_500, 25.0, None),
        (Sampling("centred", 1.0, 1, 64), 5, 25.0, (0,)),
    ],
)
def test_frames_are_those_of_the_processors(
    rule: Sampling, total: int, rate: float, frames: tuple[int, ...] | None
) -> None:
    """The numbers were written by transformers' `sample_frames`."""
    found = filmed(total, rate, rule)
    if frames is not None:
        assert found.frames == frames
    elif rule.rule == "even":
        assert found.frames[-1] < total
        assert len(found.frames) == 28
    else:
        assert (found.frames[0], found.frames[-1], len(found.frames)) == (25, 2_475, 64)
