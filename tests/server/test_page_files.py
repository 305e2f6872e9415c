"""Files, colours, models and export of the page, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import fake_server, running
from visits import BROWSER, visits

pytestmark = [pytest.mark.slow, BROWSER]
DROP = """([files]) => {
  const carried = new DataTransfer();
  for (const [name, type, text] of files) carried.items.add(new File([text], name, { type }));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const how = { dataTransfer: carried, bubbles: true, cancelable: true };
    document.body.dispatchEvent(new DragEvent(kind, how));
  }
}"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_server()) as server:
        yield server.url


@pytest.fixture
def visit(url: str) -> Iterator[Callable[..., Any]]:
    yield from visits(url)


def _ask(tab: Any, text: str) -> Any:
    before = tab.locator(".turn").count()
    tab.fill("[name=max_completion_tokens]", "5")
    tab.fill("#message", text)
    with tab.expect_request("**/v1/chat/completions") as sent:
        tab.keyboard.press("Enter")
    tab.wait_for_selector(f".turn:nth-child({before + 2}):not(.busy) .acts:not(.waits)")
    return json.loads(sent.value.post_data)


def _send(body: str, route: Any) -> None:
    route.fulfill(content_type="text/event-stream", body=body)


def test_a_dropped_text_goes_with_the_message(visit: Callable[..., Any]) -> None:
    code = ["a.py", "text/x-python", "x = 1\n"]

    def work(tab: Any) -> None:
        tab.evaluate(DROP, [[code, ["b.md", "", "```\n<b>\n```\n"]]])
        tab.wait_for_selector("#files li:nth-child(2)")
        tab.click("#files li:nth-child(1) button")
        assert tab.inner_text("#files li span") == "b.md"
        tab.evaluate(DROP, [[code]])
        tab.wait_for_selector("#files li:nth-child(2)")
        content = _ask(tab, "Explain")["messages"][0]["content"]
        assert content == [
            {"type": "text", "text": "File: b.md\n\n````md\n```\n<b>\n```\n````"},
            {"type": "text", "text": "File: a.py\n\n```py\nx = 1\n```"},
            {"type": "text", "text": "Explain"},
        ]
        assert tab.is_hidden("#files")
        assert tab.locator(".user summary").all_inner_texts() == ["b.md · 11 B", "a.py · 5 B"]
        # It is there after a reload, in an edit, and in what is saved.
        tab.reload()
        tab.wait_for_selector("#dot.ready")
        assert tab.locator(".user summary").count() == 2
        tab.click("#show-code")
        tab.click("[data-language=markdown]")
        assert "````md" in tab.inner_text("#snippet")
        tab.click("[data-language=json]")
        with tab.expect_download() as found:
            tab.click("#download")
        assert found.value.suggested_filename == "Explain.json"
        said = json.loads(Path(found.value.path()).read_text())["messages"]
        assert said[0]["content"].endswith("x = 1\n```\n\nExplain")
        assert said[1]["content"] == "Hello"
        tab.click("[data-language=curl]")
        assert tab.is_hidden("#download")
        tab.keyboard.press("Escape")
        tab.click("button:has-text('Edit')")
        assert tab.locator("#files li").count() == 2
        assert tab.input_value("#message") == "Explain"

    visit(work)


def test_a_file_that_cannot_go_is_named_with_its_reason(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        for name, kind, text, reason in (
            ("cat.png", "image/png", "x", "takes no pictures"),
            ("talk.wav", "audio/wav", "RIFF", "does not hear"),
            ("core", "", "a\0b", "no text"),
            ("big.txt", "text/plain", "x" * (2**20 + 1), "at most"),
        ):
            tab.evaluate(DROP, [[[name, kind, text]]])
            tab.wait_for_function(
                "(words) => words.every((word) => document.getElementById('file-problem')"
                ".textContent.includes(word))",
                arg=[name, reason],
            )
            assert tab.is_hidden("#files")

    visit(work)


def test_a_sound_goes_to_a_model_that_hears(visit: Callable[..., Any], url: str) -> None:
    def work(tab: Any) -> None:
        listed = {"id": "fake", "max_model_len": 512, "input_modalities": ["text", "audio"]}
        tab.route("**/v1/models", lambda route: route.fulfill(json={"data": [listed]}))
        tab.reload()
        tab.wait_for_selector("#dot.ready")
        tab.evaluate(DROP, [[["talk.wav", "audio/wav", "RIFF"]]])
        tab.wait_for_selector("#files li")
        tab.fill("#message", "What?")
        tab.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={}))
        with tab.expect_request("**/v1/chat/completions") as sent:
            tab.keyboard.press("Enter")
        content = json.loads(sent.value.post_data)["messages"][0]["content"]
        assert content[0] == {
            "type": "input_audio",
            "input_audio": {"data": "UklGRg==", "format": "wav"},
        }

    visit(work)


