"""Error that every source of files raises if it cannot deliver."""

from __future__ import annotations


class SourceFailed(Exception):
    """This source cannot deliver the file; the next one may. The message is for the user."""
