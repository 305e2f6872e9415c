"""Text recognition as a job: one run of a detector; for each line one of a classifier, which
detects upside-down text, and one of a reader."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...base.errors import EngineFault, InvalidRequest, UnsupportedModel
from ...media import Picture
from ...programs.measured import Shapes
from ...programs.ocr import steps
from ...programs.ocr.pixels import Codes, Floats
from ...programs.rows import Array
from .executor import Result, ServedProgram
from .jobs import Beside, ProgramJob

DETECTOR, CLASSIFIER, READER = "-det", "-cls", "-rec"
"""Suffixes of the names of a pipeline's programs; the classifier may be absent."""
CHARACTERS = "character"
"""Key of the reader's metadata that lists its characters, one per line."""


class OcrPipeline:
    """The programs that read pictures under one name."""

    def __init__(self, name: str, programs: Mapping[str, ServedProgram]) -> None:
        """Find the programs of this name's pipeline. Raises `UnsupportedModel` if they are not
        PP-OCR."""
        self.name = name
        self.detector = programs[name + DETECTOR]
        self.reader = programs[name + READER]
        self.classifier = programs.get(name + CLASSIFIER)
        for one in (self.detector, self.reader, self.classifier):
            if one is not None:
                _check(one)
        listed = self.reader.confined.inspection.described.metadata.get(CHARACTERS, "")
        if not listed:
            raise UnsupportedModel(f"{self.reader.name} does not say which characters it reads")
        self.characters = ("", *listed.split("\n"), " ")

    async def read(self, job: ProgramJob, picture: Picture, beside: Beside) -> list[steps.TextLine]:
        """Read a picture's lines, in reading order. `beside` computes the work between runs.

        Raises as `ProgramJob.run`, and `InvalidRequest` for a picture that is not read.
        """
        size = picture.width, picture.height
        page: steps.Page = await beside(steps.Page.of, picture.tiles[0], *size)
        asked: Floats = await beside(page.for_detector)
        rows, columns = asked.shape[2:]
        ran = await run_step(job, self.detector, asked)
        odds = _output(ran, self.detector, 1, rows, columns)
        boxes: list[Floats] = await beside(page.boxes, odds[0, 0])
        found: list[steps.TextLine | None] = [None] * len(boxes)
        # All are announced before the first one runs, so they have a common price.
        work = [(at, box, self._expected(job, box)) for at, box in enumerate(boxes)]

        async def line(item: tuple[int, Floats, tuple[float, float]]) -> None:
            at, box, expected = item
            text, score = await self._line(job, page, box, expected, beside)
            if score >= steps.KEPT:
                found[at] = steps.TextLine(text, score, page.placed(box, *size))

        await job.each(work, line)
        return [one for one in found if one is not None]

    def _expected(self, job: ProgramJob, box: Floats) -> tuple[float, float]:
        turned = 0.0
        if self.classifier is not None:
            turned = job.expect(self.classifier, _shapes(self.classifier, steps.TURNED_WIDTH))
        return turned, job.expect(self.reader, _shapes(self.reader, steps.reader_width(box)))

    async def _line(
        self,
        job: ProgramJob,
        page: steps.Page,
        box: Floats,
        expected: tuple[float, float],
        beside: Beside,
    ) -> tuple[str, float]:
        """Return the text of a box and its score."""
        line: Codes | None = await beside(page.line, box)
        if line is None:
            job.owed = max(0.0, job.owed - sum(expected))
            return "", 0.0
        if self.classifier is not None:
            asked = await beside(steps.for_classifier, line)
            ran = await run_step(job, self.classifier, asked, expected[0])
            if steps.upside_down(_output(ran, self.classifier, 2)[0]):
                line = np.rot90(line, 2)
        asked = await beside(steps.for_reader, line)
        ran = await run_step(job, self.reader, asked, expected[1])
        odds = _output(ran, self.reader, None, len(self.characters))[0]
        found: tuple[str, float] = await beside(steps.text_of, odds, self.characters)
        return found


async def run_step(
    job: ProgramJob, program: ServedProgram, asked: Floats, expected: float = 0.0
) -> Result:
    """Run a program of a pipeline. Raises as `ProgramJob.run`, but `EngineFault` if the program
    refuses its input: the client only sent a picture."""
    try:
        return await job.run(program, {next(iter(program.confined.inputs)): asked}, expected)
    except InvalidRequest as error:
        raise EngineFault(f"{program.name} does not run on a picture: {error.message}") from error


def pipeline_names(programs: Mapping[str, ServedProgram]) -> list[str]:
    """Return the names under which a detector and a reader are served."""
    names = [one.removesuffix(DETECTOR) for one in programs if one.endswith(DETECTOR)]
    return [name for name in names if name + READER in programs]


def _shapes(program: ServedProgram, width: int) -> Shapes:
    return ((next(iter(program.confined.inputs)), (1, 3, steps.HEIGHT, width)),)


def _check(program: ServedProgram) -> None:
    """Raise `UnsupportedModel` unless a program takes one picture and gives one output."""
    ports = [*program.confined.inputs.values()]
    outputs = program.confined.inspection.described.graph.outputs
    one = len(ports) == len(outputs) == 1
    if not (
        one and ports[0].type == outputs[0].type == "float32" and len(ports[0].dims or ()) == 4
    ):
        raise UnsupportedModel(
            f"{program.name} is no program of PP-OCR: it takes {', '.join(map(str, ports))}"
        )


def _output(ran: Result, program: ServedProgram, *last: int | None) -> Array:
    """Return a run's output. Raises `EngineFault` unless its sizes are 1 and `last`; None: any."""
    (found,) = ran.values()
    wanted = 1, *last
    if found.ndim != len(wanted) or any(
        want not in (None, size) for want, size in zip(wanted, found.shape, strict=True)
    ):
        raise EngineFault(f"{program.name} answers {list(found.shape)}, which no PP-OCR does")
    return found
