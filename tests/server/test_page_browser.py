"""The page in a real browser, over a real server with a tiny model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import fake_server, headrace, running
from visits import BROWSER, CHROMIUM, playwright

from tiny import talker
from tiny.kept import Kept

pytestmark = [pytest.mark.slow, BROWSER]

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["river", "canal"]}, "wide": {"type": "boolean"}},
    "required": ["kind", "wide"],
    "additionalProperties": False,
}
PROMPT = "Carry this"


@pytest.fixture(scope="module")
def in_browser() -> Iterator[Callable[..., Any]]:
    """Runs a function of a browser in a thread of its own: Playwright wants no event loop."""
    with ThreadPoolExecutor(1) as pool:
        state: dict[str, Any] = {}

        def start() -> None:
            state["run"] = playwright.sync_playwright().start()
            state["browser"] = state["run"].chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"]
            )

        def stop() -> None:
            state["browser"].close()
            state["run"].stop()

        pool.submit(start).result(120)
        try:
            yield lambda work: pool.submit(work, state["browser"]).result(500)
        finally:
            pool.submit(stop).result(120)


@pytest.fixture(scope="module")
def url(kept: Kept) -> Iterator[str]:
    model = kept(talker.make)
    # The reference kernels take milliseconds a token: the live view finds requests in work.
    with running(
        headrace("serve", str(model), "--port", "0", "--threads", "1", "--kernels", "ref")
    ) as server:
        yield server.url


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file without which no answer of `held` goes on."""
    return tmp_path / "gate"


@pytest.fixture
def held(gate: Path) -> Iterator[str]:
    """The address of a server whose answers wait in their middle for the gate."""
    with running(fake_server(gate=gate)) as server:
        yield server.url


@pytest.fixture
def page(in_browser: Callable[..., Any], url: str) -> Iterator[Callable[..., Any]]:
    """Runs a function of a fresh page that is ready; fails on any error in the page."""
    errors: list[str] = []

    def hear(said: Any) -> None:
        # A server that a busy machine held up says for a while that it is not ready.
        if said.type == "error" and not said.location["url"].endswith("/health"):
            errors.append(said.text)

    def visit(work: Callable[[Any], Any], url: str = url, script: str = "", **context: Any) -> Any:
        def inside(browser: Any) -> Any:
            opened = browser.new_context(**context)
            try:
                tab = opened.new_page()
                tab.set_default_timeout(120_000)
                tab.add_init_script(script)
                tab.on("pageerror", lambda error: errors.append(str(error)))
                tab.on("console", hear)
                tab.goto(url)
                tab.wait_for_selector("#dot.ready")
                return work(tab)
            finally:
                opened.close()

        return in_browser(inside)

    yield visit
    assert not errors


def _ask(tab: Any, text: str = PROMPT, tokens: int = 20) -> None:
    tab.fill("[name=max_completion_tokens]", str(tokens))
    tab.fill("#message", text)
    tab.keyboard.press("Enter")


def test_a_chat_is_typed_streamed_and_measured(
    page: Callable[..., Any], held: str, gate: Path
) -> None:
    def work(tab: Any) -> None:
        tab.fill("[name=system]", "Be brief.")
        with tab.expect_request("**/v1/chat/completions") as sent:
            _ask(tab)
        body = json.loads(sent.value.post_data)
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert body["max_completion_tokens"] == 20
        assert "temperature" not in body, "an empty field is left to the model's authors"
        tab.wait_for_selector(".assistant.busy .body:has-text('Hello')")
        tab.wait_for_selector(".assistant.busy .foot span")
        gate.touch()
        tab.wait_for_selector(".assistant .acts")
        assert tab.inner_text(".user .body") == PROMPT
        foot = tab.inner_text(".assistant .foot")
        for words in ("First token", "Between tokens", "tokens/s", "Tokens 20", "Prompt"):
            assert words in foot, foot
        assert "complete" in tab.inner_text("#announce")
        _ask(tab, "And this")
        tab.wait_for_selector(".turn:nth-child(4) .acts")
        tab.click("#show-code")
        curl = tab.inner_text("#snippet")
        assert "/v1/chat/completions" in curl
        assert '"And this"' in curl
        tab.click("[data-language=python]")
        code = tab.inner_text("#snippet")
        compile(code, "snippet", "exec")
        assert "max_completion_tokens=20" in code

    page(work, held)


