"""Structured output: what a grammar admits and what it does not, and what is refused early."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from vocabularies import byte_level_metadata

from headrace.base.errors import InvalidRequest
from headrace.base.ignored import all_ignored
from headrace.text import DIALECTS, StreamRouter, Tokenizer, load_tokenizer, sentences
from headrace.text import grammar as grammar_module
from headrace.text.dialects.gemma4 import QUOTE
from headrace.text.dialects.pythonic import LFM2
from headrace.text.dialects.tagged import GLM, TAGGED
from headrace.text.events import Event, ToolCallArguments
from headrace.text.grammar import MAX_NUMBER, after_reasoning, from_guided, from_response_format
from headrace.text.lltokenizer import grammar_tokenizer
from headrace.text.reasoning import THINK, ReasoningMarks
from headrace.text.toolgrammar import tool_grammar
from headrace.text.tools import Tool, ToolChoice, read_choice, read_tools

SPELT = ["gemma4", "lfm2", "olmo3", *(dialect.name for dialect in TAGGED)]
"""Dialects that write arguments one by one."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["a"],
    "additionalProperties": False,
}


DEAD = r"D: /b[^\s\S]/"
"""A terminal that nothing matches."""
IMPOSSIBLE = {"type": "object", "properties": {"a": False}, "required": ["a"]}


class Admits:
    """Does a grammar admit a whole text?"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.foreign = grammar_tokenizer(tokenizer, vocab_size=tokenizer.vocab_size + 10)

    def __call__(self, grammar: str | None, text: str) -> bool:
        assert grammar is not None
        matcher = LLMatcher(self.foreign, grammar)
        ids = self.tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def admits(byte_level: Tokenizer) -> Admits:
    return Admits(byte_level)


def test_response_formats(admits: Admits) -> None:
    assert from_response_format(None) is None
    assert from_response_format({"type": "text"}) is None
    anything = from_response_format({"type": "json_object"})
    assert admits(anything, '{"x":[1,{"y":null}]}')
    assert not admits(anything, "[1]")
    wanted = from_response_format(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    )
    assert admits(wanted, '{"a":1,"unit":"C"}')
    assert not admits(wanted, '{"a":1,"b":2}')
    assert not admits(wanted, '{"a":1.5}')
    llama_cpp = from_response_format({"type": "json_object", "schema": SCHEMA})
    assert admits(llama_cpp, '{"a":1}')
    assert not admits(llama_cpp, '{"b":1}')


def test_white_space_in_json(admits: Admits) -> None:
    """llama.cpp's rule, or none: a model that took a wrong turn cannot pad."""
    compact = from_guided(json_schema=SCHEMA, compact=True)
    spaced = from_guided(json_schema=SCHEMA)
    for text in ('{"a": 1}', '{\n  "a": 1,\n  "unit": "C"\n}', '{\n\n\t"a":1}'):
        assert admits(spaced, text)
        assert not admits(compact, text)
    for grammar in (compact, spaced):
        assert admits(grammar, '{"a":1,"unit":"C"}')
        for padding in ("  ", "\n\n\n", "\n" + " " * 21, " \n"):
            assert not admits(grammar, '{"a":' + padding + "1}")


GBNF = """# as vLLM's documents have it
root ::= select
select ::= "SELECT " column " from " table
column ::= "a" | "b" [0-9]{1,2}
table ::= "t"
"""


