"""The page for everyone: names, roles, headings, contrast and sizes, on desktop and phone, in light
and dark, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Running, fake_server, running
from visits import BROWSER, visit

pytestmark = [pytest.mark.slow, BROWSER]

ANSWER = "A list:\n\n- one `two` **three**\n\n```python\ncarry = 1\n```\n"
ENGINE = f"""engine = FakeEngine(answer={ANSWER!r})
    engine.once = True
    from headrace.engine.loop.adapters import AdapterBook
    engine.adapters = AdapterBook()
    engine.features = frozenset(["grammar"])
    for name in ("river", "lake"):
        engine.adapters.add(engine.adapters.new(name, "/adapters/" + name, "fake"))
    return engine"""

CHECK = (Path(__file__).parent / "page_access.js").read_text()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    command = fake_server()
    command[-1] = command[-1].replace("return FakeEngine(delay=0.0)", ENGINE)
    with running(command) as server:
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844), (360, 640)])
def test_names_contrast_and_sizes(server: Running, scheme: str, size: tuple[int, int]) -> None:
    phone = size[0] < 500

    def work(tab: Any) -> dict[str, list[str]]:
        found = {"empty": tab.evaluate(CHECK)}
        tab.fill("#message", "Carry " * 30)
        tab.click("#send")
        tab.wait_for_selector(".assistant .acts")
        found["answer"] = tab.evaluate(CHECK)
        if phone:
            tab.click("#open-settings")
        tab.select_option("[name=format]", "json_schema")
        tab.click("#tools-field summary")
        tab.fill("[name=tools]", "{")
        tab.press("[name=tools]", "Tab")
        found["settings"] = tab.evaluate(CHECK)
        if phone:
            tab.click("#close-settings")
        tab.fill("[name=schema]", "{}") if not phone else None
        tab.evaluate("document.querySelector('[name=tools]').value = ''")
        tab.click("#show-code")
        found["code"] = tab.evaluate(CHECK)
        tab.keyboard.press("Escape")
        tab.evaluate("location.hash = '#live'")
        tab.wait_for_selector("#cards canvas")
        found["live"] = tab.evaluate(CHECK)
        return found

    viewport = {"width": size[0], "height": size[1]}
    found = visit(server.url, work, viewport=viewport, color_scheme=scheme, has_touch=phone)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_the_model_is_chosen_by_keyboard(server: Running) -> None:
    def work(tab: Any) -> None:
        options = tab.eval_on_selector_all("#models option", "all => all.map((o) => o.textContent)")
        assert options == ["fake", "lake (adapter)", "river (adapter)"]
        assert not tab.is_visible("#model")
        assert tab.get_attribute("#models", "aria-label") == "Model"
        tab.focus("#models")
        tab.keyboard.press("ArrowDown")
        assert "lake answers" in tab.inner_text("#announce")
        tab.fill("#message", "hello")
        with tab.expect_request("**/v1/chat/completions") as sent:
            tab.press("#message", "Enter")
        assert sent.value.post_data_json["model"] == "lake"
        tab.wait_for_selector(".assistant .acts")
        assert tab.inner_text(".assistant h3") == "lake"
        tab.click("#show-code")
        assert '"lake"' in tab.inner_text("#snippet")

    visit(server.url, work)
