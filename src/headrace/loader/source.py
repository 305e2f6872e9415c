"""What every source of files shares: how it says that it could not deliver."""

from __future__ import annotations


class SourceFailed(Exception):
    """This source cannot deliver the file; the next one may. The message is for the user."""
