"""The current task's span, if traces are on.

A context variable: a request passes from the HTTP layer to the engine by plain calls in one task
and its child tasks, and the calls between need not know of traces.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

CURRENT: ContextVar[Any] = ContextVar("headrace_trace", default=None)
"""An OpenTelemetry span, or None."""
