"""Videos for models that see: drawn frames, files by PyAV, and pixels as processors have them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Frames = npt.NDArray[np.uint8]


def drawn(count: int, width: int, height: int, seed: int = 1) -> Frames:
    """Frames [count, height, width, 3] of coarse noise, each another."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (count, -(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(8, 1).repeat(8, 2)[:, :height, :width])


def file_of(frames: Frames, rate: int = 10, codec: str = "libx264", form: str = "mp4") -> bytes:
    """A video's file."""
    import av

    room = io.BytesIO()
    with av.open(room, "w", format=form) as made:
        track: Any = made.add_stream(codec, rate=rate)
        track.height, track.width = frames.shape[1:3]
        track.pix_fmt = "yuv420p"
        for frame in frames:
            for packet in track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                made.mux(packet)
        for packet in track.encode():
            made.mux(packet)
    return room.getvalue()


def normal(frames: Frames, mean: list[float], deviation: list[float]) -> torch.Tensor:
    """[n, 3, height, width] as a processor normalises them."""
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
    means, deviations = (torch.tensor(one)[:, None, None] for one in (mean, deviation))
    return (pixels - means) / deviations


def patched(pixels: torch.Tensor, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of two frames each, square by square, and their grid, as Qwen's video processors have
    them; the last frame is repeated if it has no other."""
    if len(pixels) % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
    count, channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    cut = pixels.view(count // 2, 2, channels, rows // 2, 2, patch, columns // 2, 2, patch).permute(
        0, 3, 6, 4, 7, 2, 1, 5, 8
    )
    grid = torch.tensor([[count // 2, rows, columns]])
    return cut.reshape(count // 2 * rows * columns, -1), grid
