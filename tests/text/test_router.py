"""The stream router: every dialect, cut at every border, gives back what the model meant."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.speech import Speech
from headrace.text import Foreign, IncrementalDetokenizer, Tokenizer
from headrace.text.dialects import DIALECTS, Dialect, detect_dialect
from headrace.text.dialects.listed import COMMAND
from headrace.text.dialects.mistral import MISTRAL_V11
from headrace.text.dialects.tagged import TAGGED
from headrace.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from headrace.text.reasoning import THINK, detect_reasoning
from headrace.text.router import StreamRouter
from headrace.text.tools import Tool

NAMES = ["get_weather", "add", "größe", "a-b.c"]
TOOLS = {name: Tool(name) for name in NAMES}


class Message:
    """A client's message, assembled from the events; refuses an order that no client expects."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[list[Any]] = []
        self.open = False

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ContentDelta):
                assert event.text
                assert not self.open
                self.content += event.text
            elif isinstance(event, ReasoningDelta):
                assert event.text
                assert not self.content
                assert not self.calls
                self.reasoning += event.text
            elif isinstance(event, ToolCallStart):
                assert not self.open
                assert event.index == len(self.calls)
                assert event.id
                self.open = True
                self.calls.append([event.name, "", None])
            elif isinstance(event, ToolCallArguments):
                assert self.open
                assert event.index == len(self.calls) - 1
                self.calls[-1][1] += event.text
            else:
                assert isinstance(event, ToolCallEnd)
                assert self.open
                self.open = False
                self.calls[-1][2] = event.complete

    def result(self) -> tuple[str, str, list[tuple[str, str, bool]]]:
        assert not self.open
        return self.content, self.reasoning, [tuple(call) for call in self.calls]


def route(parts: list[str], dialect: Dialect | None, **options: Any) -> Message:
    router = StreamRouter(dialect, tools=options.pop("tools", TOOLS), **options)
    message = Message()
    for part in parts:
        message.take(router.feed(part))
    message.take(router.finish())
    return message


def every_cut(text: str, dialect: Dialect | None, **options: Any) -> Message:
    """The message, after holding that every cut in two and the cut in characters give it."""
    whole = route([text], dialect, **options)
    expected = whole.result()
    for place in range(len(text) + 1):
        assert route([text[:place], text[place:]], dialect, **options).result() == expected
    assert route(list(text), dialect, **options).result() == expected
    return whole


SPELT = frozenset(["gemma4", "lfm2", "olmo3", *(dialect.name for dialect in TAGGED)])
"""Dialects that write arguments one by one: names are words, and text is told from JSON by the
tool's schema."""
WORDS = st.text(alphabet="abcxyz_", min_size=1, max_size=5)


def json_values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8)
        | st.sampled_from(
            ["</tool_call>", "}\n</", "[ARGS]", "```", "; {", "\n", "1", "True", '")']
        )
        | st.sampled_from(["</param", "\n</parameter", "</arg_valu", '<|"', "it's", "a\\"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def arguments(keys: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(keys, json_values(keys), max_size=3)


TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
ANY, SPELT_OUT = arguments(st.text(max_size=6)), arguments(WORDS)


def declared(name: str, given: dict[str, Any]) -> Tool:
    types = {key: {"type": TYPES.get(type(value), "object")} for key, value in given.items()}
    return Tool(name, {"type": "object", "properties": types})


DUMPS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}]
)
PROSE = st.text(alphabet="ab <>[]|{}\n", max_size=20).map(str.strip)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_calls_come_back_at_every_cut(name: str, data: st.DataObject) -> None:
    dialect = DIALECTS[name]
    what = SPELT_OUT if name in SPELT else ANY
    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
    calls = [(tool, data.draw(what)) for tool in data.draw(names)]
    tools = {tool: declared(tool, given) for tool, given in calls}
    style = data.draw(DUMPS)
    written = [(name, json.dumps(arguments, **style)) for name, arguments in calls]
    prose = data.draw(PROSE.filter(lambda text: not text.startswith(("{", "["))))
    reasoning = data.draw(PROSE)
    if not dialect.openers or dialect.name == "llama3":
        prose = ""
    text = dialect.format.write(written)
    text = prose + data.draw(st.sampled_from(["", "\n", "\n\n "])) + text
    text = f"<think>\n{reasoning}\n</think>\n\n" + text
    message = every_cut(text, dialect, reasoning=THINK, tools=tools)
    assert message.reasoning == reasoning
    assert message.content == prose
    assert [call[0] for call in message.calls] == [call[0] for call in calls]
    for (_, arguments), (_, streamed, complete) in zip(calls, message.calls, strict=True):
        assert complete
        assert json.loads(streamed) == arguments


