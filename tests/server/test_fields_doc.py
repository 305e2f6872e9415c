"""docs/fields.md is what the schemas say. `python tests/server/test_fields_doc.py` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.server.fields import Body
from headrace.server.routes.chat.schema import ChatBody
from headrace.server.routes.completions.schema import CompletionBody
from headrace.server.routes.embeddings import EmbeddingBody
from headrace.server.routes.images import ImagesBody
from headrace.server.routes.messages.schema import MessagesBody, MessageTool, OutputConfig
from headrace.server.routes.responses.schema import ReasoningOptions, ResponseBody, TextOptions

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
ROUTES: dict[str, dict[str, type[Body]]] = {
    "/v1/chat/completions": {"": ChatBody},
    "/v1/completions": {"": CompletionBody},
    "/v1/responses": {"": ResponseBody, "text.": TextOptions, "reasoning.": ReasoningOptions},
    "/v1/messages": {"": MessagesBody, "output_config.": OutputConfig, "tools.N.": MessageTool},
    "/v1/embeddings": {"": EmbeddingBody},
    "/v1/images/generations": {"": ImagesBody},
}
HEAD = """# Fields that are hints, and fields that are refused

Made from the schemas by `python tests/server/test_fields_doc.py`; a test holds it to them. The rule
is ADR 0047: a hint that cannot be seen in the answer is accepted; what would change the answer and
is not done here is an error that names it, except at the values that mean "off" (null always does).
All other fields of a request are in `/openapi.json`; unknown ones are errors. Unknown keys inside
messages, their parts, calls and tools are left out and counted
(`headrace_ignored_fields_total{where}`).
"""


def rows(kind: str) -> dict[tuple[str, str], list[str]]:
    """(field, what is said of it) → the routes that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for route, bodies in ROUTES.items():
        for prefix, body in bodies.items():
            for name, spec in body.model_fields.items():
                extra: Any = spec.json_schema_extra
                if not isinstance(extra, dict) or kind not in extra:
                    continue
                said = extra[kind]
                if isinstance(said, list):
                    said = ", ".join(f"`{str(value).lower()}`" for value in said[1:]) or "null only"
                found.setdefault((prefix + (spec.alias or name), said), []).append(route)
    return found


def page() -> str:
    text = HEAD
    for kind, title, column in (
        ("x-headrace-inert", "Hints: accepted and without effect", "why it cannot be seen"),
        ("x-headrace-neutral", "Refused, but at these values", "accepted"),
    ):
        text += f"\n## {title}\n\n| field | {column} | routes |\n|---|---|---|\n"
        for (name, said), routes in sorted(rows(kind).items()):
            listed = " ".join(f"`{route.removeprefix('/v1/')}`" for route in routes)
            text += f"| `{name}` | {said} | {listed} |\n"
    return text


def test_the_page_is_what_the_schemas_say() -> None:
    assert PAGE.read_text() == page(), "run python tests/server/test_fields_doc.py"


if __name__ == "__main__":
    PAGE.write_text(page())