def test_gbnf(admits: Admits) -> None:
    grammar = from_guided(lark=GBNF)
    assert admits(grammar, "SELECT b12 from t")
    assert not admits(grammar, "SELECT c from t")
    for wrong, said in (
        ("root ::= (", "Expected"),
        ("root ::= other", "not found"),
        ('other ::= "a"', "root"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "deep"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            from_guided(lark=wrong)


ANNOTATED: list[tuple[dict[str, Any], str, str]] = [
    # What pydantic, zod and OpenAPI write, a value of it, and a word of the strict refusal.
    ({"type": "string", "format": "path"}, '"/a"', "path"),
    ({"type": "string", "format": "binary"}, '"a"', "binary"),
    ({"type": "string", "format": "password"}, '"a"', "password"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,2]", "uniqueItems"),
    ({"type": "integer", "not": {"const": 3}}, "4", "not"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "{}", "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "{}", "dependentRequired"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1.5", "oneOf"),
    ({"type": "object", "if": {}, "then": {}}, "{}", "if"),
    ({"type": "string", "pattern": r"^(?!\.)[a-z]+@"}, '"a"', "look-ahead"),
]


@pytest.mark.parametrize(("schema", "value", "word"), ANNOTATED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_enforced_is_an_annotation_unless_strict(
    admits: Admits, schema: dict[str, Any], value: str, word: str
) -> None:
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    before = all_ignored().get("schema", 0)
    for form in ({"schema": whole}, {"schema": whole, "strict": False}):
        grammar = from_response_format({"type": "json_schema", "json_schema": form})
        assert admits(grammar, '{"x":' + value + "}")
        assert not admits(grammar, '{"y":1}')
    assert all_ignored()["schema"] >= before + 2
    form = {"schema": whole, "strict": True}
    with pytest.raises(InvalidRequest, match=word) as caught:
        from_response_format({"type": "json_schema", "json_schema": form})
    assert "\n" not in caught.value.message
    assert "at 2(" not in caught.value.message


def test_what_is_checked_once_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a schema at the bounds takes a core for 40 ms, which others miss."""
    asked: list[str] = []
    check = grammar_module._check

    def counted(source: str) -> tuple[bool, list[str]]:
        asked.append(source)
        return check(source)

    monkeypatch.setattr(grammar_module, "_check", counted)
    source = from_guided(json_schema={"properties": {"a": {"type": "string"}}})
    assert asked == [source]


def test_the_whole_cause_of_a_refusal_is_told() -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_guided(regex="^(?=.*a)")
    assert "look-around" in caught.value.message
    with pytest.raises(InvalidRequest, match="line 2: unknown"):
        from_guided(lark='start: "a" b\nb: nothing')


def test_guided(admits: Admits) -> None:
    assert from_guided() is None
    assert admits(from_guided(json_schema=json.dumps(SCHEMA)), '{"a":1}')
    regex = from_guided(regex=r"a/b|c\/d|[/x]\n?")
    for text in ("a/b", "c/d", "/", "x\n"):
        assert admits(regex, text)
    assert not admits(regex, "a/b ")
    choice = from_guided(choice=["yes", 'no "really"', "größe\n"])
    for text in ("yes", 'no "really"', "größe\n"):
        assert admits(choice, text)
    assert not admits(choice, "no")
    lark = from_guided(lark='start: "a" b+\nb: "b"')
    assert admits(lark, "abb")
    assert not admits(lark, "a")
    assert admits(from_guided(json_object=True), "{}")


def test_structural_tag(admits: Admits) -> None:
    tag = {
        "structures": [
            {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    grammar = from_guided(structural_tag=tag)
    assert admits(grammar, 'free <text> <f=b>12</f> and <f=a>{"a": 1}</f>.')
    assert admits(grammar, "no tags")
    assert not admits(grammar, "then <f=b>x</f>")
    assert not admits(grammar, "then <f=c>1</f>")
    assert from_response_format({"type": "structural_tag", **tag}) == grammar


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"json_schema": "{"}, "json"),
        ({"json_schema": 3}, "json"),
        ({"json_schema": {"type": "foo"}}, "json"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "json"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "("}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": [3]}, "choice"),
        ({"lark": "start: nothing"}, "grammar"),
        ({"lark": "%%%"}, "grammar"),
        ({"regex": r"a[^\s\S]b"}, "no text that matches"),
        ({"lark": f'start: "a" D\n{DEAD}'}, "no text that matches"),
        ({"lark": f'start: "{{" W D\nW: /[ \\t\\n]{{0,20}}/\n{DEAD}'}, "no text that matches"),
        ({"lark": f'start: "ab" D | "cd" D\n{DEAD}'}, "no text that matches"),
        ({"lark": 'root ::= "a" [^\\x00-\\U0010FFFF]'}, "grammar"),
        ({"json_schema": {"type": "string", "pattern": r"a[^\s\S]b"}}, "structured_outputs.json"),
        ({"json_schema": IMPOSSIBLE}, "structured_outputs.json"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<a>", "schema": IMPOSSIBLE, "end": "</a>"}],
                    "triggers": ["<a>"],
                }
            },
            "structured_outputs.structural_tag",
        ),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag"),
        ({"structural_tag": {"structures": [{"begin": "x"}], "triggers": ["y"]}}, "begin"),
        ({"json_schema": {}, "regex": "a"}, "structured_outputs"),
    ],
)
def test_refused_before_work_starts(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_guided(**arguments)
    assert param in (caught.value.param or "") + caught.value.message
    if "cannot be enforced" in caught.value.message:
        assert caught.value.param
        assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "source",
    [
        f'start: "ab" D | "cd" "e"\n{DEAD}',  # One way is enough.
        'start: "a" <[1000]>\n',  # A token of the model's own.
        "start: /[a-z]{300}/\n",
        'start: "" | "a"\n',
    ],
)
def test_a_grammar_with_a_sentence_is_taken(source: str) -> None:
    assert from_guided(lark=source)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("patterns", "good", "bad"),
    [
        ({"^score$": {"type": "integer"}}, [{"score": 5}], [{"score": 3}]),
        ({"^score$": {"maximum": 7}}, [{"score": 5}], [{"score": 10}, {"score": 5, "a": 1}]),
        ({"^(score|größe)$": {"minimum": 6}}, [{"score": 10, "größe": 6}], [{"score": 5}]),
        ({"^s": {"maximum": 7}}, [{"score": 5, "s2": 1.5}], [{"score": 10}, {"score": 5, "s2": 8}]),
        ({r"a[^\s\S]": {}}, [{"score": 5}], [{"score": 5, "a": 1}]),
        ({"^score$": {}, "^x": {}}, [{"score": 5, "x": "y"}], [{"score": 5, "y": 1}]),
    ],
)
def test_patterns_beside_listed_names(
    patterns: Any, good: Any, bad: Any, strict: bool, admits: Admits
) -> None:
    """Both are demanded, and where a pattern leaves no further name none is offered."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}, "größe": {"type": "number"}},
        "required": ["score"],
        "additionalProperties": False,
        "patternProperties": patterns,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    tool = Tool("add", schema, strict=strict)
    called = tool_grammar(DIALECTS["hermes"], [tool], ToolChoice("required"))
    source = from_response_format(form)
    for value, right in [*((one, True) for one in good), *((one, False) for one in bad)]:
        jsonschema_agrees = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert jsonschema_agrees == right
        text = json.dumps(value, ensure_ascii=False)
        assert admits(source, text) == right, text
        assert admits(called, DIALECTS["hermes"].format.write([("add", text)])) == right, text
    # Behind all listed names no further one is begun that cannot be ended.
    matcher = LLMatcher(admits.foreign, str(source), log_level=0)
    ids = admits.tokenizer.encode(f'{{"score": {good[0]["score"]}, "größe": 6, ')
    if matcher.try_consume_tokens(ids) == len(ids):
        matcher.compute_bitmask()
        assert not matcher.is_error()


def test_patterns_are_tried_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sentences, "_idle", lambda pattern, names: seen.append(pattern))
    schema = {"properties": {"a": {}}, "patternProperties": {"^a$": {}, "^b": {}}}
    sentences.without_idle_patterns({"anyOf": [schema] * 100})
    assert len(seen) == sentences.MAX_PATTERNS
    sentences.without_idle_patterns({**schema, "properties": {"a" * sentences.MAX_NAMES + "a": {}}})
    assert len(seen) == sentences.MAX_PATTERNS


@pytest.mark.parametrize(
    "response_format",
    [
        "json",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": None}},
    ],
)
def test_refused_response_formats(response_format: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_response_format(response_format)
    assert (caught.value.param or "").startswith("response_format")


def test_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(501)}}
    for arguments in (
        {"json_schema": deep},
        {"json_schema": wide},
        {"json_schema": "[" * 300_000},
        {"regex": "a" * 20_000},
        {"choice": ["a"] * 1_001},
        {"lark": "start: " + '"a" ' * 100_000},
    ):
        with pytest.raises(InvalidRequest):
            from_guided(**arguments)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53},
        {"enum": [1, -(2**53) - 1]},
        {"const": {"a": [2**64]}},
        {"type": "integer", "minimum": 2**53 + 1},
        {"items": {"multipleOf": 1e300}},
        '{"exclusiveMaximum": Infinity}',
    ],
)
def test_a_number_that_a_double_does_not_hold_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="demands a number beyond"):
        from_guided(json_schema=schema)


def test_the_largest_numbers_are_exact(admits: Admits) -> None:
    source = from_guided(json_schema={"enum": [MAX_NUMBER, -MAX_NUMBER], "default": 2**60})
    assert admits(source, str(MAX_NUMBER))
    assert admits(source, str(-MAX_NUMBER))
    assert not admits(source, str(MAX_NUMBER - 1))


def test_after_reasoning(admits: Admits, byte_level: Tokenizer) -> None:
    marks = ReasoningMarks("<reason>", "</reason>")
    answer = from_response_format({"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    assert answer is not None
    optional = after_reasoning(answer, marks, opened=False)
    assert admits(optional, '<reason>hm {"a"</reason>\n\n{"a":1}')
    assert admits(optional, '{"a":1}')
    assert not admits(optional, '<reason>hm</reason>{"b": 1}')
    opened = after_reasoning(answer, marks, opened=True)
    assert admits(opened, 'hm</reason>{"a":1}')
    assert not admits(opened, '{"a":1}')
    special = after_reasoning(answer, THINK, opened=False, special=byte_level.special_tokens)
    assert admits(special, '<think>hm</think>\n{"a":1}')
    assert admits(special, '{"a":1}')
    regex = from_guided(regex="[0-9]+")
    assert regex is not None
    assert admits(after_reasoning(regex, marks, opened=True), "hm</reason>12")


TOOLS = [Tool("add", SCHEMA, strict=True), Tool("now")]
GOOD = [("add", '{"a":1}'), ("now", '{"x": []}')]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_tool_grammars(name: str, admits: Admits, byte_level: Tokenizer) -> None:
    """Mistral's markers are special tokens of this tokenizer, the others' are text."""
    dialect = DIALECTS[name]
    write = dialect.format.write
    special = byte_level.special_tokens
    required = tool_grammar(dialect, TOOLS, ToolChoice("required"), special=special)
    assert admits(required, write(GOOD))
    assert not admits(required, "Hello")
    assert not admits(required, write([("add", '{"a": "x"}')]))
    assert not admits(required, write([("sub", '{"a": 1}')]))
    single = tool_grammar(dialect, TOOLS, ToolChoice("required"), parallel=False, special=special)
    assert admits(single, write(GOOD[:1]))
    assert not admits(single, write(GOOD))
    named = tool_grammar(dialect, TOOLS, ToolChoice("named", "now"), special=special)
    assert admits(named, write([("now", "{}")]))
    assert not admits(named, write([("add", '{"a": 1}')]))
    free = tool_grammar(dialect, TOOLS, ToolChoice("auto"), special=special)
    assert admits(free, dialect.head + "Just text.")
    assert admits(free, write(GOOD))
    assert not admits(free, write([("add", '{"a": "x"}')]))
    assert tool_grammar(dialect, TOOLS, ToolChoice("none"), special=special) is None
    assert tool_grammar(dialect, [Tool("now")], ToolChoice("auto"), special=special) is None


PLAIN = [
    '{"name": "add", "arguments": {"a": 1}}',
    '```json\n{\n  "name": "add",\n  "arguments": {\n    "a": 1\n  }\n}\n```',
    '[{"name": "add", "arguments": {"a":1}}]',
]
FORM = from_response_format({"type": "json_schema", "json_schema": {"schema": SCHEMA}})


@pytest.mark.parametrize("name", sorted({*DIALECTS} - {"harmony"}))  # Whose heads are wanted.
def test_a_strict_call_may_be_plain_json(name: str, admits: Admits, byte_level: Tokenizer) -> None:
    special = byte_level.special_tokens
    free = tool_grammar(DIALECTS[name], TOOLS, ToolChoice("auto"), special=special)
    for text in PLAIN:
        assert admits(free, text), text
        assert not admits(free, text.replace("1", '"x"'))
        assert not admits(free, text.replace('"arguments": ', '"thought": 1, "arguments": '))
    # Everything else is text, also what is nearly a call.
    for text in (
        '{"name": "Ann"}',
        '{"answer": 42}',
        "```python\nx\n```",
        '```json\n{"a": 1}\n```',
        '[{"name": "Ann"}]',
        '{"name": "adder", "arguments": {}}',
        "[1]",
        "",
    ):
        assert admits(free, text), text
        assert not _calls(name, text, held=True)
    for text in PLAIN:
        assert _calls(name, text, held=True)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("tools", [TOOLS, [Tool("add", SCHEMA), Tool("now")]], ids=["strict", ""])
def test_a_call_or_the_form(
    name: str, tools: list[Tool], admits: Admits, byte_level: Tokenizer
) -> None:
    dialect, special = DIALECTS[name], byte_level.special_tokens
    auto = ToolChoice("auto")
    either = tool_grammar(dialect, tools, auto, form=FORM, special=special)
    assert admits(either, '{"a":1,"unit":"C"}')
    for text in PLAIN:
        assert admits(either, text), text
    assert not admits(either, '{"name": "add", "arguments": {"a": "x"}}')
    assert not admits(either, '{"name": "sub", "arguments": {"a": 1}}')
    assert not admits(either, "Hello")
    if dialect.name != "llama3":  # Its own form is plain JSON with "parameters".
        assert admits(either, dialect.format.write([("add", '{"a": 1}')]))
    any_object = from_response_format({"type": "json_object"})
    either = tool_grammar(dialect, tools, auto, form=any_object, special=special)
    assert admits(either, '{"name":"hello","arguments":{"a":1}}')
    assert admits(either, PLAIN[0])
    assert not _calls(name, '{"name":"hello","arguments":{"a":1}}', held=True)
    digits = tool_grammar(dialect, tools, auto, form=from_guided(regex="[0-9]+"), special=special)
    assert admits(digits, "12")
    assert admits(digits, PLAIN[0])
    required = tool_grammar(dialect, tools, ToolChoice("required"), form=FORM, special=special)
    assert not admits(required, '{"a":1}')
    marks = ReasoningMarks("<reason>", "</reason>")
    assert admits(after_reasoning(either, marks, opened=True), "hm</reason>\n" + PLAIN[0])
    assert tool_grammar(dialect, tools, ToolChoice("none"), form=FORM) == FORM


def _calls(name: str, text: str, *, held: bool = False) -> int:
    router = StreamRouter(
        DIALECTS[name], tools={name: Tool(name) for name in ("add", "now")}, held=held
    )
    router.feed(text)
    router.finish()
    return router.calls.count


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_what_the_grammar_admits_the_router_reads(name: str) -> None:
    dialect = DIALECTS[name]
    router = StreamRouter(dialect, tools={tool.name: tool for tool in TOOLS})
    events = [*router.feed(dialect.format.write(GOOD)), *router.finish()]
    written = [
        "".join(event.text for event in events if _is_of(event, number)) for number in (0, 1)
    ]
    assert [json.loads(text) for text in written] == [json.loads(text) for _, text in GOOD]


def _is_of(event: Event, number: int) -> bool:
    return isinstance(event, ToolCallArguments) and event.index == number


PLACE = Tool(
    "place",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"$ref": "#/$defs/unit"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city", "days"],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
    strict=True,
)
WHOLE = {"city": 'Par"is,\n <b> ü', "unit": "F", "days": 3, "tags": ["a", "b c"]}


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """Has what dialects write around arguments as special tokens."""
    plain = byte_level_metadata()
    tokens = [QUOTE, *sorted(GLM.markers), *sorted(LFM2.markers)]
    return load_tokenizer(
        {
            **plain,
            "tokenizer.ggml.tokens": [*plain["tokenizer.ggml.tokens"], *tokens],
            "tokenizer.ggml.token_type": [*plain["tokenizer.ggml.token_type"], *[3] * len(tokens)],
        }
    )


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", SPELT)
def test_arguments_one_by_one(
    name: str, special: bool, byte_level: Tokenizer, marked: Tokenizer
) -> None:
    """Text without quotes, what is required, the order, a choice, and further types."""
    tokenizer = marked if special else byte_level
    admits, dialect = Admits(tokenizer), DIALECTS[name]
    required = tool_grammar(
        dialect, [PLACE], ToolChoice("required"), special=tokenizer.special_tokens
    )

    def call(**changes: Any) -> str:
        given = {key: one for key, one in {**WHOLE, **changes}.items() if one is not None}
        return dialect.format.write([("place", json.dumps(given))])

    assert admits(required, call())
    assert admits(required, call(unit=None, tags=None))
    assert admits(required, call(city="", tags=[]))
    for wrong in ({"city": None}, {"days": None}, {"unit": "K"}, {"days": "soon"}, {"more": 1}):
        assert not admits(required, call(**wrong)), wrong
    router = StreamRouter(dialect, tools={"place": PLACE})
    events = [*router.feed(call()), *router.finish()]
    assert json.loads("".join(event.text for event in events if _is_of(event, 0))) == WHOLE


def test_strict_schema_that_cannot_be_held_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "zip"}}}
    with pytest.raises(InvalidRequest, match="zip"):
        tool_grammar(DIALECTS["hermes"], [Tool("f", schema, strict=True)], ToolChoice("auto"))
    assert tool_grammar(DIALECTS["hermes"], [Tool("f", schema)], ToolChoice("required"))


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "given", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}}]
)
def test_a_tool_without_parameters_takes_none(
    given: dict[str, Any], strict: bool, name: str, admits: Admits, byte_level: Tokenizer
) -> None:
    """OpenAI's interface says so; a tool with an open schema takes any."""
    function = {"name": "now", "strict": strict, **given}
    tools = read_tools([{"type": "function", "function": function}])
    dialect = DIALECTS[name]
    for choice in (ToolChoice("required"), ToolChoice("named", "now")):
        source = tool_grammar(dialect, tools, choice, special=byte_level.special_tokens)
        assert admits(source, dialect.format.write([("now", "{}")]))
        some = dialect.format.write([("now", '{"a": "b"}')])
        assert admits(source, some) == bool(given.get("parameters"))


def test_reading_tools_and_choice() -> None:
    raw = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    tools = read_tools(raw)
    assert tools == [Tool("f", SCHEMA, strict=True)]
    assert read_tools(None) == []
    assert read_choice(None, tools).kind == "auto"
    assert read_choice(None, []).kind == "none"
    assert read_choice("required", tools).kind == "required"
    named = read_choice({"type": "function", "function": {"name": "f"}}, tools)
    assert named == ToolChoice("named", "f")
    for choice in ("sometimes", {"type": "function", "function": {"name": "g"}}, 3):
        with pytest.raises(InvalidRequest):
            read_choice(choice, tools)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        read_choice("required", [])
    for bad in (
        "f",
        [3],
        [{"type": "retrieval"}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
        raw * 2,
    ):
        with pytest.raises(InvalidRequest):
            read_tools(bad)  # type: ignore[arg-type]
