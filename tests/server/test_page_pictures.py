"""Pictures on the page, in a real browser with a model that sees: each way in, and refusals."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image
from processes import headrace, running
from visits import BROWSER, visits

from tiny import filmed
from tiny.seeing_chat import make

pytestmark = [pytest.mark.slow, BROWSER]
CHECK = (Path(__file__).parent / "page_access.js").read_text()
GIVE = """async ([how, files]) => {
  const carried = new DataTransfer();
  for (const [name, type, url] of files) {
    const bytes = await (await fetch(url)).arrayBuffer();
    carried.items.add(new File([bytes], name, { type }));
  }
  const about = { bubbles: true, cancelable: true };
  if (how === "paste") {
    const event = new ClipboardEvent("paste", { ...about, clipboardData: carried });
    document.getElementById("message").dispatchEvent(event);
    return;
  }
  for (const kind of ["dragenter", "dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { ...about, dataTransfer: carried }));
  }
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("seeing_page")
    make(folder)
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--max-context", "1024"]
    with running(headrace(*words, "--kv-dtype", "float32", "--served-name", "eye")) as server:
        yield server.url


@pytest.fixture
def visit(url: str) -> Iterator[Callable[..., Any]]:
    yield from visits(url)


def png(width: int, height: int, *, noise: bool = False) -> bytes:
    draw = np.random.default_rng(width)
    step = 1 if noise else 20
    coarse = draw.integers(0, 256, (-(-height // step), -(-width // step), 3), dtype=np.uint8)
    room = io.BytesIO()
    Image.fromarray(coarse.repeat(step, 0).repeat(step, 1)[:height, :width]).save(room, "PNG")
    return room.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _send(data: bytes, route: Any) -> None:
    route.fulfill(body=data)


def give(tab: Any, how: str, *files: tuple[str, str, bytes]) -> None:
    """Drop or paste files; the page's policy lets it fetch none, so they come by a route."""
    given = []
    for place, (name, kind, data) in enumerate(files):
        tab.route(f"**/given/{place}", partial(_send, data))
        given.append([name, kind, f"given/{place}"])
    tab.evaluate(GIVE, [how, given])


def ask(tab: Any, text: str) -> Any:
    """Send a message; return the content of the last message that is sent, and wait for the
    answer."""
    before = tab.locator(".turn").count()
    if tab.is_visible("#open-settings"):
        tab.click("#open-settings")
    tab.fill("[name=max_completion_tokens]", "5")
    if tab.is_visible("#close-settings"):
        tab.click("#close-settings")
    tab.fill("#message", text)
    with tab.expect_request("**/v1/chat/completions") as sent:
        tab.keyboard.press("Enter")
    tab.wait_for_selector(f".turn:nth-child({before + 2}):not(.busy) .acts:not(.waits)")
    assert tab.locator(".foot .failed").count() == 0
    return json.loads(sent.value.post_data)["messages"][-1]["content"]


SHOWN = "(image) => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"


@pytest.mark.parametrize("how", ["drop", "paste", "choose"])
def test_a_picture_goes_with_the_message(
    visit: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    data = png(140, 80)

    def work(tab: Any) -> None:
        if how == "choose":
            (tmp_path / "cat.png").write_bytes(data)
            tab.set_input_files("#chooser", tmp_path / "cat.png")
        else:
            give(tab, how, ("cat.png", "image/png", data))
        tab.wait_for_selector("#files li img[alt='cat.png']")
        assert tab.inner_text("#files li span") == "cat.png"
        content = ask(tab, "What is it?")
        assert content == [
            {"type": "image_url", "image_url": {"url": url_of(data)}},
            {"type": "text", "text": "What is it?"},
        ]
        assert tab.is_hidden("#files")
        assert tab.eval_on_selector(".user .thumb", SHOWN) == [140, 80]
        assert tab.locator(".user .thumb").bounding_box()["width"] <= 256
        tab.reload()
        tab.wait_for_selector("#dot.ready")
        assert tab.eval_on_selector(".user .thumb", SHOWN) == [140, 80]
        tab.click("#show-code")
        tab.click("[data-language=markdown]")
        assert "[picture]\n\nWhat is it?" in tab.inner_text("#snippet")
        tab.keyboard.press("Escape")
        tab.click("button:has-text('Edit')")
        assert tab.locator("#files .thumb").count() == 1
        assert tab.input_value("#message") == "What is it?"
        tab.click("#show-models")
        assert "takes pictures" in tab.inner_text("#served li")

    visit(work)


def test_a_video_goes_with_the_message(visit: Callable[..., Any]) -> None:
    pytest.importorskip("av", reason="needs the extra av")
    data = filmed.file_of(filmed.drawn(30, 48, 32))

    def work(tab: Any) -> None:
        give(tab, "drop", ("a.mp4", "video/mp4", data))
        tab.wait_for_selector("#files li")
        assert tab.inner_text("#files li span") == "a.mp4"
        content = ask(tab, "What is it?")
        assert content == [
            {"type": "video_url", "video_url": {"url": url_of(data, "video/mp4")}},
            {"type": "text", "text": "What is it?"},
        ]
        assert "Video" in tab.inner_text(".user")

    visit(work)


def test_a_large_picture_is_made_smaller_and_says_so(visit: Callable[..., Any]) -> None:
    data = png(2600, 700, noise=True)
    assert len(data) > 5 << 20

    def work(tab: Any) -> None:
        give(tab, "drop", ("wide.png", "image/png", data))
        tab.wait_for_selector("#files li")
        assert tab.inner_text("#files li span") == "wide.png (made smaller: 2048 × 551)"
        content = ask(tab, "What?")
        head, _, sent = content[0]["image_url"]["url"].partition(",")
        assert head == "data:image/jpeg;base64"
        sent = base64.b64decode(sent)
        assert len(sent) <= 1 << 20
        assert Image.open(io.BytesIO(sent)).size == (2048, 551)

    visit(work)


def test_what_is_no_picture_is_named(visit: Callable[..., Any]) -> None:
    def work(tab: Any) -> None:
        for name, kind, data, reason in (
            ("cat.png", "image/png", b"no picture", "is no picture that this browser reads"),
            ("cut.jpg", "image/jpeg", b"\xff\xd8\xff\xe0", "is no picture"),
            ("big.png", "image/png", bytes((20 << 20) + 1), "at most 21.0 MB"),
        ):
            give(tab, "drop", (name, kind, data))
            tab.wait_for_function(
                "(words) => words.every((word) => document.getElementById('file-problem')"
                ".textContent.includes(word))",
                arg=[name, reason],
            )
            assert tab.is_hidden("#files")

    visit(work)


@pytest.mark.parametrize("size", [(360, 640), (1280, 800)])
def test_pictures_fit_a_phone(visit: Callable[..., Any], size: tuple[int, int]) -> None:
    def work(tab: Any) -> None:
        for name, shape in (("wide.png", (900, 60)), ("high.png", (60, 900))):
            give(tab, "drop", (name, "image/png", png(*shape)))
            tab.wait_for_selector(f"#files li img[alt='{name}']")
        assert tab.evaluate(CHECK) == []
        ask(tab, "Which is wide?")
        assert tab.evaluate(CHECK) == []
        for box in tab.locator(".user .thumb").all():
            found = box.bounding_box()
            assert found["x"] >= 0
            assert found["x"] + found["width"] <= size[0]
            assert found["height"] <= 200
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")

    visit(work, viewport={"width": size[0], "height": size[1]})


TABLE = "| device | tokens/s | USD |\n|:--|--:|--:|\n| a long name " + "of a device " * 3
TABLE += "| 12,800 | 2.20 |\n\n" + "One more line.\n\n" * 20
LINES = """() => [...document.querySelectorAll(".said td.n")].map((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return range.getClientRects().length;
})"""
AWAY = "() => { const s = document.getElementById('scroller'); "
AWAY += "return s.scrollHeight - s.scrollTop - s.clientHeight; }"


def test_a_phone_follows_an_answer_behind_a_picture_and_breaks_no_number(
    visit: Callable[..., Any],
) -> None:
    chunks = [{"content": TABLE[at : at + 40]} for at in range(0, len(TABLE), 40)]
    events = [{"choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in chunks]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"

    def work(tab: Any) -> None:
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        give(tab, "drop", ("cat.png", "image/png", png(400, 300)))
        tab.wait_for_selector("#files li img")
        ask(tab, "What?")
        assert tab.evaluate(LINES) == [1, 1]
        tab.wait_for_function(f"({AWAY})() < 2")
        tab.evaluate("document.getElementById('scroller').scrollTop -= 300")
        ask(tab, "And now?")  # A message of one's own is seen, whatever was read.
        tab.wait_for_function(f"({AWAY})() < 2")

    visit(work, viewport={"width": 390, "height": 600})
