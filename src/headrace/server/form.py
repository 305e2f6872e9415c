"""What a request demands of its answer's form, in OpenAI's field and in vLLM's, as one source."""

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
        None, alias="schema", description="Of a json_object, as llama.cpp has it."
    )
    structures: list[dict[str, Any]] | None = Field(None, description="Of a structural_tag.")
    triggers: list[str] | None = Field(None, description="Of a structural_tag.")


class FormFields(SamplingFields):
    """Sampling fields with the form of the answer."""

    response_format: ResponseFormat | None = None

    @property
    def form_wanted(self) -> bool:
        """Is any of the fields set that may demand a form?"""
        return bool(self.response_format or self.structured_outputs or self.guided)

    def form(self) -> str | None:
        """The grammar that is demanded, or None. May take long. Raises `InvalidRequest`."""
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
