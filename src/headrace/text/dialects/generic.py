"""For models that know no form of their own: the whole message is JSON.

One call is an object with `name` and `arguments`; several are a list of them, or the list under
`tool_calls`. Only an object that names a tool on offer is a call, all else is content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..calls import Calls, read_call, read_list, read_text
from ..jsonstream import Malformed, skip_space
from .dialect import CallFormat, Dialect, SectionReader


def read(opener: str, calls: Calls) -> SectionReader:
    if opener == "[":
        yield from read_list(calls, certain=False)
        return None
    char = yield from skip_space()
    if char != '"':
        raise Malformed("expected a key")
    key = yield from read_text()
    if key != "tool_calls":
        yield from read_call(calls, certain=False, key=key)
        return None
    for expected in ":[":
        char = yield from skip_space()
        if char != expected:
            raise Malformed("expected a list of calls")
    yield from read_list(calls, certain=False)
    char = yield from skip_space()
    if char != "}":
        raise Malformed("expected the end")
    return None


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
    read=read,
    format=CallFormat(
        open="[", begin='{"name": "NAME", "arguments": ', end="}", separator=", ", close="]"
    ),
    first="{[",
)
