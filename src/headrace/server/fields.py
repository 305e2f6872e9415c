"""Common parts of bodies: strictness, sampling fields, inert fields, common answer fields.

A field of a request has one of four kinds (ADR 0047). *Supported*. *Inert*: a hint that cannot be
seen in the answer; it is accepted, and docs/fields.md gives the reason. *Unsupported*: it would
change the answer and is not implemented; only values that mean "off" are accepted, else an error
names it. *Unknown*: an error, because it may be misspelt. Inside messages, parts, calls and tools,
which clients echo and decorate, unknown keys are dropped and counted. Null means unset everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from ..base.errors import InvalidRequest
from ..base.foreign import any_json
from ..base.ignored import ignored
from ..base.names import hint
from ..base.request import Retained
from ..base.sampling import SamplingParams
from ..base.sections import read_rows
from ..text.grammar import from_guided
from ..text.tools import NAME


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


Integer = Annotated[int, Field(ge=-(2**63), lt=2**64), BeforeValidator(_whole)]
"""Integer in JSON's sense, so 40.0 is one. Bounded when parsed, so that no message has to print a
number of a million digits."""
TokenId = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""Integer in a possibly long list: no Python code runs per item."""
ToolName = Annotated[str, Field(pattern=NAME)]

LEAST_TOP_P = 1e-6


