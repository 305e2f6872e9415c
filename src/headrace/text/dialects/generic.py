"""Dialect of models without a form of their own: the whole message is JSON.

One call is an object with `name` and `arguments`; several are a list of them, or the list under
`tool_calls` (`bare`). A model whose template has no tools is taught it in words (`text.taught`).
"""

from __future__ import annotations

from ..bare import read_bare
from .dialect import CallFormat, Dialect

GENERIC = Dialect(
    name="generic",
    read=read_bare,
    format=CallFormat(
        open="[", begin='{"name": "NAME", "arguments": ', end="}", separator=", ", close="]"
    ),
)
