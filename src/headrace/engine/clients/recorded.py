"""The decision whether an engine records its requests: see `records`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base import environment
from ...base.config import EngineOptions
from ...base.errors import OptionError

if TYPE_CHECKING:
    from .records import Recorder


def recorder_of(options: EngineOptions) -> Recorder | None:
    """Make a recorder if the environment asks for one. Raises `OptionError` for a folder that
    cannot be made."""
    folder = environment.record_folder()
    if folder is None:
        return None
    from .records import Recorder  # Local: every start calls this, and hardly any records.

    try:
        return Recorder(folder, options)
    except OSError as refused:
        raise OptionError(f"HEADRACE_RECORD: {folder}: {refused.strerror}") from None