def test_stop_ends_the_answer_and_the_work(page: Callable[..., Any], held: str) -> None:
    def work(tab: Any) -> None:
        _ask(tab, tokens=470)
        tab.wait_for_selector(".assistant .foot span")
        assert tab.inner_text("#send") == "Stop"
        assert httpx.get(f"{held}/v1/stats").json()["requests"]
        tab.keyboard.press("Escape")
        tab.wait_for_selector(".assistant .acts")
        assert "stopped" in tab.inner_text(".assistant .foot")
        assert tab.inner_text("#send") == "Send"
        end = time.monotonic() + 60
        while httpx.get(f"{held}/v1/stats").json()["requests"]:
            assert time.monotonic() < end, "the work goes on"
            time.sleep(0.1)

    page(work, held)


def test_a_schema_is_enforced(page: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        if tab.is_disabled("[name=format]"):
            pytest.skip("this engine cannot hold an answer to a form")
        tab.select_option("[name=format]", "json_schema")
        tab.fill("[name=schema]", "{")
        tab.fill("#message", PROMPT)
        tab.keyboard.press("Enter")
        tab.wait_for_selector("[name=schema][aria-invalid=true]")
        assert tab.locator(".turn").count() == 0, "nothing was sent"
        tab.fill("[name=temperature]", "0")
        tab.fill("[name=schema]", json.dumps(SCHEMA))
        tab.focus("#message")
        _ask(tab, tokens=100)
        tab.wait_for_selector(".badge")
        assert tab.inner_text(".badge") == "valid JSON"
        answer = json.loads(tab.inner_text(".assistant .body pre"))
        assert answer["kind"] in ("river", "canal")
        assert isinstance(answer["wide"], bool)

    page(work)


def test_tokens_are_coloured_and_tell_their_rivals(page: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        # A random token may be the one that ends the answer; the likeliest one never is.
        tab.fill("[name=temperature]", "0")
        tab.check("[name=logprobs]")
        _ask(tab, tokens=12)
        tab.wait_for_selector(".tokens")
        assert tab.locator(".tok").count() == 12
        tab.locator(".tok").nth(3).hover()
        tab.wait_for_selector(".pop div:nth-child(5)")
        tab.focus(".tokens")
        tab.keyboard.press("ArrowRight")
        assert tab.locator(".tok.at").count() == 1
        assert "%" in tab.inner_text("#announce")
        tab.click(".assistant .foot [aria-pressed]")
        assert tab.locator(".tokens").count() == 0

    page(work)


def test_what_a_model_writes_is_never_markup(page: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        evil = "<img src=x onerror=alert(1)> **<b>bold</b>** `<i>`"
        reply = {"choices": [{"delta": {"content": evil}, "finish_reason": "stop"}]}
        events = f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n"
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events),
        )
        _ask(tab)
        tab.wait_for_selector(".assistant .acts")
        assert tab.locator(".assistant .body img").count() == 0
        assert tab.inner_text(".assistant .body strong") == "<b>bold</b>"

    page(work)


def test_a_tool_call_waits_for_its_result(page: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": "{}"}}
        first = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
        then = {"choices": [{"delta": {"content": "Rain."}, "finish_reason": "stop"}]}
        sent: list[Any] = []

        def answer(route: Any) -> None:
            sent.append(json.loads(route.request.post_data))
            chunk = then if len(sent) > 1 else first
            body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
            route.fulfill(status=200, content_type="text/event-stream", body=body)

        tab.route("**/v1/chat/completions", answer)
        tab.click("#tools-field summary")
        tab.click("#tools-example")
        _ask(tab)
        tab.fill(".call input", "wet")
        tab.keyboard.press("Enter")
        tab.wait_for_selector("text=Rain.")
        assert sent[0]["tools"][0]["function"]["name"] == "get_weather"
        assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "tool"]
        assert sent[1]["messages"][2] == {"role": "tool", "content": "wet", "tool_call_id": "c1"}

    page(work)


def test_what_is_typed_into_a_call_outlives_every_frame(page: Callable[..., Any]) -> None:
    """The frame that the answer's last words asked for comes after the answer's end."""
    script = """
        window.frames_held = [];
        window.requestAnimationFrame = (draw) => window.frames_held.push(draw);
        window.cancelAnimationFrame = (number) => { window.frames_held[number - 1] = () => {}; };
    """

    def work(tab: Any) -> None:
        call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": "{}"}}
        chunk = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )
        _ask(tab)
        tab.wait_for_selector(".call input")
        tab.evaluate("() => { document.querySelector('.call input').value = 'wet'; }")
        assert tab.evaluate("() => frames_held.splice(0).map((draw) => draw(0)).length")
        assert tab.input_value(".call input") == "wet"

    page(work, script=script)


