"""At the door: what a request must be, its n sequences, and when to come again if it is full."""

from __future__ import annotations

import math
from array import array
from collections import deque

from headrace.base.errors import ContextOverflow, InvalidRequest
from headrace.base.request import Request
from headrace.kv import KvManager, PrefixChain

from .limits import Policy
from .queue import PATIENCE_SECONDS
from .sequence import Sequence


def sequences_of(
    request: Request,
    *,
    taken: bool,
    order: int,
    now: float,
    policy: Policy,
    max_context: int,
    kv: KvManager,
) -> list[Sequence]:
    """The n sequences of a request, or the error that says why there can be none.

    `taken`: the id belongs to a live request. `order`: number of the first sequence.
    """
    prompt, spec = request.prompt, request.spec
    sampling = spec.sampling
    if taken:
        raise InvalidRequest(f"a request with id {request.id!r} is running", param="request_id")
    if not prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
    try:
        lowest = min(array("i", prompt))
    except (TypeError, OverflowError):
        lowest = -1
    if lowest < 0:
        raise InvalidRequest("the prompt must be token ids from 0 to 2**31 - 1", param="prompt")
    if sampling.n < 1:
        raise InvalidRequest(f"n must be at least 1, not {sampling.n}", param="n")
    limit = _limit(request, max_context)
    chain = None
    if kv.prefix_cache and spec.generates:
        # A pooled vector needs every hidden state, and encoders see to both sides.
        chain = PrefixChain(kv.block_size, request.cache_salt, spec.adapter)
        if sampling.n > 1:
            chain.extend(prompt, len(prompt) // kv.block_size)
    urgency = now + request.priority * PATIENCE_SECONDS if policy == "priority" else 0.0
    return [
        Sequence(
            id=order + choice,
            request=request,
            choice=choice,
            limit=limit,
            rank=(urgency, order + choice),
            chain=chain.fork() if chain is not None and choice else chain,
        )
        for choice in range(sampling.n if spec.generates else 1)
    ]


def _limit(request: Request, max_context: int) -> int:
    """Total length at which a sequence of the request ends."""
    length, wish = len(request.prompt), request.spec.sampling.max_tokens
    if not request.spec.generates:
        if length > max_context:
            raise ContextOverflow(
                f"the input has {length} tokens; at most {max_context} fit", param="prompt"
            )
        return length + 1
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
    """When a full queue may have room: from the pace at which sequences ended lately."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def finished(self, now: float) -> None:
        self._ends.append(now)

    def seconds(self, now: float, waiting: int) -> float:
        """Until about half of `waiting` have ended; 1 to 60 seconds."""
        if not self._ends:
            return 1.0
        pace = len(self._ends) / max(now - self._ends[0], 1e-3)
        return float(min(60, max(1, math.ceil(waiting / 2 / pace))))
