"""Prompts that come as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.errors import InvalidRequest

if TYPE_CHECKING:
    from .service import Service


def check_ids(service: Service, ids: Sequence[int], param: str) -> None:
    """Raise `InvalidRequest` unless the model has all of them."""
    size = service.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise InvalidRequest(f"token ids must be from 0 to {size - 1}, not {wrong}", param=param)
