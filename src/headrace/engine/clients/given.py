"""Arguments of a caller of `LLM`: one for all prompts, or one for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...base.errors import HeadraceError, InvalidRequest

TextOrIds = str | Sequence[int] | Mapping[str, Any]
"""A prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
OneOrEach = str | Sequence[str | None] | None


def as_list(prompts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    """Return a list of prompts; a single one needs no list. Raises `InvalidRequest`."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts must be a text, token ids or a list of them, not {prompts!r:.80}",
            param="prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def for_each(given: OneOrEach, name: str, count: int) -> Sequence[str | None]:
    """Return one value for each prompt, given one for all or one for each."""
    if given is None or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} {name}s for {count} prompts", param=name)
    return given


def text_or_ids(prompt: TextOrIds) -> tuple[str | None, list[int] | None]:
    """Return (text, ids); one of them may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is None and ids is None:
            raise InvalidRequest(
                "a prompt given as a dictionary has the key prompt or prompt_token_ids",
                param="prompts",
            )
        return text, None if ids is None else list(ids)
    if not isinstance(prompt, Iterable):
        raise InvalidRequest(
            f"a prompt is text, token ids or a dictionary, not {prompt!r:.80}", param="prompts"
        )
    return None, list(prompt)


@contextlib.contextmanager
def placed(name: str, place: int, count: int) -> Iterator[None]:
    """Prefix errors raised inside with `name[place]`, if there are several prompts."""
    try:
        yield
    except HeadraceError as error:
        if count > 1:
            error.message = f"{name}[{place}]: {error.message}"
            error.args = (error.message,)
        raise
