"""Records that cross a process border with a tag, which distinguishes the types of a union.

They are structs of msgspec. A machine that runs a worker alone, as the GPU scripts do, may lack it.
Nothing crosses a border there, and frozen dataclasses with the same fields serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import Struct as Tagged
else:
    try:
        from msgspec import Struct as Tagged
    except ModuleNotFoundError:

        class Tagged:
            """See the module."""

            def __init_subclass__(cls, **_options: Any) -> None:
                dataclass(frozen=True)(cls)


__all__ = ["Tagged"]
