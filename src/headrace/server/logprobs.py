"""Log-probabilities in the shapes of OpenAI's two interfaces and of vLLM's prompt_logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.step import TokenLogprobs

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

LOWEST = -9999.0
"""What stands for minus infinity, which JSON has not."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The token alone as text; incomplete characters become U+FFFD."""
    return tokenizer.piece(token).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token: int, as_ids: bool) -> str:
    """How logprobs call a token: its text, or `bytes:…` where it is no whole character, as OpenAI
    has it; `as_ids`: `token_id:…`, as vLLM has it."""
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
    """`logprobs.content` of a chat choice: one entry per token with its `top` alternatives."""
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
    """`logprobs` of one completions choice, continued over its chunks (text_offset counts)."""

    def __init__(
        self, tokenizer: Tokenizer, top: int, offset: int = 0, *, as_ids: bool = False
    ) -> None:
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._top = top
        self._offset = offset

    def feed(self, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> dict[str, Any]:
        """The object for these tokens; an entry without value (the prompt's first) is null."""
        texts: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, info in zip(tokens, logprobs, strict=True):
            text = token_name(self._tokenizer, token, self._as_ids)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(token_text(self._tokenizer, token))
            if info is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(info.logprob))
            top = {
                token_name(self._tokenizer, other, self._as_ids): finite(logprob)
                for other, logprob in list(zip(info.top_ids, info.top_logprobs, strict=True))[
                    : self._top
                ]
            }
            # As OpenAI does, the chosen token is always among them.
            top.setdefault(text, finite(info.logprob))
            tops.append(top)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: list[int], logprobs: list[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token of the prompt {id: {logprob, rank, decoded_token}}."""
    shaped: list[dict[str, Any] | None] = []
    for token, info in zip(prompt, logprobs, strict=True):
        if info is None:
            shaped.append(None)
            continue
        entry: dict[str, Any] = {
            str(other): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_text(tokenizer, other),
            }
            for rank, (other, logprob) in enumerate(
                zip(info.top_ids, info.top_logprobs, strict=True), start=1
            )
        }
        entry[str(token)] = {
            "logprob": finite(info.logprob),
            "rank": info.rank,
            "decoded_token": token_text(tokenizer, token),
        }
        shaped.append(entry)
    return shaped
