"""Prompt that asks a code model for the text between two others (fill-in-the-middle)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.errors import ContextOverflow, InvalidRequest
from ..text.infill import Infill, plain_encoder

if TYPE_CHECKING:
    from .service import Service


def infill_of(service: Service) -> Infill | None:
    """Return the infill markers of the served model, or None."""
    engine = service.engine
    return Infill.of(engine.tokenizer, engine.files.tokenizer)


async def infill_prompt(
    service: Service,
    prefix: str,
    suffix: str,
    *,
    param: str,
    extra: Sequence[tuple[str, str]] = (),
    written: str = "",
    output: int | None = None,
) -> tuple[list[int], tuple[int, ...]]:
    """Build the prompt; return (token ids, ids that end the answer in addition to the model's own).

    `extra`: (file name, text) of other files. Their beginnings are cut so that the rest fits with
    `output` tokens. Raises `InvalidRequest` if the model was not trained for infill,
    `ContextOverflow` if prefix and suffix alone do not fit.
    """
    engine = service.engine
    marks = infill_of(service)
    if marks is None:
        raise InvalidRequest(
            f"{service.name!r} was not trained to fill gaps: it has no tokens that mark them",
            param=param,
            code="unsupported_parameter",
        )
    most = engine.max_context
    texts = (prefix, suffix, written)
    if any(len(text) > most and engine.tokenizer.fewest(text) > most for text in texts):
        raise ContextOverflow(
            f"prefix and suffix are more tokens than the {most} that fit in the context",
            param=param,
        )
    encode = plain_encoder(engine.tokenizer, marks)
    # As many characters from the end of each file as may fit.
    allowed = 16 * most
    files = [(name[:1000], text[-allowed:]) for name, text in extra][-64:]
    ids = await service.hands.run(
        marks.prompt,
        encode,
        prefix,
        suffix,
        start=engine.tokenizer.vocabulary.prefix_ids,
        extra=files,
        room=most - min(output or most // 4, most // 2),
        written=written,
    )
    return ids, marks.ends
