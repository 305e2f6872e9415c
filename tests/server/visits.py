"""Visits of the page by a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
"""Mark of a file of visits."""


def visit(
    url: str, work: Callable[[Any], Any], errors: list[str] | None = None, **context: Any
) -> Any:
    """The result of `work(tab)`, in a thread of its own: Playwright wants no event loop. `errors`
    gets those of the page, and breaches of its policy."""

    def inside() -> Any:
        with playwright.sync_playwright() as run:
            browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab = browser.new_context(**context).new_page()
            tab.set_default_timeout(120_000)
            if errors is not None:
                tab.on("pageerror", lambda error: errors.append(str(error)))
                tab.on("console", lambda line: "Policy" in line.text and errors.append(line.text))
            tab.goto(url)
            tab.wait_for_selector("#dot.ready")
            try:
                return work(tab)
            finally:
                browser.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inside).result(500)


def visits(url: str) -> Iterator[Callable[..., Any]]:
    """Runs a function of a fresh page; fails on any error in the page."""
    errors: list[str] = []

    def call(work: Callable[[Any], Any], **context: Any) -> Any:
        return visit(url, work, errors, **context)

    yield call
    assert not errors
