# ruff: noqa: E501 - templates are one line each
"""Chat templates: what they render, what they are kept from, and how they fail."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest, ModelFileError, TooLarge
from headrace.text import ChatTemplate
from headrace.text import sandbox as sandbox_module
from headrace.text import template as template_module
from headrace.text.taught import Teaching

HI = [{"role": "user", "content": "Hi"}]

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA_LIKE = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- elif message.role in ["tool", "ipython"] %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}"""

GEMMA_LIKE = """{{ bos_token }}{% if messages[0]['role'] == 'system' -%}
{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"""

REASONING_LIKE = """{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {{- '[' ~ loop.index0 ~ reasoning ~ ']' }}
    {%- endif %}
    {{- message.role ~ ': ' ~ content ~ '\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    HI,
    [{"role": "system", "content": " Be brief. "}, *HI],
    [*HI, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello <b>"}, *HI],
    [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"ü": [1]}}}
            ],
        },
        {"role": "tool", "content": "7°", "tool_call_id": "1"},
    ],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<&'ü>", "parameters": {}}}


@pytest.mark.parametrize("source", [CHATML, LLAMA_LIKE, GEMMA_LIKE, REASONING_LIKE])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_as_transformers_renders(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False}
    shown = Teaching(source).teach(messages, tools) if tools else messages
    try:
        expected = utils._compile_jinja_template(source).render(
            messages=shown, tools=tools, documents=None, add_generation_prompt=True, **variables
        )
    except Exception as error:  # noqa: BLE001 - whatever the reference says, ours says in its way
        with pytest.raises(InvalidRequest, match=str(error)[:30]):
            ChatTemplate(source).render(messages, tools=tools, variables=variables)
        return
    ours = ChatTemplate(source, special={"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(messages, tools=tools, variables={"enable_thinking": False}) == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_tojson(value: Any) -> None:
    rendered = ChatTemplate("{{ x | tojson }}").render(HI, variables={"x": value})
    assert rendered == json.dumps(value, ensure_ascii=False)


PARTS_ALONE = (
    "{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]"
    "['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}<end>\n{% endfor %}"
)
"""A template such as SmolVLM's: it knows no content that is a text."""


def test_a_template_that_knows_parts_alone_gets_parts() -> None:
    template, text = ChatTemplate(PARTS_ALONE), {"type": "text", "text": "b"}
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "image"}, text, text]},
        {"role": "assistant", "content": "c"},
    ]
    whole = "System: a<end>\nUser:<image>bb<end>\nAssistant: c<end>\n"
    assert template.render(messages, add_generation_prompt=False) == whole
    opened = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert opened == whole.removesuffix("<end>\n")


