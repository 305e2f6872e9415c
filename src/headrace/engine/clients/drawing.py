"""Pictures of a class or a text: the fields of a request, checked, and its pictures as they are
drawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...base.denoising import (
    MOST_GUIDANCE,
    MOST_PARTIAL,
    MOST_PICTURES,
    Denoiser,
    PictureWish,
)
from ...base.errors import EngineFault, InvalidRequest
from ...base.modelfiles import ModelFiles
from ...base.names import nearest
from ...base.outputs import PictureOutput
from ...base.request import OutputDelta
from ...base.sampling import SamplingParams
from ...media.png import png
from .face import OutputStream, ServingEngine
from .input import resolve_seed

STEPS, GUIDANCE = 20, 4.0
"""Steps and guidance of a request that names none."""


class PictureOrder(NamedTuple):
    """A request's pictures, verified against the model."""

    label: int
    seed: int
    wishes: tuple[PictureWish, ...]
    """One for each picture."""

    @property
    def inputs(self) -> int:
        """Tokens of its texts, or one for a class."""
        return sum(map(len, self.wishes[0].texts)) or 1

    @property
    def entries(self) -> int:
        """Model entries of all its steps: each runs the model on all patches of a picture."""
        return sum(one.steps * one.entries for one in self.wishes)


def denoiser_of(files: ModelFiles, name: str) -> Denoiser:
    """Return the shape of a model that draws. Raises `InvalidRequest` for another model."""
    if files.arch.denoiser is None:
        raise InvalidRequest(
            f"{name} draws no pictures; a folder of a pipeline of diffusers is needed",
            param="model",
            code="unsupported_model",
        )
    return files.arch.denoiser


def read_drawing(
    engine: ServingEngine,
    denoiser: Denoiser,
    prompt: str,
    *,
    negative: str | None = None,
    n: int | None = None,
    size: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    partial: int | None = None,
) -> PictureOrder:
    """Check the fields of a request; None for the default of each. `prompt`: a text, or a class's
    name or number; `negative`: the text that guidance leads away from; `size`: ROWSxCOLUMNS. Raises
    `InvalidRequest`, which names the field."""
    most, one = denoiser.solver.most, size_of(denoiser)
    if size not in (None, "auto", one):
        raise InvalidRequest(
            f"size is {size!r:.40}; this model draws pictures of {one} alone, or auto", param="size"
        )
    count = _within("n", n, 1, MOST_PICTURES, 1)
    steps = _within("steps", steps, 1, most, min(STEPS, most))
    partial = _within("partial_images", partial, 0, MOST_PARTIAL, 0)
    factor = GUIDANCE if guidance is None else guidance
    if not 0 <= factor <= MOST_GUIDANCE:
        raise InvalidRequest(
            f"guidance is {factor:g}; allowed: from 0 to {MOST_GUIDANCE:g}; at most 1: none",
            param="guidance",
        )
    number, texts = 0, tuple[tuple[int, ...], ...]()
    if denoiser.texts:
        given = [("prompt", prompt), ("negative_prompt", negative or "")]
        texts = tuple(_tokens(engine, denoiser, *one) for one in given[: 1 + (factor > 1)])
    elif negative is not None:
        raise InvalidRequest(
            "negative_prompt needs a model that reads texts", param="negative_prompt"
        )
    else:
        number = _label(engine.files, denoiser, prompt)
    runs = denoiser.solver.evaluations(steps)
    wishes = (PictureWish(number, runs, factor, choice, partial, texts) for choice in range(count))
    return PictureOrder(number, resolve_seed(seed), tuple(wishes))


def size_of(denoiser: Denoiser) -> str:
    """Return the size of pictures as requests name it: ROWSxCOLUMNS."""
    return "{1}x{2}".format(*denoiser.shape)


