"""Demanded forms over HTTP, with the official client: schemas, tools, reasoning, streams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from processes import Running, headrace, running, serving

from tiny import talker

MESSAGES: Any = [{"role": "user", "content": "Where does the water go?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["turbine", "sea", "Fluß"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 500},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["place", "depth", "name"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "flow", "parameters": SCHEMA, "strict": True}},
    {
        "type": "function",
        "function": {
            "name": "stop",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TEMPLATE = (
    "{# It writes <tool_call> </tool_call> and <think> </think>. #}"
    "{% for tool in tools or [] %}{{ tool.function.name + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n'"
    " + (message.content or '') + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    "{% if think %}{{ '<think>\n' }}{% endif %}"
)


def speaking(folder: Path) -> Path:
    """The tiny model, with two of its tokens made into the special tokens of reasoning."""
    talker.make(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    for text in ("</think>", "<think>"):
        merges.pop()
        last = max(vocabulary, key=vocabulary.__getitem__)
        index = vocabulary.pop(last)
        data["added_tokens"].append(
            {
                "id": index,
                "content": text,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
    data["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(data))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = speaking(tmp_path_factory.mktemp("models") / "tiny")
    with serving(model, "--max-sequences 8 --kv-memory 16MiB") as server:
        yield server


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai(timeout=120)


def chat(client: openai.OpenAI, seed: int = 1, **more: Any) -> Any:
    given = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 400,
        "temperature": 1.5,
        "seed": seed,
        # It never learned to think, so it would not come to an end.
        "logit_bias": {str(_token(client, "<think>")): -100},
    }
    return client.chat.completions.create(**(given | more))


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    whole = chat(client, seed, response_format=FORM).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    chunks = list(chat(client, seed, response_format=FORM, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.message.content


def test_choices_are_each_held(client: openai.OpenAI) -> None:
    reply = chat(client, response_format=FORM, n=4)
    texts = {choice.message.content for choice in reply.choices}
    assert len(texts) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_the_fields_of_vllm(client: openai.OpenAI) -> None:
    for extra in (
        {"structured_outputs": {"regex": "[a-c]{3}x"}},
        {"guided_regex": "[a-c]{3}x"},
    ):
        content = chat(client, extra_body=extra).choices[0].message.content
        assert re.fullmatch("[a-c]{3}x", content)
        reply = client.completions.create(
            model="tiny", prompt=["a", "b"], max_tokens=40, temperature=1.5, extra_body=extra
        )
        for choice in reply.choices:
            assert re.fullmatch("[a-c]{3}x", choice.text)
            assert choice.finish_reason == "stop"
    one = client.completions.create(
        model="tiny", prompt="x", max_tokens=40, extra_body={"guided_choice": ["ja", "nein"]}
    )
    assert one.choices[0].text in ("ja", "nein")


@pytest.mark.parametrize("seed", range(3))
def test_the_form_of_a_completion(client: openai.OpenAI, seed: int) -> None:
    given: Any = {
        "model": "tiny",
        "prompt": ["x", "yy"],
        "max_tokens": 400,
        "temperature": 1.5,
        "seed": seed,
        "extra_body": {"response_format": FORM},
    }
    whole = client.completions.create(**given)
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    texts = ["", ""]
    for chunk in client.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    both = {"response_format": FORM, "guided_regex": "a"}
    with pytest.raises(openai.BadRequestError, match="together"):
        client.completions.create(**given | {"extra_body": both})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_have_to_be_called(client: openai.OpenAI, seed: int, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "flow"}}
    given: Any = {"tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False}
    if stream:
        call, finish = {"name": "", "arguments": ""}, None
        for chunk in chat(client, seed, stream=True, **given):
            for part in chunk.choices[0].delta.tool_calls or ():
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
            finish = chunk.choices[0].finish_reason or finish
    else:
        choice = chat(client, seed, **given).choices[0]
        assert len(choice.message.tool_calls) == 1
        function = choice.message.tool_calls[0].function
        call, finish = {"name": function.name, "arguments": function.arguments}, None
        finish = choice.finish_reason
    assert call["name"] == "flow"
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    assert finish == "tool_calls"


def test_required(client: openai.OpenAI) -> None:
    for seed in range(4):
        choice = chat(
            client, seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name in ("flow", "stop")
        json.loads(call.function.arguments)


@pytest.mark.parametrize("strict", [True, False])
def test_tools_beside_a_form(client: openai.OpenAI, strict: bool) -> None:
    """Agents with an output type ask so: the answer is a call or the form, nothing else."""
    tools = [
        {"type": "function", "function": tool["function"] | {"strict": strict}} for tool in TOOLS
    ]
    for seed in range(6):
        choice = chat(client, seed, tools=tools, response_format=FORM).choices[0]
        for call in choice.message.tool_calls or ():
            schema = {"flow": SCHEMA, "stop": TOOLS[1]["function"]["parameters"]}
            jsonschema.validate(json.loads(call.function.arguments), schema[call.function.name])
        if not choice.message.tool_calls:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    choice = chat(client, tools=tools, tool_choice="required", response_format=FORM).choices[0]
    assert choice.message.tool_calls


def test_json_may_be_demanded_without_white_space(client: openai.OpenAI) -> None:
    wanted = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    content = chat(client, extra_body=wanted).choices[0].message.content
    assert content == json.dumps(json.loads(content), ensure_ascii=False, separators=(",", ":"))


def test_a_form_after_reasoning(client: openai.OpenAI) -> None:
    """The marks are special tokens: they reach the router, and not the reader."""
    seen = 0
    for seed in range(6):
        # A model that never trained does not close its reasoning: a helping hand.
        bias = {str(_token(client, "</think>")): 8.0}
        choice = chat(
            client,
            seed,
            response_format=FORM,
            logit_bias=bias,
            extra_body={"chat_template_kwargs": {"think": True}},
        ).choices[0]
        if choice.finish_reason != "stop":
            continue
        seen += 1
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert "think>" not in choice.message.content
        assert "think>" not in (choice.message.model_extra or {}).get("reasoning_content", "")
    assert seen, "no answer ended"


def _token(client: openai.OpenAI, text: str) -> int:
    reply = httpx.post(
        str(client.base_url).removesuffix("/v1/") + "/tokenize",
        json={"prompt": text, "add_special_tokens": False},
    )
    (token,) = reply.json()["tokens"]
    return int(token)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "string", "format": "zip"},
                        "strict": True,
                    },
                }
            },
            "zip",
        ),
        ({"extra_body": {"guided_regex": "("}}, "guided.regex"),
        ({"extra_body": {"guided_regex": "a", "structured_outputs": {"regex": "b"}}}, "together"),
    ],
)
def test_what_cannot_be_held_is_refused_before_work(
    client: openai.OpenAI, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        chat(client, **fields)


@pytest.mark.model
@pytest.mark.parametrize(
    ("model", "capital"), [("qwen2.5-coder-0.5b", "Paris"), ("smollm2-135m", None)]
)
def test_a_real_model_answers_in_a_form(model: str, capital: str | None) -> None:
    """`capital`: what it says where it knows; any text is in the form."""
    with running(headrace("serve", model, "--port", "0", "--max-sequences", "4")) as server:
        client = server.openai()
        country = {
            "type": "object",
            "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
            "required": ["country", "capital"],
            "additionalProperties": False,
        }
        form: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": country}}
        question: Any = [{"role": "user", "content": "What is the capital of France?"}]
        given: Any = {"model": model, "messages": question, "temperature": 0}
        reply = client.chat.completions.create(**given, response_format=form, max_tokens=80)
        said = json.loads(reply.choices[0].message.content or "")
        assert set(said) == {"country", "capital"}
        assert capital in (None, said["capital"])
        weather: Any = [
            {
                "type": "function",
                "function": {
                    "name": "capital_of",
                    "strict": True,
                    "parameters": {
                        "type": "object",
                        "properties": {"country": {"type": "string"}},
                        "required": ["country"],
                        "additionalProperties": False,
                    },
                },
            }
        ]
        reply = client.chat.completions.create(
            **given,
            tools=weather,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
        )
        (call,) = reply.choices[0].message.tool_calls or ()
        assert capital is None or json.loads(call.function.arguments)["country"] == "France"
        assert list(json.loads(call.function.arguments)) == ["country"]
