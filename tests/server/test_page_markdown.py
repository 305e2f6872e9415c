"""Markdown and formulas of an answer: the nodes they become, whatever pieces they come in; hostile
and huge texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from processes import fake_server, running
from visits import BROWSER, CHROMIUM, playwright

pytestmark = [pytest.mark.slow, BROWSER]

DRAW = """([text, size]) => {
  const root = document.createElement("div");
  const markdown = new Markdown(root);
  for (let at = 0; size && at < text.length; at += size) markdown.write(text.slice(at, at + size));
  markdown.write(size ? "" : text, true);
  root.normalize();
  return root.innerHTML;
}"""
WORK = """([text, size]) => {
  const count = { made: 0, put: 0, characters: 0 };
  const { createElement: make, createElementNS: own } = document;
  const { appendData: append } = CharacterData.prototype;
  const put = Element.prototype.append;
  document.createElement = function (...all) { count.made++; return make.apply(this, all); };
  document.createElementNS = function (...all) { count.made++; return own.apply(this, all); };
  CharacterData.prototype.appendData = function (data) {
    count.characters += data.length;
    return append.call(this, data);
  };
  Element.prototype.append = function (...nodes) {
    count.put += nodes.length;
    return put.apply(this, nodes);
  };
  const root = make.call(document, "div");
  const markdown = new Markdown(root);
  for (let at = 0; at < text.length; at += size) markdown.write(text.slice(at, at + size));
  markdown.write("", true);
  delete document.createElement;
  delete document.createElementNS;
  CharacterData.prototype.appendData = append;
  Element.prototype.append = put;
  return { ...count, length: root.textContent.length };
}"""
ALLOWED = {
    "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H4", "HR", "LI", "OL", "P",
    "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL",
    "math", "mfrac", "mi", "mn", "mo", "mover", "mphantom", "mroot", "mrow", "mspace", "msqrt",
    "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover",
}  # fmt: skip
ATTRIBUTES = {
    "accent", "alttext", "aria-label", "class", "colspan", "display", "displaystyle", "fence",
    "hidden", "href", "linethickness", "lspace", "mathvariant", "rel", "role", "rspace", "scope",
    "start", "stretchy", "tabindex", "target", "title", "type", "width",
}  # fmt: skip
FOUND = """(html) => {
  const root = document.createElement("template");
  root.innerHTML = html;
  const all = [...root.content.querySelectorAll("*")];
  return {
    tags: [...new Set(all.map((e) => e.tagName))],
    attributes: [...new Set(all.flatMap((e) => e.getAttributeNames()))],
    links: all.filter((e) => e.tagName === "A").map((e) => [e.protocol, e.rel, e.target]),
  };
}"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Callable[[str, Any], Any]]:
    """Runs a function of JavaScript in the page, in whose window `Markdown` is."""
    with running(fake_server()) as server, ThreadPoolExecutor(1) as pool:
        state: dict[str, Any] = {}

        def start() -> None:
            state["run"] = playwright.sync_playwright().start()
            browser = state["run"].chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = state["page"] = browser.new_page()
            page.set_default_timeout(120_000)
            page.goto(server.url)
            page.evaluate(
                """async () => {
                  const base = document.querySelector("script[type=module]").src;
                  window.Markdown = (await import(base.replace("main.js", "markdown.js"))).Markdown;
                }"""
            )

        pool.submit(start).result(120)
        try:
            yield lambda code, value: pool.submit(state["page"].evaluate, code, value).result(300)
        finally:
            pool.submit(lambda: state["run"].stop()).result(120)


