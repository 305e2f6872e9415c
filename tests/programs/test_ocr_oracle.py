"""Lines of drawn pages as RapidOCR reads them with the same weights."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.loader.open import fetched
from headrace.programs import inspected
from headrace.programs.ocr import steps

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")
rapid = pytest.importorskip("rapidocr_onnxruntime", reason="rapidocr-onnxruntime is not installed")
Image, ImageDraw, ImageFont = (
    pytest.importorskip(f"PIL.{name}", reason="needs the extra pictures")
    for name in ("Image", "ImageDraw", "ImageFont")
)
pytestmark = [pytest.mark.model, pytest.mark.slow]
TEXT = """Receipt Total Due water turns the wheel mill 1,284.50 EUR 2026-11-30 bridge before noon
SEVEN boats pass ref: 42% (copy) [draft] Zurich quick brown fox 17:45 Street"""


@cache
def session(file: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(fetched("ocr-pp-v4") / file, options)


@cache
def characters() -> tuple[str, ...]:
    found = inspected(fetched("ocr-pp-v4") / "rec.onnx").described.metadata["character"]
    return ("", *found.split("\n"), " ")


@cache
def oracle() -> Any:
    """One line at a time: lines that share a run are padded to the widest, and read otherwise."""
    return rapid.RapidOCR(rec_batch_num=1, cls_batch_num=1, intra_op_num_threads=1)


def run(file: str, x: Any) -> Any:
    return session(file).run(None, {"x": x})[0]


def ours(picture: Any) -> list[steps.TextLine]:
    page = steps.Page.of(np.asarray(picture), *picture.size)
    found = []
    for box in page.boxes(run("det.onnx", page.for_detector())[0, 0]):
        line = page.line(box)
        assert line is not None
        if steps.upside_down(run("cls.onnx", steps.for_classifier(line))[0]):
            line = np.rot90(line, 2)
        text, score = steps.text_of(run("rec.onnx", steps.for_reader(line))[0], characters())
        if score >= steps.KEPT:
            found.append(steps.TextLine(text, score, page.placed(box, *picture.size)))
    return found


def drawn(seed: int) -> Any:
    """A page of lines that end before its edge: dark or bright, upright, tilted, or on its head."""
    draw = np.random.default_rng(seed)
    width, height = int(draw.integers(400, 1100)), int(draw.integers(120, 700))
    paper, ink = ("white", "black") if seed % 4 else ((20, 25, 40), (235, 235, 220))
    made = Image.new("RGB", (width, height), paper)
    pen, y = ImageDraw.Draw(made), int(draw.integers(10, 30))
    while y < height - 60:
        size = int(draw.integers(20, 40))
        font, text = ImageFont.load_default(size), ""
        for word in draw.choice(TEXT.split(), 6):
            if pen.textlength(f"{text} {word}", font) > width - 90:
                break
            text = f"{text} {word}".strip()
        pen.text((int(draw.integers(15, 45)), y), text, ink, font=font)
        y += int(size * draw.uniform(1.6, 2.5))
    if seed % 5 == 2:
        angle = float(draw.uniform(-6, 6))
        made = made.rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=paper)
    return made.rotate(180) if seed % 5 == 3 else made


def test_lines_are_the_oracles() -> None:
    """Equal numbers of lines, corners up to a pixel (the oracle's rectangles are computed in single
    precision and cut to integers), and of 200 characters at most one other: this pixel decides
    between o, O and 0. The reader is unsure of spaces."""
    others = total = 0
    for seed in range(12):
        picture = drawn(seed)
        wanted = oracle()(picture)[0] or []
        for one, (box, text, score) in zip(ours(picture), wanted, strict=True):
            assert np.abs(np.array(one.box) - box).max() <= 1.1
            assert one.score == pytest.approx(score, abs=0.1)
            ours_, theirs = one.text.replace(" ", ""), text.replace(" ", "")
            same = SequenceMatcher(None, ours_, theirs, autojunk=False).get_matching_blocks()
            others += max(len(ours_), len(theirs)) - sum(block.size for block in same)
            total += len(theirs)
    assert total > 1000
    assert others <= total / 200, f"{others} of {total} characters"
