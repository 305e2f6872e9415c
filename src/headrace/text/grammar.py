"""A request's constraints on its answer, as one llguidance grammar.

All constraints are checked and bounded here, before work starts: one that cannot be enforced is an
`InvalidRequest`. The result goes to the engine as `Request.grammar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.base.ignored import ignored

from .lark import TEXT, grammar, joined, json_value, literal
from .reasoning import ReasoningMarks
from .sentences import admits_nothing

CODE = "invalid_grammar"
"""Error code of a form that cannot be enforced."""
MAX_SOURCE = 256 * 1024
"""Characters of a schema or grammar."""
MAX_REGEX = 16_384
MAX_CHOICES = 1_000
MAX_DEPTH = 64
"""Nesting of a schema."""
MAX_NODES = 20_000
"""Values inside a schema."""
MAX_OBJECT = 500
"""Properties of one object in a schema: llguidance's time grows with their square."""
MAX_PROPERTIES = 2_000
"""Properties of all objects in a schema together, which `allOf` can make one."""
MAX_NUMBER = 2**53 - 1
"""Largest number that a schema may demand. llguidance holds each as a double, which cannot
distinguish larger whole numbers (RFC 8259, section 6)."""
_DEMANDING = frozenset(
    ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
)

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_POSITION = re.compile(r"^at (\d+)\(\d+\): ")
_LISTING = re.compile(r"^\s*(\d+ \| .*|\^+)?$")
_NO_SPECIAL: Mapping[str, int] = {}


def from_response_format(response_format: Mapping[str, Any] | None) -> str | None:
    """Make the grammar of OpenAI's `response_format`; None if any text is allowed."""
    where = "response_format"
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's way to ask for a schema.
        schema = response_format.get("schema")
        if schema is not None:
            return from_schema(schema, where + ".schema", strict=False)
        return from_schema({"type": "object"}, where)
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        where = "response_format.json_schema"
        if not isinstance(wrapper, Mapping):
            raise InvalidRequest(f"{where} must be an object", param=where)
        strict = bool(wrapper.get("strict"))
        return from_schema(wrapper.get("schema"), where + ".schema", strict=strict)
    if kind == "structural_tag":
        return from_structural_tag(response_format, where)
    raise InvalidRequest(
        f"{where}.type must be one of {', '.join(_FORMATS)}, not {kind!r}", param=where + ".type"
    )


