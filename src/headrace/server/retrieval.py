"""Retrieval of items: the history of a request, and the items that a search finds."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from ..base.errors import ContextOverflow, EngineFault, InvalidRequest
from ..base.items import ItemCatalogue, RetrievalWish
from ..base.outputs import FoundItems
from ..base.sampling import SamplingParams
from .caller import CALLER, engine_id
from .generation import check_whole
from .service import Service

WIDTH = 64
"""Beams of a search that does not say how many it keeps, if it wants no more items."""


class RetrievedItem(TypedDict):
    item: str
    score: float
    ids: list[int]


def wish_of(count: int | None, beams: int | None) -> RetrievalWish:
    """Return the wish for `count` items (10). Raises `InvalidRequest` if the beams are fewer."""
    count = 10 if count is None else count
    beams = max(count, WIDTH) if beams is None else beams
    if beams < count:
        raise InvalidRequest(f"{beams} beams do not find {count} items", param="beams")
    return RetrievalWish(count, beams)


def catalogue_of(service: Service) -> ItemCatalogue:
    """Return the model's catalogue. Raises `InvalidRequest` without one, `EngineFault` if the
    engine has another since its file has changed."""
    catalogue: ItemCatalogue | None = getattr(service.engine, "items", None)
    if catalogue is None:
        raise InvalidRequest(
            f"{service.name} recommends nothing; /v1/recommend needs a ranker, or a language model "
            "with a catalogue (option items)",
            param="model",
            code="unsupported_model",
        )
    identity = service.engine.identity
    if identity is not None and identity.options["items"] != catalogue.digest:
        raise EngineFault("the catalogue's file has changed since the start; start the server anew")
    return catalogue


def history_ids(
    service: Service,
    catalogue: ItemCatalogue,
    prompt: str | Sequence[int] | None,
    history: Sequence[str] | None,
) -> list[int]:
    """Return the prompt's ids with those of the history's items behind them. Raises
    `InvalidRequest` naming the field, `ContextOverflow`."""
    ids: list[int] = []
    if isinstance(prompt, str):
        ids = service.engine.tokenizer.encode(prompt, add_bos=True)
        # A file's own vocabulary may be larger than the model.
        service.check_ids(ids, "prompt")
    elif prompt is not None:
        service.check_ids(prompt, "prompt")
        ids = [*prompt]
    for place, name in enumerate(history or ()):
        if (item := catalogue.places.get(name)) is None:
            raise InvalidRequest(
                f"the catalogue has no item {name!r:.100}", param=f"history.{place}"
            )
        ids += catalogue.path(item)
    if not ids:
        raise InvalidRequest("a prompt or a history is needed, and it is empty", param="prompt")
    most = service.engine.max_context - catalogue.levels
    if len(ids) > most:
        raise ContextOverflow(
            f"prompt and history have {len(ids)} tokens; at most {most} fit before an item",
            param="history" if history else "prompt",
        )
    return ids


async def retrieved(
    service: Service,
    ids: list[int],
    wish: RetrievalWish,
    *,
    name: str,
    priority: int,
    cache_salt: str | None,
) -> FoundItems:
    """Search for items after a prompt."""
    stream = service.engine.submit(
        ids,
        SamplingParams(),
        whole=True,
        request_id=engine_id(name),
        priority=priority,
        task="items",
        given=wish,
        cache_salt=CALLER.get().salt(cache_salt),
    )
    try:
        async for delta in stream:
            check_whole(delta)
            if isinstance(delta.output, FoundItems):
                return delta.output
    finally:
        stream.cancel()
    raise EngineFault("a search ended without items")
