"""Constraint on an answer's form: OpenAI's field and vLLM's fields, as one grammar."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..base.errors import InvalidRequest
from ..text.grammar import from_response_format
from .fields import Loose, SamplingFields


class JsonSchemaFormat(Loose):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Loose):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="Schema of a json_object, as in llama.cpp."
    )
    structures: list[dict[str, Any]] | None = Field(
        None, description="Structures of a structural_tag."
    )
    triggers: list[str] | None = Field(None, description="Triggers of a structural_tag.")


class FormFields(SamplingFields):
    """Sampling fields and the form of the answer."""

    response_format: ResponseFormat | None = None

    @property
    def form_wanted(self) -> bool:
        """Whether a field is set that may constrain the form."""
        return bool(self.response_format or self.structured_outputs or self.guided)

    def form(self) -> str | None:
        """Return the demanded grammar, or None. This may take long. Raises `InvalidRequest`."""
        given = self.response_format
        source = from_response_format(
            None if given is None else given.model_dump(exclude_none=True, by_alias=True)
        )
        extra = self.demanded()
        if source is not None and extra is not None:
            raise InvalidRequest(
                "response_format and structured_outputs cannot be set together",
                param="structured_outputs",
            )
        return source or extra
