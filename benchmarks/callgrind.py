"""Callgrind from inside the counted process, and what it has written.

`Marks` asks the valgrind that runs this process for something: a magic sequence of instructions
that does nothing on a CPU (valgrind.h of Valgrind 3.19, x86-64), here in a page of its own, since
ctypes has no assembler. `read_parts` reads the format of Callgrind's dumps (callgrind-format.html
of the same version).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

LINE = 64
"""Bytes of a cache line."""
SPLIT = "/"
"""In the name of a dump: between some work and the place of a record in it."""
_RUNNING_ON_VALGRIND = 0x1001
_CALLGRIND = ord("C") << 24 | ord("T") << 16
_DUMP_AT, _START, _STOP = _CALLGRIND + 3, _CALLGRIND + 4, _CALLGRIND + 5
_CODE = bytes.fromhex(
    "4889f8"  # mov rax, rdi: the request and its five arguments
    "31d2"  # xor edx, edx: the answer without valgrind
    "48c1c703"
    "48c1c70d"
    "48c1c73d"
    "48c1c733"  # rol rdi by 3, 13, 61, 51: as it was
    "4887db"  # xchg rbx, rbx: here valgrind looks
    "4889d0"
    "c3"  # mov rax, rdx; ret
)
_Request = ctypes.c_uint64 * 6


class Marks:
    """Requests to the valgrind that runs this process; without one they do nothing."""

    def __init__(self) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise OSError(f"requests to valgrind are written for x86-64, not {platform.machine()}")
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._page[: len(_CODE)] = _CODE
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        allowed = ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC
        )
        if allowed != 0:
            raise OSError(ctypes.get_errno(), "no executable page for the requests to valgrind")
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(at)

    def _ask(self, request: int, argument: int = 0) -> int:
        asked = _Request(request, argument)
        return int(self._call(ctypes.addressof(asked)))

    @property
    def under_valgrind(self) -> bool:
        return self._ask(_RUNNING_ON_VALGRIND) > 0

    def start(self) -> None:
        """Count from here on, with empty caches."""
        self._ask(_START)

    def stop(self) -> None:
        """Run on without counting: some ten times faster."""
        self._ask(_STOP)

    def dump(self, name: str) -> None:
        """Write what was counted since the last dump, and begin at zero."""
        text = ctypes.create_string_buffer(name.encode())
        self._ask(_DUMP_AT, ctypes.addressof(text))


class Counts(Counter[str]):
    """Events by Callgrind's names (Ir, DLmr, …)."""

    @property
    def instructions(self) -> int:
        return self["Ir"]

    @property
    def fetched(self) -> int:
        """Bytes of the lines that the last-level cache did not hold."""
        return LINE * (self["ILmr"] + self["DLmr"] + self["DLmw"])


@dataclass
class Part:
    """One dump."""

    name: str
    """That `Marks.dump` gave it; empty for the one at the process's end."""
    inside: Counts = field(default_factory=Counts)
    """From calls into the library until they return."""
    functions: Counter[str] = field(default_factory=Counter)
    """Instructions of the library's functions, without those that they call."""
    objects: Counter[str] = field(default_factory=Counter)
    """All other instructions, by shared object; what the library calls is the library's."""

    @property
    def outside(self) -> int:
        """All other instructions."""
        return self.objects.total()


def read_parts(lines: Iterable[str], library: str) -> Iterator[Part]:
    """Parts of one file of combined dumps; `library`: how the shared object's path ends.

    Raises `ValueError` for what is not in the format.
    """
    reader: _Reader | None = None
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if text.startswith("part: "):
            if reader is not None:
                yield reader.part
            reader = _Reader(library)
        elif reader is not None:
            try:
                reader.take(text)
            except (ValueError, KeyError, IndexError) as error:
                raise ValueError(f"line {number} of Callgrind's dump: {text[:80]!r}") from error
    if reader is None:
        raise ValueError("Callgrind's dump has no part")
    yield reader.part


class _Reader:
    """Reader of one part's names. A name is written once, `(id) name`, and then as `(id)`."""

    def __init__(self, library: str) -> None:
        self.part = Part("")
        self._library = library
        self._events: list[str] = []
        self._names: dict[tuple[str, str], str] = {}
        self._object = self._callee = self._function = ""
        self._calls = False
        """The next line of costs is that of a call, with all that it led to."""

    def take(self, text: str) -> None:
        key, mark, value = text.partition("=")
        if text[:1] in "0123456789+-*" and text:
            self._costs(text.split()[1:])
        elif mark:
            self._position(key, value)
        elif text.startswith("desc: Trigger: Client Request: "):
            self.part.name = text.removeprefix("desc: Trigger: Client Request: ")
        elif text.startswith("events: "):
            self._events = text.split()[1:]

    def _position(self, key: str, value: str) -> None:
        if key == "ob":
            self._object = self._callee = self._name("ob", value)
        elif key == "cob":
            self._callee = self._name("ob", value)
        elif key == "fn":
            self._function = self._name("fn", value)
        elif key == "cfn":
            self._name("fn", value)
        elif key == "calls":
            self._calls = True

    def _name(self, kind: str, value: str) -> str:
        if not value.startswith("("):
            return value
        number, _, name = value.partition(") ")
        number = number.rstrip(")")
        if name:
            self._names[kind, number] = name
        return self._names[kind, number]

    def _counts(self, values: list[str]) -> Counts:
        """Zeros at the end are left out."""
        return Counts(dict(zip(self._events, map(int, values), strict=False)))

    def _costs(self, values: list[str]) -> None:
        counts, here = self._counts(values), self._object.endswith(self._library)
        if self._calls:
            there = self._callee.endswith(self._library)
            if there and not here:
                self.part.inside.update(counts)
            elif here and not there:
                self.part.objects[self._callee] -= counts.instructions
            self._calls, self._callee = False, self._object
        elif here:
            self.part.functions[self._function] += counts.instructions
        else:
            self.part.objects[self._object] += counts.instructions
