"""A worker of a model that sees, driven by hand: rows of its encoder, and answers in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.base.encodings import EncodingName, EncodingStart
from headrace.base.groups import graph_groups
from headrace.base.modelfiles import ModelFiles
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan, RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.base.tiling import cut
from headrace.dist.payloads import SealedInput
from headrace.engine.clients.kept_pictures import PictureShape
from headrace.engine.clients.pictures import PicturePrompts
from headrace.kernels.cpu.library import LibraryAbsent, load
from headrace.loader.panels import PanelShelf
from headrace.media import picture_child
from headrace.models.registry import describe
from headrace.worker import Worker, WorkerOptions

ROOM = 64
"""Blocks of 16 tokens."""
TOKENS = 8
SIZES = ((70, 40), (1, 1), (33, 96), (64, 64), (10, 200), (31, 32), (90, 89), (5, 50), (96, 12))


def worker_of(
    files: ModelFiles,
    kernels: str = "auto",
    kv_dtype: str = "float32",
    quantise: str = "auto",
    shelf: PanelShelf | None = None,
) -> Worker:
    if kernels == "auto":
        try:
            load()
        except LibraryAbsent as absent:
            pytest.skip(f"the CPU library is not built: {absent}")
    room = 16 * ROOM
    options = WorkerOptions(
        threads=2,
        kernels=kernels,
        kv_dtype=kv_dtype,
        quantise=quantise,
        max_context=room,
        step_tokens=room,
        rows=2,
    )
    worker = Worker(files, options, shelf=shelf)
    worker.allocate(PoolShape(16, graph_groups(describe(files.arch), kv_dtype, ROOM + 1)))
    return worker


def drawn(count: int, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Image.Image]:
    """Pictures of the first sizes: coarse noise."""
    draw, made = np.random.default_rng(7), []
    for width, height in sizes[:count]:
        coarse = draw.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
        made.append(Image.fromarray(coarse.repeat(5, 0).repeat(5, 1)[:height, :width]))
    return made


class Prompt(NamedTuple):
    ids: list[int]
    spans: tuple[InputSpan, ...]
    held: list[SealedInput]


def prompt_of(
    prompts: PicturePrompts, pictures: Sequence[Image.Image], *, small: bool = False
) -> Prompt:
    """Text, a picture, text, a picture, ..., text; each tile is an input of its own."""
    ids, spans, held = [5, 6], [], []
    rule = prompts.picture.sizing.small() if small else prompts.picture.sizing
    for picture in pictures:
        found = cut(*picture.size, rule)
        tiles = [
            prompts.prepare(np.array(tile))
            for tile in picture_child.tiles_of(picture, found, Image)
        ]
        shape = PictureShape(found.rows, found.columns, tiles[0].rows, tiles[0].columns)
        made, parted = prompts.ids(shape), bool(prompts.picture.between)
        assert made.count(prompts.picture.place) == sum(tile.rows for tile in tiles)
        at = 0
        for tile in tiles:
            held.append(prompts.payloads.hold("", tile.patches, prompts.levels))
            at = made.index(prompts.picture.place, at)
            length = tile.rows + (tile.rows // tile.columns - 1 if parted else 0)
            given = length, "picture", tile.digest, held[-1].source, len(tile.patches)
            span = InputSpan(len(ids) + at, *given, tile.columns)
            spans.append(span._replace(mutual=prompts.picture.mutual, parted=parted))
            at += length
        ids += [*made, 7]
    return Prompt(ids, tuple(spans), held)


def encode(worker: Worker, prompt: Prompt, cuts: tuple[int, ...] = ()) -> list[Any]:
    """Rows of all tiles. `cuts`: slices of each run but the last."""
    encoder = worker.encoder
    assert encoder is not None
    starts = [
        EncodingStart(at, EncodingName("", span.digest), span.source, span.units, span.columns)
        for at, span in enumerate(prompt.spans)
        if span.source is not None
    ]
    encoder.take(StepPlan(0, [], [], [], [], encodings=starts))
    for start in starts:
        first = 0
        for count in (*cuts, len(encoder._bounds) - 1 - sum(cuts)):
            encoder.run(start.slot, first, count)
            first += count
    return [np.asarray(encoder._items[start.slot].rows) for start in starts]


def answer(worker: Worker, prompt: Prompt, chunk: int) -> tuple[list[int], list[Any]]:
    """Greedy tokens, and the log-probabilities at each. No chunk ends between tokens that see each
    other: the one before them does, or a larger one behind them."""
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=20)
    spec, ids = RequestSpec(sampling, 0, inputs=prompt.spans), prompt.ids
    told: list[Any] = []
    tokens: list[int] = []
    at = number = 0
    while len(tokens) < TOKENS:
        count = min(chunk, len(ids) - at) if at < len(ids) else 1
        for span in prompt.spans:
            if span.mutual and span.first < at + count < span.end:
                count = (span.first if span.first > at else span.end) - at
        sampled = at + count >= len(ids)
        plan = StepPlan(number, [0], [at], [count], [sampled], parts=())
        if not number:
            plan.admitted.append(Admission(0, 0, ids, len(ids) + TOKENS, 0, spec, ""))
            for group in range(len(worker._pool.groups)):
                plan.blocks.append(BlockWrite(0, group, 0, list(range(1, ROOM + 1))))
        result = worker.execute(plan)
        assert result.error is None, result.error
        tokens += result.tokens[0]
        told += (result.logprobs or [[]])[0]
        at, number = at + count, number + 1
    worker.execute(StepPlan(number, [], [], [], [], released=[0]))
    return tokens, told


def greedy(oracle: Any, **given: Any) -> Any:
    """The tokens of transformers, and their logits."""
    with torch.no_grad():
        return oracle.generate(
            **given,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )


def check_answer(worker: Worker, prompt: Prompt, out: Any) -> None:
    """Tokens are those of `greedy`, log-probabilities as near as 1e-4."""
    tokens, told = answer(worker, prompt, len(prompt.ids))
    assert tokens == out.sequences[0, -TOKENS:].tolist()
    for one, logits in zip(told, out.logits, strict=True):
        expected = torch.log_softmax(logits[0], -1)[torch.tensor(one.top_ids)].numpy()
        assert np.abs(np.array(one.top_logprobs) - expected).max() < 1e-4


def check_bits(
    worker: Worker,
    prompt: Prompt,
    other: Prompt,
    chunks: Sequence[int] = (1, 7, 64),
    slices: int = 4,
) -> None:
    """Chunks, slices and the pictures of another prompt change no bit."""
    rows = encode(worker, prompt)
    whole = answer(worker, prompt, len(prompt.ids))
    for chunk in chunks:
        assert answer(worker, prompt, chunk) == whole
    assert worker.encoder is not None
    worker.encoder.forget()
    encode(worker, other)
    again = encode(worker, prompt, (1,) * (slices - 1))
    assert all(np.array_equal(one, two) for one, two in zip(rows, again, strict=True))