def from_guided(
    *,
    json_schema: str | Mapping[str, Any] | None = None,
    json_object: bool | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    lark: str | None = None,
    structural_tag: str | Mapping[str, Any] | None = None,
    where: str = "structured_outputs",
    compact: bool = False,
) -> str | None:
    """Make the grammar of vLLM's extra fields (`structured_outputs`, older `guided_*`), at most one
    may be set. `compact`: JSON has no white space."""
    given = {
        "json": json_schema,
        "json_object": json_object or None,
        "regex": regex,
        "choice": choice,
        "grammar": lark,
        "structural_tag": structural_tag,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequest(f"only one of {', '.join(names)} may be set in {where}", param=where)
    if json_schema is not None:
        return from_schema(json_schema, f"{where}.json", strict=False, compact=compact)
    if json_object:
        return from_schema({"type": "object"}, where, compact=compact)
    if regex is not None:
        return from_regex(regex, f"{where}.regex")
    if choice is not None:
        return from_choice(choice, f"{where}.choice")
    if lark is not None:
        return from_lark(lark, f"{where}.grammar")
    if structural_tag is not None:
        tag = _parsed(structural_tag, f"{where}.structural_tag")
        return from_structural_tag(tag, f"{where}.structural_tag")
    return None


def from_schema(schema: Any, where: str, *, strict: bool = True, compact: bool = False) -> str:
    """Make the grammar of a JSON schema, given as an object or as text.

    `strict`: a keyword, format or pattern that cannot be enforced is an error. Otherwise it is an
    annotation, like formats in JSON Schema, and counted. `compact`: see `lark.json_value`.
    """
    schema = checked_schema(schema, where)
    if strict:
        return verified(grammar(json_value(schema, compact=compact)), where)
    schema, sound = _enforceable(schema)
    source = grammar(json_value(schema, lenient=True, compact=compact))
    return source if sound and not compact else verified(source, where)


def loose_value(schema: Mapping[str, Any], *, compact: bool = False) -> str:
    """Return a JSON value for the enforceable part of a checked schema; the rest is counted."""
    return json_value(_enforceable(schema)[0], lenient=True, compact=compact)


def _enforceable(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the enforceable part of a checked schema, and whether llguidance takes it; count the
    rest. The check takes a core for tens of milliseconds if the schema is large."""
    failed, messages = _check(grammar(json_value(schema, lenient=True)))
    if failed:
        schema = _without_bad_patterns(schema)
        failed, messages = _check(grammar(json_value(schema, lenient=True)))
    if messages:
        ignored("schema", len(messages))
    return schema, not failed


def _without_bad_patterns(value: Any) -> Any:
    """Remove the patterns that no finite automaton has (zod writes look-aheads)."""
    if isinstance(value, list):
        return [_without_bad_patterns(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, inner in value.items():
        if key == "pattern" and isinstance(inner, str) and _check(_regex_source(inner))[0]:
            ignored("schema")
            continue
        kept[key] = _without_bad_patterns(inner)
    return kept


def from_regex(pattern: Any, where: str) -> str:
    """Make the grammar of a regular expression that the whole answer matches (no look-around)."""
    _text(pattern, where, MAX_REGEX)
    return _with_sentence(verified(_regex_source(pattern), where), where)


def from_choice(choices: Any, where: str) -> str:
    if not isinstance(choices, list | tuple) or not choices:
        raise InvalidRequest(f"{where} must be a list with at least one text", param=where)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"{where} has {len(choices)} texts; at most {MAX_CHOICES}", param=where
        )
    for choice in choices:
        _text(choice, where, MAX_REGEX)
    return verified(grammar(" | ".join(literal(choice, {}) for choice in choices)), where)


def from_lark(source: Any, where: str) -> str:
    """Make the grammar of a context-free grammar: llguidance's dialect of Lark with a rule `start`,
    or GBNF (EBNF as in llama.cpp and vLLM) with a rule `root`."""
    _text(source, where, MAX_SOURCE)
    if "::=" in source and not _LARK_START.search(source):
        source = _from_gbnf(source, where)
    elif "start" not in source:
        raise InvalidRequest(
            f"{where} must be a Lark grammar with a rule start, or GBNF with a rule root",
            param=where,
        )
    if source.lstrip().startswith("%"):
        return _with_sentence(verified(source, where, shift=0), where)
    return _with_sentence(verified(f"%llguidance {{}}\n{source}", where, shift=1), where)


_LARK_START = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:))")


def _from_gbnf(source: str, where: str) -> str:
    # Local, as in `verified`.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # noqa: BLE001 - raises bare Exception, and RecursionError
        problem = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"{where} is no GBNF: {problem[:500]}", param=where) from None


def from_structural_tag(tag: Mapping[str, Any], where: str) -> str:
    """Make the grammar of free text in which certain beginnings force a schema. The tag has
    `structures` of begin, schema and end, and `triggers` after which one of them must follow."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise InvalidRequest(
            f"{where} must have a list of structures (begin, schema, end) and one of triggers",
            param=where,
        )
    if len(structures) > MAX_CHOICES or len(triggers) > MAX_CHOICES:
        raise InvalidRequest(f"{where} has more than {MAX_CHOICES} entries", param=where)
    rules: list[tuple[str, str]] = []
    names: list[str] = []
    for index, structure in enumerate(structures):
        here = f"{where}.structures.{index}"
        if not isinstance(structure, Mapping):
            raise InvalidRequest(f"{here} must be an object", param=here)
        begin = _text(structure.get("begin"), f"{here}.begin", MAX_REGEX)
        end = structure.get("end") and _text(structure["end"], f"{here}.end", MAX_REGEX)
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None
        )
        if trigger is None:
            raise InvalidRequest(f"{here}.begin starts with none of the triggers", param=here)
        schema = checked_schema(structure.get("schema") or {}, f"{here}.schema")
        value = json_value(schema)
        names.append(f"tag_{index}")
        body = f"{value} {literal(end or '', _NO_SPECIAL)}"
        rules += triggered(names[-1], trigger, begin, body, _NO_SPECIAL)
    return verified(grammar(f"({' | '.join(names)})* TEXT", [("TEXT", TEXT), *rules]), where)


def triggered(
    name: str, trigger: str, begin: str, body: str, special: Mapping[str, int], text: str = "TEXT"
) -> list[tuple[str, str]]:
    """Make rules for any text up to `trigger`, the rest of `begin`, and `body`. `text`: the
    terminal for any text."""
    rest = literal(begin[len(trigger) :], special)
    if trigger in special:
        return [(name, f"{text} <[{special[trigger]}]> {rest} {body}")]
    return [
        (f"{name}_trigger[lazy]", f"{text} {literal(trigger, special)}"),
        (name, f"{name}_trigger {rest} {body}"),
    ]


def after_reasoning(
    source: str, marks: ReasoningMarks, *, opened: bool, special: Mapping[str, int] = _NO_SPECIAL
) -> str:
    """Make the grammar of free reasoning followed by the grammar `source`.

    `opened`: the prompt ends inside reasoning; otherwise reasoning may be left out. `special`:
    special tokens, text → id. Its length is limited elsewhere:
    `SamplingParams.thinking_token_budget`.
    """
    if marks.close in special:
        closing = [("thoughts", f"{TEXT} <[{special[marks.close]}]>")]
    else:
        closing = [(f"thoughts[suffix={json.dumps(marks.close)}]", TEXT)]
    start = f"thoughts SPACE {literal(marks.behind, special)}"
    start = start if opened else f"({literal(marks.open, special)} {start})?"
    outer = grammar(f"{start} @answer", [("SPACE", r"/[ \t\r\n]{0,8}/"), *closing])
    return verified(joined(outer, {"answer": source}), "grammar")


