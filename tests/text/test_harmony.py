"""Harmony, as gpt-oss speaks it: channels become reasoning, content and calls at every cut."""

from __future__ import annotations

import itertools

import pytest

from headrace.server.speech import Speech
from headrace.text import ChatTemplate
from headrace.text.dialects import HARMONY, detect_dialect
from headrace.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from headrace.text.grammar import after_reasoning, from_choice
from headrace.text.messages import clean_messages
from headrace.text.reasoning import HARMONY as MARKS
from headrace.text.reasoning import THINK, detect_reasoning
from headrace.text.router import StreamRouter
from headrace.text.toolgrammar import headed, tool_grammar
from headrace.text.tools import Tool, ToolChoice

TEMPLATE = """{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
            {{- '<|channel|>commentary json<|message|>' }}
            {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
THOUGHT = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "thought and answer": (
        THOUGHT + "<|channel|>final<|message|>Hello\n{world}.<|return|>",
        "I think.",
        "Hello\n{world}.",
        [],
    ),
    "answer alone": ("<|channel|>final<|message|>Hi <|x", "", "Hi <|x", []),
    "no head at all": ("Hi there", "", "Hi there", []),
    "call": (
        THOUGHT + CALL + '{"a": [1, "<|end|>"]}',
        "I think.",
        "",
        [("add", '{"a": [1, "<|end|>"]}')],
    ),
    "call to its end": (CALL + '{"a": 1}<|call|>', "", "", [("add", '{"a": 1}')]),
    "recipient first": (
        THOUGHT + ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "I think.",
        "",
        [("add", '{"a": 1}')],
    ),
    "recipient at once": (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        "",
        "",
        [("add", '{"a": 1}')],
    ),
    "words before a call": (
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + CALL + "{}<|call|>",
        "",
        "I add.",
        [("add", "{}")],
    ),
    "two calls": (
        CALL + "{}<|call|><|start|>assistant" + CALL + '{"b": 2}<|call|>',
        "",
        "",
        [("add", "{}"), ("add", '{"b": 2}')],
    ),
    "thoughts twice": (
        THOUGHT + THOUGHT.replace("I think", " Again") + "<|channel|>final<|message|>So.",
        "I think.Again.",
        "So.",
        [],
    ),
    "thoughts behind words": (
        "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant" + THOUGHT + CALL + "{}",
        "I think.",
        "Wait.",
        [("add", "{}")],
    ),
    "another's tool": (
        "<|channel|>commentary to=python<|message|>1 + 1<|end|>",
        "",
        "1 + 1",
        [],
    ),
}


OFFERED = {"add": Tool("add")}


def routed(parts: list[str], tools: dict[str, Tool] = OFFERED, cut: bool = False) -> tuple:
    router = StreamRouter(HARMONY, tools=tools, reasoning=MARKS, hidden=HARMONY.markers)
    events: list[Event] = [event for part in parts for event in router.feed(part)]
    events += router.finish(cut=cut)
    said = dict.fromkeys((ContentDelta, ReasoningDelta), "")
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ContentDelta | ReasoningDelta):
            said[type(event)] += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[-1][1] += event.text
        else:
            assert isinstance(event, ToolCallEnd)
    return said[ReasoningDelta], said[ContentDelta], [tuple(call) for call in calls]


@pytest.mark.parametrize("case", CASES)
def test_channels_at_every_cut(case: str) -> None:
    text, *expected = CASES[case]
    assert routed([text]) == tuple(expected)
    assert routed(list(text)) == tuple(expected)
    for place in range(len(text)):
        assert routed([text[:place], text[place:]]) == tuple(expected), text[:place]


def test_an_answer_that_is_cut_shows_no_part_of_a_head() -> None:
    text = THOUGHT + "<|channel|>final<|message|>Hello"
    for place in range(len(THOUGHT), len(text) - len("Hello")):
        thought, content, _ = routed([text[:place]], cut=True)
        assert (thought, content.replace("assistant", "")) == ("I think.", ""), text[:place]
    _, _, calls = routed([CALL + '{"a": 1'], cut=True)
    assert calls == [("add", '{"a": 1')]


def test_a_call_without_tools_is_content() -> None:
    _, content, calls = routed([CALL + "{}"], tools={})
    assert calls == []
    assert "{}" in content


def test_what_a_template_tells() -> None:
    assert detect_dialect(TEMPLATE) is HARMONY
    assert detect_reasoning(TEMPLATE) is MARKS
    assert detect_reasoning("{{ '<|end|>' }} </think>") is THINK
    assert detect_reasoning("<|user|>{{ m }}<|end|><|assistant|>") is None


def test_earlier_thoughts_reach_the_template_beside_calls() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    told = ChatTemplate(TEMPLATE).render(messages, variables={"reasoning_effort": "low"})
    assert "analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<" in told
    assert told.endswith("2<|end|><|start|>assistant")
    assert not MARKS.open_in(told)
    # The published template takes no content and thoughts together before a call.
    messages[1]["content"] = "I add."
    assert "thinking" not in clean_messages(messages)[1]


def accepts(source: str, text: str) -> bool:
    """Does the grammar take the text, with its marks as text, to the end?"""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, source)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


TOOL = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_grammars_hold_heads(thought: str) -> None:
    """Whatever is demanded stands in its channel, behind reasoning or at once."""
    call, final = CALL + '{"a": 1}<|call|>', "<|channel|>final<|message|>yes"
    form = headed(from_choice(["yes", "no"], "x"), HARMONY)

    def held(choice: str, strict: bool, form: str | None) -> str:
        tool = Tool(TOOL.name, TOOL.parameters, strict=strict)
        source = tool_grammar(HARMONY, [tool], ToolChoice(choice), form=form)
        assert source is not None
        return after_reasoning(source, MARKS, opened=False)

    required = held("required", True, None)
    assert accepts(required, thought + call)
    assert not accepts(required, thought + final)
    both = held("auto", False, form)
    assert accepts(both, thought + call)
    assert accepts(both, thought + final)
    assert not accepts(both, thought + final + " and more")
    free = held("auto", True, None)
    assert accepts(free, thought + call)
    assert accepts(free, thought + final + " and more")
    assert not accepts(free, thought + call.replace("1", '"x"'))
    alone = after_reasoning(form, MARKS, opened=False)
    assert accepts(alone, thought + final)
    assert not accepts(alone, thought + "yes")


def test_heads_are_read_where_no_tools_are_on_offer() -> None:
    special = {marker: 100 + at for at, marker in enumerate(sorted(HARMONY.markers))}
    speech = Speech(HARMONY, MARKS, special)
    hidden = speech.hidden(tools=False)
    assert hidden == HARMONY.markers
    assert len(speech.ids(hidden)) == len(special)
    router = speech.router(opened=False, tools=None, hidden=hidden, held=False)
    assert router is not None
    events = [*router.feed(CASES["thought and answer"][0]), *router.finish()]
    assert events == [ReasoningDelta("I think."), ContentDelta("Hello\n{world}.")]
    assert Speech(None, THINK, special).hidden(tools=False) == frozenset()


def test_the_dialects_own_form_is_read() -> None:
    calls = [("add", '{"a": 1}'), ("add", "{}")]
    text = HARMONY.format.write(calls)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        if second - first < 3:
            parts = [text[:first], text[first:second], text[second:]]
            assert routed(parts) == ("", "", calls)