CASES = {
    "# A `b` #": "<h4>A <code>b</code></h4>",
    "### C#": '<h4 class="minor">C#</h4>',
    "a\n===\nb\n---": "<h4>a</h4><h4>b</h4>",
    "one\ntwo": "<p><span>one<br>\ntwo</span></p>",
    "*a* **b** ***c*** ~~d~~ e_f_g 3 * 4 * 5": "<p><span><em>a</em> <strong>b</strong> "
    "<em><strong>c</strong></em> <del>d</del> e_f_g 3 * 4 * 5</span></p>",
    "**a *b* c** `` x`y ``": "<p><span><strong>a <em>b</em> c</strong> <code>x`y</code></span></p>",
    r"\*a\* &lt;b&gt; &#65;": "<p><span>*a* &lt;b&gt; A</span></p>",
    "<b>a</b> <br> c": "<p><span>&lt;b&gt;a&lt;/b&gt; <br> c</span></p>",
    "- a\n  - b\n- c": "<ul><li><p><span>a</span></p><ul><li><p><span>b</span></p></li></ul></li>"
    "<li><p><span>c</span></p></li></ul>",
    "3. a\n\n   b\n4. c": '<ol start="3"><li><p><span>a</span></p><p><span>b</span></p></li>'
    "<li><p><span>c</span></p></li></ol>",
    "> a\n> > b\n\nc": "<blockquote><p><span>a</span></p><blockquote><p><span>b</span></p>"
    "</blockquote></blockquote><p><span>c</span></p>",
    "***": "<hr>",
    "$5 and $10": "<p><span>$5 and $10</span></p>",
    "$x$ costs $5": '<p><span><math display="inline" alttext="x"><mrow><mi>x</mi></mrow></math>'
    " costs $5</span></p>",
    r"\(\frac{1}{x_2}\)": r'<p><span><math display="inline" alttext="\frac{1}{x_2}"><mrow><mfrac>'
    "<mn>1</mn><msub><mi>x</mi><mn>2</mn></msub></mfrac></mrow></math></span></p>",
    r"$\nonsense{x}$ $}{$": r"<p><span><code>\nonsense{x}</code> <code>}{</code></span></p>",
}


@pytest.mark.parametrize("text", CASES)
def test_markdown_becomes_nodes(tab: Callable[[str, Any], Any], text: str) -> None:
    for size in (0, 1, 3):
        assert tab(DRAW, [text, size]) == CASES[text]


def test_code_keeps_every_character(tab: Callable[[str, Any], Any]) -> None:
    lines = [f"  line {number} *not* <em>" for number in range(450)]
    text = "1. see\n\n   ```python\n" + "".join(f"   {line}\n" for line in lines) + "   ```\n"
    read = (
        "(html) => new DOMParser().parseFromString(html, 'text/html')"
        ".querySelector('code').textContent"
    )
    for size in (0, 7, 1000):
        assert tab(read, tab(DRAW, [text, size])) == "\n".join(lines)


def test_a_table_has_its_columns_alone(tab: Callable[[str, Any], Any]) -> None:
    text = "Before\n| a | b | c |\n|:-:|--:|---|\n| `1` | 2\\|3 |\n| 1 | 2 | 3 | 4 |\n\nafter"
    made = tab(DRAW, [text, 0])
    assert made == tab(DRAW, [text, 2])
    assert made.startswith("<p><span>Before</span></p>")
    assert '<th scope="col" class="middle">a</th><th scope="col" class="n">b</th>' in made
    assert '<td class="middle"><code>1</code></td><td class="n">2|3</td><td></td>' in made
    assert ">4<" not in made
    assert made.endswith("<p><span>after</span></p>")
    wide = "|" + "a|" * 1000 + "\n|" + "-|" * 1000 + "\n" + "|x|\n" * 50
    assert "<table>" not in tab(DRAW, [wide, 0]), "a thousand columns are text"


def test_only_addresses_of_the_web_and_of_mail_are_links(tab: Callable[[str, Any], Any]) -> None:
    good = "[a](https://a.example/x) <mailto:b@c.example> http://d.example/(e). www.f.example"
    found = tab(FOUND, tab(DRAW, [good, 0]))
    assert [link[0] for link in found["links"]] == ["https:", "mailto:", "http:", "https:"]
    assert {tuple(link[1:]) for link in found["links"]} == {
        ("noopener noreferrer nofollow", "_blank")
    }
    bad = (
        "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](/etc)"
        " [e](//f.g) [g](vbscript:x) [h](\tjavascript:x) ![i](file:///etc/passwd) <javascript:x>"
        " [j](blob:x) [k](&#106;avascript:x) [l](java\nscript:x) [m]( )"
    )
    assert tab(FOUND, tab(DRAW, [bad, 0]))["links"] == []
    masked = tab(DRAW, ["[https://bank.example](https://evil.example/x)", 0])
    assert masked.endswith("</a> (evil.example)</span></p>")
    picture = tab(DRAW, ["![cat](https://a.example/cat.png)", 0])
    assert "<img" not in picture
    assert ">cat</a>" in picture


