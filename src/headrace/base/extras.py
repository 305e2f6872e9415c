"""PyTorch, which an installation may lack: it is an extra of the package (ADR 0074).

Whoever computes on tensors imports it where it does so; a border above says who wanted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import PackageAbsent
from .hardware import torch_build

INSTALL_TORCH = "pip install 'headrace[torch]'"


@contextmanager
def needing_torch(who: Callable[[], str]) -> Iterator[None]:
    """Raise `PackageAbsent` where what goes on inside finds no torch to import.

    `who`: asked only then, the subject of "… needs PyTorch".
    """
    try:
        yield
    except ModuleNotFoundError as absent:
        if absent.name != "torch":
            raise
        raise _torch_absent(who()) from absent


def require_torch(who: str) -> None:
    """Raise `PackageAbsent` where torch is not installed: for who asks another process for it."""
    if not torch_build()[0]:
        raise _torch_absent(who)


def _torch_absent(who: str) -> PackageAbsent:
    return PackageAbsent(f"{who} needs PyTorch, which is not installed: {INSTALL_TORCH}")