def test_colours_are_chosen_and_kept(visit: Callable[..., Any]) -> None:
    paper = "() => getComputedStyle(document.body).backgroundColor"

    def work(tab: Any) -> None:
        light = tab.evaluate(paper)
        tab.click("#theme")
        assert tab.get_attribute("#theme", "aria-label") == "Colours: light"
        tab.click("#theme")
        dark = tab.evaluate(paper)
        assert dark != light
        tab.reload()
        assert tab.evaluate(paper) == dark
        tab.emulate_media(color_scheme="dark")
        assert tab.evaluate(paper) == dark
        tab.click("#theme")
        assert tab.get_attribute("#theme", "aria-label") == "Colours: system"
        assert tab.evaluate(paper) == dark, "as the system has it"

    visit(work, color_scheme="light")


def test_the_models_are_listed_with_what_they_take(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        tab.click("#show-models")
        assert tab.inner_text("#served li") == "fake\n512 tokens of context"
        tab.wait_for_selector("#licence:has-text('Licence')")
        tab.keyboard.press("Escape")
        assert tab.get_attribute("#to-docs", "href") == "docs"

    visit(work)


def test_each_model_beside_others_is_asked_by_what_it_takes(visit: Callable[..., Any]) -> None:
    """Speech to text is chosen as a chat is, and left again; a voice answers no message."""
    writer = {"id": "fake", "max_model_len": 512, "input_modalities": ["text"]}
    ears = {"id": "ears", "max_model_len": 448, "input_modalities": ["audio"]}
    voice = {"id": "voice", "max_model_len": 0, "input_modalities": ["text"], "task": "speech"}
    ears |= {"task": "transcription", "languages": ["de", "en"]}

    def work(tab: Any) -> None:
        tab.route("**/v1/models", partial(_send, json.dumps({"data": [ears, voice, writer]})))
        tab.reload()
        tab.wait_for_selector("#models:not([hidden])")
        options = "all => all.map((one) => one.value)"
        assert tab.eval_on_selector_all("#models option", options) == ["fake", "ears"]
        assert tab.is_visible("#send")
        assert tab.is_hidden("#hear")
        tab.select_option("#models", "ears")
        assert tab.is_hidden("#send")
        assert tab.is_visible("#hear")
        assert tab.is_visible("#to-live")
        assert tab.locator("#language option").count() == 3
        tab.route("**/v1/audio/transcriptions", partial(_send, "data: [DONE]\n\n"))
        with tab.expect_request("**/v1/audio/transcriptions") as sent:
            sound = {"name": "a.wav", "mimeType": "audio/wav", "buffer": b"RIFF"}
            tab.set_input_files("#chooser", sound)
        assert b'name="model"\r\n\r\nears' in sent.value.post_data_buffer
        tab.fill("#message", "words")
        tab.press("#message", "Enter")
        tab.click("#show-models")
        rows = tab.locator("#served li").all_inner_texts()
        assert rows[1] == "voice\ntext to speech · asked through the API"
        tab.click("#served button:has-text('fake')")
        assert tab.is_visible("#send")
        assert tab.is_hidden("#hear")
        assert tab.is_hidden("#speak")
        assert tab.locator("#turns li").count() == 0
        assert tab.get_attribute("#message", "placeholder") == "Message"

    visit(work)


def test_a_busy_machine_is_said(visit: Callable[..., Any]) -> None:
    """Only the share is the test's own: what others use here and now is not the test's to say."""

    def point(others: float) -> dict[str, Any]:
        names = (
            "kv_usage output_tokens_per_second prompt_tokens_per_second batch step_seconds busy"
            " roofline prefix_lookups prefix_hits running waiting"
        )
        latency = {"p50": None, "p90": None, "p99": None}
        more = {"others": others, "time_to_first_token": latency, "inter_token_latency": latency}
        return dict.fromkeys(names.split(), 0) | more

    def work(tab: Any) -> None:
        server = {"decisions": [], "uptime": 60, "version": "1"}
        for others, shown in (([0.9, 0.3], True), ([0.02, 0.05], False)):
            snapshot = {"points": list(map(point, others)), "requests": [], "server": server}
            body = f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n"
            tab.unroute_all()
            tab.route("**/v1/stats/stream", partial(_send, body))
            tab.goto(tab.url.partition("#")[0] + "#chat")
            tab.reload()
            tab.click("#to-live")
            tab.wait_for_selector("#uptime:has-text('up')")
            assert tab.is_visible("#busy") == shown
            if shown:
                assert "other programs use 60 % of the processors" in tab.inner_text("#busy")

    visit(work)
