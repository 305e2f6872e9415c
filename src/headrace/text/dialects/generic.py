"""For models that know no form of their own: the whole message is JSON.

One call is an object with `name` and `arguments`; several are a list of them, or the list under
`tool_calls` (`bare`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..bare import read_bare
from .dialect import CallFormat, Dialect


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """Words for the system message that teach this form to a model whose template has no tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions:\n"
        f"{listed}\n\n"
        "To call functions, answer with nothing but a JSON list, one object per call: "
        '[{"name": "<name of the function>", "arguments": {<its arguments>}}]'
    )


GENERIC = Dialect(
    name="generic",
    read=read_bare,
    format=CallFormat(
        open="[", begin='{"name": "NAME", "arguments": ', end="}", separator=", ", close="]"
    ),
)
