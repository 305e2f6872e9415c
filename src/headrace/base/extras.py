"""Packages that an installation may lack, extras of this one: PyTorch (ADR 0004), the factory's.

Whoever computes on tensors imports it where it does so; a border above says who wanted it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from .errors import PackageAbsent
from .hardware import torch_build


def needed(package: str, who: str, extra: str) -> Any:
    """A package of an extra, imported. Raises `PackageAbsent`: "`who` need …"."""
    try:
        return import_module(package)
    except ImportError as absent:
        raise PackageAbsent(
            f"{who} need {package}, which is not installed: {install_extra(extra)}"
        ) from absent


def install_torch() -> str:
    """The command that installs it."""
    return install_extra("torch")


def install_extra(extra: str) -> str:
    """The command that installs an extra: from the checkout, where the package is one."""
    # Local: with it come the mail and archive modules, 2 MB in every start.
    from importlib.metadata import PackageNotFoundError, distribution

    package, mode = "headrace", ""
    with suppress(PackageNotFoundError, ValueError, TypeError):
        source = json.loads(distribution("headrace").read_text("direct_url.json") or "{}")
        if source.get("dir_info", {}).get("editable") and source["url"].startswith("file://"):
            package, mode = unquote(source["url"].removeprefix("file://")), "--editable "
    return f"pip install {mode}'{package}[{extra}]'"


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


@contextmanager
def needing_factory() -> Iterator[None]:
    """Raise `PackageAbsent` where a package of the extra `factory` is not there to import."""
    try:
        yield
    except ModuleNotFoundError as absent:
        raise PackageAbsent(
            f"the factory needs {absent.name}, which is not installed: {install_extra('factory')}"
        ) from absent


def require_torch(who: str) -> None:
    """Raise `PackageAbsent` where torch is not installed: for who asks another process for it."""
    if not torch_build()[0]:
        raise _torch_absent(who)


def _torch_absent(who: str) -> PackageAbsent:
    return PackageAbsent(f"{who} needs PyTorch, which is not installed: {install_torch()}")
