"""Bodies of the routes of foreign programs. They need no numpy, because servers of text models
import them too."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .fields import Body


class StreamBody(Body):
    """Request to admit a periodic stream."""

    shapes: dict[str, list[int]] = Field(description="Shape of each input of a run.")
    values: dict[str, float] = Field(
        default_factory=dict,
        description="Number that fills an input while runs are measured; default 0.",
    )
    period: float = Field(gt=0, le=3600, description="Seconds from one run to the next.")
    deadline: float | None = Field(
        None, gt=0, le=3600, description="Seconds in which a run must end; null: the period."
    )


class OcrBody(Body):
    model: str | None = Field(
        None, description="Name of a pipeline, such as ocr-pp-v4; null: the only one."
    )
    image: str = Field(
        min_length=1,
        description="A jpeg, png, webp, bmp or gif as a data URL or in base64; nothing is fetched.",
    )
    timeout: float | None = Field(
        None, gt=0, le=3600, description="Seconds to the deadline of the whole request."
    )
    urgency: Literal["interactive", "batch"] | None = Field(
        None, alias="class", description="Default interactive; batch comes last."
    )


Three = Annotated[list[Annotated[float, Field(ge=-1e6, le=1e6)]], Field(min_length=3, max_length=3)]


class CameraBody(Body):
    """Request to open a camera in a session."""

    camera: str = Field(min_length=1, max_length=64, description="Its name.")
    model: str = Field(description="A program that takes one picture, or a pipeline that reads.")
    period: float = Field(gt=0, le=60, description="Seconds from one frame to the next.")
    deadline: float | None = Field(
        None, gt=0, le=60, description="Seconds from a frame to its answer; null: the period."
    )
    format: Literal["picture", "tensor"] = "picture"
    motion: float = Field(0.0, ge=0, le=1)
    refresh: float = Field(1.0, gt=0, le=5)
    lost_after: float | None = Field(None, gt=0, le=60)
    size: list[int] | None = Field(None, min_length=2, max_length=2)
    scale: float | None = Field(None, gt=0, le=1e6)
    mean: Three = Field(default_factory=lambda: [0.0] * 3)
    std: Three = Field(default_factory=lambda: [1.0] * 3)
    channels: Literal["rgb", "bgr"] = "rgb"
    outputs: list[str] | None = Field(None, min_length=1, max_length=64)
