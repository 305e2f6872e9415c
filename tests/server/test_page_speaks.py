"""The page's microphone in a real browser, whose microphone plays a file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import headrace, running

from headrace.base.errors import DownloadError
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("websockets", reason="needs the extra audio")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
ESPEAK = shutil.which("espeak-ng")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(ESPEAK is None, reason="espeak-ng is not installed"),
]


def test_what_is_said_is_written_down(tmp_path: Path) -> None:
    try:
        fetch_catalog(CATALOG["whisper-base"])
    except DownloadError as error:
        pytest.skip(f"no whisper-base: {error.message}")
    said = tmp_path / "said.wav"
    text = "The meeting begins on Tuesday at nine."
    subprocess.run([str(ESPEAK), "-v", "en-us", "-s", "140", "-w", str(said), text], check=True)
    flags = [
        "--no-sandbox",
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={said}%noloop",
    ]
    with (
        running(headrace("serve", "whisper-base", "--port", "0", "--threads", "2")) as server,
        playwright.sync_playwright() as run,
    ):
        browser = run.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_context(permissions=["microphone"]).new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda line: problems.append(line.text) if line.type == "error" else None
        )
        page.goto(server.url)
        button = page.locator("#speak")
        button.wait_for(state="visible", timeout=30_000)
        assert page.locator("#send").is_hidden()
        button.click()
        message = page.locator("#message")
        for word in ("meeting", "tuesday"):
            found = re.compile(word, re.IGNORECASE)
            playwright.expect(message).to_have_value(found, timeout=90_000)
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        playwright.expect(button).to_have_attribute("aria-pressed", "false", timeout=60_000)
        page.set_input_files("#chooser", str(said))
        save = page.locator("#hear-srt")
        save.wait_for(state="visible", timeout=90_000)
        assert "tuesday" in page.locator("#segments").inner_text().lower()
        with page.expect_download() as taken:
            save.click()
        assert taken.value.suggested_filename == "said.srt"
        cues = Path(taken.value.path()).read_text()
        assert cues.startswith("1\n00:00:00,")
        assert "Tuesday" in cues
        with page.expect_download() as taken:
            page.locator("#hear-vtt").click()
        assert Path(taken.value.path()).read_text().startswith("WEBVTT\n\n00:00:00.")
        assert page.locator("#language option").count() > 90
        page.select_option("#language", "en")
        page.check("#translate")
        with page.expect_request("**/v1/audio/translations") as sent:
            page.set_input_files("#chooser", str(said))
        assert b'name="language"' in sent.value.post_data_buffer
        page.locator("#hear-stop").wait_for(state="hidden", timeout=90_000)
        assert not problems, problems
        browser.close()
