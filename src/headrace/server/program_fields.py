"""Bodies of the routes of foreign programs. They need no numpy, because servers of text models
import them too."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .fields import Body


class StreamBody(Body):
    """A periodic stream that asks to be admitted."""

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
