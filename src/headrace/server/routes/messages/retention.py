"""Anthropic's `cache_control`: marks up to which a conversation is retained in the context cache.

Prefixes are shared whether marked or not. A mark says how long the preceding part is worth keeping:
5 minutes or an hour from its last use. It also says which part of the prompt `usage` reports as
cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....base.errors import HeadraceError
from ....base.request import Retained
from ..chat.request import Chat
from .convert import to_chat
from .schema import Block, CountBody, Turn

if TYPE_CHECKING:
    from ...service import Service

SECONDS = {"5m": 300.0, "1h": 3600.0}
_EMPTY = [Turn(role="user", content="")]


async def retain(service: Service, body: CountBody, chat: Chat) -> None:
    """Set the retained prefixes of a tokenised conversation.

    A mark's position in the tokens is found by rendering the conversation up to the mark and taking
    the common prefix of both renderings. Only the last mark of each duration counts, since it
    covers the earlier ones. A mark after the whole prompt needs no rendering.
    """
    marks = {seconds: cut for cut, seconds in marks_of(body)}
    found = []
    sees = service.pictures is not None
    for seconds, cut in marks.items():
        tokens = len(chat.prompt)
        if cut is not None:
            begun = await service.hands.beside(
                lambda cut=cut: to_chat(cut, beginning=True, sees=sees)
            )
            part = Chat(service, begun, "")
            try:
                await part.tokenise(counts=True)
            except HeadraceError:
                continue  # The template needs more than this part.
            same = zip(part.prompt, chat.prompt, strict=False)
            tokens = next(
                (at for at, (one, other) in enumerate(same) if one != other),
                min(len(part.prompt), len(chat.prompt)),
            )
        found.append(Retained(tokens, seconds))
    chat.retained = tuple(found)


def marks_of(body: CountBody) -> list[tuple[CountBody | None, float]]:
    """List (conversation up to a mark, seconds) in prompt order: tools, system, messages.

    None stands for the whole conversation.
    """
    found: list[tuple[CountBody | None, float]] = []

    def note(marked: Any, cut: CountBody | None) -> None:
        if isinstance(marked, dict) and marked.get("type") == "ephemeral":
            found.append((cut, SECONDS.get(marked.get("ttl") or "5m", SECONDS["5m"])))

    for at, tool in enumerate(body.tools or ()):
        cut = body.model_copy(
            update={"tools": (body.tools or [])[: at + 1], "system": None, "messages": _EMPTY}
        )
        note(tool.cache_control, cut)
    for at, block in enumerate(_blocks(body.system)):
        system = _blocks(body.system)[: at + 1]
        note(block.cache_control, body.model_copy(update={"system": system, "messages": _EMPTY}))
    for at, turn in enumerate(body.messages):
        blocks = _blocks(turn.content)
        for place, block in enumerate(blocks):
            last = at == len(body.messages) - 1 and place == len(blocks) - 1
            shorter = turn.model_copy(update={"content": blocks[: place + 1]})
            cut = body.model_copy(update={"messages": [*body.messages[:at], shorter]})
            note(block.cache_control, None if last else cut)
    note(body.cache_control, None)
    return found


def _blocks(content: str | list[Block] | None) -> list[Block]:
    return content if isinstance(content, list) else []
