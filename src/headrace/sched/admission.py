"""Admission: the check of a request, the work it becomes, and the time to retry if it is full."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable

from headrace.base.errors import ContextOverflow, InvalidRequest
from headrace.base.request import Request
from headrace.kv import KvManager

from .beams import Search
from .limits import Limits
from .once import Once
from .queue import PATIENCE_SECONDS
from .sequence import Sequence
from .stepped import Stepped
from .work import ALL, Work


def verify_request(request: Request) -> None:
    """Raise `InvalidRequest` for a request that is invalid for every model."""
    prompt, n = request.prompt, request.spec.sampling.n
    if not prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
    try:
        lowest = min(array("i", prompt))
    except (TypeError, OverflowError):
        lowest = -1
    if lowest < 0:
        raise InvalidRequest("the prompt must be token ids from 0 to 2**31 - 1", param="prompt")
    if n < 1:
        raise InvalidRequest(f"n must be at least 1, not {n}", param="n")


def verify_atoms(works: Iterable[Work], most: int) -> None:
    """Raise `InvalidRequest` if work has more units that one step computes than a step has."""
    for work in works:
        assert min(work.atom, work.known) <= most, "never fits into a step"
        atom = max((end - first for first, end in work.atoms), default=0)
        if atom > most:
            raise InvalidRequest(
                f"an input has {atom} tokens that one step computes; a step has at most {most}",
                param="messages",
            )


def work_of(
    request: Request,
    *,
    order: int,
    now: float,
    limits: Limits,
    max_context: int,
    kv: KvManager,
) -> list[Work]:
    """Turn a request into work; raise the error that says why it cannot be. `order`: number of the
    first."""
    prioritised = limits.policy == "priority"
    urgency = now + request.priority * PATIENCE_SECONDS if prioritised else 0.0
    if request.spec.generates:
        return list(_sequences(request, order, urgency, max_context, kv))
    if (wish := request.spec.picture) is not None:
        denoiser = limits.denoiser
        assert denoiser is not None, "the model draws no pictures"
        size = denoiser.tokens * wish.entries
        return [Stepped(order, request, len(denoiser.phases(wish)), size, (urgency, order))]
    if request.spec.retrieval is not None:
        return [*_search(request, (urgency, order), limits, max_context, kv).begin(order)]
    return [_once(request, order, urgency, max_context, kv)]


def _sequences(
    request: Request, order: int, urgency: float, max_context: int, kv: KvManager
) -> list[Sequence]:
    """Make the n choices of a text, which share a prompt and the names of its prefixes."""
    length = _length(request, max_context)
    made = [
        Sequence(order + choice, request, choice, length, (urgency, order + choice))
        for choice in range(request.spec.sampling.n)
    ]
    first = made[0].chain = kv.chain(request, made[0].tokens)
    if first is not None and len(made) > 1:
        first.extend(len(request.prompt) // kv.block_size)
        for other in made[1:]:
            other.chain = first.fork(other.tokens)
    return made


def _once(request: Request, order: int, urgency: float, max_context: int, kv: KvManager) -> Once:
    """Make the work of an input whose vector or score is wanted. It needs every position's hidden
    state, so it takes up no prefix. A model that keeps nothing between two steps reads it whole."""
    length, keeps = len(request.prompt), bool(kv.groups)
    if length > max_context:
        raise ContextOverflow(
            f"the input has {length} tokens; at most {max_context} fit", param="prompt"
        )
    # A candidate's score is its own, so candidates are cut anywhere.
    atom = 1 if keeps or request.spec.ranking is not None else ALL
    return Once(order, request, 0, length, (urgency, order), keeps=keeps, atom=atom)


def _search(
    request: Request, rank: tuple[float, int], limits: Limits, max_context: int, kv: KvManager
) -> Search:
    catalogue, length = limits.catalogue, len(request.prompt)
    assert catalogue is not None, "the model retrieves no items"
    if length + catalogue.levels > max_context:
        raise ContextOverflow(
            f"the prompt has {length} tokens and an item {catalogue.levels}; together at most "
            f"{max_context} fit in the context",
            param="prompt",
        )
    return Search(catalogue, request, rank, kv, limits.running)


def _length(request: Request, max_context: int) -> int:
    """Return the total length at which a sequence of the request ends."""
    length, wish = len(request.prompt), request.spec.sampling.max_tokens
    if length >= max_context:
        raise ContextOverflow(
            f"the prompt has {length} tokens; with at least one of output, at most {max_context} "
            "fit in the context",
            param="prompt",
        )
    if wish is None:
        return max_context
    if wish < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {wish}", param="max_tokens")
    if length + wish > max_context:
        raise ContextOverflow(
            f"the prompt has {length} tokens and max_tokens is {wish}; together at most "
            f"{max_context} fit in the context",
            param="max_tokens",
        )
    return length + wish


class RetryEstimate:
    """Estimate when a full queue may have room, from the pace at which work ended lately."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def finished(self, now: float) -> None:
        self._ends.append(now)

    def seconds(self, now: float, waiting: int) -> float:
        """Estimate the seconds until about half of `waiting` have ended; 1 to 60."""
        if not self._ends:
            return 1.0
        pace = len(self._ends) / max(now - self._ends[0], 1e-3)
        return float(min(60, max(1, math.ceil(waiting / 2 / pace))))
