"""Access log: one line a request, with its key, model, tokens and times.

The lines go to the server's log. `headrace factory ingest` takes them into the fleet's store, where
`headrace factory usage` adds them up by key and model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import code_of

if TYPE_CHECKING:
    from ..base.errors import HeadraceError
    from .accounts import Account
    from .generation import Usage

CLIENT_GONE = 499
"""Status in the log and the metrics if the client left before its answer."""

log = logging.getLogger("headrace.server")


def log_exchange(
    level: int, extra: Mapping[str, Any], scope: Mapping[str, Any], begin: float = 0.0
) -> None:
    """Write a request's line: `extra`, and the caller and work recorded in the scope.

    `begin`: its start in seconds of `time.perf_counter`; 0: unknown, so no time to the first
    token.
    """
    account: Account | None = scope.get("headrace.account")
    usage: Usage | None = scope.get("headrace.usage")
    error: HeadraceError | None = scope.get("headrace.error")
    more: dict[str, Any] = {} if account is None else {"key": account.key.name}
    if error is not None:
        # The message may repeat what the client sent; the code and the field do not.
        more["error"] = code_of(error) or error.type
        if error.param:
            more["param"] = error.param
    if usage is not None:
        more |= {
            "model": usage.model,
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.completion,
        }
        if usage.first is not None and begin:
            more["ttft_seconds"] = round(usage.first - begin, 6)
        if usage.finishes:
            more["finish"] = ",".join(sorted(usage.finishes))
    log.log(level, "exchange", extra={**extra, **more, **scope.get("headrace.trace", {})})