@pytest.mark.parametrize("content", ["message.content", "message['content']"])
def test_a_search_in_a_text_is_no_loop_over_parts(content: str) -> None:
    source = (
        "{% for message in messages %}{% if '</think>' in " + content + " %}"
        "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</think>c"}]
    assert ChatTemplate(source).render(messages) == "ac"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}{{ undefined }}", "Hi"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}a", "a"),
        ("{% for i in range(9) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}", "012"),
        ("{% generation %}{{ 'gen' }}{% endgeneration %}", "gen"),
        (
            "{% macro m(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ m(1) }}{{ m(3, y=4) }}",
            "[12][34]",
        ),
        ("{% macro f() %}({{ caller() }}){% endmacro %}{% call f() %}in{% endcall %}", "(in)"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ x | upper }}", "a1A1"),
        (
            "{% set ns = namespace(n=[]) %}{% for m in messages %}{% set ns.n = ns.n + [m.role] %}"
            "{% endfor %}{{ ns.n | join('-') }}",
            "user",
        ),
        (
            "{{ ('a,b'.split(',') + ['c']) | join(' ') }}{{ 'x' * 3 }}{{ '%s-%d' % ('a', 2) }}",
            "a b cxxxa-2",
        ),
        ("{{ {'a': 1, 'b': [2, none]} | tojson }}", '{"a": 1, "b": [2, null]}'),
        (
            "{{ {'a': 1} | items | list }}{% for k, v in {'q': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
            "[('a', 1)]q1",
        ),
        ("{{ messages | map(attribute='role') | list }}", "['user']"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'aXbX'.replace('X', '-') }}{{ 'ab' | replace('b', 'cc') }}", "a-b-acc"),
        ("{{ 'a\nb' | indent(2) }}{{ '-'.join(['x', 'y']) }}", "a\n  bx-y"),
        ("{{ '{:03d}'.format(7) }}{{ 5 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}", "00721024" + "3"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ (1, 2) | first }}{{ [1, 2][-1] }}{{ messages is sequence }}", "12True"),
        ("{{ add_generation_prompt }}{{ tools is none }}", "TrueTrue"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(HI) == expected


BOMBS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}"
    "{% endset %}{% set ns.s = t %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s | replace('x', 'xxxx') %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s.replace('x', 'xxxx') %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] | join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(60) }}",
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * 'x' }}",
    "{{ [1] * 1000000000 }}",
    "{{ 9 ** 999999999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ ('x' | attr('format'))() }}{{ '{0:{1}}' | attr('format') }}{{ '{:9999}'.format(1) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{{ [[]] | tojson(indent=1000000000) }}",
    "{% for i in range(20) %}{{ 'x' * 15000000 }}{% endfor %}",
    "{% set a %}{% for i in range(20) %}{{ 'x' * 15000000 }}{% endfor %}{% endset %}",
    "{% set a %}{% for i in range(100000) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "{{ range(100000000) | list }}",
    "{{ messages | batch(1000000000, 'x') | list }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ lipsum(100000) }}",
    "{{ cycler.__class__ }}{{ ''.format_map({}) }}{{ 'x'.ljust(1000000000) }}",
]

SLOW_BOMBS = [
    "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = {1: ns.s, 2: ns.s} %}"
    "{% endfor %}",
    "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
]
"""A second of computing each; the quick set has the same of lists, `~` and `+`."""


@pytest.mark.parametrize(
    "source", [*BOMBS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_BOMBS)]
)
def test_bombs_end_soon(source: str) -> None:
    started = time.process_time()
    with pytest.raises((InvalidRequest, ModelFileError)):
        ChatTemplate(source).render(HI)
    assert time.process_time() - started < 5


def test_a_wide_format_is_refused_before_it_is_made() -> None:
    for source in ("{{ '{:1000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 1000000000) }}"):
        with pytest.raises(TooLarge, match="width"):
            ChatTemplate(source).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.append(1) }}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
        "{{ self.__init__.__globals__ }}{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ environment.held }}{{ ().__class__() }}",
        "{{ '{0.__class__.__base__}'.format(1).x.y }}",
    ],
)
def test_nothing_outside_is_reached(source: str) -> None:
    with pytest.raises((InvalidRequest, ModelFileError)):
        print(ChatTemplate(source).render(HI))


def test_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HI)
    with pytest.raises(InvalidRequest, match="UndefinedError"):
        ChatTemplate("{{ nothing.inside.it }}").render(HI)
    with pytest.raises(ModelFileError, match="does not compile"):
        ChatTemplate("{% for %}")
    with pytest.raises(ModelFileError, match="characters"):
        ChatTemplate("x" * (template_module.MAX_TEMPLATE + 1))


def test_output_is_bounded() -> None:
    with pytest.raises(TooLarge):
        ChatTemplate("{{ messages[0].content }}" * 5).render(
            [{"role": "user", "content": "x" * (4 * 2**20)}]
        )


