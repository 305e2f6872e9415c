"""Output of the command line during a download, without a terminal."""

from __future__ import annotations

import io

import pytest

from headrace.base.errors import DownloadError
from headrace.loader.progress import ProgressLine


def test_a_wait_is_shown_without_a_size() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as bars:
        bars.start(0, "waiting for another process")
        bars.advance(0)
        bars.done()
    assert stream.getvalue() == "waiting for another process\n"
    with pytest.raises(DownloadError, match="stopped"):
        bars.advance(0)


def test_a_computation_is_shown_in_per_cent() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as bars:
        bars.start(8, "calibrating", share=True)
        bars.advance(2)
        bars.done()
        bars.start(3 << 20, "a file")
        bars.advance(3 << 20)
        bars.done()
    assert stream.getvalue().splitlines() == ["calibrating: 25 %"] * 2 + ["a file: 3 of 3 MiB"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_line_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "PATIENCE", 0.0)
    monkeypatch.setattr(ProgressLine, "INTERVALS", (0.0, 0.0))
    stream = Terminal()
    with ProgressLine(stream) as bars:
        bars.start(8, "calibrating", share=True)
        bars.advance(2)
        bars.start(3 << 20, "a file")
        bars.advance(1 << 20)
    shown = stream.getvalue()
    assert "\rcalibrating: 25 %\x1b[K" in shown
    assert "\ra file: 1 of 3 MiB, " in shown
    assert shown.endswith(" s left\x1b[K\r\x1b[K")
