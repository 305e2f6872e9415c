"""The catalog's programs, of wheels: the bits of bare ONNX Runtime, speech found in a recording, a
picture's text read back, a voice that repeats itself."""

from __future__ import annotations

import json
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.loader.open import fetched
from headrace.programs import ForeignProgram, inspected

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")
pytestmark = pytest.mark.model
Array = np.ndarray[Any, Any]
RATE = 16_000
FRAME, CONTEXT = 512, 64
WORDS = "ðə wˈɔːɾɚ tˈɜːnz ðə wˈiːl, ænd ðə wˈiːl tˈɜːnz ðə mˈɪl."


@cache
def folder(name: str) -> Path:
    return fetched(name)


@cache
def program(name: str, file: str) -> ForeignProgram:
    return ForeignProgram(inspected(folder(name) / file), trial=name == "vad-silero")


@cache
def bare(name: str, file: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = folder(name) / file
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def spoken(seed: int) -> Array:
    """The voice joe, 22,050 samples a second."""
    config = json.loads((folder("joe") / "joe.onnx.json").read_text())
    ids = config["phoneme_id_map"]
    tokens = ids["^"] + [one for symbol in WORDS for one in (*ids["_"], *ids[symbol])]
    tokens = np.array([tokens + ids["_"] + ids["$"]])
    feed = {
        "input": tokens,
        "input_lengths": np.array([tokens.shape[1]]),
        "scales": np.array([0.667, 1.0, 0.8], np.float32),
    }
    return program("joe", "joe.onnx").run(feed, seed=seed)["output"].reshape(-1)


def test_a_voice_repeats_itself() -> None:
    """Same seed, same sound: bare ONNX Runtime draws anew in every run."""
    first, again, other = spoken(1), spoken(1), spoken(2)
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()
    assert 2.0 < len(first) / 22_050 < 8.0
    assert 0.05 < np.abs(first).max() <= 1.5


def recording() -> tuple[Array, float, float]:
    """Speech after 1.5 s of quiet noise and before as much; its begin and end in seconds."""
    sound = spoken(1)
    step = gcd(RATE, 22_050)
    places = np.arange(len(sound) * (RATE // step) // (22_050 // step)) * 22_050 / RATE
    speech = np.interp(places, np.arange(len(sound)), sound).astype(np.float32)
    quiet = np.random.default_rng(0).standard_normal(RATE * 3 // 2).astype(np.float32) * 1e-3
    return np.concatenate([quiet, speech, quiet]), 1.5, 1.5 + len(speech) / RATE


def test_speech_is_found_in_a_recording() -> None:
    vad, reference = program("vad-silero", "silero_vad.onnx"), bare("vad-silero", "silero_vad.onnx")
    sound, begin, end = recording()
    states, theirs = vad.start(), np.zeros((2, 1, 128), np.float32)
    context, odds = np.zeros(CONTEXT, np.float32), []
    for at in range(0, len(sound) - FRAME, FRAME):
        frame = np.concatenate([context, sound[at : at + FRAME]])[None]
        context = sound[at + FRAME - CONTEXT : at + FRAME]
        outputs, states = vad.step({"input": frame, "sr": np.array(RATE)}, states)
        expected, theirs = reference.run(
            ["output", "stateN"], {"input": frame, "state": theirs, "sr": np.array(RATE)}
        )
        assert outputs["output"].tobytes() == expected.tobytes()
        assert states["state"].tobytes() == theirs.tobytes()
        odds.append(outputs["output"].item())
    heard = np.flatnonzero(np.array(odds) > 0.5) * FRAME / RATE
    assert heard[0] == pytest.approx(begin, abs=0.35)
    assert heard[-1] == pytest.approx(end, abs=0.35)
    assert len(heard) * FRAME / RATE > 0.7 * (end - begin)


LINES = ("Invoice 2026-1187", "Total: 1,284.50 EUR", "Due on 14 December")


def page() -> Array:
    image, draw, font = (
        pytest.importorskip(f"PIL.{one}") for one in ("Image", "ImageDraw", "ImageFont")
    )
    made = image.new("RGB", (640, 256), "white")
    pen = draw.Draw(made)
    for at, line in enumerate(LINES):
        pen.text((40, 30 + 70 * at), line, "black", font=font.load_default(36))
    return np.asarray(made)


def scaled(picture: Array) -> Array:
    """[h, w, 3] in bytes → [1, 3, h, w] from −1 to 1."""
    return np.ascontiguousarray((picture.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)[None])


def run_both(file: str, x: Array) -> Array:
    (found,) = program("ocr-pp-v4", file).run({"x": x}).values()
    (expected,) = bare("ocr-pp-v4", file).run(None, {"x": x})
    assert found.tobytes() == expected.tobytes()
    return found


def stretches(mask: Array) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def test_a_picture_is_read_back() -> None:
    image = pytest.importorskip("PIL.Image")
    picture = page()
    mask = run_both("det.onnx", scaled(picture))[0, 0] > 0.3
    read = []
    symbols = [
        "",
        *program("ocr-pp-v4", "rec.onnx").inspection.described.metadata["character"].split("\n"),
        " ",
    ]
    for top, bottom in stretches(mask.any(1)):
        columns = np.flatnonzero(mask[top:bottom].any(0))
        # The detector marks the core of a line.
        more = (bottom - top) // 2
        crop = picture[
            max(0, top - more) : bottom + more, max(0, columns[0] - more) : columns[-1] + more
        ]
        width = round(48 * crop.shape[1] / crop.shape[0])
        line = np.asarray(image.fromarray(crop).resize((width, 48)))
        upright = run_both("cls.onnx", scaled(np.asarray(image.fromarray(line).resize((192, 48)))))
        assert upright.argmax() == 0
        best = run_both("rec.onnx", scaled(line))[0].argmax(1)
        kept = best[(best > 0) & (np.diff(best, prepend=-1) != 0)]
        read.append("".join(symbols[one] for one in kept))
    assert [one.replace(" ", "") for one in read] == [one.replace(" ", "") for one in LINES]


def test_kokoro_speaks_as_bare_onnx_runtime_does() -> None:
    vocabulary = json.loads((folder("kokoro") / "vocab.json").read_text())
    vocabulary = vocabulary.get("vocab", vocabulary)
    voices = np.load(folder("kokoro") / "voices.npz")
    tokens = [vocabulary[one] for one in "koɴniʨiwa" if one in vocabulary]
    style = voices[voices.files[0]].reshape(-1, 1, 256)[len(tokens)]
    feed = {
        "tokens": np.array([[0, *tokens, 0]]),
        "style": style.astype(np.float32),
        "speed": np.ones(1, np.float32),
    }
    found = program("kokoro", "kokoro.onnx").run(feed)["audio"]
    (expected,) = bare("kokoro", "kokoro.onnx").run(None, feed)
    assert found.tobytes() == expected.tobytes()
    assert 0.3 < len(found) / 24_000 < 5.0


def test_rows_of_real_programs() -> None:
    """Frames of several recordings go together if that is cheaper: their bits are equal."""
    draw = np.random.default_rng(0)
    frame = {"input": draw.standard_normal((1, 576), np.float32), "sr": np.array(RATE)}
    vad = program("vad-silero", "silero_vad.onnx")
    assert vad.prove({**frame, **vad.start()}, 4).reason.startswith("equal")
    reader = program("ocr-pp-v4", "rec.onnx")
    line = {"x": draw.standard_normal((1, 3, 48, 96), np.float32)}
    assert reader.prove(line, 3).reason.startswith("equal")
    voice = program("joe", "joe.onnx").rows
    assert voice == "it draws numbers, and each row has its own seed"
