"""The page keeps conversations: over a reload, as branches, as files; and refuses nothing in
silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import fake_server, running
from visits import BROWSER, visits

pytestmark = [pytest.mark.slow, BROWSER]


USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file without which no answer has more than five tokens."""
    return tmp_path_factory.mktemp("page") / "gate"


@pytest.fixture(scope="module")
def url(gate: Path) -> Iterator[str]:
    with running(fake_server(gate=gate)) as server:
        yield server.url


@pytest.fixture
def visit(url: str) -> Iterator[Callable[..., Any]]:
    yield from visits(url)


def _ask(tab: Any, text: str) -> None:
    before = tab.locator(".turn").count()
    tab.fill("#message", text)
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f".turn:nth-child({before + 2}):not(.busy) .acts:not(.waits)")


def test_a_reload_loses_nothing(visit: Callable[..., Any], url: str) -> None:
    def work(tab: Any) -> None:
        tab.fill("[name=max_completion_tokens]", "5")
        tab.fill("[name=system]", "Be brief.")
        _ask(tab, "One")
        tab.reload()
        tab.wait_for_selector("#dot.ready")
        assert tab.inner_text(".user .body") == "One"
        assert "Hello" in tab.inner_text(".assistant .body")
        assert tab.input_value("[name=system]") == "Be brief."
        with tab.expect_request("**/v1/chat/completions") as sent:
            _ask(tab, "Two")
        body = json.loads(sent.value.post_data)
        said = [message["content"] for message in body["messages"]]
        assert said == ["Be brief.", "One", "Hello", "Two"]
        assert body["max_completion_tokens"] == 5
        # Nothing of it is the server's, and a new chat is not the old one.
        tab.click("#clear")
        assert tab.locator(".turn").count() == 0
        tab.reload()
        tab.wait_for_selector("#dot.ready")
        assert tab.locator(".turn").count() == 0
        tab.click("#show-talks")
        tab.click("#talks .talk-title")
        assert tab.locator(".turn").count() == 4

    visit(work)


def test_an_edit_is_a_branch_and_both_are_kept(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        tab.fill("[name=max_completion_tokens]", "5")
        _ask(tab, "One")
        _ask(tab, "Two")
        tab.click(".turn:nth-child(3) button:has-text('Edit')")
        assert tab.input_value("#message") == "Two"
        assert tab.locator(".turn").count() == 2
        _ask(tab, "Another")
        tab.click("#show-talks")
        assert tab.locator("#talks li").count() == 2
        with tab.expect_download() as found:
            tab.click("#talks li:nth-child(1) >> text=Markdown")
        text = Path(found.value.path()).read_text()
        assert "## You\n\nAnother\n" in text
        assert "Two" not in text
        with tab.expect_download() as found:
            tab.click("#talks li:nth-child(2) >> text=JSON")
        saved = json.loads(Path(found.value.path()).read_text())
        assert [message["content"] for message in saved["messages"]] == [
            "One",
            "Hello",
            "Two",
            "Hello",
        ]
        tab.click("#talks li:nth-child(1) >> text=Delete")
        tab.click("#talks li:nth-child(1) >> text=Delete")
        assert tab.is_visible("#no-talks")
        tab.click("#shelf-close")
        assert tab.locator(".turn").count() == 0

    visit(work)


def test_kept_text_is_never_markup_and_damage_is_left_out(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        evil = "<img src=x onerror=document.title='evil'>"
        talk = {
            "id": "e",
            "title": evil,
            "changed": 1,
            "messages": [{"role": "user", "content": evil}, {"role": "assistant", "content": evil}],
        }
        for name, value in {
            "headrace.talk.e": json.dumps(talk),
            "headrace.talk.broken": "{",
            "headrace.open": "e",
            "headrace.talk.odd": "[]",
            "headrace.settings": '{"nothing": 1, "temperature": "x"}',
        }.items():
            tab.evaluate("([name, value]) => localStorage.setItem(name, value)", [name, value])
        tab.reload()
        tab.wait_for_selector("#dot.ready")
        assert tab.inner_text(".user .body") == evil
        tab.click("#show-talks")
        assert tab.locator("#talks li").count() == 1
        assert tab.title() == "Headrace"
        assert tab.locator("main img").count() == 0

    visit(work)


def test_the_number_kept_is_bounded(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        for at in range(150):
            talk = {"id": f"t{at}", "title": f"t{at}", "changed": at, "messages": [USER]}
            kept = [f"headrace.talk.t{at}", json.dumps(talk)]
            tab.evaluate("([name, value]) => localStorage.setItem(name, value)", kept)
        tab.fill("[name=max_completion_tokens]", "5")
        _ask(tab, "Newest")
        tab.click("#show-talks")
        assert tab.locator("#talks li").count() == 100
        assert "Newest" in tab.inner_text("#talks li:first-child")
        assert "t51" in tab.inner_text("#talks li:last-child")

    visit(work)


def test_on_a_phone_a_wrong_setting_is_shown(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        tab.click("#open-settings")
        tab.fill("[name=temperature]", "7")
        tab.click("#close-settings")
        tab.fill("#message", "hi")
        tab.click("#send")
        assert tab.is_visible("[name=temperature]")
        assert tab.evaluate("document.activeElement.name") == "temperature"
        assert tab.input_value("#message") == "hi"
        tab.fill("[name=temperature]", "1")
        tab.fill("[name=max_completion_tokens]", "5")
        tab.click("#close-settings")
        tab.click("#send")
        tab.wait_for_selector(".assistant:not(.busy) .acts")
        for button in ("#show-talks", "#clear"):
            assert tab.is_visible(button)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 375

    visit(work, viewport={"width": 375, "height": 667})


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_above_an_answer_moves(visit: Callable[..., Any], gate: Path, width: int) -> None:
    heights = "[...document.querySelectorAll('.turn')].slice(0, 4).map((turn) => turn.offsetHeight)"

    def work(tab: Any) -> None:
        if width < 800:
            tab.click("#open-settings")
        tab.fill("[name=max_completion_tokens]", "30")
        if width < 800:
            tab.click("#close-settings")
        gate.touch()
        _ask(tab, "One")
        _ask(tab, "Two")
        gate.unlink()
        before = tab.evaluate(heights)
        tab.fill("#message", "Three")
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".turn.busy .foot span")
        assert tab.evaluate(heights) == before
        gate.touch()
        tab.wait_for_selector(".turn:nth-child(6):not(.busy) .acts:not(.waits)")
        assert tab.evaluate(heights) == before

    visit(work, viewport={"width": width, "height": 700})