def test_the_live_view_moves_under_load(page: Callable[..., Any], url: str) -> None:
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            with suppress(httpx.TimeoutException):
                body = {"prompt": "x", "max_tokens": 400, "n": 2}
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    def work(tab: Any) -> None:
        tab.click("#to-live")
        big = tab.locator(".card .big").first
        tab.wait_for_selector("#requests .id")
        seen = set()
        end = time.monotonic() + 120
        while len(seen) < 3:
            assert time.monotonic() < end, seen
            seen.add(big.inner_text())
            time.sleep(0.5)
        names = [tab.locator(".card h3").nth(place).inner_text() for place in range(7)]
        assert names[:2] == ["Throughput", "Time to first token"]
        assert "highest" in tab.locator("canvas").first.get_attribute("aria-label")
        drawn = tab.locator("canvas").first.evaluate(
            "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
        )
        assert drawn
        tab.click("#pause")
        before = big.inner_text()
        time.sleep(2.5)
        assert big.inner_text() == before
        tab.click("#to-chat")
        tab.wait_for_selector("#message")

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        page(work)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_keyboard_alone_reaches_everything(page: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        assert tab.evaluate("() => document.activeElement.id") == "message"
        seen = []
        for _ in range(40):
            tab.keyboard.press("Tab")
            seen.append(
                tab.evaluate(
                    "() => document.activeElement.id || document.activeElement.name"
                    " || document.activeElement.className"
                )
            )
        # On from the message, around the page and back to it.
        order = [
            seen.index(name)
            for name in ("send", "show-code", "system", "temperature", "skip", "to-live", "message")
        ]
        assert order == sorted(order), seen
        nameless = tab.evaluate(
            """() => [...document.querySelectorAll('input,textarea,select,button,a')]
            .filter(e => !(e.labels?.length || e.textContent.trim()
              || e.getAttribute('aria-label'))).map(e => e.outerHTML)"""
        )
        assert not nameless

    page(work)


@pytest.mark.parametrize("hash_", ["#chat", "#live"])
def test_a_phone_has_no_sideways_scroll(page: Callable[..., Any], hash_: str) -> None:
    def work(tab: Any) -> None:
        tab.evaluate(f"() => {{ location.hash = '{hash_}' }}")
        tab.wait_for_selector(hash_)
        wide = tab.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= 360
        if hash_ == "#chat":
            # A click follows a touch when the browser has seen that it is no longer one.
            tab.tap("#open-settings")
            tab.wait_for_selector("[name=temperature]")
            tab.fill("[name=temperature]", "0")
            tab.tap("#close-settings")
            tab.wait_for_selector("[name=temperature]", state="hidden")
            tab.tap("#open-settings")
            tab.check("[name=logprobs]")
            tab.fill("[name=max_completion_tokens]", "8")
            tab.tap("#close-settings")
            tab.fill("#message", PROMPT)
            tab.tap("#send")
            tab.wait_for_selector(".assistant .acts")
            tab.locator(".tok").nth(2).tap()
            tab.wait_for_selector(".pop")
            tab.wait_for_timeout(200)
            assert tab.is_visible(".pop"), "a touch shows the rivals, and they stay"

    page(work, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)


def test_with_keys_the_page_asks_and_forgets(
    in_browser: Callable[..., Any], tmp_path: Path
) -> None:
    made = headrace("keys", "add", "browser", "--file", str(tmp_path / "keys.toml"))
    options = f"port=0, keys={str(tmp_path / 'keys.toml')!r}"
    secret = _made_key(made, tmp_path)
    with running(fake_server(options=options)) as server:

        def work(browser: Any) -> None:
            opened = browser.new_context()
            opened.set_default_timeout(120_000)
            tab = opened.new_page()
            tab.goto(server.url)
            tab.fill("#key [name=key]", secret)
            tab.keyboard.press("Enter")
            tab.wait_for_selector("#dot.ready")
            _ask(tab, tokens=5)
            tab.wait_for_selector(".assistant .acts")
            assert secret not in tab.evaluate("() => JSON.stringify(localStorage)")
            assert tab.evaluate("() => document.cookie") == ""
            assert tab.evaluate("() => sessionStorage.getItem('headrace.key')") == secret
            assert secret not in tab.content()
            tab.click("#show-code")
            assert secret not in tab.inner_text("#snippet")
            other = opened.new_page()
            other.goto(server.url)
            other.wait_for_selector("#key[open]")
            opened.close()

        in_browser(work)


def _made_key(command: list[str], folder: Path) -> str:
    import re
    import subprocess

    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = re.search(r"\b[A-Za-z]+[-_][A-Za-z0-9_-]{16,}", said.stdout)
    assert found, said.stdout
    return found.group()