def _tokens(engine: ServingEngine, denoiser: Denoiser, name: str, text: str) -> tuple[int, ...]:
    """Return the tokens of a text, in lower case and without spaces around it, as the pipelines
    read it that do not clean captions. A folder's tokenizer may have more ids than its encoder has
    rows, and none of an empty text."""
    found = tuple[int, ...](engine.tokenizer.encode_with_specials(text.lower().strip()))
    if not found:
        raise InvalidRequest(f"{name} has no tokens; this model needs at least one", param=name)
    if not 0 <= min(found) <= max(found) < (rows := engine.files.arch.vocab_size):
        raise InvalidRequest(
            f"{name} has token {max(found)}; this model has tokens from 0 to {rows - 1}", param=name
        )
    if len(found) > denoiser.texts:
        raise InvalidRequest(
            f"{name} has {len(found)} tokens; at most {denoiser.texts} are read", param=name
        )
    if denoiser.reads is not None and (pad := denoiser.reads.pad) is not None:
        found += (pad,) * (denoiser.texts - len(found))
    return found


def _within(name: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; allowed: from {low} to {high}", param=name)
    return value


def _label(files: ModelFiles, denoiser: Denoiser, label: str) -> int:
    """Return a class's number, given its name or number."""
    text = label.strip().lower()
    number = files.labels.get(text)
    if number is None and text.isascii() and text.isdecimal() and len(text) < 8:
        number = int(text)
    if number is not None and number < denoiser.classes:
        return number
    known = f"a number from 0 to {denoiser.classes - 1}"
    if files.labels:
        known = f"a name of a class such as {next(iter(files.labels))!r:.40}, or {known}"
    raise InvalidRequest(
        f"no class {label!r:.80}; allowed: {known}{nearest(text, files.labels)}",
        param="prompt",
        code="unknown_label",
    )


def predicted(engine: ServingEngine, order: PictureOrder) -> float | None:
    """Predict the seconds of the pictures, each as if it ran alone; None if the engine does not
    know its hardware."""
    known = engine.memory
    if "step_seconds_1" not in known:
        return None
    text, decoding = known.get("texts_seconds", 0.0), known.get("decoder_seconds", 0.0)
    return sum(
        one.steps * known[f"step_seconds_{one.entries}"]
        + len(one.texts) * text
        + (1 + one.partial) * decoding
        for one in order.wishes
    )


def submit(
    engine: ServingEngine,
    order: PictureOrder,
    names: Sequence[str],
    *,
    whole: bool,
    priority: int = 0,
) -> list[OutputStream]:
    """Send a request for each picture, under these names."""
    streams: list[OutputStream] = []
    try:
        for name, wish in zip(names, order.wishes, strict=True):
            options: dict[str, Any] = {"task": "picture", "given": wish, "priority": priority}
            sampling = SamplingParams(seed=order.seed)
            given = [order.label], sampling
            streams.append(engine.submit(*given, request_id=name, whole=whole, **options))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


class PictureFile(NamedTuple):
    """A picture that has come."""

    number: int
    png: bytes
    step: int
    final: bool


async def drawn(
    denoiser: Denoiser, deltas: AsyncIterator[tuple[int, OutputDelta]]
) -> AsyncIterator[PictureFile]:
    """Yield pictures from (index of a request, its delta), written in a thread. Raises
    `EngineFault`."""
    async for index, delta in deltas:
        if isinstance(delta.output, PictureOutput):
            final, step = delta.finish_reason is not None, delta.output.step
            data = await asyncio.to_thread(file_of, denoiser, delta.output)
            yield PictureFile(index, data, step, final)
        elif delta.finish_reason is not None:
            raise EngineFault("a picture ended before its last step")


def file_of(denoiser: Denoiser, picture: PictureOutput) -> bytes:
    """Return a picture as a PNG: -1 is black and 1 is white, as diffusers writes it."""
    values = np.frombuffer(picture.values, np.float32).reshape(denoiser.shape).transpose(1, 2, 0)
    shades = (np.clip(values / 2 + 0.5, 0, 1) * 255).round().astype(np.uint8)
    return png(shades)
