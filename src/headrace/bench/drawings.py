"""Drawn pictures with known content: shapes of one kind and one colour, made from a seed."""

from __future__ import annotations

import base64
import random
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..media.png import png

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 200, 20),
    "black": (20, 20, 20),
}
NUMBERS = ("one", "two", "three", "four", "five", "six")
_PLACES = 3, 2
"""Columns and rows of the possible places of shapes."""
QUESTIONS = {
    "shape": "What shape is in the picture: a circle, a square or a triangle? Answer in one word.",
    "colour": f"What colour has it: {', '.join(COLOURS)}? Answer in one word.",
    "count": "How many shapes are in the picture? Answer with one number.",
}
_KINDS = SHAPES, tuple(COLOURS), NUMBERS
_SAME = {str(at + 1): word for at, word in enumerate(NUMBERS)} | {f"{one}s": one for one in SHAPES}


class DrawnPicture(NamedTuple):
    """A picture and its content."""

    png: bytes
    shape: str
    colour: str
    number: int
    """Number of shapes in the picture."""

    @property
    def url(self) -> str:
        """The picture as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    def answer(self, question: str) -> str:
        """Return the right answer, in one word, to a key of `QUESTIONS`."""
        answers = {"shape": self.shape, "colour": self.colour, "count": NUMBERS[self.number - 1]}
        return answers[question]


def drawing(width: int, height: int, rng: random.Random) -> DrawnPicture:
    """Draw one to six equal shapes on a light ground, whose noise makes each picture unique."""
    shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    count = rng.randint(1, _PLACES[0] * _PLACES[1])
    noise = np.frombuffer(rng.randbytes(-(-width // 8) * -(-height // 8)), np.uint8) % 16
    cells = noise.reshape(-(-height // 8), -(-width // 8))
    ground = (cells.repeat(8, 0).repeat(8, 1)[:height, :width] + 236).astype(np.uint8)
    pixels = np.stack([ground] * 3, 2)
    columns, rows = _PLACES
    cell = width / columns, height / rows
    radius = max(0.5, 0.35 * min(cell))
    for place in rng.sample(range(columns * rows), count):
        x = (place % columns + rng.uniform(0.45, 0.55)) * cell[0]
        y = (place // columns + rng.uniform(0.45, 0.55)) * cell[1]
        pixels[_inside(shape, width, height, x, y, radius)] = COLOURS[colour]
    return DrawnPicture(png(pixels), shape, colour, count)


def _inside(
    shape: str, width: int, height: int, x: float, y: float, radius: float
) -> npt.NDArray[np.bool_]:
    """Return the mask [height, width] of a shape around a point."""
    across = np.arange(width)[None, :] + 0.5 - x
    down = np.arange(height)[:, None] + 0.5 - y
    if shape == "circle":
        disc: npt.NDArray[np.bool_] = across**2 + down**2 <= radius**2
        return disc
    box: npt.NDArray[np.bool_] = (np.abs(across) <= radius) & (np.abs(down) <= radius)
    return box if shape == "square" else box & (2 * np.abs(across) <= down + radius)


def is_right(text: str, answer: str) -> bool:
    """Return whether the first possible answer word in a text is the right one."""
    kind = next(words for words in _KINDS if answer in words)
    said = (_SAME.get(word, word) for word in re.findall(r"[a-z]+|[0-9]+", text.lower()))
    return next((word for word in said if word in kind), None) == answer
