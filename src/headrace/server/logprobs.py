"""Log-probabilities in the formats of OpenAI's two interfaces and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..base.step import TokenLogprobs
from .wire import Many

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Substitute for minus infinity, which JSON lacks."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the token alone as text; incomplete characters become U+FFFD."""
    return tokenizer.piece(token).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token: int, as_ids: bool) -> str:
    """Return a token's name in logprobs: its text, or `bytes:…` for incomplete characters.

    Both are OpenAI's forms. With `as_ids` it is `token_id:…`, vLLM's form.
    """
    if as_ids:
        return f"token_id:{token}"
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    return {
        "token": token_name(tokenizer, token, as_ids),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: list[int],
    logprobs: list[TokenLogprobs],
    top: int,
    *,
    as_ids: bool = False,
) -> list[dict[str, Any]]:
    """Build `logprobs.content` of a chat choice: one entry per token with its `top`
    alternatives."""
    entries = []
    for token, info in zip(tokens, logprobs, strict=True):
        entry = _entry(tokenizer, token, info.logprob, as_ids)
        entry["top_logprobs"] = [
            _entry(tokenizer, other, logprob, as_ids)
            for other, logprob in list(zip(info.top_ids, info.top_logprobs, strict=True))[:top]
        ]
        entries.append(entry)
    return entries


class CompletionLogprobs:
    """`logprobs` of one completions choice, continued over its chunks (text_offset accumulates)."""

    def __init__(
        self, tokenizer: Tokenizer, top: int, *, as_ids: bool = False, many: bool = False
    ) -> None:
        """Begin a choice. `many`: its lists may be long, so they become `Many`, to be written in
        the order in which they were made."""
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._list: Callable[[Iterable[Any]], Any] = Many if many else list

    def feed(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Build the object for these tokens; an entry without a value (the prompt's first) is
        null."""
        pairs = zip(tokens, logprobs, strict=True)
        return {
            "tokens": self._list(map(self._name, tokens)),
            "token_logprobs": self._list(
                None if info is None else finite(info.logprob) for info in logprobs
            ),
            "top_logprobs": self._list(self._alternatives(token, info) for token, info in pairs)
            if self._top
            else None,
            "text_offset": self._list(self._offsets(tokens)),
        }

    def _name(self, token: int) -> str:
        return token_name(self._tokenizer, token, self._as_ids)

    def _offsets(self, tokens: Sequence[int]) -> Iterator[int]:
        for token in tokens:
            yield self._offset
            self._offset += len(token_text(self._tokenizer, token))

    def _alternatives(self, token: int, info: TokenLogprobs | None) -> dict[str, float] | None:
        if info is None:
            return None
        pairs = zip(info.top_ids[: self._top], info.top_logprobs[: self._top], strict=True)
        top = {self._name(other): finite(logprob) for other, logprob in pairs}
        # As in OpenAI's answers, the chosen token is always included.
        top.setdefault(self._name(token), finite(info.logprob))
        return top


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: list[TokenLogprobs | None]
) -> Many:
    """Build vLLM's `prompt_logprobs`: per prompt token {id: {logprob, rank, decoded_token}}."""

    def entry(token: int, info: TokenLogprobs) -> dict[str, Any]:
        shaped: dict[str, Any] = {
            str(other): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_text(tokenizer, other),
            }
            for rank, (other, logprob) in enumerate(
                zip(info.top_ids, info.top_logprobs, strict=True), start=1
            )
        }
        shaped[str(token)] = {
            "logprob": finite(info.logprob),
            "rank": info.rank,
            "decoded_token": token_text(tokenizer, token),
        }
        return shaped

    return Many(
        None if info is None else entry(token, info)
        for token, info in zip(prompt, logprobs, strict=True)
    )
