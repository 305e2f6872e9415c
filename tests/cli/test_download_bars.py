"""Output of the command line during a download, without a terminal."""

from __future__ import annotations

import io

import pytest

from headrace.base.errors import DownloadError
from headrace.cli.progress import DownloadBars


def test_a_wait_is_shown_without_a_size() -> None:
    stream = io.StringIO()
    with DownloadBars(stream) as bars:
        bars.start(0, "waiting for another process")
        bars.advance(0)
        bars.done()
    assert stream.getvalue() == "waiting for another process\n"
    with pytest.raises(DownloadError, match="stopped"):
        bars.advance(0)


def test_a_computation_is_shown_in_per_cent() -> None:
    stream = io.StringIO()
    with DownloadBars(stream) as bars:
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


def test_a_terminal_has_a_bar_of_each_kind() -> None:
    stream = Terminal()
    with DownloadBars(stream) as bars:
        bars.start(8, "calibrating", share=True)
        bars.advance(2)
        bars.start(3 << 20, "a file")
        bars.advance(3 << 20)
    assert "25%" in stream.getvalue()
    assert "3.1/3.1 MB" in stream.getvalue()