def test_continue_final_message() -> None:
    template = ChatTemplate(CHATML)
    messages = [*HI, {"role": "assistant", "content": "Once upon "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    keeping = ChatTemplate(CHATML.replace(" | trim", ""))
    assert keeping.source != CHATML
    text = keeping.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon ")  # As in transformers.
    ended = [*HI, {"role": "assistant", "content": "<|im_end|>"}]
    text = template.render(ended, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n<|im_end|>")
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="with text"):
        template.render(
            [{"role": "assistant", "content": " "}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    with pytest.raises(InvalidRequest, match="cannot be"):
        ChatTemplate("nothing").render(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    text = ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
    assert "Hello you<|im_end|>" in text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ({}, "messages"),
        (["Hi"], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": 3, "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 7}], "messages.0.content"),
        ([*HI, {"role": "user", "content": [{"type": "image_url"}]}], "messages.1.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0"),
        ([{"role": "user", "content": [7]}], "messages.0.content.0"),
        ([{"role": "assistant", "tool_calls": 1}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0"),
    ],
)
def test_bad_messages(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.param == param


def test_too_many_messages() -> None:
    with pytest.raises(TooLarge):
        ChatTemplate(CHATML).render(HI * 10_001)


def test_tool_call_arguments_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.a }}{{ messages[0].content }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate(source).render([message]) == "ü"
    broken = {**call, "function": {"name": "f", "arguments": "{oops"}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert ChatTemplate(source).render([{**message, "tool_calls": [broken]}]) == "{oops"
    # What came in is not changed.
    assert call["function"]["arguments"] == '{"a": "ü"}'  # type: ignore[index]


def test_a_method_called_within_a_loop_and_a_block() -> None:
    """jinja hands what stands there to each call as further arguments."""
    loop = "{% for m in messages %}{% set x = m.content %}{{ (x | trim).replace('H', 'h') }}{{ ', '.join([x, x]) }}{% endfor %}"
    assert ChatTemplate(loop).render(HI) == "hiHi, Hi"
    block = "{% block b scoped %}{{ messages[0].content.replace('H', 'h') }}{{ '{}'.format(1) }}{% endblock %}"
    assert ChatTemplate(block).render(HI) == "hi1"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SPOKEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def taught(template: str, messages: list[dict[str, Any]] = HI) -> str:
    return ChatTemplate(template).render(messages, tools=[ADD])


def test_tools_are_taught_where_a_template_takes_none() -> None:
    system = [{"role": "system", "content": "Be kind."}, *HI]
    text = taught(SPOKEN, system)
    assert text.startswith("system: Be kind.\n\nYou can call these functions:\n")
    assert '"name": "add"' in text
    assert '[{"name": "<name of the function>"' in text
    assert taught(SPOKEN).startswith("system: You can call")
    assert "function" not in ChatTemplate(SPOKEN).render(HI)
    refuses = SPOKEN + "{% if false %}{{ raise_exception('System role not supported') }}{% endif %}"
    text = taught(refuses)
    assert text.startswith("user: You can call")
    assert text.endswith("\n\nHi\n")
    # The words show the form in which the model writes calls.
    granite = taught(SPOKEN + "{# <|tool_call|> #}")
    assert '<|tool_call|>[{"name": "<name of the function>"' in granite


def test_tools_come_in_the_way_that_a_template_takes_them() -> None:
    assert taught("{{ tools[0].function.name }} {{ messages | length }}") == "add 1"
    assert taught("{% for tool in tools or [] %}{{ tool.type }}{% endfor %}") == "function"
    assert taught("{{ xml_tools[0].function.name }} {{ messages | length }}") == "add 1"
    field = "{% for message in messages %}{{ message['role'] }}<|tool|>{{ message['tools'] }}<|/tool|>{% endfor %}"
    assert taught(field).startswith('system<|tool|>[{"name": "add"')
    assert "# tools" in taught("{{ '# tools' }}{{ messages[0].content }}")
    assert "You can call" in taught("{{ '# tools' }}{{ messages[0].content }}")


def test_variables_cannot_replace_the_messages() -> None:
    text = ChatTemplate("{{ messages[0].content }}").render(HI, variables={"messages": []})
    assert text == "Hi"


DEEPSEEK = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and message['content'] is none %}"
    "<|tool_calls|>{{ message['tool_calls'][0]['function']['name'] }}"
    "{% elif message['role'] == 'assistant' %}<|Assistant|>{{ message['content'] }}"
    "{% else %}<|User|>{{ message['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_template_that_tells_a_tool_call_by_its_missing_content(content: dict[str, None]) -> None:
    call = {"function": {"name": "weather", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
    text = ChatTemplate(DEEPSEEK).render(messages, add_generation_prompt=False)
    assert text.endswith("<|tool_calls|>weather")
    joined = DEEPSEEK.replace("message['content'] is none", "not message['content'] + ''")
    text = ChatTemplate(joined).render(messages, add_generation_prompt=False)
    assert text.endswith("<|tool_calls|>weather")


# Small renderings, and the process for all others

BIG = [
    "15|round(-10**8, 'floor')",
    "15|round(10**7, 'ceil')",
    "1.5|round(10**9)",
    "(range(100000)|list)|sort",
    "(range(100000)|list)|sum(start=[])",
    "messages|map('wordcount')|list|sort|sum",
    "2 ** 90000",
    "(2 ** 90000) // 3",
    "'a b ' * 4000000 | wordcount",
    "('x' * 16000000)|urlencode|length",
    "('ab' * 8000000)|title|upper|reverse|length",
    "(['a' * 100000] * 100)|unique|list|length",
    "(['a' * 100000] * 100)|groupby(0)|list|length",
    "messages|sort(attribute='content')|length",
]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that what is large reaches soon; one that is hit early makes a typed error too."""
    monkeypatch.setattr("headrace.text.renderer.HARD_SECONDS", 0.3)


@pytest.mark.parametrize("expression", BIG)
def test_what_c_does_is_killed_in_time(hurried: None, expression: str) -> None:
    """Whatever it costs, it is over soon, and nothing of it is done in this process."""
    template = ChatTemplate("{{ " + expression + " }}{{ messages[0].content }}")
    assert template.render_small(HI) is None
    with suppress(TooLarge, InvalidRequest):
        assert template.render(HI).endswith("Hi")


def test_after_a_kill_the_next_conversation_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'bad' %}{{ 15|round(-10**8, 'floor') }}{% endif %}"
        "{{ messages[0].content|wordcount }}"
    )
    for _ in range(2):
        monkeypatch.setattr("headrace.text.renderer.HARD_SECONDS", 0.3)
        with pytest.raises(TooLarge, match="longer than"):
            template.render([{"role": "user", "content": "bad"}])
        monkeypatch.setattr("headrace.text.renderer.HARD_SECONDS", 120.0)
        assert template.render([{"role": "user", "content": "a b"}]) == "2"


def test_a_constant_is_not_computed_while_it_compiles() -> None:
    for source in ("{{ 15|round(-100000000, 'floor') }}", "{{ 'a'|center(10000000) }}"):
        try:
            ChatTemplate(source)
        except ModelFileError as error:
            assert "center" in error.message  # noqa: PT017
    with pytest.raises(ModelFileError):
        ChatTemplate("{{ 0x" + "f" * 300_000 + " // 0x3" + "1" * 150_000 + " }}")
    with pytest.raises(ModelFileError):
        ChatTemplate("{{ " + "9" * 5000 + " }}")


OWN = {
    "tojson",
    "replace",
    "join",
    "indent",
    "string",
    "batch",
    "slice",
    "format",
    "pprint",
    "wordwrap",
}
ALLOWED = sorted(sandbox_module.ALLOWED_FILTERS | OWN)
LARGE = [
    "'ab ' * 4000000",
    "range(80000)|list",
    "['ab ' * 80000] * 10",
    "1" + "0" * 300,
    "[[messages] * 100] * 100",
]


MORE = {
    "replace": "('a', 'bb')",
    "attr": "('x')",
    "groupby": "(0)",
    "batch": "(3, 'x')",
    "slice": "(70000, 'x')",
    "format": "(v, v)",
    "wordwrap": "(1, true, 'xyz')",
}


@pytest.fixture(scope="module")
def filtering() -> ChatTemplate:
    """One template of every filter and every large value, so that one process renders them until
    it is killed: the conversation says which."""
    source = "".join(
        f"{{% if messages[1].content == '{place}' %}}{{% set v = {value} %}}{{% endif %}}"
        for place, value in enumerate(LARGE)
    ) + "".join(
        f"{{% if messages[0].content == '{name}' %}}"
        f"{{% set x = v|{name}{MORE.get(name, '')} %}}{{% endif %}}"
        for name in ALLOWED
    )
    return ChatTemplate(source + "done")


@pytest.mark.timeout(600)  # Against a hang; five processes take a while on a busy machine.
@pytest.mark.parametrize("name", ALLOWED)
def test_every_filter_with_large_values(hurried: None, filtering: ChatTemplate, name: str) -> None:
    """Whether in this process or in one of its own: a text, or a typed error, and soon."""
    for place in range(len(LARGE)):
        asked = [{"role": "user", "content": said} for said in (name, str(place))]
        with suppress(TooLarge, InvalidRequest):
            assert filtering.render(asked) == "done"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("range(5)|batch(2)|list", "[[0, 1], [2, 3], [4]]"),
        ("range(5)|batch(2, 'x')|list", "[[0, 1], [2, 3], [4, 'x']]"),
        ("range(7)|slice(3)|list", "[[0, 1, 2], [3, 4], [5, 6]]"),
        ("range(7)|slice(3, 'x')|list", "[[0, 1, 2], [3, 4, 'x'], [5, 6, 'x']]"),
        ("'%s and %s'|format('a', 2)", "a and 2"),
        ("'%(x)s!'|format(x='a')", "a!"),
        ("{'b': [1], 'a': 2}|pprint", "{'a': 2, 'b': [1]}"),
        ("'one two three\n\nfour'|wordwrap(8)", "one two\nthree\n\nfour"),
        ("'abcdef'|wordwrap(4, wrapstring='/')", "abcd/ef"),
    ],
)
def test_filters_of_our_own_are_jinjas(expression: str, text: str) -> None:
    source = "{{ " + expression + " }}"
    assert ChatTemplate(source).render(HI) == text == jinja2.Template(source).render()


@pytest.mark.parametrize(
    "expression",
    [
        "('%(a)s' * 50000) % {'a': 'x' * 200000}",
        "('%s' * 50000)|format('x' * 200000)",
        "('%(a)s' * 50000)|format(a='x' * 200000)",
        "('{0}' * 60000).format('x' * 200000)",
        "('{a}' * 60000).format(a=['x' * 200000])",
        "[1]|batch(10**12, 1)|list",
        "[1]|slice(10**12)|list",
        "[1]|batch(0)|list",
        "[1]|slice(0)|list",
        "('a ' * 100000)|wordwrap(1, true, 'x' * 100000)",
        "'a'|wordwrap(-1)",
        "'%s'|format('a', b=1)",
        "'%999999s'|format('a')",
    ],
)
def test_filters_and_formats_of_hostile_sizes(expression: str) -> None:
    """Gigabytes by one operation: a typed error before anything of it is made."""
    template = ChatTemplate("{{ " + expression + " }}")
    with pytest.raises((TooLarge, InvalidRequest)):
        template.render(HI)


def test_small_and_large_give_the_same() -> None:
    for source in (CHATML, LLAMA_LIKE, REASONING_LIKE):
        template = ChatTemplate(source)
        here = template.render_small(HI, add_generation_prompt=True)
        assert here is not None, "what published templates use is small"
        template._needs_process = True
        assert template.render_small(HI) is None
        assert template.render(HI, add_generation_prompt=True) == here


def test_long_conversations_are_not_for_the_loop() -> None:
    template = ChatTemplate(CHATML)
    assert template.render_small(HI * 65) is None
    assert template.render_small([{"role": "user", "content": "a" * 70_000}]) is None
    assert template.render(HI * 65).count("<|im_start|>user") == 65
    assert template.render_small(HI) is not None