def _neglected(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Read `neglected.txt`: section → name → arguments of its `Field`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    section = ""

    def read(row: str) -> None:
        nonlocal section
        if row.startswith("["):
            section = row.strip("[]")
            found[section] = {}
            return
        names, note = row.split(" | ")
        if note.startswith("["):
            neutral = [None, *any_json(note)]
            extra: dict[str, Any] = {"x-headrace-neutral": neutral, "enum": neutral}
            words = f"Not supported: only {', '.join(map(repr, neutral))} is accepted."
        else:
            extra = {"x-headrace-inert": note}
            words = f"Accepted and without effect: {note}."
        spec = {"description": words, "json_schema_extra": extra}
        found[section] |= dict.fromkeys(names.split(), spec)

    read_rows(path, read)
    return found


_NEGLECTED = _neglected(Path(__file__).with_name("neglected.txt"))


def _stop_at_the_first(schema: Any) -> None:
    """Make the lists of a schema stop at their first wrong item.

    Otherwise a hundred thousand wrong items, or members of a union, would make as many errors.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for inner in schema.values():
            _stop_at_the_first(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _stop_at_the_first(inner)


class Body(BaseModel):
    """Base of every request body: strict types, no unknown fields except null ones, no NaN."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )
    _neutral: ClassVar[dict[str, list[Any]]] = {}

    def __init_subclass__(cls, *, neglects: str | None = None, **kwargs: Any) -> None:
        """Declare the fields of a section of `neglected.txt`; pydantic collects them after this."""
        super().__init_subclass__(**kwargs)
        for name, spec in _NEGLECTED[neglects].items() if neglects else ():
            cls.__annotations__[name] = Any
            setattr(cls, name, Field(None, **spec))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_the_first(schema)
        return schema

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._neutral = {
            name: list(cast("list[Any]", extra["x-headrace-neutral"]))
            for name, spec in cls.model_fields.items()
            if isinstance(extra := spec.json_schema_extra, dict) and "x-headrace-neutral" in extra
        }

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Body:
        if self.__pydantic_extra__:
            self._take_unknown(self.__pydantic_extra__)
        given = self.__pydantic_fields_set__
        if given.isdisjoint(self._neutral):  # Runs for thousands of messages.
            return self
        for name in given & self._neutral.keys():
            neutral = self._neutral[name]
            value = getattr(self, name)
            if not any(type(value) is type(other) and value == other for other in neutral):
                shown = ", ".join(repr(other) for other in neutral)
                raise ValueError(
                    InvalidRequest(
                        f"{name} is not supported here; allowed: {shown}",
                        param=name,
                        code="unsupported_parameter",
                    )
                )
        return self

    def _take_unknown(self, extra: dict[str, Any]) -> None:
        name = next((name for name, value in extra.items() if value is not None), None)
        if name is not None:
            words = f"{name[:100]} is not a known parameter{hint(name, type(self).model_fields)}"
            raise ValueError(InvalidRequest(words, param=name[:100], code="unknown_parameter"))
        extra.clear()


class Loose(Body):
    """Base of objects that clients echo and decorate: messages, parts, calls, tools. Unknown keys
    are dropped and counted."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    def _take_unknown(self, extra: dict[str, Any]) -> None:
        given = sum(value is not None for value in extra.values())
        if given:
            ignored(type(self).__name__, given)
        extra.clear()


class StreamOptions(Body, neglects="stream"):
    include_usage: bool | None = Field(None, description="Send a final chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage in every chunk.")


class StructuredOutputs(Body):
    """vLLM's fields for a constrained answer; at most one may be set."""

    json_: str | dict[str, Any] | None = Field(
        default=None, alias="json", description="JSON schema."
    )
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(
        default=None, description="Lark grammar with a rule start, or GBNF with a rule root."
    )
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = Field(None, description="true: JSON without whitespace.")


class Retention(Body):
    """A prefix of the prompt to be retained in the context cache."""

    seconds: float = Field(gt=0, le=604_800, description="Seconds from its last use.")
    tokens: Integer | None = Field(
        None, ge=1, description="Number of tokens; null: the whole prompt."
    )
    priority: Integer = Field(
        50,
        ge=0,
        le=100,
        description="Retained prefixes with the lowest priority are evicted first.",
    )


class PlainSampling(Body):
    """Sampling fields that all interfaces have."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = Field(None, description="0 or -1: all tokens.")
    min_p: float | None = None
    typical_p: float | None = Field(None, description="Locally typical sampling; 1: off.")
    repeat_penalty: float | None = Field(
        None, description="llama.cpp's name of repetition_penalty."
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None


class SamplingFields(PlainSampling, neglects="sampling"):
    """Sampling fields that chat and completions share: OpenAI's, and vLLM's extras."""

    model: str | None = Field(None, description="Served name; null: the served model.")
    n: Integer | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id → bias.")
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    thinking_token_budget: Integer | None = Field(
        None, description="Maximum tokens of reasoning; then its end is forced."
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = None
    return_token_ids: bool | None = Field(None, description="Add token_ids to each choice.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Integer | None = Field(None, description="Lower runs first (policy priority).")
    cache_salt: str | None = Field(
        None, max_length=256, description="Prefixes are shared only within one salt."
    )
    retention: list[Retention] | None = Field(
        None, max_length=8, description="Prefixes of the prompt to retain in the context cache."
    )
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")

    prompt_cache_retention: Any = Field(
        None,
        description='"24h": the prompt stays in the context cache for a day from its last use.',
    )
    truncate_prompt_tokens: Integer | None = Field(
        None,
        ge=-1,
        description="Keep only this many last tokens of the prompt (-1: all that fit).",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens in logprobs as token_id:ID."
    )
    top_a: float | None = Field(None, description="0: off.")
    top_n_sigma: float | None = Field(None, description="0 or -1: off.")
    bad_words: list[str] | None = Field(None, description="Words that the model may not write.")
    allowed_token_ids: list[TokenId] | None = Field(
        None, description="Allow only these ids in the answer."
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = Field(
        None, description="Older form of structured_outputs."
    )
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def guided(self) -> bool:
        """Whether one of the older fields is set."""
        older = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        return any(value is not None for value in older)

    def demanded(self) -> str | None:
        """Return the grammar that vLLM's fields demand, or None. Raises `InvalidRequest`."""
        if self.guided:
            if self.structured_outputs is not None:
                raise InvalidRequest(
                    "structured_outputs and guided_* cannot be set together",
                    param="structured_outputs",
                )
            return from_guided(
                json_schema=self.guided_json,
                regex=self.guided_regex,
                choice=self.guided_choice,
                lark=self.guided_grammar,
                where="guided",
            )
        given = self.structured_outputs
        if given is None:
            return None
        return from_guided(
            json_schema=given.json_,
            json_object=given.json_object,
            regex=given.regex,
            choice=given.choice,
            lark=given.grammar,
            structural_tag=given.structural_tag,
            compact=bool(given.disable_any_whitespace),
        )

    def retained(self, prompt: int) -> tuple[Retained, ...]:
        """Return the prefixes of a prompt of `prompt` tokens to retain in the context cache."""
        wanted = [
            Retained(prompt if one.tokens is None else one.tokens, one.seconds, one.priority)
            for one in self.retention or ()
        ]
        if self.prompt_cache_retention == "24h":
            wanted.append(Retained(prompt, 86_400.0))
        return tuple(wanted)

    def cut(self, prompt: list[int], most: int) -> list[int]:
        """Return the end of a prompt as `truncate_prompt_tokens` demands; `most` tokens fit."""
        wish = self.truncate_prompt_tokens
        if wish is None:
            return prompt
        return prompt[-max(1, most if wish < 0 else wish) :]

    def verify_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed together with stream: true", param="stream_options"
            )

    def sampling(
        self,
        *,
        defaults: SamplingParams,
        max_tokens: int | None,
        logprobs: int | None,
        vocab_size: int | None,
    ) -> SamplingParams:
        """Return the parameters, with the model's own defaults for fields that are not set.

        `logprobs` is the number of alternatives per token. Raises `InvalidRequest`.
        """
        given = {name: value for name in _PLAIN if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            if self.repetition_penalty not in (None, self.repeat_penalty):
                raise InvalidRequest(
                    "repeat_penalty is another name of repetition_penalty, and both are set to "
                    "different values",
                    param="repeat_penalty",
                )
            given["repetition_penalty"] = self.repeat_penalty
        if self.top_p == 0:  # OpenAI's minimum: only the likeliest token, as with any small share.
            given["top_p"] = LEAST_TOP_P
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        params = replace(
            defaults,
            **given,
            logit_bias=_logit_bias(self.logit_bias),
            stop=[text for text in stops if text],  # Forms send "" to mean no stop text.
            max_tokens=max_tokens,
            logprobs=logprobs,
        )
        params.verify(vocab_size)
        return params


_PLAIN = tuple(
    """
    n temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty
    typical_p top_a top_n_sigma bad_words allowed_token_ids seed stop_token_ids ignore_eos
    min_tokens include_stop_str_in_output skip_special_tokens prompt_logprobs
    thinking_token_budget
    """.split()  # noqa: SIM905
)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise InvalidRequest(
            "the keys of logit_bias must be token ids", param="logit_bias"
        ) from None


class ReplyHead(TypedDict):
    id: str
    object: str
    created: int
    model: str


class ListReply(TypedDict):
    """A page of a list, without its items."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool
