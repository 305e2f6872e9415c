"""Chat templates that have names: a request with tools or documents gets the one made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest, ModelFileError
from headrace.loader import open_model
from headrace.loader.hub import HubFile
from headrace.loader.hub_model import choose
from headrace.text import ChatTemplates
from tiny import bytewise
from tiny.checkpoints import hf_model
from tiny.gguf_files import save_gguf

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
TOOL_USE = (
    "{% for t in tools or [] %}<tool_call> {{ t.function.name }} </tool_call>{% endfor %}"
    "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}"
)
RAG = "{% for d in documents or [] %}{{ d.text }} {% endfor %}" + PLAIN
NAMED = {"default": PLAIN, "tool_use": TOOL_USE, "rag": RAG}
ASKED = [{"role": "user", "content": "q"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "d",
            "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}},
        },
    }
]
DOCUMENTS = [{"title": "one", "text": "words"}]


def by_list(folder: Path, named: dict[str, str]) -> None:
    entries = [{"name": name, "template": text} for name, text in named.items()]
    told(folder, chat_template=entries)


def by_folder(folder: Path, named: dict[str, str]) -> None:
    told(folder)
    more = folder / "additional_chat_templates"
    more.mkdir()
    for name, text in named.items():
        path = folder / "chat_template.jinja" if name == "default" else more / f"{name}.jinja"
        path.write_text(text)


def told(folder: Path, **more: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bytewise.make(tmp_path / "model")


@pytest.mark.parametrize("write", [by_list, by_folder])
@pytest.mark.parametrize("names", [("default",), ("default", "tool_use"), tuple(NAMED)])
def test_as_transformers_chooses(folder: Path, write: Any, names: tuple[str, ...]) -> None:
    write(folder, {name: NAMED[name] for name in names})
    ours = ChatTemplates(open_model(str(folder)))
    theirs = AutoTokenizer.from_pretrained(folder)

    def expected(**more: Any) -> str:
        text: str = theirs.apply_chat_template(ASKED, tokenize=False, **more)
        return text

    assert ours.render(ASKED) == expected()
    if "tool_use" in names:
        assert ours.render(ASKED, tools=TOOLS) == expected(tools=TOOLS) != expected()
        both = ours.render(ASKED, tools=TOOLS, documents=DOCUMENTS)
        assert both == expected(tools=TOOLS, documents=DOCUMENTS)
    if "rag" in names:
        # Which transformers takes by its name alone.
        wanted = expected(documents=DOCUMENTS, chat_template="rag")
        assert ours.render(ASKED, documents=DOCUMENTS) == wanted != expected()
        assert ours.render_small(ASKED, documents=DOCUMENTS) == wanted


def test_files_come_before_the_config(folder: Path) -> None:
    """If a default file exists, names of the config are ignored, as in transformers."""
    by_folder(folder, {"default": PLAIN})
    entries = [{"name": name, "template": f"old {name}"} for name in ("default", "tool_use")]
    told(folder, chat_template=entries)
    theirs = AutoTokenizer.from_pretrained(folder)
    files = open_model(str(folder))
    assert (files.chat_template, files.named_templates) == (PLAIN, {})
    assert theirs.get_chat_template(tools=TOOLS) == PLAIN
    # Without one the config's default stays: transformers then has none.
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    files = open_model(str(folder))
    assert (files.chat_template, files.named_templates) == ("old default", {"tool_use": TOOL_USE})


def test_a_template_of_a_name_alone_serves_all(folder: Path) -> None:
    by_list(folder, {"tool_use": TOOL_USE})
    assert ChatTemplates(open_model(str(folder))).render(ASKED) == "(user) q"


def test_a_gguf_names_them_by_its_keys(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": PLAIN,
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": TOOL_USE,
        "tokenizer.chat_template.rag": RAG,
    }
    model = hf_model("Qwen2")
    path = save_gguf(model, tmp_path / "m.gguf", "qwen2", metadata=metadata)
    files = open_model(str(path))
    assert files.chat_template == PLAIN
    assert files.named_templates == {"tool_use": TOOL_USE, "rag": RAG}
    metadata["tokenizer.chat_template.rag"] = 7  # type: ignore[assignment]
    path = save_gguf(model, tmp_path / "n.gguf", "qwen2", metadata=metadata)
    with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template\.rag must be a string"):
        open_model(str(path))


def test_a_hub_is_asked_for_them() -> None:
    names = [
        "config.json",
        "model.safetensors",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/notes.txt",
        "additional_chat_templates/../../other.jinja",
        "elsewhere/tool_use.jinja",
    ]
    found = choose([HubFile(name, 1, None) for name in names], "org/name", "")
    assert [file.path for file in found] == [names[0], names[2], names[1]]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({}, "chat_template must be text, or a list of objects with name and template"),
        ([{"name": "default"}], "chat_template must be text, or a list"),
        ([7], "chat_template must be text, or a list"),
        ([{"name": ["x"], "template": "t"}], "chat_template must be text, or a list"),
    ],
)
def test_what_is_no_template_is_refused(folder: Path, found: Any, says: str) -> None:
    told(folder, chat_template=found)
    with pytest.raises(ModelFileError, match=says):
        open_model(str(folder))


def test_a_folder_of_too_many_or_too_large_ones_is_refused(folder: Path) -> None:
    by_folder(folder, {"default": PLAIN, "tool_use": "x" * ((1 << 20) + 1)})
    with pytest.raises(ModelFileError, match=r"tool_use\.jinja: larger than 1 MiB"):
        open_model(str(folder))
    more = folder / "additional_chat_templates"
    for place in range(33):
        (more / f"t{place}.jinja").write_text("x")
    with pytest.raises(ModelFileError, match="34 templates; at most 32 are read"):
        open_model(str(folder))


def test_one_that_does_not_compile_ends_the_start(folder: Path) -> None:
    by_list(folder, {"default": PLAIN, "tool_use": "{% for %}"})
    with pytest.raises(ModelFileError, match="does not compile"):
        ChatTemplates(open_model(str(folder)))


def test_no_template(folder: Path) -> None:
    told(folder)
    with pytest.raises(InvalidRequest, match="base model") as caught:
        ChatTemplates(open_model(str(folder)))
    assert caught.value.param == "messages"


def test_blocking_calls_take_it(folder: Path) -> None:
    by_list(folder, NAMED)
    with LLM(folder, max_context=256, max_sequences=2, threads=1) as llm:

        def prompt(**more: Any) -> str:
            output = llm.chat(ASKED, SamplingParams(max_tokens=1), **more)[0]
            return llm.get_tokenizer().decode(output.prompt_token_ids)

        assert prompt() == "[user] q"
        assert prompt(tools=TOOLS) == "<tool_call> lookup </tool_call>(user) q"
        assert prompt(template="rag") == "[user] q"
        assert prompt(template="{{ messages[0].content }}") == "q"
