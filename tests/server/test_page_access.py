"""The page for everyone: names, roles, headings, contrast and sizes, on desktop and phone, in light
and dark, in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from processes import Running, fake_server, running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

ANSWER = "A list:\n\n- one `two` **three**\n\n```python\ncarry = 1\n```\n"
ENGINE = f"""engine = FakeEngine(answer={ANSWER!r})
    engine.once = True
    from headrace.engine.adapters import AdapterBook
    engine.adapters = AdapterBook()
    engine.features = frozenset(["grammar"])
    for name in ("river", "lake"):
        engine.adapters.add(engine.adapters.new(name, "/adapters/" + name, "fake"))
    return engine"""

CHECK = r"""
() => {
  const wrong = [];
  const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) &&
    !e.closest(".unseen, .skip, [inert]");
  const about = (e) => `${e.tagName.toLowerCase()}${e.id ? "#" + e.id : ""}.${e.className} ` +
    `"${(e.textContent || "").trim().slice(0, 30)}"`;
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const ground = (e) => {
    if (!e) return rgba("Canvas");
    const own = rgba(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own : [...over(own, ground(e.parentElement)), 1];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const contrast = (e, color, opacity = 1) => {
    const behind = ground(e);
    const ink = rgba(color);
    ink[3] *= opacity;
    const [a, b] = [light(over(ink, behind)), light(behind)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  for (const e of document.querySelectorAll("body *")) {
    if (!seen(e)) continue;
    const style = getComputedStyle(e);
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (text && !e.closest("option, :disabled")) {
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      const found = contrast(e, style.color);
      if (found < (large ? 3 : 4.5)) wrong.push(`contrast ${found.toFixed(2)}: ${about(e)}`);
    }
    if (e.placeholder) {
      const placeholder = getComputedStyle(e, "::placeholder");
      const found = contrast(e, placeholder.color, Number(placeholder.opacity));
      if (found < 4.5) wrong.push(`contrast of the placeholder ${found.toFixed(2)}: ${about(e)}`);
    }
    if (e.matches("input, select, textarea")) {
      if (!e.labels?.length && !e.ariaLabel && !e.getAttribute("aria-labelledby")) {
        wrong.push(`no label: ${about(e)}`);
      }
    }
    if (e.matches("button, a[href], summary, input, select, textarea, [tabindex='0']")) {
      const { width, height } = e.getBoundingClientRect();
      const labelled = e.labels?.[0]?.getBoundingClientRect();
      const inText = e.matches("p a, li a");
      if (Math.max(width, labelled?.width ?? 0) < 24 || Math.max(height, labelled?.height ?? 0) < 24) {
        if (!inText) wrong.push(`small target ${width.toFixed(0)}x${height.toFixed(0)}: ${about(e)}`);
      }
      if (e.matches("button, a[href], summary") && !e.textContent.trim() && !e.ariaLabel) {
        wrong.push(`no name: ${about(e)}`);
      }
    }
    if (e.matches("canvas, svg, img") && !e.closest("[aria-hidden=true]") &&
        !(e.ariaLabel || e.alt || e.getAttribute("role") === "img" && e.ariaLabel)) {
      wrong.push(`a picture without words: ${about(e)}`);
    }
    for (const name of ["aria-labelledby", "aria-describedby", "aria-controls"]) {
      for (const id of (e.getAttribute(name) ?? "").split(" ").filter(Boolean)) {
        if (!document.getElementById(id)) wrong.push(`${name} names nothing: ${about(e)}`);
      }
    }
    if (!e.closest(".scroll, pre") && e.scrollWidth > innerWidth + 1 && style.overflowX === "visible") wrong.push(`too wide: ${about(e)}`);
  }
  let level = 0;
  for (const e of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!e.checkVisibility()) continue;
    const here = Number(e.tagName[1]);
    if (level && here > level + 1) wrong.push(`a heading of level ${here} after ${level}: ${about(e)}`);
    level = here;
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
  if ([...document.querySelectorAll("main")].filter((e) => e.checkVisibility()).length !== 1) {
    wrong.push("not exactly one main");
  }
  return wrong;
}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    command = fake_server()
    command[-1] = command[-1].replace("return FakeEngine(delay=0.0)", ENGINE)
    with running(command) as server:
        yield server


def visit(server: Running, work: Any, **context: Any) -> Any:
    """The result of `work(tab)`, in a thread of its own: Playwright wants no event loop."""

    def inside() -> Any:
        with playwright.sync_playwright() as run:
            browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab = browser.new_context(**context).new_page()
            tab.set_default_timeout(60_000)
            tab.goto(server.url)
            tab.wait_for_selector("#dot.ready")
            try:
                return work(tab)
            finally:
                browser.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inside).result(180)


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
    found = visit(server, work, viewport=viewport, color_scheme=scheme, has_touch=phone)
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

    visit(server, work)
