"""Escaping of control tokens in foreign text, where they are plain text.

A template writes a conversation out. The tokenizer that reads it cannot tell the template's
`<|im_end|>` from one in a user's message or in a page that a tool fetched. Either would end the
turn, and the following text could forge another role's turn. So such a token is cut after its first
character before the template runs, and the rendered text is encoded between the cuts: its letters
arrive, the token does not. Text without such a token is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Protocol

from headrace.base.errors import InvalidRequest

from .pieces import SPACE
from .specials import SpecialSplitter

CUT = "\ue0f2\ue0f3"
"""Private characters that mark a cut, as in `template`; a text's own ones are left out with the
cuts."""
MAX_CUTS = 10_000
"""Largest number of cuts in one text: every cut costs a call of the encoder."""
FOREIGN = frozenset({"user", "tool"})
"""Roles whose texts come from outside. A developer's own texts (system) may name control tokens;
the model's (assistant) are its own words, which templates look into."""


class Encoder(Protocol):
    def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        most: int | None = None,
        unbroken: int | None = None,
    ) -> list[int]: ...


class Foreign:
    """Cutter of one model's control tokens."""

    def __init__(self, tokens: Iterable[str], *, everywhere: bool = False) -> None:
        """Prepare cuts of `tokens`, as the vocabulary writes them. `everywhere`: for all roles."""
        self._everywhere = everywhere
        names = [name for token in tokens for name in {token, token.replace(SPACE, " ")}]
        self._names = [name for name in names if len(name) > 1]
        self._splitter = SpecialSplitter({name: at for at, name in enumerate(self._names)})

    def cut(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with their foreign texts cut; contents are texts or lists of parts,
        of which neighbouring texts become one."""
        return [
            {**message, "content": self._content(message.get("content"))}
            if self._everywhere or message.get("role") in FOREIGN
            else message
            for message in messages
        ]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.text(content)
        if isinstance(content, list):
            parts = _merged(content)
            for part in filter(_is_text, parts):
                part["text"] = self.text(part["text"])
            return self._apart(parts)
        return content

    def _apart(self, parts: list[Any]) -> list[Any]:
        """Cut the tokens that texts make together: a template may write pictures elsewhere."""
        texts = [part for part in parts if _is_text(part)]
        places = self._places("".join(part["text"] for part in texts))
        begin = 0
        for part in texts if places else ():
            end = begin + len(part["text"])
            mine = [place - begin for place in places if begin <= place < end]
            part["text"], begin = _with_cuts(part["text"], mine), end
        return parts

    def text(self, text: str) -> str:
        return _with_cuts(text, self._places(text))

    def _places(self, text: str) -> list[int]:
        """List the places of the cuts, each after the first character of a token."""
        places: list[int] = []
        at = 0
        for part in self._splitter.split(text):
            if isinstance(part, str):
                at += len(part)
                continue
            if len(places) == MAX_CUTS:
                raise InvalidRequest(
                    f"a message has more than {MAX_CUTS} of the model's control tokens in its "
                    "text, each of which is encoded by itself",
                    param="messages",
                )
            places.append(at + 1)
            at += len(self._names[part])
        return places


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _merged(content: list[Any]) -> list[Any]:
    """Return copies of the parts, neighbouring texts joined as `messages` would join them after
    the cuts."""
    parts: list[Any] = []
    for text, group in groupby(content, _is_text):
        if text:
            first, *others = group
            parts.append({**first, "text": "".join([first["text"], *(o["text"] for o in others)])})
        else:
            parts += group
    return parts


def _with_cuts(text: str, places: list[int]) -> str:
    if not places:
        return text
    ends = pairwise([0, *places, len(text)])
    return CUT.join(text[begin:end] for begin, end in ends)


def encode_between(
    tokenizer: Encoder,
    text: str,
    *,
    add_bos: bool = False,
    most: int | None = None,
    unbroken: int | None = None,
) -> list[int]:
    """Encode a rendered text between its cuts. `most`, `unbroken`: as in `Tokenizer.encode`."""
    first, *others = text.split(CUT)
    ids = tokenizer.encode(first, add_bos=add_bos, most=most, unbroken=unbroken)
    for part in others:
        if most is not None and len(ids) > most:
            break
        ids += tokenizer.encode(part, most=most, unbroken=unbroken)
    return ids