@pytest.mark.parametrize("name", [*sorted(DIALECTS), None])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_text_at_any_cut(name: str | None, data: st.DataObject) -> None:
    """Markers and pieces of calls in any order: never an exception, the same for any cut."""
    dialect = DIALECTS[name] if name else None
    pieces = [
        "{",
        "}",
        '{"name": "add"',
        ', "arguments": ',
        '{"a": 1}',
        "text",
        " ",
        "\n",
        '"',
        "<think>",
        "</think>",
        "[",
        "]",
        ";",
        "add",
        "```json\n",
        "function",
    ]
    if dialect:
        pieces += [*dialect.openers, *dialect.markers, dialect.format.end, dialect.format.close]
        pieces += [dialect.format.begin_call("add"), dialect.format.write([("add", '{"a": 2}')])]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    sound(text, every_cut(text, dialect, reasoning=data.draw(st.sampled_from([None, THINK]))))


def sound(text: str, message: Message) -> None:
    """Arguments are objects, and nothing of the text is told twice."""
    for _, arguments, _ in message.calls:
        assert isinstance(json.loads(arguments), dict), arguments
    rest = iter(text)
    assert all(char in rest for char in message.content), message.content


LOG = Tool(
    "log",
    {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "day": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "any": {},
        },
    },
)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_call_that_is_written_badly(name: str, data: st.DataObject) -> None:
    """Whole calls with a stretch left out, doubled or replaced: arguments are objects all the same,
    also where the tool is known by its name alone."""
    dialect = DIALECTS[name]
    given = {"note": 'a "b"\n</x>', "day": 3, "tags": ["c", "d"], "any": {"e": None}}
    text = dialect.format.write([("log", json.dumps(given)), ("log", '{"day": 4}')])
    for _ in range(data.draw(st.integers(1, 2))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        new = data.draw(st.sampled_from(["", "", text[start:end] * 2, "\n", "<", '"', "}", "'"]))
        text = text[:start] + new + text[end:]
    text = text[: data.draw(st.integers(len(text) // 2, len(text)))]
    for tools in ({"log": LOG}, {"log": Tool("log")}):
        sound(text, every_cut(text, dialect, tools=tools))


CODER = "<tool_call>\n<function=log>\n"
BADLY = [
    # A value ends at the next tag, at the end of the call or at that of the text.
    (
        "qwen3_coder",
        CODER + "<parameter=note>\nhello\n</function>\n</tool_call>",
        {"note": "hello"},
    ),
    (
        "qwen3_coder",
        CODER + "<parameter=day>\n3\n</parameter>\n<parameter=note\noops\n</parameter>\n"
        "</function>\n</tool_call>",
        {"day": 3},
    ),
    ("qwen3_coder", CODER + "<parameter=day>\n3", {"day": 3}),
    ("qwen3_coder", CODER + "<parameter=day>\n3\n</para", {"day": 3}),
    ("qwen3_coder", CODER + "<parameter=note>\nhello", {"note": "hello"}),
    ("qwen3_coder", CODER + "<parameter=tags>\n[1, 2", None),
    (
        "qwen3_coder",
        CODER + "<parameter=note>\nhello\n<parameter=day>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        {"note": "hello", "day": 3},
    ),
    (
        "qwen3_coder",
        CODER + "<parameter=note>\n<parameter=x>\n</parameter>\n</function>\n</tool_call>",
        {"note": "<parameter=x>"},
    ),
    (
        "qwen3_coder",
        CODER + "<parameter=tags>\n['a', 'b']\n</parameter>\n</function>\n</tool_call>",
        {"tags": ["a", "b"]},
    ),
    ("qwen3_coder", CODER + "<parameter=day>\n3\n</parameter>\n</tool_call>", {"day": 3}),
    (
        "glm47",
        "<tool_call>log<arg_key>note</arg_key><arg_value>a<arg_key>day</arg_key><arg_value>3"
        "</tool_call>",
        {"note": "a", "day": 3},
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="log">\n<parameter name="note"><parameter name="x"/>'
        '<parameter name="day">3\n</invoke>\n</minimax:tool_call>',
        {"note": '<parameter name="x"/>', "day": 3},
    ),
    (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="log">\n<｜DSML｜parameter name="note" '
        'string="true">3<｜DSML｜parameter name="day" string="false">3</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        {"note": "3", "day": 3},
    ),
    # JSON that ends too early, or holds what JSON does not have.
    (
        "hermes",
        '<tool_call>\n{"name": "log", "arguments": {"note": "a}\n</tool_call>',
        {"note": "a}"},
    ),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"day": 3,}}\n</tool_call>', {"day": 3}),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"day": 3', {"day": 3}),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"day": 3}\n</tool_call>', {"day": 3}),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"day": 3}}}\n</tool_call>', {"day": 3}),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"day": 3}}}', {"day": 3}),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"any": True}}', {"any": True}),
    (
        "hermes",
        '<tool_call>\n{"name": "log", "arguments": {"note": "a\n\tb </tool_call> \\d \\ud83dx"}}\n'
        "</tool_call>",
        {"note": "a\n\tb </tool_call> \\d \ufffdx"},
    ),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {"day": 3, "note', {"day": 3}),
    ("hermes", '<tool_call>\n{"name": "log", "arguments": {', None),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>log<｜tool▁sep｜>{"day": 3',
        {"day": 3},
    ),
    ("gemma4", '<|tool_call>call:log{note:<|"|>hel', {"note": "hel"}),
    ("gemma4", "<|tool_call>call:log{day:3", {"day": 3}),
    ("lfm2", "<|tool_call_start|>[log(day=3", None),
    ("generic", '{"name": "log", "arguments": {"note": "hel', {"note": "hel"}),
]


@pytest.mark.parametrize(("name", "text", "arguments"), BADLY)
def test_the_right_reading_of_a_bad_call(
    name: str, text: str, arguments: dict[str, Any] | None
) -> None:
    """The call with what it says, and nothing of its frame as content; or content as written."""
    message = every_cut(text, DIALECTS[name], tools={"log": LOG})
    sound(text, message)
    if arguments is None:
        assert (message.content, message.calls) == (text, [])
    else:
        assert [json.loads(call[1]) for call in message.calls] == [arguments]
        assert message.content == ""


@pytest.mark.parametrize("name", ["deepseek", "deepseek_v31", "kimi", "minimax", "dsml", "hermes"])
def test_a_call_behind_a_broken_one_is_read(name: str) -> None:
    dialect = DIALECTS[name]
    text = dialect.format.write([("log", '{"note": "a", "day": 3}'), ("log", '{"note": "b"}')])
    place = text.index("day") - 3
    message = every_cut(text[:place] + " oops " + text[place:], dialect, tools={"log": LOG})
    assert [json.loads(call[1]) for call in message.calls][1:] == [{"note": "b"}]
    assert message.content == ""


@pytest.mark.parametrize("name", sorted({*DIALECTS} - {"harmony"}))  # Whose heads are no content.
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_is_no_call_is_content_as_written(name: str, data: st.DataObject) -> None:
    dialect = DIALECTS[name]
    alphabet = sorted({*"".join(dialect.openers)[:6], *'{}[]": a1\n,'})
    text = data.draw(st.text(alphabet=alphabet, max_size=24))
    broken = data.draw(st.sampled_from(["", *dialect.openers])) + text
    message = every_cut("x \n" + broken, dialect)
    if not message.calls:
        assert message.content == "x \n" + broken


def test_no_dialect_is_plain_content() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert every_cut(text, None).result() == (text, "", [])


def test_a_call_cut_off_in_its_arguments_ends_incomplete() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": [1, '
    message = every_cut(text, DIALECTS["hermes"])
    assert message.calls == [["add", '{"a": [1]}', False]]
    assert message.content == ""
    router = StreamRouter(DIALECTS["hermes"], tools=TOOLS)
    message = Message()
    message.take([*router.feed(text), *router.finish(cut=True)])
    assert message.calls == [["add", '{"a": [1, ', False]], "a limit leaves it open"


def test_a_call_that_breaks_off_leaves_the_rest_as_content() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": oops}} and so on'
    assert every_cut(text, DIALECTS["hermes"]).result() == (text, "", [])
    text = '<tool_call>\n{"name": "add", "arguments": {"b": 1, "a": oops}} and so on'
    message = every_cut(text, DIALECTS["hermes"])
    assert message.calls == [["add", '{"b": 1}', False]]
    assert message.content == '"a": oops}} and so on'
    assert every_cut(text + "</tool_call>So.", DIALECTS["hermes"]).content == "So."


def test_missing_closing_marker_is_forgiven() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool'
    message = every_cut(text, DIALECTS["hermes"])
    assert message.result() == ("", "", [("add", '{"a": 1}', True)])


def test_arguments_before_the_name_and_packed_in_a_string() -> None:
    text = r'<tool_call>{"id": 3, "arguments": "{\"a\": \"ü\\n\"}", "name": "add"}</tool_call>'
    message = every_cut(text, DIALECTS["hermes"])
    assert json.loads(message.calls[0][1]) == {"a": "ü\n"}


def test_an_object_that_names_no_tool_is_an_answer() -> None:
    for text in ('{"name": "Ann", "arguments": {}}', '{"name": "add"}', '["a"]', '{"answer": 42}'):
        assert every_cut(text, DIALECTS["generic"]).result() == (text, "", [])
        assert every_cut(text, DIALECTS["llama3"]).result() == (text, "", [])


BARE = [
    ('{"name": "add", "arguments": {"a": 1}}', 1, ""),
    ('  {"name": "add", "parameters": {"a": 1}} That is it.', 1, "That is it."),
    ('```json\n{\n  "name": "add",\n  "arguments": {"a": 1}\n}\n```', 1, ""),
    ('```\n{"name": "add", "arguments": {"a": 1}}```\nSo.', 1, "So."),
    ('```json\n[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "args": {}}]\n```', 2, ""),
    ('{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {}}', 2, ""),
    ('{"name": "add", "arguments": {"a": 1}};\n\n{"name": "add", "arguments": {}}', 2, ""),
    ('{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}', 1, ""),
    ('{"id": "x", "function": "add", "arguments": {"a": 1}}', 1, ""),
    (
        '```json\n{"name": "add", "arguments": {"a": 1}}\n```\n```json\n'
        '{"name": "add", "arguments": {}}\n```',
        2,
        "",
    ),
    ('{"name": "add", "arguments": {"a": 1}}\n{"b": 2}', 1, '{"b": 2}'),
]


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize(("text", "count", "content"), BARE)
def test_a_call_that_begins_the_answer_as_plain_json(
    name: str, text: str, count: int, content: str
) -> None:
    """Models for code do that, whatever their template taught them."""
    message = every_cut(text, DIALECTS[name], reasoning=THINK)
    assert [call[0] for call in message.calls] == ["add"] * count
    assert json.loads(message.calls[0][1]) == {"a": 1}
    assert all(call[2] for call in message.calls)
    assert message.content == content


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "sub", "arguments": {}}',
        '{"name": "add"}',
        '```json\n{"a": 1}\n```',
        "```python\nadd(1)\n```",
        '[1, {"name": "add", "arguments": {}}]',
        "`add`",
        "{",
        "```json\n",
        '{"answer": {"name": "add", "arguments": {}}}',
        ' {"name": "add", "arguments": 3}',
        '{"name": "Ann", "age": 3} ```',
        '[{"name": "add"}]',
        "[TOOL",
        "[]",
    ],
)
def test_plain_json_that_names_no_tool_is_content(name: str, text: str) -> None:
    assert every_cut(text, DIALECTS[name]).result() == (text, "", [])


@pytest.mark.parametrize("text", ['{"answer":', "```python", '{"name": "Ann"', "[1", "`a"])
def test_what_is_no_call_is_not_held_back(text: str) -> None:
    router = StreamRouter(DIALECTS["hermes"], tools=NAMES)
    events = list(itertools.chain.from_iterable(router.feed(char) for char in text))
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == text


def test_nothing_of_a_plain_call_is_shown_first() -> None:
    router = StreamRouter(DIALECTS["hermes"], tools=NAMES)
    text = BARE[2][0].replace("1", '"some text"')
    events = [event for char in text for event in router.feed(char)]
    assert isinstance(events[0], ToolCallStart)
    assert not [event for event in events if isinstance(event, ContentDelta)]
    # Its arguments stream.
    assert len([event for event in events if isinstance(event, ToolCallArguments)]) > 5


@pytest.mark.parametrize("tag", ["tools", "function_call"])
def test_wrappers_that_hermes_models_make_up(tag: str) -> None:
    text = f'I look.\n<{tag}>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</{tag}>'
    message = every_cut(text, DIALECTS["hermes"])
    assert message.result() == ("I look.", "", [("add", '{"a": 1}', True)])
    text = f'The tag <{tag}> holds {{"name": "add"}}.'
    assert every_cut(text, DIALECTS["hermes"]).content == text


@pytest.mark.parametrize(
    ("written", "streamed"),
    [
        ("123", '{"a": 123}'),
        ("true", '{"a": true}'),
        ('"x', '{"a": "x"}'),
        ('"x\\u00e', '{"a": "x"}'),
        ('{"b": [1, {"c"', '{"a": {"b": [1]}}'),
        ('3, "b": -1.5e', '{"a": 3}'),
        ('3, "b": tru', '{"a": 3}'),
        ("-1.5e", None),
        ("{", None),
    ],
)
def test_a_call_that_ends_inside_a_value_is_closed(written: str, streamed: str | None) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": ' + written
    message = every_cut(text, DIALECTS["hermes"])
    expected = [] if streamed is None else [("add", streamed, False)]
    assert message.result() == ("" if streamed else text, "", expected)


def test_the_beginning_of_a_call_is_not_shown_where_a_limit_cut_it() -> None:
    for text in ('<tool_call>\n{"name": "ad', "<tool_call>\n", '<tool_call>{"'):
        router = StreamRouter(DIALECTS["hermes"], tools=NAMES)
        assert [*router.feed("So: " + text), *router.finish(cut=True)] == [ContentDelta("So:")]
        # Without a limit it is what the model had to say.
        router = StreamRouter(DIALECTS["hermes"], tools=NAMES)
        message = Message()
        message.take([*router.feed("So: " + text), *router.finish()])
        assert message.content == "So: " + text
    router = StreamRouter(DIALECTS["hermes"], tools=NAMES)
    events = router.feed('{"name": "add", "arguments": {}}\n{"name": "a')
    events += router.finish(cut=True)
    assert not [event for event in events if isinstance(event, ContentDelta)]


def test_generic_tool_calls_wrapper() -> None:
    text = '{"tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "args": {}}]}'
    message = every_cut(text, DIALECTS["generic"])
    assert [call[1] for call in message.calls] == ['{"a": 1}', "{}"]


def test_llama_forms() -> None:
    dialect = DIALECTS["llama3"]
    text = 'So: <|python_tag|>{"name": "add", "parameters": {"a": 1}}; '
    text += '{"name": "add", "parameters": {}}'
    message = every_cut(text, dialect)
    assert message.content == "So:"
    assert [call[1] for call in message.calls] == ['{"a": 1}', "{}"]
    message = every_cut('<function=add>{"a": 2}</function>', dialect)
    assert message.calls == [["add", '{"a": 2}', True]]


def test_mistral_call_ids_and_id_form() -> None:
    router = StreamRouter(MISTRAL_V11)
    events = router.feed("[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{}[TOOL_CALLS]add[ARGS]{}")
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts[0].id == "abc123XYZ"
    assert len(starts[1].id) == 9


def test_reasoning_that_the_prompt_opened() -> None:
    assert THINK.open_in("<|im_start|>assistant\n<think>\n")
    assert not THINK.open_in("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    text = "hm, <tool_call>\n</think>\n\nHello"
    message = every_cut(text, DIALECTS["hermes"], reasoning=THINK, in_reasoning=True)
    assert message.result() == ("Hello", "hm, <tool_call>", [])


def test_reasoning_in_whose_midst_the_prompt_ends() -> None:
    turn = "<|im_start|>assistant\n"
    for written in ("<think>\nFirst, I", "<think>\n", "  <think>a < b\nand"):
        assert THINK.open_in(turn + written.strip(), answer=written.strip())
    # The template opened it, the answer begins behind the mark.
    assert THINK.open_in(f"{turn}<think>\nFirst, I", answer="First, I")
    # It was closed; or it is the text of somebody else.
    assert not THINK.open_in(f"{turn}<think>hm</think>So", answer="<think>hm</think>So")
    asked = f"<|im_start|>user\nWhat is <think>?<|im_end|>\n{turn}"
    assert not THINK.open_in(asked)
    assert not THINK.open_in(f"{asked}It is", answer="It is")


def test_reasoning_only_at_the_start() -> None:
    text = "The tag <think> opens reasoning.</think>"
    assert every_cut(text, DIALECTS["hermes"], reasoning=THINK).result() == (text, "", [])


def test_reasoning_tokens_are_counted() -> None:
    router = StreamRouter(DIALECTS["hermes"], reasoning=THINK, in_reasoning=True)
    for part in ("one ", "two ", "</think>", "four"):
        router.feed(part, tokens=1)
    assert router.reasoning_tokens == 3
    assert not router.in_reasoning


def test_reasoning_tokens_hardly_depend_on_how_news_is_merged() -> None:
    pieces = ["<think>", *["word "] * 30, "</think>", *["said "] * 10]
    counts = []
    for size in (1, 7, len(pieces)):
        router = StreamRouter(reasoning=THINK)
        for at in range(0, len(pieces), size):
            part = pieces[at : at + size]
            router.feed("".join(part), len(part))
        counts.append(router.reasoning_tokens)
    assert all(abs(count - 31) <= 2 for count in counts), counts


def test_hidden_markers_never_show() -> None:
    message = route(
        ["<|python_tag|>print(1)"], DIALECTS["llama3"], hidden=frozenset(["<|python_tag|>"])
    )
    assert message.content == "print(1)"


def test_markers_that_are_special_tokens(byte_level: Tokenizer) -> None:
    """From ids to calls: the markers survive detokenising, other special tokens do not."""
    text = "<think>hm</think>Sure.<|im_start|>[TOOL_CALLS]add[ARGS]{}<|end|>"
    special = byte_level.special_tokens
    speech = Speech(MISTRAL_V11, THINK, special, Foreign(special))
    markers = speech.hidden(tools=True)
    assert markers == {"<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"}
    detokenizer = IncrementalDetokenizer(byte_level, keep=frozenset(speech.ids(markers)))
    router = speech.router(opened=False, tools={}, hidden=markers, held=False)
    assert router is not None
    message = Message()
    for index in byte_level.encode(text):
        message.take(router.feed(detokenizer.feed([index]), tokens=1))
    message.take(router.feed(detokenizer.finish()))
    message.take(router.finish())
    assert message.result() == ("Sure.", "hm", [("add", "{}", True)])


def test_arguments_stream_while_they_are_written() -> None:
    router = StreamRouter(DIALECTS["hermes"])
    router.feed('<tool_call>\n{"name": "add", "arguments": {"text": "')
    events = list(itertools.chain.from_iterable(router.feed(char) for char in "abc"))
    assert events == [ToolCallArguments(0, char) for char in "abc"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{'<tool_call>'}}...{{'</tool_call>'}}", "hermes"),
        ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]{{name}}[ARGS]", "mistral_v11"),
        ("<｜tool▁calls▁begin｜>{{x}}<｜tool▁sep｜>\n```json", "deepseek"),
        ("<｜tool▁calls▁begin｜>{{x}}<｜tool▁sep｜>", "deepseek_v31"),
        ("<|start_header_id|>{{'\"parameters\": '}}", "llama3"),
        ("<|tool_call|>{{ message.tool_calls }}", "granite"),
        ("<|START_ACTION|>[{{x}}]<|END_ACTION|>", "command"),
        ("<tool_call>{{'<function=' + name}}{{'<parameter=' + key}}</tool_call>", "qwen3_coder"),
        ("<tool_call>{{name}}\n<arg_key>{{k}}</arg_key>\n<arg_value></tool_call>", "glm"),
        ("<tool_call>{{name}}<arg_key>{{k}}</arg_key><arg_value></tool_call>", "glm47"),
        ('<minimax:tool_call><invoke name="{{n}}"><parameter name="{{k}}">', "minimax"),
        ("<seed:tool_call><function=x><parameter=y>1</parameter>", "seed"),
        ("{{'<' + '｜DSML｜' + 'function_calls>'}}{{message['tool_calls']}}", "dsml"),
        ("{{'<' + '｜DSML｜' + 'tool_calls>'}}", "dsml_v4"),
        ("<|tool_calls_section_begin|>{{id}}<|tool_call_argument_begin|>", "kimi"),
        ("{{'<|tool_call>call:' + name}}{{'<|\"|>' + text}}", "gemma4"),
        ("<|im_start|>system\nList of tools: [", "lfm2"),
        ("<functions>{{tools}}</functions><function_calls>", "olmo3"),
        ("{{ messages }}", "generic"),
        (None, "generic"),
    ],
)
def test_detection(template: str | None, name: str) -> None:
    assert detect_dialect(template).name == name


def test_reasoning_of_command_is_between_its_own_marks() -> None:
    template = "<|START_THINKING|>{{plan}}<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|>"
    marks = detect_reasoning(template)
    assert marks is not None
    call = COMMAND.format.write([("add", '{"a": 1}')])
    text = f"{marks.open}so{marks.close}{call}"
    assert every_cut(text, COMMAND, reasoning=marks).result() == (
        "",
        "so",
        [("add", '{"a": 1}', True)],
    )