def verified(source: str, where: str, *, shift: int | None = None) -> str:
    """Return the grammar if llguidance accepts it; otherwise raise `InvalidRequest` with its words.

    `shift`: number of lines before the user's own; None: no line is the user's.
    """
    if len(source) > 2 * MAX_SOURCE:
        raise InvalidRequest(f"{where} is larger than {MAX_SOURCE} characters", param=where)
    failed, messages = _check(source)
    if failed:
        problem = _readable(messages[0], shift) if messages else "not valid"
        raise InvalidRequest(f"{where} cannot be enforced: {problem[:500]}", param=where, code=CODE)
    return source


def _with_sentence(source: str, where: str) -> str:
    """Return a verified grammar; raise `InvalidRequest` if no text matches it. JSON schemas need
    no such test: llguidance refuses those that nothing matches."""
    if admits_nothing(source):
        raise InvalidRequest(
            f"{where} cannot be enforced: there is no text that matches it", param=where, code=CODE
        )
    return source


def _check(source: str) -> tuple[bool, list[str]]:
    """Return whether llguidance refuses the grammar, and its messages: errors, or warnings if it
    does not."""
    # Local: a worker on a machine without llguidance can import this package.
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(source)
    return failed, [str(message) for message in messages]


def _readable(message: str, shift: int | None) -> str:
    """Make one sentence of llguidance's several lines, without the source that it repeats."""
    place = _POSITION.match(message)
    line = ""
    if place is not None:
        message = message[place.end() :]
        if shift is not None:
            line = f"line {int(place[1]) - shift}: "
    kept = [each.strip() for each in message.split("\n") if not _LISTING.match(each)]
    return line + " ".join(kept).replace("failed to compile JSON schema: ", "")


def checked_schema(schema: Any, where: str) -> Mapping[str, Any]:
    """Check that a JSON schema is within the bounds above; raises `InvalidRequest`."""
    schema = _parsed(schema, where)
    count = properties = 0
    # A value, its depth, and the keyword that constrains the numbers in it, if any.
    pending: list[tuple[Any, int, str | None]] = [(schema, 0, None)]
    while pending:
        value, depth, demand = pending.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} deep", param=where)
        if count > MAX_NODES:
            raise InvalidRequest(f"{where} has more than {MAX_NODES} values", param=where)
        if isinstance(value, Mapping):
            if len(value) > MAX_OBJECT:
                raise InvalidRequest(
                    f"{where} has an object of {len(value)} properties; at most {MAX_OBJECT}",
                    param=where,
                )
            listed = value.get("properties")
            properties += len(listed) if isinstance(listed, Mapping) else 0
            if properties > MAX_PROPERTIES:
                raise InvalidRequest(
                    f"{where} has more than {MAX_PROPERTIES} properties", param=where
                )
            pending += [
                (inner, depth + 1, demand or (key if key in _DEMANDING else None))
                for key, inner in value.items()
            ]
        elif isinstance(value, list):
            pending += [(inner, depth + 1, demand) for inner in value]
        elif demand and isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise InvalidRequest(
                f"{where} demands a number beyond ±(2^53 - 1) with {demand}: "
                "such numbers cannot be enforced exactly",
                param=where,
            )
    if len(json.dumps(schema)) > MAX_SOURCE:
        raise InvalidRequest(f"{where} is larger than {MAX_SOURCE} characters", param=where)
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _parsed(value: Any, where: str) -> Mapping[str, Any]:
    """Return an object given as itself or as its text."""
    if isinstance(value, str):
        _text(value, where, MAX_SOURCE)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not valid JSON: {error}", param=where) from None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be a JSON object", param=where)
    return value


def _text(value: Any, where: str, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where} must be a non-empty text", param=where)
    if len(value) > limit:
        raise InvalidRequest(f"{where} has {len(value)} characters; at most {limit}", param=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{where} is not valid Unicode", param=where) from None
    return value


def _regex_source(pattern: str) -> str:
    """Return a grammar of this regular expression, not yet verified."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: {_regex(pattern)}"}]})


def _regex(pattern: str) -> str:
    """Write a pattern as a Lark terminal: a slash ends it, so bare slashes are escaped."""
    escaped, previous = [], ""
    for char in pattern:
        if char == "/" and previous != "\\":
            escaped.append("\\")
        escaped.append("\\n" if char == "\n" else char)
        previous = "" if previous == "\\" else char
    return "/" + "".join(escaped) + "/"
