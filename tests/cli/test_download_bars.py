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
