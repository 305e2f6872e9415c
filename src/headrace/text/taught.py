"""Tools for a model whose chat template does not take any: they are put into the conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .dialects import GENERIC, detect_dialect

_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_VARIABLE = re.compile(r"(?<![\w.])tools\b")
_XML_VARIABLE = re.compile(r"\bxml_tools\b")
_FIELD = re.compile(r"\bmessage(\.tools\b|\[[\"']tools[\"']\])")
_NO_SYSTEM = re.compile(r"system role", re.IGNORECASE)
"""Words of templates that refuse a system message (Gemma 1 and 2)."""


class Teaching:
    """Way in which a conversation gets tools, found in the template's text.

    Most templates have the variable `tools`. SmolLM3's is `xml_tools`; Phi-4-mini's tools are a
    field of the system message. A model without any of these is taught in words, in the first
    message: the available functions, and the form of a call in its dialect.
    """

    def __init__(self, template: str) -> None:
        code = "\n".join(_CODE.findall(template))
        words = _TEXT.sub("", code)
        self._takes = _VARIABLE.search(words) is not None
        self._takes_xml = _XML_VARIABLE.search(words) is not None
        self._field = _FIELD.search(code) is not None
        self._role = "user" if _NO_SYSTEM.search(template) else "system"
        self._dialect = detect_dialect(template)

    def variables(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the template's variables for the tools."""
        return {"tools": list(tools)} | ({"xml_tools": list(tools)} if self._takes_xml else {})

    def teach(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the messages, with the tools in the first one if the template does not take
        them."""
        if self._takes or self._takes_xml:
            return messages
        first, rest = messages[0] if messages else {}, messages[1:]
        role = "system" if self._field else self._role
        if first.get("role") != role:
            first, rest = {"role": role, "content": ""}, messages
        if self._field:
            return [{**first, "tools": _dumped([tool["function"] for tool in tools])}, *rest]
        parts = [self._words(tools), str(first.get("content") or "")]
        if role == "system":
            parts.reverse()
        return [{**first, "content": "\n\n".join(filter(None, parts))}, *rest]

    def _words(self, tools: Sequence[Mapping[str, Any]]) -> str:
        listed = "\n".join(map(_dumped, tools))
        if self._dialect is GENERIC:
            how = (
                "answer with nothing but a JSON list, one object per call: "
                '[{"name": "<name of the function>", "arguments": {<its arguments>}}]'
            )
        else:
            call = ("<name of the function>", '{"<argument>": "<its value>"}')
            how = "write them in this form:\n" + self._dialect.format.write([call])
        return f"You can call these functions:\n{listed}\n\nTo call functions, {how}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
