"""Optional packages (extras of this one), and the command that installs them.

A module that computes on tensors imports PyTorch locally (ADR 0004); an outer layer names the
feature that needed it. The command names packages of the index, never this one: it compiles
nothing, and no other project can take our name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .errors import PackageAbsent
from .hardware import torch_build

_OWN = "headrace"
_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)")


def needed(package: str, subject: str, *extras: str, param: str | None = None) -> Any:
    """Return a module of an extra. Raises `PackageAbsent`: "`subject` need …"."""
    try:
        return import_module(package)
    except ImportError as fault:
        raise absent(f"{subject} need", package, *extras, param=param) from fault


def absent(subject: str, package: str, *extras: str, param: str | None = None) -> PackageAbsent:
    """Return the error that names the extras' missing packages; `package` cannot be imported."""
    names = _missing(*extras) or [package.partition(".")[0]]
    *most, last = (match[0] for name in names if (match := _NAME.match(name)))
    short, verb = (f"{', '.join(most)} and {last}", "are") if most else (last, "is")
    return PackageAbsent(
        f"{subject} {short}, which {verb} not installed: {_command(names)}", param=param
    )


def install(*extras: str) -> str:
    """Return the command that installs the extras' missing packages, or all if none is."""
    return _command(_missing(*extras) or _packages(*extras))


def _command(names: list[str]) -> str:
    return f"pip install {shlex.join(names)}"


def _packages(*extras: str) -> list[str]:
    """Return the requirements of the extras; none if this package runs without being installed."""
    # Local: it imports the mail and archive modules, 2 MB in every start.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(_OWN) or []
    except PackageNotFoundError:
        return []
    found: dict[str, None] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if extra is None or extra[1] not in extras:
            continue
        if requirement.startswith(f"{_OWN}["):
            inner = requirement.partition("[")[2].partition("]")[0]
            found |= dict.fromkeys(_packages(*inner.split(",")))
        else:
            found[requirement.strip()] = None
    return list(found)


def _missing(*extras: str) -> list[str]:
    from importlib.metadata import PackageNotFoundError, version  # Local, as above.

    found = []
    for requirement in _packages(*extras):
        name = _NAME.match(requirement)
        assert name is not None
        try:
            version(name[0])
        except PackageNotFoundError:
            found.append(requirement)
    return found


@contextmanager
def needing_torch(subject: Callable[[], str]) -> Iterator[None]:
    """Raise `PackageAbsent` if the code inside fails to import torch.

    `subject`: called only then, the subject of "… needs PyTorch".
    """
    try:
        yield
    except ModuleNotFoundError as fault:
        if fault.name != "torch":
            raise
        raise _torch_absent(subject()) from fault


@contextmanager
def needing(subject: str, *extras: str, param: str | None = None) -> Iterator[None]:
    """Raise `PackageAbsent` if a package of the extras cannot be imported: "`subject` …"."""
    try:
        yield
    except ImportError as fault:
        raise absent(subject, fault.name or str(fault), *extras, param=param) from fault


def require_torch(subject: str) -> None:
    """Raise `PackageAbsent` if torch is not installed: for code that needs it in another
    process."""
    if not torch_build()[0]:
        raise _torch_absent(subject)


def _torch_absent(subject: str) -> PackageAbsent:
    return PackageAbsent(f"{subject} needs PyTorch, which is not installed: {install('torch')}")