HOSTILE = {
    "quotes": ">" * 20_000 + " a\n" + "> " * 5_000 + "b",
    "lists": "".join("  " * depth + f"- {depth}\n" for depth in range(300)),
    "emphasis": "*a _b " * 4_000 + "c_ d*" * 4_000,
    "stars": "*" * 50_000 + "a" + "*" * 50_000,
    "brackets": "[" * 30_000 + "](" * 30_000,
    "links": "[a](https://b.example " * 8_000,
    "ticks": "".join("`" * (number % 700) + " " for number in range(2_000)),
    "dollars": "$a" * 20_000 + "$$" * 9_001,
    "maths": "$$" + "{" * 1_500 + "$$ $" + r"\frac{" * 160 + "$ $" + r"\left(" * 160 + "$",
    "scripts": "$x" + "^{x" * 300 + "}" * 300 + "$ $" + r"\sqrt" * 190 + "$",
    "spaces": (" " * 4_000 + "x\n") * 40 + "#" * 8_000 + " x\n--- " + " " * 4_000 + "|x\n",
    "entities": "&#0;&#xd800;&#1114111;&#x110000;&amp" + "&" * 20_000,
    "table": "|a|b|\n|-|-|\n" + "|\n" * 20_000,
    "markup": "<script>alert(1)</script><svg onload=alert(1)><math href=javascript:x>" * 500,
    "long line": "a b" * 50_000,
    "fences": "```\n~~~\n" * 3_000,
    "addresses": "https://a.example/" + ")" * 3_000 + " http://[ http:// www. https://%" * 200,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_ends_soon_in_known_elements(
    tab: Callable[[str, Any], Any], name: str
) -> None:
    text = HOSTILE[name]
    made = tab(DRAW, [text, 0])
    assert tab(DRAW, [text, 5000]) == made
    found = tab(FOUND, made)
    assert set(found["tags"]) <= ALLOWED
    assert set(found["attributes"]) <= ATTRIBUTES
    depth = """(html) => {
      let most = 0;
      const root = document.createElement("template");
      root.innerHTML = html;
      const all = document.createTreeWalker(root.content, NodeFilter.SHOW_ELEMENT);
      for (let deep = 0, e = all.nextNode(); e; e = all.nextNode()) {
        deep = 0;
        for (let p = e; p; p = p.parentNode) deep++;
        most = Math.max(most, deep);
      }
      return most;
    }"""
    assert tab(depth, made) < 130


def test_pieces_of_any_size_give_the_same_nodes(tab: Callable[[str, Any], Any]) -> None:
    rng = random.Random(7)
    marks = (
        "a b c *d* **e** `f` $x^2$ \\( \\) \\[ \\] $$ | - 1. 2) > # ``` ~~~ --- === |-|-| [x]"
        " < & <br> [l](http://m.n) &lt; ![ ]( ) \\ _ __ ~~ https://o.p/q."
    )
    words = [*marks.split(), "\t", "\n", "\n", "\n", "\n\n", "", "    "]
    for _ in range(60):
        text = "".join(
            rng.choice(words) + rng.choice(["", " ", "\n"]) for _ in range(rng.randrange(10, 200))
        )
        whole = tab(DRAW, [text, 0])
        for size in (1, 2, 5, 40):
            assert tab(DRAW, [text, size]) == whole, text
        found = tab(FOUND, whole)
        assert set(found["tags"]) <= ALLOWED
        assert {link[0] for link in found["links"]} <= {"http:", "https:"}


PARAGRAPH = "Some *words* with `code` and $x_1$ in them. " * 12 + "\n\n"
KINDS = {
    "prose": PARAGRAPH,
    "one line": "word " * 100,
    "list": "- an item with **bold** words\n" * 20,
    "table": None,
    "code": None,
}
MOST = dict.fromkeys(KINDS, 400_000) | {"code": 1_000_000, "prose": 1_000_000}


@pytest.mark.parametrize("kind", KINDS)
def test_work_grows_with_the_length_alone(tab: Callable[[str, Any], Any], kind: str) -> None:
    """Four (ten) times the text: as many times the elements, insertions and characters."""

    def text(size: int) -> str:
        piece = KINDS[kind]
        if kind == "table":
            return "| a | b |\n|---|---|\n" + "| cell | *cell* |\n" * (size // 18)
        if kind == "code":
            return "```\n" + "a line of code\n" * (size // 15)
        assert piece is not None
        return piece * (size // len(piece))

    small, large = (tab(WORK, [text(size), 400]) for size in (100_000, MOST[kind]))
    times = MOST[kind] / 100_000
    for name in ("made", "put", "characters"):
        assert large[name] <= 1.1 * times * small[name] + 100, (name, small, large)
    assert large["length"] > 0.4 * MOST[kind]
